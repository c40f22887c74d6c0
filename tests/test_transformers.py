"""What is special to the Trainer: its callbacks, logs and checkpoints, and checkpointed layers.

What holds in every framework is in test_frameworks.py.
"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from frameworks import BreakingOff, Transformers, batches  # noqa: E402
from models import adapted, flat, language_model, perceptron  # noqa: E402
from models import task as points  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from gemproj.torch import GradientProjector  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_state")


class Watching(TrainerCallback):
    """Keeps what other callbacks could see."""

    def __init__(self, gem):
        self.gem, self.logs, self.steps = gem, [], []

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.steps.append(self.gem.last)

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


def test_logs_hold_means_over_the_steps_since_the_last(tmp_path):
    driver = Transformers(tmp_path)
    for k in range(2):
        driver.object.memory.add(batches(k)[0], k)
    with pytest.raises(ConnectionError):
        driver.train(BreakingOff(batches(2)), logging_steps=9)  # whose step is in no log
    early, late = Watching(driver.object), Watching(driver.object)
    trainer = driver.trainer(batches(2, 12), late, eval_strategy="steps", eval_steps=4, logging_steps=4)
    trainer.callback_handler.callbacks.insert(0, early)
    for _ in range(2):
        driver.object.attach(trainer)
    assert trainer.callback_handler.callbacks.count(driver.object) == 1
    trainer.train()
    assert len(late.steps) == 6
    assert sum(p.num_violated for p in late.steps[:4]) > 0
    names = {"violations": "num_violated", "active": "num_active", "cosine": "cosine", "seconds": "seconds"}
    for history in (early.logs, late.logs, trainer.state.log_history):
        first, last = (next(log for log in history if key in log) for key in ("loss", "train_loss"))
        for log, part in ((first, late.steps[:4]), (last, late.steps[4:])):
            means = {name: sum(getattr(p, key) for p in part) / len(part) for name, key in names.items()}
            means["worst_cosine"] = min(p.worst_cosine for p in part)
            assert {name: log[f"gem/{name}"] for name in means} == pytest.approx(means)
        assert not any(key.startswith("gem/") for log in history if "eval_loss" in log for key in log)


@pytest.mark.parametrize(
    ("skipped", "optim"), [(0, "adamw_torch"), (1, "adamw_torch_fused"), (2, "adamw_torch")]
)
def test_a_step_that_the_scaler_skips_is_not_in_the_logs(skipped, optim, tmp_path):
    driver, data = Transformers(tmp_path, precision="fp16"), batches(1, dtype=torch.float32)
    driver.end_task(batches(0, dtype=torch.float32))
    data[2 * skipped]["x"][0] = float("inf")
    logs = driver.train(data, optim=optim)
    assert ["gem/cosine" in log for log in logs] == [step != skipped for step in range(3)]


@pytest.mark.parametrize("how", ["load", "arguments", "nothing", "load another step"])
def test_a_checkpoint_elsewhere_is_named_by_the_caller(how, tmp_path):
    whole, resumed = (Transformers(tmp_path / name, examples=3) for name in ("whole", "resumed"))
    whole.object.memory.add(batches(0)[0], 0)
    whole.train(batches(1), save=True, epochs=2)
    checkpoint, later = (str(whole.folder / f"checkpoint-{step}") for step in (3, 6))
    changes = {"resume_from_checkpoint": checkpoint} if how == "arguments" else {}
    trainer = resumed.trainer(batches(1), num_train_epochs=2, **changes)
    if how.startswith("load"):
        resumed.object.load(checkpoint if how == "load" else later)
    if how in ("load", "arguments"):
        trainer.train(resume_from_checkpoint=checkpoint)
        assert torch.equal(flat(resumed.model), flat(whole.model))
    else:
        with pytest.raises(
            ValueError, match=r"resumes at step 3, .* GEMCallback\.load\(folder\).* without GEM, begin"
        ):
            trainer.train(resume_from_checkpoint=checkpoint)


def test_steps_out_of_sight_are_reported(tmp_path):
    class Elsewhere(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            driver.object.remove()

    driver = Transformers(tmp_path)
    with pytest.raises(RuntimeError, match=r"optim=.* are not taken by optimizer"):
        driver.train(batches(0), Elsewhere())


# Bart draws masks in its layers themselves and leaves layers out; Mamba writes a cache in evaluation mode.
CHECKPOINTED = {
    "gpt2": {"n_layer": 3},
    "llama": {"num_hidden_layers": 3, "attention_dropout": 0.5},
    "bart": {"d_model": 8, "dropout": 0.5},
    "mamba": {"num_hidden_layers": 3, "state_size": 4},
}
CHECKPOINTED["bart"] |= {
    f"{part}_{name}": n
    for part in ("encoder", "decoder")
    for name, n in (("layers", 3), ("attention_heads", 2), ("ffn_dim", 16), ("layerdrop", 0.5))
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", [*CHECKPOINTED, "gpt2 lora"])
def test_layers_are_checkpointed_in_evaluation_mode_too(name, reentrant):
    pytest.importorskip("transformers.modeling_layers")
    kind, _, adapter = name.partition(" ")
    model = language_model(kind, **CHECKPOINTED[kind]).train()
    if adapter:
        model = adapted(model, lora_dropout=0.5, fan_in_fan_out=True)
    ids = torch.randint(1, 20, (4, 12))
    projector = GradientProjector(model.parameters())
    found = []
    for checkpoints in (False, True):
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        before = {m: dict(m.__dict__) for m in model.modules()}
        saved = []

        def pack(tensor, saved=saved):
            saved.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            projector.recall(model, [{"input_ids": ids, "labels": ids}])
        assert all(m.__dict__ == kept for m, kept in before.items())
        assert model.config.use_cache
        found.append((projector.constraints.clone(), sum(saved)))
    (rows, whole), (same, less) = found
    torch.testing.assert_close(same, rows)
    assert 2.5 * less < whole


def test_a_module_with_a_function_for_checkpoints_alone_is_evaluated():
    model = perceptron()
    model[1]._gradient_checkpointing_func = None
    projector = GradientProjector(model.parameters())
    projector.recall(model, [points(0)], lambda model, batch: model(batch[0]).mean())
    assert len(projector.constraints) == 1
