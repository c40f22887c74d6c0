"""GEM under a Trainer does what a plain loop does; its numbers are logged, and it resumes to the bit."""

import contextlib
import copy
import gc
import shutil
import sys
import warnings
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from models import SAID, flat, gradient, perceptron, promises, trainable  # noqa: E402
from models import task as points  # noqa: E402
from transformers import (  # noqa: E402
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    GPT2ForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    get_linear_schedule_with_warmup,
)

from gemproj.integrations.transformers import GEMCallback  # noqa: E402
from gemproj.torch import GEM, EpisodicMemory, GradientProjector  # noqa: E402
from gemproj.torch.constraint_gradients import model_loss  # noqa: E402
from gemproj.torch.losses import model_logits  # noqa: E402

LENGTH, LABELS = 6, 4


pytestmark = pytest.mark.usefixtures("fresh_state")


def network(peft=False, dtype=torch.float64, dropout=0.0):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=20,
        n_positions=LENGTH,
        n_embd=8,
        n_layer=1,
        n_head=2,
        num_labels=LABELS,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2ForSequenceClassification(config).to(dtype)
    if peft:
        from peft import LoraConfig, get_peft_model

        adapter = LoraConfig(r=2, task_type="SEQ_CLS", lora_dropout=dropout, fan_in_fan_out=True)
        model = get_peft_model(model, adapter).to(dtype)
    return model


def examples(task, n=20):
    generator = torch.Generator().manual_seed(task)
    words = torch.randint(1, 20, (n, LENGTH), generator=generator)
    return [{"input_ids": ids, "labels": (int(ids[-1]) + task) % LABELS} for ids in words]


def arguments(folder, **changes):
    options = {
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 2,
        "learning_rate": 0.05,
        "max_grad_norm": 0.5,
        "warmup_steps": 2,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(str(folder), **(options | changes))


def make(model, task, folder, *callbacks, collate=default_data_collator, **changes):
    return Trainer(
        model,
        arguments(folder, **changes),
        train_dataset=examples(task),
        eval_dataset=examples(task + 1),
        data_collator=collate,
        callbacks=[*callbacks],
    )


def learn(*given, resume=None, **options):
    trainer = make(*given, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def remembered(*tasks):
    memory = EpisodicMemory(per_task=8, label="labels")
    for task in tasks:
        memory.add(default_data_collator(examples(task)), task)
    return memory


def trained(model):
    return flat(trainable(model))


class Watching(TrainerCallback):
    """Keeps what other callbacks could see."""

    def __init__(self, gem=None):
        self.gem, self.logs, self.projections, self.constraints = gem, [], [], []

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.projections.append(self.gem.projector.last)
        self.constraints.append(self.gem.projector.constraints.clone())

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


@pytest.mark.parametrize(
    ("peft", "promise", "options"),
    [
        pytest.param(False, model_loss, {"margin": 0.05}, id="margin"),
        pytest.param(False, model_loss, {"on": "both", "metric": "adam", "interval": 2}, id="adam"),
        pytest.param(True, model_loss, {}, id="adapters"),
        pytest.param(True, model_loss, {"on": "both"}, id="adapters, both"),
        *(pytest.param(False, *one.values, id=one.id) for one in promises(model_logits, "labels")),
    ],
)
def test_a_trainer_takes_the_steps_of_a_plain_loop(peft, promise, options, tmp_path):
    seen = []  # the batches of each task, in the order of the trainer

    def collate(features):
        seen[-1].append(default_data_collator(features))
        return seen[-1][-1]

    model, logged = network(peft), []
    gem = GEMCallback(remembered(), promise, microbatch=3, **options)
    for task in range(3):
        seen.append([])
        trainer = make(model, task, tmp_path, gem, collate=collate, logging_steps=1)
        trainer.model_accepts_loss_kwargs = False  # else sums of losses, for models that do not count items
        trainer.train()
        logged += [log["gem/excess"] for log in trainer.state.log_history if "gem/excess" in log]
        gem.end_task([default_data_collator(examples(task))])

    plain, memory, active, excess = network(peft), remembered(), 0, []
    for task in range(3):
        optimizer = torch.optim.AdamW(trainable(plain), lr=0.05, weight_decay=0.0)
        gem = GEM(plain, optimizer, promise, memory=memory, microbatch=3, **options)
        schedule = get_linear_schedule_with_warmup(optimizer, 2, 6)
        epochs = [seen[task][:5], seen[task][5:]]
        assert [len(epoch) for epoch in epochs] == [5, 5]
        for epoch in epochs:
            for window in (epoch[:2], epoch[2:4], epoch[4:]):
                optimizer.zero_grad()
                for batch in window:
                    (plain(**batch).loss / len(window)).backward()
                gem.clip_grad_norm_(0.5)
                optimizer.step()
                schedule.step()
                active += gem.last.num_active
                if gem.last.excess is not None and len(gem.last.excess):
                    excess.append(float(gem.last.excess.max()))
        gem.end_task([default_data_collator(examples(task))])
    assert active > 3
    moved = torch.linalg.norm(trained(plain) - trained(network(peft)))
    assert torch.linalg.norm(trained(model) - trained(plain)) < 1e-9 * moved
    assert bool(excess) == ("bound" in options)
    assert logged == pytest.approx(excess, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("peft", [False, True])
def test_a_margin_is_the_weight_of_replay_also_where_gradients_are_clipped(peft, tmp_path):
    seen, model = [], network(peft)

    def collate(features):
        seen.append(default_data_collator(features))
        return seen[-1]

    gem = GEMCallback(remembered(0), margin=3.0)
    watching = Watching(gem)
    trainer = make(model, 1, tmp_path, gem, watching, collate=collate, num_train_epochs=1, logging_steps=1)
    trainer.model_accepts_loss_kwargs = False
    trainer.train()
    assert not any(step.num_active for step in watching.projections)  # replay, and nothing else

    plain, stored, norms = network(peft), remembered(0).batch(0), []
    optimizer = torch.optim.AdamW(trainable(plain), lr=0.05, weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, 2, 3)
    for window in (seen[:2], seen[2:4], seen[4:]):
        optimizer.zero_grad()
        for batch in window:
            (plain(**batch).loss / len(window)).backward()
        norms.append(float(gradient(plain).norm()))
        (3.0 * plain(**stored).loss).backward()
        assert torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5) > 1.0
        optimizer.step()
        schedule.step()
    logged = [log["grad_norm"] for log in trainer.state.log_history if "grad_norm" in log]
    assert logged == pytest.approx(norms)  # before clipping, as without GEM
    assert torch.linalg.norm(trained(model) - trained(plain)) < 1e-9 * torch.linalg.norm(trained(plain))


def test_logs_hold_means_over_the_steps_since_the_last(tmp_path):
    gem = GEMCallback(remembered(0, 1))
    watching, early = Watching(gem), Watching(gem)
    changes = {"eval_strategy": "steps", "eval_steps": 4, "logging_steps": 4}
    trainer = make(network(), 2, tmp_path, early, watching, **changes)
    gem.attach(trainer)
    gem.attach(trainer)
    assert trainer.callback_handler.callbacks.count(gem) == 1
    trainer.train()
    steps = watching.projections
    assert len(steps) == 6
    assert sum(p.num_violated for p in steps[:4]) > 0
    for history in (early.logs, watching.logs, trainer.state.log_history):
        first, last = (next(log for log in history if key in log) for key in ("loss", "train_loss"))
        for log, part in ((first, steps[:4]), (last, steps[4:])):
            assert log["gem/violations"] == pytest.approx(sum(p.num_violated for p in part) / len(part))
            assert log["gem/active"] == pytest.approx(sum(p.num_active for p in part) / len(part))
            assert log["gem/cosine"] == pytest.approx(sum(p.cosine for p in part) / len(part))
            assert log["gem/worst_cosine"] == pytest.approx(min(p.worst_cosine for p in part))
            assert log["gem/seconds"] == pytest.approx(sum(p.seconds for p in part) / len(part))
        assert not any(key.startswith("gem/") for log in history if "eval_loss" in log for key in log)


def test_without_attach_the_history_has_the_numbers(tmp_path):
    trainer = learn(network(), 1, tmp_path, GEMCallback(remembered(0)))
    assert ["gem/cosine" in log for log in trainer.state.log_history] == [True, True, True, False]


RESUMABLE = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1}


def gem_of(*tasks):
    """Tasks in another order than the one that was saved would give other weights."""
    return GEMCallback(remembered(*tasks), on="both", method="pgd", interval=3)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    AcceleratorState._reset_state(reset_partial_state=True)
    model = network(peft=True, dropout=0.2)
    trainer = learn(model, 2, folder, gem_of(0, 1), **RESUMABLE)
    return folder, trained(model).clone(), trainer.state.log_history


def test_a_resumed_training_ends_with_the_same_bits(uninterrupted, tmp_path):
    folder, expected, history = uninterrupted
    for step in (2, 4):
        here = tmp_path / str(step)
        here.mkdir()
        shutil.copytree(folder / f"checkpoint-{step}", here / f"checkpoint-{step}")
        model, gem = network(peft=True, dropout=0.2), gem_of()
        trainer = learn(model, 2, here, gem, resume=True, **RESUMABLE)
        assert gem.memory.tasks == [0, 1]
        assert torch.equal(trained(model), expected)
        for old, new in zip(history[:-1], trainer.state.log_history[:-1], strict=True):
            assert {k: v for k, v in new.items() if "seconds" not in k} == {
                k: v for k, v in old.items() if "seconds" not in k
            }


@pytest.mark.parametrize("how", ["load", "arguments", "nothing", "load another step"])
def test_a_checkpoint_elsewhere_is_named_by_the_caller(how, uninterrupted, tmp_path):
    folder, expected, _ = uninterrupted
    checkpoint = str(folder / "checkpoint-4")
    model, gem = network(peft=True, dropout=0.2), gem_of()
    changes = RESUMABLE | {"save_strategy": "no"}
    if how == "arguments":
        changes["resume_from_checkpoint"] = checkpoint
    trainer = make(model, 2, tmp_path, gem, **changes)
    if how.startswith("load"):
        gem.load(checkpoint if how == "load" else folder / "checkpoint-2")
    if how in ("load", "arguments"):
        trainer.train(resume_from_checkpoint=checkpoint)
        assert torch.equal(trained(model), expected)
    else:
        with pytest.raises(ValueError, match=r"resumes at step 4, but .* Call GEMCallback\.load\(folder\)"):
            trainer.train(resume_from_checkpoint=checkpoint)


def test_constraints_have_the_precision_of_training(tmp_path):
    model, kinds = network(dtype=torch.float32), set()
    model.transformer.h[0].mlp.c_fc.register_forward_hook(
        lambda module, args, out: kinds.add((module.training, out.dtype))
    )
    learn(model, 1, tmp_path, GEMCallback(remembered(0)), bf16=True)
    assert kinds == {(True, torch.bfloat16), (False, torch.bfloat16)}


def test_checkpointed_layers_have_the_same_gradients(tmp_path):
    def run(reentrant):
        model, gem = network(), GEMCallback(remembered(0))
        watching = Watching(gem)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        learn(model, 1, tmp_path, gem, watching, max_steps=1)
        return watching.constraints[0]

    torch.testing.assert_close(run(reentrant=True), run(reentrant=False))


SIZES = {"vocab_size": 20, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
TINY = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}
# Bart draws masks in its layers themselves and leaves layers out; Mamba writes a cache in evaluation mode.
PAIRS = {f"{part}_{name}": n for part in ("encoder", "decoder") for name, n in (
    ("layers", 3), ("attention_heads", 2), ("ffn_dim", 16), ("layerdrop", 0.5))}  # fmt: skip
CHECKPOINTED = {
    "gpt2": {"n_embd": 8, "n_layer": 3, "n_head": 2, "n_positions": 16},
    "llama": TINY | {"attention_dropout": 0.5},
    "bart": PAIRS | {"d_model": 8, "dropout": 0.5, "max_position_embeddings": 16},
    "mamba": {"hidden_size": 8, "num_hidden_layers": 3, "state_size": 4},
}


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", [*CHECKPOINTED, "gpt2 lora"])
def test_layers_are_checkpointed_in_evaluation_mode_too(name, reentrant):
    pytest.importorskip("transformers.modeling_layers")
    kind, _, adapter = name.partition(" ")
    torch.manual_seed(0)
    head = AutoModelForSeq2SeqLM if kind == "bart" else AutoModelForCausalLM
    model = head.from_config(AutoConfig.for_model(kind, **SIZES, **CHECKPOINTED[kind])).train()
    if adapter:
        peft = pytest.importorskip("peft")
        options = {"lora_dropout": 0.5, "init_lora_weights": False, "fan_in_fan_out": True}
        model = peft.get_peft_model(model, peft.LoraConfig(**options))
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


class ByHand:
    """The events of a trainer, one at a time."""

    def __init__(self, gem, model, optimizer):
        self.gem, self.optimizer = gem, optimizer
        self.args = SimpleNamespace(optim="odd", resume_from_checkpoint=None, output_dir="nowhere")
        self.state = SimpleNamespace(global_step=0, log_history=[])
        gem.on_train_begin(self.args, self.state, None, model=model, optimizer=optimizer)

    def step(self, step):
        self.gem.on_pre_optimizer_step(self.args, self.state, None)
        step()
        self.gem.on_optimizer_step(self.args, self.state, None, optimizer=self.optimizer)
        self.state.log_history.append({})
        self.gem.on_log(self.args, self.state, None, logs={"loss": 1.0})
        return self.state.log_history[-1]


def test_a_step_that_the_scaler_skips_is_not_counted():
    Accelerator(cpu=True)
    model, gem = network(dtype=torch.float32), GEMCallback(remembered(0))
    scaler = torch.amp.GradScaler("cpu")
    optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)
    trainer = ByHand(gem, model, optimizer)
    for finite in (True, False, True):
        optimizer.zero_grad()
        scaler.scale(model(**default_data_collator(examples(1))).loss).backward()
        if not finite:
            model.score.weight.grad[0] = float("inf")
        log = trainer.step(optimizer.step)
        assert optimizer.step_was_skipped is not finite
        assert ("gem/cosine" in log) is finite


def test_steps_out_of_sight_are_reported():
    Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(RuntimeError, match="optim='odd' are not taken by optimizer"):
        ByHand(GEMCallback(remembered(0)), model, optimizer).step(lambda: None)


def test_a_training_that_broke_off_leaves_no_second_hook(tmp_path):
    class Failing(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise KeyboardInterrupt

    model, gem, failing = network(), GEMCallback(remembered(0)), Failing()
    trainer = make(model, 1, tmp_path, gem, failing)
    with contextlib.suppress(KeyboardInterrupt):
        trainer.train()
    trainer.remove_callback(failing)
    counts, layer = [], network()
    plain = torch.optim.SGD(layer.parameters(), lr=1.0)
    GEM(layer, plain)
    expected = len(plain._optimizer_step_pre_hooks)

    class Counting(TrainerCallback):
        def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
            counts.append(len(optimizer.optimizer._optimizer_step_pre_hooks))

        on_train_end = on_train_begin

    gem.attach(trainer)
    trainer.add_callback(Counting())
    trainer.train()
    assert counts[0] > counts[1] == 0
    assert counts[0] == expected


def test_end_task_takes_a_loader_and_wants_fixed_shapes(tmp_path):
    gem = GEMCallback(EpisodicMemory(per_task=8, label="labels"))
    trainer = learn(network(), 0, tmp_path, gem)
    assert not any(key.startswith("gem/") for log in trainer.state.log_history for key in log)
    gem.end_task(trainer.get_train_dataloader())
    assert gem.memory.tasks == [0]
    assert sorted(next(gem.memory.batches())) == ["input_ids", "labels"]
    short = default_data_collator([{**one, "input_ids": one["input_ids"][:3]} for one in examples(1)])
    with pytest.raises(ValueError, match="Pad sequences to a fixed length"):
        gem.end_task([short])


def test_a_state_that_is_saved_before_training_has_all_of_it():
    fresh = GEMCallback(EpisodicMemory())
    fresh.exclude = "now"
    assert fresh.state_dict()["exclude"] == "now"
    model = perceptron()
    gem = GEM(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b[0]).mean(), interval=4)
    gem.end_task([points(0)])
    gem.projector.recall(model, gem.memory.batches(), lambda m, b: m(b[0]).mean())
    gem.exclude = "then"
    fresh.load_state_dict(gem.state_dict())
    state = fresh.state_dict()
    assert state.keys() == gem.state_dict().keys()
    assert (state["exclude"], state["projector"]["calls"]) == ("then", 1)
    assert fresh.exclude == "then"
    assert torch.equal(state["projector"]["constraints"]["rows"], gem.projector.constraints)
    fresh.load_state_dict(GEMCallback(EpisodicMemory()).state_dict())
    assert fresh.state_dict()["projector"] is None


def test_what_a_model_can_do_is_stored_before_training():
    model, sizes, batch = perceptron(), [], points(0, 24)
    model.register_forward_pre_hook(lambda model, given: sizes.append(len(given[0])))
    gem = GEMCallback(EpisodicMemory(per_task=10, label=1), SAID, bound=0.1, microbatch=3)
    with pytest.raises(ValueError, match="model is needed"):
        copy.deepcopy(gem).end_task([batch])
    gem.end_task([batch], model=model)
    assert max(sizes) == 3
    stored = gem.memory.batch(0)
    torch.testing.assert_close(stored.outputs, SAID.outputs(model, stored.batch))
    torch.testing.assert_close(stored.losses, SAID(model, stored.batch, stored.outputs).detach())
    assert model.training
    # The examples again, with the model as it is by then.
    with torch.no_grad():
        model[2].bias.add_(torch.arange(3.0))
    with pytest.warns(UserWarning, match="in no training with this GEMCallback"):  # which changed it
        gem.end_task([], 0, model=model)
    torch.testing.assert_close(gem.memory.batch(0).outputs, SAID.outputs(model, stored.batch))


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ((), {}, r"GEMCallback needs a memory, such as GEMCallback\(EpisodicMemory\(100\)\).*NoneType"),
        ((), {"per_task": 50}, r"such as GEMCallback\(EpisodicMemory\(50\)\)"),
        ((model_loss,), {}, r"GEMCallback needs a memory, .*found function"),
        (
            (EpisodicMemory(),),
            {"per_task": 50},
            r"GEMCallback has no option 'per_task': .*EpisodicMemory\(per",
        ),
        ((EpisodicMemory(),), {"marign": 0.5}, "GEMCallback has no option 'marign'; did you mean 'margin'"),
        ((EpisodicMemory(),), {"memory_strength": 1.0}, "it is called margin here"),
    ],
)
def test_mistakes_are_told_by_the_name_of_the_callback(given, options, message, tmp_path):
    with pytest.raises(TypeError, match=message):
        GEMCallback(*given, **options)
    if not (given or options):  # the class, where an object is needed
        with pytest.raises(TypeError, match=message):
            make(network(), 0, tmp_path, GEMCallback)


def test_a_training_without_a_stored_set_is_told(tmp_path, caplog, monkeypatch):
    monkeypatch.delattr(sys, "last_value", raising=False)
    with caplog.at_level("WARNING", "gemproj"):
        learn(network(), 0, tmp_path, GEMCallback(EpisodicMemory()), max_steps=2)
        gc.collect()
    assert "Nothing was protected: all 2 steps were taken before a task was stored" in caplog.text


@pytest.mark.parametrize("passed", [False, True])
def test_a_callback_that_no_trainer_was_given_is_told(passed, tmp_path):
    model, gem = network(), GEMCallback(EpisodicMemory())
    batches = [default_data_collator(examples(0))]
    for _ in range(2):  # no training in between
        gem.end_task(batches, model=model)
    learn(model, 0, tmp_path, *[gem] * passed, max_steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gem.end_task(batches, model=model)
    messages = [str(warning.message) for warning in caught if warning.category is UserWarning]
    assert ["no training with this GEMCallback" in message for message in messages] == [True] * (not passed)
