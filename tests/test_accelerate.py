"""GEM in a loop of Accelerate does what a plain loop does, and its checkpoints bring everything back."""

import contextlib
import importlib
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

from accelerate import Accelerator, debug_launcher  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402
from accelerate.state import AcceleratorState, PartialState  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402

from gemproj.integrations.accelerate import GEM  # noqa: E402
from gemproj.torch import EpisodicMemory, GradientProjector  # noqa: E402


@pytest.fixture(autouse=True)
def fresh_state():
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def network(dtype=torch.float64):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).to(dtype)


def batches(seed, n=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    flip = [1.0, -1.0, 0.5][seed % 3]
    made = []
    for _ in range(n):
        x = torch.randn(4, 6, generator=generator, dtype=dtype)
        made.append({"x": x, "y": (flip * x[:, :3]).argmax(1)})
    return made


def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def parameters(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def remembered(*tasks, dtype=torch.float64):
    memory = EpisodicMemory(per_task=8, label="y")
    for task in tasks:
        for batch in batches(task, dtype=dtype):
            memory.add(batch, task)
    return memory


def train(gem, accelerator, model, optimizer, stream):
    """Take one step per two batches."""
    computed = []
    for batch in stream:
        with accelerator.accumulate(model):
            accelerator.backward(loss(model, batch))
            computed.append(gem.recall())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    return computed


@pytest.mark.parametrize("on", ["gradient", "update", "both"])
def test_a_loop_of_accelerate_takes_the_steps_of_a_plain_loop(on):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    memory, active = EpisodicMemory(per_task=8, label="y"), 0
    projector = GradientProjector(model.parameters(), on=on, interval=2)
    projector.attach(optimizer)
    for task in range(3):
        projector.reset()
        stream = batches(task)
        for first, second in zip(stream[::2], stream[1::2], strict=True):
            optimizer.zero_grad()
            for batch in (first, second):
                (loss(model, batch) / 2).backward()
            projector.recall(model, memory.batches(), loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            active += projector.last.active
        for batch in stream:
            memory.add(batch, task)
    assert active > 0

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared = network()
    prepared, optimizer = accelerator.prepare(prepared, torch.optim.AdamW(prepared.parameters(), lr=0.05))
    memory = EpisodicMemory(per_task=8, label="y")
    gem = GEM(accelerator, prepared, optimizer, memory, loss=loss, on=on, interval=2)
    for task in range(3):
        gem.projector.reset()
        computed = train(gem, accelerator, prepared, optimizer, batches(task))
        assert computed == [False, True, False, False, False, True]
        for batch in batches(task):
            memory.add(batch, task)
    torch.testing.assert_close(parameters(prepared), parameters(model), rtol=1e-9, atol=0.0)


def begin(interval=2):
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.05))
    memory = EpisodicMemory(per_task=8, label="y")
    gem = GEM(accelerator, model, optimizer, memory, loss=loss, method="pgd", on="both", interval=interval)
    return accelerator, model, optimizer, memory, gem


@pytest.mark.parametrize("interval", [1, 3])
def test_a_checkpoint_brings_back_memory_constraints_and_warm_start(interval, tmp_path):
    accelerator, model, optimizer, memory, gem = begin(interval)
    for task in (0, 1):
        for batch in batches(task):
            memory.add(batch, task)
    train(gem, accelerator, model, optimizer, batches(2))
    accelerator.save_state(tmp_path)
    rows = torch.load(tmp_path / "gem.pt", weights_only=True)["projector"]["constraints"]["rows"]
    assert len(rows) == (0 if interval == 1 else 2)  # those that would be computed anew are not kept
    memory.add(batches(3)[0], 3)
    train(gem, accelerator, model, optimizer, batches(4))
    expected = parameters(model)

    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator, model, optimizer, memory, gem = begin(interval)
    accelerator.load_state(tmp_path)
    assert memory.tasks == [0, 1]
    memory.add(batches(3)[0], 3)
    train(gem, accelerator, model, optimizer, batches(4))
    assert torch.equal(parameters(model), expected)


def test_a_checkpoint_without_gem_is_refused(tmp_path):
    accelerator, _, _, _, gem = begin()
    gem.remove()
    accelerator.save_state(tmp_path)
    assert not list(tmp_path.glob("gem*"))
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(FileNotFoundError, match=r"has no gem\.pt; of such files it has none"):
        begin()[0].load_state(tmp_path)


def test_what_is_removed_projects_no_more():
    accelerator, model, optimizer, memory, gem = begin()
    memory.add(batches(0)[0], 0)
    gem.remove()
    train(gem, accelerator, model, optimizer, batches(1))
    assert len(gem.projector.constraints) == 1
    assert gem.projector.last is None


def test_constraints_have_the_precision_of_training():
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    model = network(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    memory = remembered(0, dtype=torch.float32)
    full = torch.autograd.grad(loss(model, next(memory.batches())), list(model.parameters()))
    model, optimizer = accelerator.prepare(model, optimizer)
    gem = GEM(accelerator, model, optimizer, memory, loss=loss)
    assert gem.recall()
    accelerator.backward(loss(model, next(memory.batches())))
    trained = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    assert torch.equal(gem.projector.constraints[0], trained)
    assert not torch.equal(trained, torch.cat([g.reshape(-1) for g in full]))


def test_constraints_in_float16_do_not_vanish():
    Accelerator(cpu=True)
    model, small = network(torch.float32), 2.0**-22

    def half_loss(model, batch):
        with torch.autocast("cpu", torch.float16):
            out = model(batch["x"])
        return torch.nn.functional.cross_entropy(out.float(), batch["y"]) * small

    memory = remembered(0, 1, dtype=torch.float32)
    full, plain = GradientProjector(model.parameters()), GradientProjector(model.parameters())
    full.recall(model, memory.batches(), loss)
    plain.recall(model, memory.batches(), half_loss)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**26)
    optimizer = AcceleratedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), scaler=scaler)
    gem = GEM(Accelerator(cpu=True), model, optimizer, memory, loss=half_loss)
    gem.recall()

    def error(rows):
        return float(torch.linalg.norm(rows / small - full.constraints) / torch.linalg.norm(full.constraints))

    assert error(plain.constraints) > 0.1
    assert error(gem.projector.constraints) < 0.01


@pytest.mark.parametrize(
    ("kind", "version", "message"),
    [
        (DistributedType.DEEPSPEED, None, "DEEPSPEED takes its steps itself"),
        (DistributedType.MEGATRON_LM, None, "MEGATRON_LM takes its steps itself"),
        (DistributedType.FSDP, 1, "fsdp_version=2"),
        (DistributedType.FSDP, 2, None),
    ],
)
def test_engines_out_of_reach_are_refused(kind, version, message, monkeypatch):
    accelerator = Accelerator(cpu=True)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monkeypatch.setitem(PartialState._shared_state, "distributed_type", kind)
    if version is not None:
        plugin = type("Plugin", (), {"fsdp_version": version})()
        monkeypatch.setitem(AcceleratorState._shared_state, "fsdp_plugin", plugin)
    expected = contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=message)
    with expected:
        GEM(accelerator, model, optimizer, EpisodicMemory(), loss=loss)


def test_the_install_line_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "gemproj.integrations.accelerate")
    with pytest.raises(ImportError, match=r"pip install 'gemproj\[accelerate\]'"):
        importlib.import_module("gemproj.integrations.accelerate")


def two_processes(folder):
    accelerator = Accelerator(cpu=True)
    rank, whole = accelerator.process_index, network()
    model = network()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(model, torch.nn.parallel.DistributedDataParallel)
    memory = EpisodicMemory(per_task=16)
    for batch in batches(0)[rank::2]:
        memory.add(batch, 0)
    gem = GEM(accelerator, model, optimizer, memory, loss=loss)
    gem.recall()

    everything = {key: torch.cat([batch[key] for batch in batches(0)]) for key in ("x", "y")}
    expected = torch.autograd.grad(loss(whole, everything), list(whole.parameters()))
    rows = torch.cat([g.reshape(-1) for g in expected])
    torch.testing.assert_close(gem.projector.constraints[0], rows, rtol=1e-9, atol=1e-12)

    accelerator.backward(loss(model, batches(1)[rank]))
    optimizer.step()
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    memory.load_state_dict(EpisodicMemory(per_task=16).state_dict())
    accelerator.load_state(folder)
    assert torch.equal(next(memory.batches())["x"][:4], batches(0)[rank]["x"])


def test_processes_bring_and_keep_examples_of_their_own(tmp_path):
    debug_launcher(two_processes, (tmp_path,), num_processes=2)
    assert sorted(file.name for file in tmp_path.glob("gem*")) == ["gem_rank0.pt", "gem_rank1.pt"]
