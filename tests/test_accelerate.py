"""GEM in a loop of Accelerate does what a plain loop does, and its checkpoints bring everything back."""

import contextlib

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

from accelerate import Accelerator  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.state import AcceleratorState, PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from models import (  # noqa: E402
    SMALL,
    assert_same_weights,
    flat,
    gradient,
    half_loss,
    loss,
    moved,
    perceptron,
    promises,
    rival,
    rows,
    task,
)

import gemproj.torch  # noqa: E402
from gemproj.integrations.accelerate import GEM  # noqa: E402
from gemproj.torch import EpisodicMemory  # noqa: E402

pytestmark = pytest.mark.usefixtures("fresh_state")


def batches(seed, n=6, dtype=torch.float64):
    """Tasks that contradict each other."""
    made = [rival(task(10 * seed + k, 4, dtype), seed) for k in range(n)]
    return [{"x": x, "y": y} for x, y in made]


def remembered(*tasks, dtype=torch.float64):
    memory = EpisodicMemory(per_task=8, label="y")
    for k in tasks:
        for batch in batches(k, dtype=dtype):
            memory.add(batch, k)
    return memory


def train(accelerator, model, optimizer, stream):
    """Take one step per two batches."""
    for batch in stream:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()


def begin(promised=loss, **options):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = perceptron()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    gem = GEM(accelerator, model, optimizer, remembered(), promised, **options)
    return accelerator, model, optimizer, gem


EVERY_OTHER = [pytest.param(loss, {"on": on, "interval": 2}, id=on) for on in ("gradient", "step", "both")]


@pytest.mark.parametrize(("promise", "options"), [*EVERY_OTHER, *promises()])
def test_a_loop_of_accelerate_takes_the_steps_of_a_plain_loop(promise, options):
    plain, active = perceptron(), 0
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    gem = gemproj.torch.GEM(plain, optimizer, promise, memory=remembered(), **options)
    for k in range(3):
        stream = batches(k)
        for window in zip(stream[::2], stream[1::2], strict=True):
            optimizer.zero_grad()
            for batch in window:
                (loss(plain, batch) / 2).backward()
            gem.clip_grad_norm_(0.1)
            optimizer.step()
            active += gem.last.num_active
        gem.end_task(stream)
    assert active

    accelerator, model, optimizer, gem = begin(promise, **options)
    for k in range(3):
        train(accelerator, model, optimizer, batches(k))
        gem.end_task(batches(k))
    assert_same_weights(model, plain)


@pytest.mark.parametrize("framework", [False, True])
def test_a_margin_is_the_weight_of_replay_also_where_gradients_are_clipped(framework):
    accelerator, model, optimizer, gem = begin(margin=4.0)
    if not framework:
        gem.remove()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        gem = gemproj.torch.GEM(model, optimizer, loss, memory=gem.memory, margin=4.0)
    gem.memory.add(batches(0)[0], 0)
    plain = perceptron()
    reference = torch.optim.AdamW(plain.parameters(), lr=0.05)
    for window in zip(batches(1)[::2], batches(1)[1::2], strict=True):
        optimizer.zero_grad()
        reference.zero_grad()
        for batch in window:
            (loss(model, batch) / 2).backward()
            (loss(plain, batch) / 2).backward()
        norm = gradient(plain).norm()
        assert norm > 0.1
        clipped = (
            accelerator.clip_grad_norm_(model.parameters(), 0.1) if framework else gem.clip_grad_norm_(0.1)
        )
        assert float(clipped) == pytest.approx(float(norm))
        optimizer.step()
        assert gem.last.num_active == 0  # replay, and nothing else
        (4.0 * loss(plain, gem.memory.batch(0))).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        reference.step()
        assert_same_weights(model, plain)


def test_steps_have_the_margin_of_clipped_gradients():
    model, batch, past = perceptron(), batches(1)[0], batches(0)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gem = gemproj.torch.GEM(model, optimizer, loss, on="step", margin=4.0)
    gem.end_task([past])
    (row,) = rows(model, [past])
    loss(model, batch).backward()
    g, before = gradient(model), flat(model)
    gem.clip_grad_norm_(0.1)
    optimizer.step()
    assert gem.last.num_active == 0
    torch.testing.assert_close(before - flat(model), 0.1 * (g + 4.0 * row) * (0.1 / float(g.norm())))


def test_optimizers_that_share_a_model_have_their_gradients_clipped_at_once():
    model = perceptron()
    parts = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    gem = gemproj.torch.GEM(model, parts, loss, margin=4.0)
    loss(model, batches(0)[0]).backward()
    gem.clip_grad_norm_(0.1)
    assert float(gradient(model).norm()) == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("kind", [1.0, 2.0, float("inf")])
@pytest.mark.parametrize("size", [1.0, 1e25])
def test_where_nothing_is_remembered_gradients_are_clipped_as_without_gem(size, kind, fresh_state):
    weights = []
    for attached in (False, True):
        fresh_state()
        accelerator, model = Accelerator(cpu=True), perceptron(torch.float32)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        if attached:
            GEM(accelerator, model, optimizer, EpisodicMemory(), loss=loss)
        accelerator.backward(loss(model, batches(0, dtype=torch.float32)[0]) * size)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.1, kind)
        optimizer.step()
        weights.append((flat(model), norm))
    assert weights[0][0].isfinite().all()
    torch.testing.assert_close(*weights)


def test_gradients_are_unscaled_where_their_norm_is_measured(monkeypatch):
    accelerator, model, *_ = begin()
    accelerator.backward(loss(model, batches(0)[0]))
    norm = gradient(model).norm()

    def unscale(self):
        for p in model.parameters():
            p.grad /= 4

    monkeypatch.setattr(Accelerator, "unscale_gradients", unscale)
    torch.testing.assert_close(accelerator.clip_grad_norm_(model.parameters(), 0.1), norm / 4)


def test_clipping_is_forgotten_with_the_gradients_of_a_dropped_batch():
    model, batch = perceptron(), batches(1)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gem = gemproj.torch.GEM(model, optimizer, loss)
    loss(model, batches(0)[0]).backward()
    gem.clip_grad_norm_(1e-3)
    optimizer.zero_grad()
    loss(model, batch).backward()
    g = gradient(model)
    torch.testing.assert_close(moved(model, optimizer.step), 0.1 * g)


def test_a_prepared_optimizer_is_detached_from():
    _, _, optimizer, _ = begin()
    gemproj.torch.detach(optimizer)
    assert not optimizer.optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("interval", [1, 3])
def test_a_checkpoint_brings_back_memory_constraints_and_warm_start(interval, tmp_path, fresh_state):
    options = {"method": "pgd", "on": "both", "interval": interval}
    accelerator, model, optimizer, gem = begin(**options)
    for k in (0, 1):
        gem.end_task(batches(k))
    train(accelerator, model, optimizer, batches(2))
    accelerator.save_state(tmp_path)
    rows = torch.load(tmp_path / "gem.pt", weights_only=True)["projector"]["constraints"]
    assert (rows is None) == (interval == 1)  # those that would be recomputed are not kept
    gem.memory.add(batches(3)[0], 3)
    train(accelerator, model, optimizer, batches(4))
    expected = flat(model)

    fresh_state()
    accelerator, model, optimizer, gem = begin(**options)
    accelerator.load_state(tmp_path)
    assert gem.memory.tasks == [0, 1]
    gem.memory.add(batches(3)[0], 3)
    train(accelerator, model, optimizer, batches(4))
    assert torch.equal(flat(model), expected)

    fresh_state()
    gem, state = begin(**options)[-1], torch.load(tmp_path / "gem.pt", weights_only=True)
    gem.load_state_dict(state)
    # Rows that were not kept are due at the next step.
    assert gem.projector.state_dict()["calls"] == (0 if interval == 1 else state["projector"]["calls"])


def test_two_objects_have_two_files(tmp_path, fresh_state):
    accelerator, *_, first = begin()
    other = accelerator.prepare(perceptron())
    parts = accelerator.prepare(
        *(torch.optim.SGD(part.parameters(), lr=0.1) for part in (other[0], other[2]))
    )
    second = GEM(accelerator, other, list(parts), EpisodicMemory(), loss=loss)
    first.end_task(batches(0), "one")
    second.end_task(batches(1), "two")
    second.exclude = "two"
    accelerator.save_state(tmp_path)
    second.exclude = None
    accelerator.load_state(tmp_path)
    assert (first.memory.tasks, second.memory.tasks) == (["one"], ["two"])
    assert (first.exclude, second.exclude) == (None, "two")
    loss(other, batches(0)[0]).backward()
    for part in parts:
        part.step()
    assert len(second.projector.constraints) == 0


def test_a_prepared_optimizer_is_for_the_object_of_accelerate():
    _, model, optimizer, gem = begin()
    gem.remove()
    with pytest.raises(
        TypeError, match=r"AcceleratedOptimizer wraps another one.*integrations.accelerate.GEM"
    ):
        gemproj.torch.GEM(model, optimizer)


def test_what_is_removed_is_in_no_checkpoint_and_projects_no_more(tmp_path, fresh_state):
    accelerator, model, optimizer, gem = begin()
    gem.memory.add(batches(0)[0], 0)
    gem.remove()
    accelerator.save_state(tmp_path)
    assert not list(tmp_path.glob("gem*"))
    train(accelerator, model, optimizer, batches(1))
    assert gem.last is None
    fresh_state()
    with pytest.raises(FileNotFoundError, match=r"has no gem\.pt; of such files it has none"):
        begin()[0].load_state(tmp_path)


def test_constraints_have_the_precision_of_training():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = perceptron(torch.float32)
    memory = remembered(0, dtype=torch.float32)
    full = rows(model, memory.batches())[0]
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    gem = GEM(accelerator, model, optimizer, memory, loss=loss)
    accelerator.backward(loss(model, next(memory.batches())))
    trained = gradient(model)
    optimizer.step()
    assert torch.equal(gem.projector.constraints[0].double(), trained)
    assert not torch.equal(trained, full)


def test_constraints_in_float16_have_the_scale_of_training():
    accelerator = Accelerator(cpu=True)
    model = perceptron(torch.float32)
    memory = remembered(0, dtype=torch.float32)
    full = rows(model, memory.batches())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)
    optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), scaler=scaler)
    gem = GEM(accelerator, model, optimizer, memory, loss=half_loss)
    scaler.scale(loss(model, next(memory.batches())) * SMALL).backward()
    optimizer.step()
    assert float((gem.projector.constraints.double() / SMALL - full).norm() / full.norm()) < 0.01


@pytest.mark.parametrize(
    ("kind", "version", "message"),
    [
        (DistributedType.DEEPSPEED, None, None),  # what cannot be projected there is told by the optimizer
        (DistributedType.MEGATRON_LM, None, "MEGATRON_LM takes its steps itself"),
        (DistributedType.FSDP, 1, "fsdp_version=2"),
        (DistributedType.FSDP, 2, None),
    ],
)
def test_engines_out_of_reach_are_refused(kind, version, message, monkeypatch):
    accelerator = Accelerator(cpu=True)
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", kind)
    if version is not None:
        plugin = type("Plugin", (), {"fsdp_version": version})()
        monkeypatch.setitem(AcceleratorState._shared_state, "fsdp_plugin", plugin)
    expected = contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message)
    with expected:
        GEM(accelerator, model, optimizer, EpisodicMemory(), loss=loss)
