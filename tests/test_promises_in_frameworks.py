"""The promises of `gemproj.torch.GEM` are those of its shells: the same steps as a plain loop takes."""

import copy

import pytest

torch = pytest.importorskip("torch")

from models import flat, loss, perceptron, rival, task  # noqa: E402

from gemproj.torch import GEM, EpisodicMemory  # noqa: E402
from gemproj.torch.losses import CrossEntropy, Distillation  # noqa: E402


def logits(model, batch):
    return model(batch["x"])


EACH = CrossEntropy(logits, labels="y")
SAID = Distillation(logits, labels=EACH, weight=0.2)
PROMISES = [
    (SAID, {"bound": 0.01, "kappa": 0.5, "rows": 5, "on": "both", "metric": "adam"}),
    (EACH, {"bound": 0.0, "room": False, "promise": "label", "on": "step"}),
    (SAID, {"rows": 3, "smoothing": 0.5, "margin": 0.3}),
    (EACH, {"groups": "module", "gate": True, "on": "both"}),
]
TASKS = 2
IDS = ["distilled and bound", "labels and bound", "smoothed", "groups"]


def batches(k, n=6):
    """Tasks that contradict each other: the same points, other labels."""
    made = [rival(task(j, 4), k) for j in range(n)]
    return [{"x": x, "y": y} for x, y in made]


def memory():
    return EpisodicMemory(per_task=10, label="y")


def by_hand(promise, options, tasks=TASKS):
    model, kept, excess, active = perceptron(), memory(), [], 0
    for k in range(tasks):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
        gem = GEM(model, optimizer, promise, memory=kept, **options)
        for batch in batches(k):
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
            excess.append(gem.last.excess)
            active += gem.last.num_active
        gem.end_task(batches(k))
    assert active
    return model, excess


@pytest.mark.parametrize(("promise", "options"), PROMISES, ids=IDS)
def test_lightning(promise, options):
    lightning = pytest.importorskip("lightning")
    from gemproj.integrations.lightning import GEMCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = perceptron()

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            return loss(self, batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.0)

    module, gem = Module(), GEMCallback(memory(), promise, **options)
    for k in range(TASKS):
        trainer = lightning.Trainer(
            max_epochs=1,
            callbacks=[gem],
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            # One in double precision, to see that outputs are computed in the precision of training.
            precision="64-true",
        )
        trainer.fit(module, torch.utils.data.DataLoader(batches(k), batch_size=None))
        gem.end_task(batches(k))
    torch.testing.assert_close(flat(module), flat(by_hand(promise, options)[0]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("promise", "options"), PROMISES, ids=IDS)
def test_accelerate(promise, options, fresh_state):
    accelerate = pytest.importorskip("accelerate")
    from gemproj.integrations.accelerate import GEM as AcceleratedGEM

    accelerator = accelerate.Accelerator(cpu=True)
    model, kept = perceptron(), memory()
    for k in range(TASKS):
        model, optimizer = accelerator.prepare(
            model, torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
        )
        gem = AcceleratedGEM(accelerator, model, optimizer, kept, promise, **options)
        for batch in batches(k):
            optimizer.zero_grad()
            accelerator.backward(loss(model, batch))
            optimizer.step()
        gem.end_task(batches(k))
        gem.remove()
    torch.testing.assert_close(flat(model), flat(by_hand(promise, options)[0]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("promise", "options"), PROMISES, ids=IDS)
def test_transformers(promise, options, fresh_state, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from gemproj.integrations.transformers import GEMCallback

    class Network(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = perceptron()

        def forward(self, x, y=None):
            return (
                {"loss": torch.nn.functional.cross_entropy(self.net(x), y)} if y is not None else self.net(x)
            )

    model, gem, logs = Network(), GEMCallback(memory(), promise, **options), []
    for k in range(TASKS):
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            per_device_train_batch_size=1,
            num_train_epochs=1,
            learning_rate=0.02,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            remove_unused_columns=False,
        )
        trainer = transformers.Trainer(
            model, arguments, train_dataset=batches(k), data_collator=lambda one: one[0], callbacks=[gem]
        )
        trainer._get_train_sampler = lambda *_: torch.utils.data.SequentialSampler(range(6))
        trainer.train()
        gem.end_task(batches(k))
        logs += [entry["gem/excess"] for entry in trainer.state.log_history if "gem/excess" in entry]
    plain, excess = by_hand(promise, options)
    torch.testing.assert_close(flat(model), flat(plain), rtol=1e-9, atol=1e-12)
    if "bound" in options:
        expected = [float(one.max()) for one in excess if one is not None and len(one)]
        assert logs[: len(expected)] == pytest.approx(expected, rel=1e-6, abs=1e-12)
    else:
        assert not logs


def test_a_group_may_be_any_part_of_a_name(fresh_state):
    accelerate = pytest.importorskip("accelerate")
    from gemproj.integrations.accelerate import GEM as AcceleratedGEM

    model = perceptron()
    accelerator = accelerate.Accelerator(cpu=True)
    prepared = accelerator.prepare(torch.nn.Sequential(model), torch.optim.SGD(model.parameters(), lr=0.1))
    gem = AcceleratedGEM(accelerator, *prepared, memory(), groups=lambda name: name.split(".")[1])
    assert len(gem.projector._groups) == 2


def test_what_a_model_can_do_is_stored_before_training(tmp_path):
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    from gemproj.integrations.transformers import GEMCallback

    model, sizes = perceptron(), []
    model.register_forward_pre_hook(lambda model, given: sizes.append(len(given[0])))
    gem = GEMCallback(memory(), SAID, bound=0.1, microbatch=3)
    with pytest.raises(ValueError, match="model is needed"):
        copy.deepcopy(gem).end_task(batches(0))
    gem.end_task(batches(0), model=model)
    assert max(sizes) == 3
    stored = gem.memory.batch(0)
    torch.testing.assert_close(stored.outputs, SAID.outputs(model, stored.batch))
    torch.testing.assert_close(stored.losses, SAID(model, stored.batch, stored.outputs).detach())
    assert model.training
    # The examples again, with the model as it is by then.
    with torch.no_grad():
        model[2].bias.add_(torch.arange(3.0))
    gem.end_task([], 0, model=model)
    torch.testing.assert_close(gem.memory.batch(0).outputs, SAID.outputs(model, stored.batch))
