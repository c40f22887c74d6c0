"""The callback in Lightning's loop takes the same steps as a loop by hand."""

import io
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lightning", reason="needs the extra lightning")

import lightning.pytorch as pl  # noqa: E402
from lightning.pytorch.core.optimizer import LightningOptimizer  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision, Precision  # noqa: E402
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy  # noqa: E402
from models import EACH, assert_same_weights, loss, promises  # noqa: E402

from gemproj.integrations.lightning import GEMCallback  # noqa: E402
from gemproj.torch import GEM, EpisodicMemory, GradientProjector  # noqa: E402

ACCUMULATE, CLIP = 2, 0.3


class Classifier(pl.LightningModule):
    def __init__(self, manual=False):
        super().__init__()
        self.automatic_optimization = not manual
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        if self.automatic_optimization:
            return loss(self, batch)
        optimizer = self.optimizers()
        self.manual_backward(loss(self, batch) / ACCUMULATE)
        if batch_idx % ACCUMULATE == ACCUMULATE - 1:
            self.clip_gradients(optimizer, CLIP, "norm")
            optimizer.step()
            optimizer.zero_grad()
        return None

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.02, weight_decay=0.1)


class Batches:
    """An iterable that is no list: of those, Lightning takes one item from each element at a time."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def task(k, dtype=torch.float32):
    """Tasks that contradict each other: the same inputs, other labels."""
    x = torch.randn(8, 6, 4, generator=torch.Generator().manual_seed(0))
    return Batches([(part.to(dtype), ((part[:, 0] > 0) + k) % 3) for part in x])


def callback(promised=loss, **options):
    return GEMCallback(EpisodicMemory(10, label=1), promised, **options)


def trainer(gem, epochs=1, accumulate=ACCUMULATE, clip=CLIP, **options):
    defaults = {"accelerator": "cpu", "logger": False, "enable_checkpointing": False, "barebones": False}
    return pl.Trainer(
        max_epochs=epochs,
        callbacks=[gem],
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        enable_progress_bar=False,
        enable_model_summary=False,
        **(defaults | options),
    )


def by_lightning(model, options, tasks=2, make=trainer, promise=loss):
    gem, seen = callback(promise, **options), []
    for k in range(tasks):
        make(gem).fit(model, task(k))
        seen.append(gem.projector.last)
        gem.end_task(task(k))
    return gem, seen


def by_hand(model, options, tasks=2, promise=None, context=nullcontext, scaler=None):
    memory, seen, active = EpisodicMemory(10, label=1), [], 0
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    dtype = next(model.parameters()).dtype

    def in_context(model, batch):
        with context():
            return loss(model, batch)

    for k in range(tasks):
        optimizer = model.configure_optimizers()
        gem = GEM(model, optimizer, promise or in_context, memory=memory, scaler=scaler, **options)
        for i, batch in enumerate(task(k, dtype)):
            scaler.scale(in_context(model, batch) / ACCUMULATE).backward()
            if i % ACCUMULATE == ACCUMULATE - 1:
                scaler.unscale_(optimizer)
                gem.clip_grad_norm_(CLIP)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                active += gem.last.num_active
        seen.append(gem.last)
        gem.end_task(task(k, dtype))
    assert active  # or a loop without the callback would end at the same weights
    return seen


def assert_same(model, other):
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


OPTIONS = [
    {},
    {"on": "both", "metric": "adam"},
    {"on": "step"},
    {"on": "both", "margin": 0.1, "interval": 3},
    {"method": "agem"},
]


@pytest.mark.parametrize(
    ("options", "manual"),
    [*((one, False) for one in OPTIONS), (OPTIONS[1], True), (OPTIONS[3], True)],
    ids=str,
)
def test_fits_as_a_loop_by_hand(options, manual):
    model, other = Classifier(manual), Classifier()
    # Lightning does not accumulate nor clip what is optimized manually; the module does.
    gem, seen = by_lightning(
        model, options, 3, (lambda gem: trainer(gem, accumulate=1, clip=None)) if manual else trainer
    )
    expected = by_hand(other, options, 3)
    assert_same(model, other)
    assert [one.constraints for one in seen] == [one.constraints for one in expected] == [0, 1, 2]
    assert seen[2].worst_cosine == expected[2].worst_cosine
    assert gem.memory.tasks == [0, 1, 2]


@pytest.mark.parametrize(("promise", "options"), promises())
def test_has_the_promises_of_a_loop_by_hand_in_double_precision(promise, options):
    model, other = Classifier(), Classifier().double()
    by_lightning(model, options, 3, lambda gem: trainer(gem, precision="64-true"), promise)
    by_hand(other, options, 3, promise)
    assert_same(model, other)


@pytest.mark.parametrize("on", ["gradient", "both"])
def test_constraints_have_the_precision_of_training(on):
    model, other = Classifier(), Classifier()
    by_lightning(model, {"on": on}, make=lambda gem: trainer(gem, precision="bf16-mixed"))
    by_hand(other, {"on": on}, context=partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False))
    assert_same(model, other)


@pytest.mark.parametrize("manual", [False, True])
def test_a_margin_is_the_weight_of_replay_also_where_gradients_are_clipped(manual):
    gem, model, plain = callback(margin=4.0), Classifier(manual), Classifier().double()
    gem.end_task(task(0))
    stored = gem.memory.batch(0)[0].double(), gem.memory.batch(0)[1]
    options = {"accumulate": 1, "clip": None} if manual else {}
    trainer(gem, precision="64-true", **options).fit(model, task(1))
    assert gem.last.num_active == 0  # replay, and nothing else

    optimizer, batches = plain.configure_optimizers(), task(1, torch.double).batches
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        optimizer.zero_grad()
        ((loss(plain, first) + loss(plain, second)) / 2 + 4.0 * loss(plain, stored)).backward()
        assert torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP) > CLIP
        optimizer.step()
    assert_same_weights(model, plain)


def test_clipping_is_of_the_optimizer_that_is_attached_to():
    class Lookahead(torch.optim.SGD):
        """Has another optimizer in it."""

    model = Classifier()
    optimizer = Lookahead(model.parameters(), lr=1.0)
    optimizer.optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    GEM(model, optimizer, loss)
    loss(model, task(0).batches[0]).backward()
    before = [p.grad.clone() for p in model.parameters()]
    for given in (optimizer, LightningOptimizer(optimizer)):
        Precision().clip_grad_by_norm(given, 1e-3)  # in the step
        assert all(map(torch.equal, before, [p.grad for p in model.parameters()]))
    optimizer.step()
    assert torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]) < 1.1e-3


def test_batches_are_converted_as_for_training():
    model = Classifier()
    gem, _ = by_lightning(model, {}, make=lambda gem: trainer(gem, precision="64-true"))
    assert next(gem.memory.batches())[0].dtype == torch.float32
    assert gem.projector.constraints.dtype == torch.float64


def test_after_training_batches_go_where_the_module_is(monkeypatch):
    """When `fit` ends, Lightning moves the module to the CPU, but not its own idea of the device."""
    module, gem = Classifier(), callback(EACH, bound=0.0)
    loop = trainer(gem)
    loop.fit(module, task(0))
    monkeypatch.setattr(type(loop.strategy), "root_device", torch.device("meta"))
    gem.end_task(task(0))
    assert gem.memory.batch(0).losses.device.type == "cpu"


@pytest.mark.parametrize("on", ["gradient", "both"])
def test_a_gradient_scaler_runs_the_closure_before_the_step(on):
    model, other = Classifier(), Classifier()

    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)

    def make(gem):
        return trainer(gem, plugins=MixedPrecision("16-mixed", "cpu", scaler=shared))

    shared = scaler()
    by_lightning(model, {"on": on}, make=make)
    half = partial(torch.autocast, "cpu", torch.half, cache_enabled=False)
    by_hand(other, {"on": on}, context=half, scaler=scaler())
    assert_same(model, other)
    assert shared.get_scale() > 2.0**10


def test_logs_what_the_projector_did():
    gem, model = callback(on="both"), Classifier()
    first = trainer(gem)
    first.fit(model, task(0))
    assert not any(name.startswith("gem/") for name in first.logged_metrics)
    gem.end_task(task(0))
    second = trainer(gem)
    second.fit(model, task(1))
    last = gem.projector.last
    logged = {name: float(value) for name, value in second.logged_metrics.items()}
    assert logged == pytest.approx(
        {
            "gem/violations": last.num_violated,
            "gem/active": last.num_active,
            "gem/cosine": last.cosine,
            "gem/worst_cosine": last.worst_cosine,
            "gem/seconds": last.seconds,
        }
    )


@pytest.mark.parametrize("weights_only", [None, True])
def test_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path, weights_only):
    options = {"on": "both", "metric": "adam", "interval": 3}  # rows of the checkpoint serve after it
    gem, model = GEMCallback(EpisodicMemory(10, label=1, seed=5), loss, **options), Classifier()
    trainer(gem).fit(model, task(0))
    gem.end_task(task(0))
    start = io.BytesIO()
    torch.save((model.state_dict(), gem.memory.state_dict()), start)
    trainer(gem, epochs=4).fit(model, task(1))
    constraints = gem.projector.constraints.clone()
    gem.end_task(task(1))

    start.seek(0)
    weights, remembered = torch.load(start, weights_only=True)
    other, before = Classifier(), callback(**options)
    other.load_state_dict(weights)
    before.memory.load_state_dict(remembered)
    interrupted = trainer(before, epochs=2)
    interrupted.fit(other, task(1))
    interrupted.save_checkpoint(tmp_path / "half.ckpt")

    resumed, after = Classifier(), callback(**options)
    trainer(after, epochs=4).fit(
        resumed, task(1), ckpt_path=tmp_path / "half.ckpt", weights_only=weights_only
    )
    assert_same(model, resumed)
    assert torch.equal(after.projector.constraints, constraints)
    after.end_task(task(1))
    for kept, other_kept in zip(gem.memory.batches(), after.memory.batches(), strict=True):
        assert torch.equal(kept[0], other_kept[0])


def test_a_checkpoint_that_is_evaluated_leaves_the_memory_alone(tmp_path):
    class Evaluated(Classifier):
        def test_step(self, batch, batch_idx):
            pass

    gem, model = callback(), Evaluated()
    one = trainer(gem)
    one.fit(model, task(0))
    one.save_checkpoint(tmp_path / "before.ckpt")
    gem.end_task(task(0))
    one.test(model, task(0), ckpt_path=tmp_path / "before.ckpt")
    assert gem.memory.tasks == [0]
    trainer(gem).fit(model, task(1), ckpt_path=tmp_path / "before.ckpt")
    assert gem.memory.tasks == []


def test_a_checkpoint_has_no_rows_of_shards(monkeypatch):
    gem = callback(interval=3)
    gem.end_task(task(0))
    trainer(gem).fit(Classifier(), task(1))
    assert gem.state_dict()["projector"]["constraints"] is not None
    # Lightning would give those of process 0 to all processes, which have other columns.
    monkeypatch.setattr(GradientProjector, "sharded", True)
    assert gem.state_dict()["projector"]["constraints"] is None


def test_leaves_the_optimizer_alone_afterwards():
    class Failing(Classifier):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("on purpose")

    for model, ending in (
        (Classifier(), nullcontext()),
        (Failing(), pytest.raises(RuntimeError, match="on purpose")),
    ):
        one = trainer(callback())
        with ending:
            one.fit(model, task(0))
        (optimizer,) = one.optimizers
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks


def test_refuses_what_it_cannot_do():
    with pytest.raises(TypeError, match="loss must be a function of model and batch; found NoneType"):
        callback(None)
    with pytest.raises(ValueError, match="on must be one of"):
        callback(on="all")

    class Two(Classifier):
        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.net[0], self.net[2])]

    gem = callback()
    with pytest.raises(ValueError, match=r"one optimizer; found 2.*GEM\(self, \[opt.optimizer for opt in"):
        trainer(gem, accumulate=1, clip=None).fit(Two(manual=True), task(0))
    for strategy in (DeepSpeedStrategy, FSDPStrategy):
        running = SimpleNamespace(strategy=object.__new__(strategy))
        with pytest.raises(ValueError, match=f"cannot work with {strategy.__name__}"):
            gem.on_train_start(running, Classifier())
