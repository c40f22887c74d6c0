"""Promises of a training loop against plain forms of their formulas: bounds and rows."""

import copy
import io
import itertools
from functools import cache, partial

import pytest

torch = pytest.importorskip("torch")

import models  # noqa: E402
from models import (  # noqa: E402
    BOTH,
    EACH,
    SAID,
    adam_weights,
    cosines,
    flat,
    gradient,
    loss,
    moved,
    perceptron,
    protect,
    rival,
    rows,
    sgd,
    take,
    task,
)

from gemproj import project  # noqa: E402
from gemproj.torch import EpisodicMemory, GradientProjector, Promise, Remembered, constraints, stream  # noqa: E402
from gemproj.torch.constraints import ConstraintMatrix  # noqa: E402


@cache
def learned_once(n):
    model, batch = perceptron(), task(0, n)
    optimizer = sgd(model.parameters(), 0.3)
    for _ in range(60):
        take(model, optimizer, batch)
    return model, batch


def learned(n=24, dtype=torch.float64):
    """Return a model that has learned a task, and that task."""
    model, (x, y) = copy.deepcopy(learned_once(n))
    return model.to(dtype), (x.to(dtype), y)


def begin(promised=loss, *more, rate=0.05, make=torch.optim.SGD, n=24, dtype=torch.float64, **options):
    """A model that has learned a task, GEM with a memory of this task and of more, and the task."""
    model, batch = learned(n, dtype)
    model, optimizer, gem = models.begin(promised, model=model, make=partial(make, lr=rate), **options)
    for one in (batch, *more):
        gem.end_task([one])
    return model, optimizer, gem, batch


def unlearn(model, optimizer, batch, steps):
    """Train on a task that contradicts the batch."""
    for _ in range(steps):
        take(model, optimizer, rival(batch))


def give(model, g):
    """Set the gradient of a model."""
    for p, part in zip(model.parameters(), g.split([p.numel() for p in model.parameters()]), strict=True):
        p.grad = part.view_as(p).clone()


# --- each step in plain form ----------------------------------------------------------------------

SETS = [task(1), dict(zip("xy", task(2), strict=True)), task(3), task(4)]
OF_SETS = {
    "nothing rises": [Promise(loss)] * 3,
    "replay": [Promise(loss, weight=weight) for weight in (0.01, 0.3, 0.0)],
    "penalties": [Promise(loss, penalty=1e-3), Promise(loss, weight=0.1, penalty=0.2), Promise(loss)],
    "equalities": [Promise(loss, equal=True), Promise(loss), Promise(loss, equal=True)],
    "bounds": [Promise(EACH, tolerance=0.002), Promise(EACH, tolerance=10.0, repair=0.3)],
    "a row of zeros": [Promise(loss), Promise(lambda model, batch: 0.0 * loss(model, batch))],
    "all kinds": [
        Promise(loss, weight=0.3),
        Promise(BOTH, tolerance=0.002, repair=0.5),
        Promise(EACH),
        Promise(loss, equal=True),
    ],
}
OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.5, 0.5), amsgrad=True),
    "AdamW, for each": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, foreach=True),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, foreach=False),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, fused=True),
    "AdamW, capturable rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.02), foreach=False),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.02),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.02),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.02),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}
SECOND_MOMENTS = [name for name in OPTIMIZERS if "Adam" in name and name != "Adamax"]


def in_plain_form(G, v, promises, excess, weighted=True, unit=1.0, rate=1.0, metric=None):
    """Project a gradient or a step: ``G s >= repair (loss - bound)``, at most ``|g_k| |s|``."""
    weights = torch.ones_like(v) if metric is None else metric
    longest = ((G**2 / weights).sum(1) * (v**2 * weights).sum()).sqrt()
    demands = [one.repair * over / rate for one, over in zip(promises, excess.tolist(), strict=True)]
    h = torch.minimum(torch.tensor(demands, dtype=torch.float64).nan_to_num(0.0), longest)
    penalty = [torch.inf if one.penalty is None else unit * one.penalty for one in promises]
    return project(
        G,
        v,
        h=h,
        margin=[unit * one.weight * weighted for one in promises],
        penalty=torch.tensor(penalty, dtype=torch.float64),
        equality=torch.tensor([one.equal for one in promises]),
        metric=metric,
    )


class Twins:
    """A model under promises, and another one whose gradients and steps are projected by hand."""

    def __init__(self, make, promises, on, metric):
        self.on, self.metric, self.promises = on, metric, promises
        self.model, self.plain = perceptron(), perceptron()
        self.optimizer, self.other = (
            make([{"params": layer.parameters()} for layer in (model[0], model[2])])
            for model in (self.model, self.plain)
        )
        if not isinstance(self.optimizer.param_groups[1]["lr"], torch.Tensor):
            self.optimizer.param_groups[1]["lr"] *= 0.5
        for one in (self.optimizer, self.other):  # hooks may drop gradients in a step
            one.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
        self.gem = protect(self.model, self.optimizer, on=on, metric=metric)
        self.losses = []
        for batch, one in zip(SETS, promises, strict=False):
            self.gem.keep([batch], one)
            given = (batch, one.loss.outputs(self.plain, batch)) if hasattr(one.loss, "outputs") else (batch,)
            self.losses.append(lambda m, one=one, given=given: one.loss(m, *given).mean())
        tolerances = [torch.nan if one.tolerance is None else one.tolerance for one in promises]
        self.bounds = self.now() + torch.tensor(tolerances, dtype=torch.float64)

    def now(self):
        return torch.stack([one(self.plain).detach() for one in self.losses])

    def step(self):
        """Take a step with each, from the same weights and state, and compare them and what is said of them."""
        plain, gem, on = self.plain, self.gem, self.on
        plain.load_state_dict(self.model.state_dict())
        for p, its in zip(plain.parameters(), self.model.parameters(), strict=True):
            self.other.state[p] = copy.deepcopy(self.optimizer.state[its])
        for group, its in zip(self.other.param_groups, self.optimizer.param_groups, strict=True):
            group["lr"] = copy.deepcopy(its["lr"])
        G = torch.stack([flat(torch.autograd.grad(one(plain), plain.parameters())) for one in self.losses])
        losses, excess = self.now(), self.now() - self.bounds
        rate = max(float(group["lr"]) for group in self.other.param_groups)
        for model in (self.model, plain):
            model.zero_grad()
            loss(model, rival(SETS[0])).backward()
        if on != "step":
            give(plain, in_plain_form(G, gradient(plain), self.promises, excess, rate=rate))
        step = moved(plain, self.other.step)
        if on != "gradient":
            # In units of gradients: times the rate those of steps; Adam's metric has the rate in it.
            w, unit = (adam_weights(plain, self.other, G), 1.0) if self.metric == "adam" else (None, rate)
            step = in_plain_form(G, step, self.promises, excess, on == "step", unit, metric=w)
        found = moved(self.model, self.optimizer.step)
        torch.testing.assert_close(found, step, rtol=1e-7, atol=1e-10)
        torch.testing.assert_close(gem.last.cosines, cosines(G, step).nan_to_num(0.0), rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(gem.last.losses, losses)
        if gem.last.excess is not None:
            torch.testing.assert_close(gem.last.excess, excess, rtol=1e-6, atol=1e-12, equal_nan=True)
        assert (gem.last.solution is gem.last.step) == (on == "step")  # what `num_active` counts
        # Moments, counts and schedules are the optimizer's own, as if it had been left alone.
        states = [
            [o.state[p] for p in m.parameters()]
            for o, m in ((self.optimizer, self.model), (self.other, plain))
        ]
        torch.testing.assert_close(*states, rtol=1e-6, atol=1e-12)
        return gem.last.num_active


@pytest.mark.parametrize(
    ("on", "metric"),
    [("gradient", None), *((on, metric) for on in ("step", "both") for metric in ("euclidean", "adam"))],
)
@pytest.mark.parametrize(
    ("kind", "name", "streamed"),
    [
        *itertools.product(OF_SETS, ["AdamW", "AdamW, amsgrad"], [False]),
        *itertools.product(["nothing rises"], list(OPTIMIZERS)[2:], [False]),
        ("all kinds", "AdamW", True),
    ],
)
def test_each_step_is_a_projection_of_the_optimizers_own(kind, name, streamed, on, metric, monkeypatch):
    if streamed:  # as rows of another dtype are; here they have the same one, to compare them
        monkeypatch.setattr(stream, "_HOST_TILE", 40)  # 10 of 83 columns
        monkeypatch.setattr(ConstraintMatrix, "streamed", True)
    if metric == "adam" and name not in SECOND_MOMENTS:
        pytest.skip("keeps no second moments")
    twins = Twins(OPTIMIZERS[name], OF_SETS[kind], on, metric)
    schedule = torch.optim.lr_scheduler.LambdaLR(twins.optimizer, lambda step: min(step + 1, 4) / 4)
    active = 0
    for _ in range(5):
        active += twins.step()
        schedule.step()
    assert active or kind == "replay"


@pytest.mark.parametrize("on", ["gradient", "both"])
def test_a_step_within_the_step_of_a_subclass_is_a_part_of_it(on):
    """Torch has a class call hooks if one of its own was made before; and a step may break off within another."""

    class Decaying(torch.optim.AdamW):
        unlucky = True

        def step(self, closure=None):
            value = super().step(closure)
            if self.unlucky:
                raise KeyboardInterrupt
            with torch.no_grad():
                torch._foreach_mul_(self.param_groups[0]["params"], 0.95)
            return value

    torch.optim.AdamW(perceptron().parameters())
    twins = Twins(partial(Decaying, lr=0.02), OF_SETS["replay"], on, "euclidean")
    loss(twins.model, rival(SETS[0])).backward()
    with pytest.raises(KeyboardInterrupt):
        twins.optimizer.step()
    Decaying.unlucky = False
    for _ in range(4):
        twins.step()


@pytest.mark.parametrize("penalty", [None, 0.1])
@pytest.mark.parametrize("on", ["gradient", "step", "both"])
def test_losses_that_cannot_all_come_back_are_an_error_that_names_them_unless_there_is_a_penalty(on, penalty):
    def signed(model, batch):
        return batch[2] * EACH(model, batch)

    model, batch = learned()
    sign, memory = torch.ones(len(batch[1]), dtype=torch.float64), EpisodicMemory()
    past = [(*batch, sign), (*task(5, 24), sign), (*batch, -sign)]  # the last wants what the first forbids
    for k, one in enumerate(past):
        memory.add(one, k, losses=signed(model, one).detach() - 0.05)
    before, options = flat(model), {"tolerance": 0.01, "penalty": penalty, "on": on}
    _, optimizer, gem = models.begin(signed, model=model, memory=memory, **options)
    loss(model, rival(batch)).backward()
    given = gradient(model)
    if penalty is not None:
        optimizer.step()
        assert gem.last.num_active
        return
    names = r"Row 0 is of 0, row 1 is of 1, row 2 is of 2\. h comes from their tol"
    message = rf"h is infeasible: .* in rows 0, 2 at once.*penalty.* {names}"
    with pytest.raises(ValueError, match=message if on != "step" else f"was undone.*{message}"):
        optimizer.step()
    assert torch.equal(flat(model), before)
    assert torch.equal(gradient(model), given)


@pytest.mark.parametrize("metric", ["euclidean", "adam"])
@pytest.mark.parametrize("promise", [EACH, SAID], ids=["labels", "outputs"])
def test_a_bound_holds_where_a_promise_to_first_order_drifts(promise, metric):
    def drift(bound):
        model, optimizer, gem, batch = begin(
            promise, rate=0.03, make=torch.optim.AdamW, per_task=24, on="step", tolerance=bound
        )
        gem.metric = metric
        (held,) = gem.memory.batches()
        given = (held.outputs,) if promise is SAID else ()
        before = promise(model, batch, *given).mean().detach()
        unlearn(model, optimizer, batch, 60)
        assert gem.last.worst_cosine > -1e-9 or bound is not None
        return float(promise(model, batch, *given).mean().detach() - before)

    drifted = drift(None)
    assert drifted > 0.005  # without one violated step
    assert drift(0.0) < drifted / 2


def test_losses_are_followed_while_rows_are_reused():
    model, optimizer, gem, batch = begin(EACH, rate=1e-4, tolerance=0.5, every=4)
    start = loss(model, batch).item()
    for age in range(4):
        now = loss(model, batch).item()
        take(model, optimizer, rival(batch))
        assert gem.last.age == age
        # To first order: what is missing is quadratic in steps of 1e-4.
        assert abs(float(gem.last.excess) + 0.5 - (now - start)) < 1e-2 * abs(now - start) + 1e-12
    assert now > start


@pytest.mark.parametrize(
    ("per", "n"), [("label", None), ("example", None), ("all", None), ("all", 60), ("task", 5), ("label", 2)]
)
def test_rows_are_about_what_the_memory_draws(per, n):
    model, optimizer, gem, batch = begin(loss, task(7, 6), per_task=24, label=1, per=per, examples=n)
    memory = EpisodicMemory(24, label=1)
    for k, one in enumerate((batch, task(7, 6))):
        memory.add(one, k)
    for _ in range(3):
        G = rows(model, list(memory.batches(n=n, per=per)))
        _, step = take(model, optimizer, rival(batch))
        torch.testing.assert_close(gem.projector.constraints, G)
        assert cosines(G, step).min() > -1e-9


def test_hundreds_of_equalities():
    options = {"per_task": 200, "per": "example", "equal": True, "on": "both"}
    model, optimizer, gem, batch = begin(rate=0.01, make=torch.optim.Adam, n=200, **options)
    G = rows(model, list(gem.memory.batches(per="example")))
    _, step = take(model, optimizer, rival(batch))
    # More rows than parameters, and directions are left: outputs depend on differences of logits only.
    assert len(G) > len(step) > torch.linalg.matrix_rank(G)
    assert (G @ step).abs().max() < 1e-9 < step.norm()


@pytest.mark.parametrize("on", ["gradient", "both"])
def test_rows_in_half_precision_are_a_projection_for_rounded_rows(on, monkeypatch):
    other, plain, read = task(5, dtype=torch.float32), stream.tiles, torch.zeros(83)

    def counting(rows, like, columns):
        for at, tile in plain(rows, like, columns):
            read[at] += 1
            yield at, tile

    for module in (stream, constraints):
        monkeypatch.setattr(module, "tiles", counting)
    model, optimizer, gem, batch = begin(
        loss, other, rate=0.1, dtype=torch.float32, rows_dtype=torch.bfloat16, on=on
    )
    G = rows(model, [batch, other])
    g, step = take(model, optimizer, rival(batch))
    # The projection reads the rows twice, and what follows the losses once.
    assert on == "both" or (read == 3).all()
    kept = gem.projector.constraints
    assert kept.dtype == torch.bfloat16
    torch.testing.assert_close(kept.double(), G, rtol=2.0**-8, atol=0.0)
    # Parameters of size one are float32: a step is known to about 1e-7.
    torch.testing.assert_close(step / 0.1, project(kept.double(), g), rtol=0.0, atol=3e-6)
    torch.testing.assert_close(gem.last.cosines, cosines(kept.double(), step), rtol=1e-4, atol=1e-5)
    assert cosines(G, step).min() > -0.002


@pytest.mark.parametrize(("said", "options"), [(SAID, {}), (EACH, {"tolerance": 0.0})])
def test_a_task_may_end_in_several_parts(said, options):
    batch, memories = learned()[1], []
    halves = [tuple(leaf[part] for leaf in batch) for part in (slice(12), slice(12, 24))]
    for parts in (halves, [batch]):
        gem = models.begin(said, model=learned()[0], **options)[2]
        for part in parts:
            gem.end_task([part], "a")
        memories.append(gem.memory.batch("a"))
    found, expected = memories
    torch.testing.assert_close(found.outputs, expected.outputs)
    torch.testing.assert_close(found.losses, expected.losses)


OPTIONS = [
    {"examples": 4, "weight": 0.5},
    {"examples": 4, "tolerance": 0.0, "on": "both"},
    {"tolerance": 0.01, "repair": 0.5, "every": 3, "on": "step"},
    {"examples": 3, "per": "label"},
    {"examples": 4, "method": "pgd"},
    {"per": "all", "examples": 6, "method": "agem"},
    {"every": 2, "method": "gem2017"},
]
TOGETHER = [Promise(loss, per="all", weight=weight) for weight in (2.0, 0.5)]


@pytest.mark.parametrize(
    ("promise", "options", "sets"),
    [
        *((promise, options, [None, None]) for promise in (EACH, SAID) for options in OPTIONS),
        # Another set is left out right after the state was saved or loaded.
        *((EACH, {"every": 5, "exclude": (1, now)}, [None, None]) for now in (1, 0)),
        # Sets that have a row together.
        *((EACH, {"every": 3}, TOGETHER[:1] * n) for n in (1, 2)),
        (EACH, {"every": 3}, [*TOGETHER[:1] * 2, *TOGETHER[1:] * 2]),
    ],
)
def test_a_checkpoint_goes_on_to_the_bit(promise, options, sets):
    batch, options = learned()[1], dict(options)
    left_out = options.pop("exclude", (None, None))

    def start():
        model, _ = learned()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        gem = protect(model, optimizer, promise, per_task=12, label=1, **options)
        gem.memory.promises.update((k, one) for k, one in enumerate(sets) if one is not None)
        return model, optimizer, gem

    def go_on(model, optimizer, gem):
        gem.exclude = left_out[1]
        unlearn(model, optimizer, batch, 4)
        return flat(model), str(gem.history.points())  # where NaN is equal to itself

    model, optimizer, gem = start()
    for k, own in enumerate(sets):
        gem.keep([batch if k == 0 else task(6 + k)], own)
    gem.exclude = left_out[0]
    unlearn(model, optimizer, batch, 4)
    stored = io.BytesIO()
    torch.save([part.state_dict() for part in (model, optimizer, gem)], stored)
    expected, points = go_on(model, optimizer, gem)
    for remembers in (True, False):
        parts = start()
        stored.seek(0)
        states = torch.load(stored, weights_only=True)
        for part, state in zip(parts, states if remembers else states[:2], strict=remembers):
            part.load_state_dict(state)
        assert parts[2].exclude == (left_out[0] if remembers else None)
        found, then = go_on(*parts)
        assert torch.equal(found, expected) is remembers
        assert (then == points) is remembers
    assert (found - expected).abs().max() > 1e-4  # so the state of GEM matters
    lines = [line for line in gem.report() if line.steps]
    if sets[0]:
        assert [line.examples for line in lines] == [12 * len(sets) // len(set(sets))] * len(set(sets))


def test_what_a_bound_needs():
    model, batch = learned()
    _, optimizer, gem = models.begin(model=model, tolerance=0.0)
    with pytest.raises(ValueError, match=r"one loss for each example, shape \(24,\); found \(\)"):
        gem.end_task([batch])
    gem.memory.add(batch, 5)
    loss(model, batch).backward()
    with pytest.raises(ValueError, match="tolerance needs the losses that examples of 5 had"):
        optimizer.step()
    projector = GradientProjector(model.parameters(), Promise(loss, tolerance=0.0))
    projector.recall(model, [Remembered(batch, losses=EACH(model, batch).detach())])
    with pytest.raises(ValueError, match="attach"):
        projector.project_()
    assert projector.project_(learning_rate=0.1).num_violated == 0


@pytest.mark.parametrize(("excess", "active"), [(1e-7, 0), (1e-3, 1)])
def test_the_rounding_of_a_loss_is_no_excess(excess, active):
    model, batch = learned(dtype=torch.float32)
    memory = EpisodicMemory()
    memory.add(batch, 0, losses=EACH(model, batch).detach().double() - excess)
    slow = partial(sgd, rate=1e-4)  # so that even that would ask for much
    _, optimizer, gem = models.begin(EACH, model=model, make=slow, memory=memory, tolerance=0.0)
    (row,), (g,) = rows(model, [batch]), rows(model, [rival(batch)])
    give(model, (g + (1e-4 - row @ g) / (row @ row) * row).float())  # it lowers the loss by very little
    optimizer.step()
    assert gem.last.num_active == active


def test_a_loss_that_is_at_its_bound_to_rounding_is_left_alone():
    """Where the divergence from the outputs is rounding, and its gradient too, nothing is to be repaired."""
    model, batch = learned(dtype=torch.float32)
    outputs, memory = SAID.outputs(model, batch), EpisodicMemory()
    memory.add(batch, 0, outputs=outputs, losses=SAID(model, batch, outputs).detach() - 1e-7)
    _, optimizer, gem = models.begin(SAID, model=model, memory=memory, tolerance=0.0)
    g, step = take(model, optimizer, batch)
    assert gem.last.excess > 0
    # At most the component along one row of noise goes.
    assert step.norm() <= 0.1 * g.norm() * (1 + 1e-5)


@pytest.mark.parametrize("options", [{}, {"on": "step"}, {"on": "both", "tolerance": 0.0}], ids=str)
def test_a_divergence_that_was_just_stored_does_not_turn_the_step(options):
    """It is zero, and its gradient noise in a random direction: it allows a step, or the opposite one."""
    for sign in (1, -1):
        model, optimizer, gem, batch = begin(SAID, dtype=torch.float32, rate=0.1, **options)
        g = sign * rows(model, [rival(batch)])[0].float()
        for first in (True, False):
            give(model, g)
            before = flat(model)
            optimizer.step()
            assert gem.last.constraints == 1
            assert (gem.last.num_active > 0) is not first
            if first:
                torch.testing.assert_close((before - flat(model)).float(), 0.1 * g, rtol=1e-4, atol=1e-6)
