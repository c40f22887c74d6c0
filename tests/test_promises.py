"""Promises of a training loop against plain forms of their formulas: bounds and rows."""

import copy
import io
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
from gemproj.torch import EpisodicMemory, GradientProjector, Promise, Remembered, stream  # noqa: E402
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


def parts_of(batch, per):
    """Return the examples of each row."""
    masks = [batch[1] == y for y in batch[1].unique()] if per == "label" else torch.eye(len(batch[1])).bool()
    return [tuple(leaf[mask] for leaf in batch) for mask in masks]


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
    "bounds": [Promise(EACH, tolerance=0.01), Promise(EACH, tolerance=10.0, repair=0.3)],
    "all kinds": [
        Promise(loss, weight=0.3),
        Promise(BOTH, tolerance=0.002, repair=0.5),
        Promise(EACH),
        Promise(loss, equal=True),
    ],
}


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


@pytest.mark.parametrize(
    ("on", "metric"),
    [("gradient", None), *((on, metric) for on in ("step", "both") for metric in ("euclidean", "adam"))],
)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("kind", OF_SETS)
def test_each_step_is_a_projection_of_the_optimizers_own(kind, on, metric, amsgrad):
    promises, active = OF_SETS[kind], 0
    model, plain = perceptron(), perceptron()
    # The second one, whose steps are projected by hand, is taken to where the first one is.
    optimizer, other = (
        torch.optim.AdamW(
            [{"params": m[0].parameters()}, {"params": m[2].parameters(), "lr": 0.005}],
            lr=0.01,
            amsgrad=amsgrad,
        )
        for m in (model, plain)
    )
    gem = protect(model, optimizer, on=on, metric=metric)
    losses = []
    for batch, one in zip(SETS, promises, strict=False):
        gem.keep([batch], one)
        given = (batch, one.loss.outputs(plain, batch)) if hasattr(one.loss, "outputs") else (batch,)
        losses.append(lambda m, one=one, given=given: one.loss(m, *given).mean())
    bounds = torch.stack([one(plain).detach() for one in losses]) + torch.tensor(
        [torch.nan if one.tolerance is None else one.tolerance for one in promises], dtype=torch.float64
    )
    # In units of gradients: times the rate those of steps; Adam's metric has the rate in it.
    unit = 1.0 if metric == "adam" else 0.01
    for _ in range(4):
        before = flat(plain)
        G = torch.stack([flat(torch.autograd.grad(one(plain), plain.parameters())) for one in losses])
        excess = torch.stack([one(plain).detach() for one in losses]) - bounds
        for m, its in ((model, optimizer), (plain, other)):
            its.zero_grad()
            loss(m, rival(SETS[0])).backward()
        if on != "step":
            give(plain, in_plain_form(G, gradient(plain), promises, excess, rate=0.01))
        optimizer.step()
        step = moved(plain, other.step)
        if on != "gradient":
            w = adam_weights(plain, other, G) if metric == "adam" else None
            step = in_plain_form(G, step, promises, excess, on == "step", unit, metric=w)
        torch.testing.assert_close(before - flat(model), step, rtol=1e-7, atol=1e-10)
        torch.testing.assert_close(gem.last.cosines, cosines(G, step), rtol=1e-6, atol=1e-9)
        assert (gem.last.solution is gem.last.step) == (on == "step")  # what `num_active` counts
        active += gem.last.num_active
        # Moments, counts and schedules are the optimizer's own, as if it had been left alone.
        states = [[o.state[p] for p in m.parameters()] for o, m in ((optimizer, model), (other, plain))]
        torch.testing.assert_close(*states, rtol=1e-6, atol=1e-12)
        plain.load_state_dict(model.state_dict())
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert active or kind == "replay"


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
    message = r"h is infeasible: .* in rows 0, 2 at once.*penalty"
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


@pytest.mark.parametrize("microbatch", [None, 5])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_losses_come_with_the_rows(microbatch, scale):
    model, batch = learned()
    projector, each = GradientProjector(model.parameters()), EACH(model, batch).detach()
    examples = Remembered(batch, losses=each + 1.0)
    projector.recall(model, [examples, task(3)], loss, microbatch=microbatch, scale=scale)
    give(model, projector.constraints[0])
    last = projector.project_()
    torch.testing.assert_close(last.losses, torch.stack([each.mean(), loss(model, task(3)).detach()]))
    torch.testing.assert_close(last.stored[0], each.mean() + 1.0)
    assert last.stored[1].isnan()


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


OTHER = task(7, 6)


def together(batch):
    return [tuple(map(torch.cat, zip(batch, OTHER, strict=True)))]


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"per": "label"}, lambda batch: [*parts_of(batch, "label"), *parts_of(OTHER, "label")]),
        ({"per": "example"}, lambda batch: [*parts_of(batch, "example"), *parts_of(OTHER, "example")]),
        ({"per": "all"}, together),
        ({"per": "all", "examples": 60}, together),  # of which there are no more
    ],
    ids=["label", "example", "all", "all of 60"],
)
def test_rows_are_about_parts_of_tasks_or_about_all(options, parts):
    model, optimizer, gem, batch = begin(loss, OTHER, per_task=24, label=1, **options)
    G = rows(model, parts(batch))
    _, step = take(model, optimizer, rival(batch))
    # A memory of all examples keeps their order.
    torch.testing.assert_close(gem.projector.constraints, G)
    assert cosines(G, step).min() > -1e-9


def test_fresh_rows_are_those_that_the_memory_draws():
    model, optimizer, gem, batch = begin(examples=5)
    memory = EpisodicMemory()
    memory.add(batch, 0)
    for _ in range(6):
        G = rows(model, list(memory.batches(n=5)))
        take(model, optimizer, rival(batch))
        torch.testing.assert_close(gem.projector.constraints, G)


def test_hundreds_of_equalities():
    options = {"per_task": 200, "per": "example", "equal": True, "on": "both"}
    model, optimizer, _, batch = begin(rate=0.01, make=torch.optim.Adam, n=200, **options)
    G = rows(model, parts_of(batch, "example"))
    _, step = take(model, optimizer, rival(batch))
    # More rows than parameters, and directions are left: outputs depend on differences of logits only.
    assert len(G) > len(step) > torch.linalg.matrix_rank(G)
    assert (G @ step).abs().max() < 1e-9 < step.norm()


@pytest.mark.parametrize("on", ["gradient", "both"])
def test_rows_in_half_precision_are_a_projection_for_rounded_rows(on):
    other = task(5, dtype=torch.float32)
    model, optimizer, gem, batch = begin(
        loss, other, rate=0.1, dtype=torch.float32, rows_dtype=torch.bfloat16, on=on
    )
    G = rows(model, [batch, other])
    g, step = take(model, optimizer, rival(batch))
    kept = gem.projector.constraints
    assert kept.dtype == torch.bfloat16
    torch.testing.assert_close(kept.double(), G, rtol=2.0**-8, atol=0.0)
    # Parameters of size one are float32: a step is known to about 1e-7.
    torch.testing.assert_close(step / 0.1, project(kept.double(), g), rtol=0.0, atol=3e-6)
    torch.testing.assert_close(gem.last.cosines, cosines(kept.double(), step), rtol=1e-4, atol=1e-5)
    assert cosines(G, step).min() > -0.002


@pytest.mark.parametrize(
    "options", [{"on": "both"}, {"on": "step", "tolerance": 0.0, "every": 2}, {"equal": True}], ids=str
)
def test_rows_that_are_read_tile_by_tile(options, monkeypatch):
    """As those of another dtype are; here they have the same one, to compare them."""

    def train():
        model, optimizer, gem, batch = begin(EACH, task(5), rate=0.02, make=torch.optim.Adam, **options)
        unlearn(model, optimizer, batch, 5)
        return flat(model), gem.last.cosines

    expected = train()
    monkeypatch.setattr(stream, "_HOST_TILE", 20)  # 10 of 83 columns
    monkeypatch.setattr(ConstraintMatrix, "streamed", True)
    torch.testing.assert_close(train(), expected, rtol=1e-8, atol=1e-10)


def test_rows_are_converted_twice_for_each_projection(monkeypatch):
    model, past, plain = perceptron(torch.float32), task(1, dtype=torch.float32), stream.tiles
    projector = GradientProjector(model.parameters(), rows_dtype=torch.bfloat16)
    projector.recall(model, [past], loss)
    loss(model, rival(past)).backward()
    read = torch.zeros(projector.constraints.shape[1])

    def counting(rows, like, columns):
        for at, tile in plain(rows, like, columns):
            read[at] += 1
            yield at, tile

    monkeypatch.setattr(stream, "tiles", counting)
    assert projector.project_().num_violated
    assert (read == 2).all()


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


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("promise", [EACH, SAID], ids=["labels", "outputs"])
def test_a_checkpoint_goes_on_to_the_bit(promise, options):
    batch = learned()[1]

    def start():
        model, _ = learned()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        return model, optimizer, protect(model, optimizer, promise, per_task=12, label=1, **options)

    def go_on(model, optimizer, gem):
        unlearn(model, optimizer, batch, 4)
        return flat(model), str(gem.history.points())  # where NaN is equal to itself

    model, optimizer, gem = start()
    for one in (batch, task(7)):
        gem.end_task([one])
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
        found, then = go_on(*parts)
        assert torch.equal(found, expected) is remembers
        assert (then == points) is remembers
    assert (found - expected).abs().max() > 1e-4  # so the state of GEM matters


def test_logs_have_the_largest_excess():
    model, optimizer, gem, batch = begin(EACH, rate=0.3, tolerance=0.0)
    assert gem.logs() == {}
    steps = []
    for _ in range(5):
        unlearn(model, optimizer, batch, 1)
        steps.append(gem.last)
    taken = gem.logs()
    assert gem.logs() == {}
    assert float(taken["gem/excess"]) == max(float(step.excess.max()) for step in steps)
    assert float(taken["gem/worst_cosine"]) == min(step.worst_cosine for step in steps)
    assert float(taken["gem/cosine"]) == pytest.approx(sum(step.cosine for step in steps) / 5)
    model, optimizer, gem, batch = begin(EACH, rate=0.3)
    unlearn(model, optimizer, batch, 1)
    assert gem.last.excess is None
    assert "gem/excess" not in gem.logs()


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
