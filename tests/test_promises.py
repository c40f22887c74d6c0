"""Promises of a training loop against plain forms of their formulas: bounds and rows."""

import copy
import io
from functools import cache, partial

import pytest

torch = pytest.importorskip("torch")

import models  # noqa: E402
from models import (  # noqa: E402
    EACH,
    SAID,
    cosines,
    flat,
    gradient,
    loss,
    perceptron,
    protect,
    rival,
    rows,
    take,
    task,
)

from gemproj import project  # noqa: E402
from gemproj.torch import GEM, EpisodicMemory, GradientProjector, Promise, Remembered, stream  # noqa: E402
from gemproj.torch.constraints import ConstraintMatrix  # noqa: E402


def learned(n=24, dtype=torch.float64):
    """A model that has learned a task, and that task."""
    model, (x, y) = copy.deepcopy(learned_once(n))
    return model.to(dtype), (x.to(dtype), y)


@cache
def learned_once(n):
    model, batch = perceptron(), task(0, n)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(60):
        take(model, optimizer, batch)
    return model, batch


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


@pytest.mark.parametrize("repair", [1.0, 0.3])
@pytest.mark.parametrize("on", ["gradient", "step", "both"])
def test_a_bound_is_a_right_hand_side(on, repair):
    """``G s >= repair (loss - bound)``, at most ``|g_k| |s|``; of the gradient over the learning rate."""
    rate, tolerance = 0.2, 0.01
    for stored in (0.0, 10.0):  # far above the bound, and far below
        model, batch = learned()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        memory = EpisodicMemory()
        memory.add(batch, 0, losses=EACH(model, batch).detach() + stored - 0.05)
        gem = GEM(model, optimizer, Promise(EACH, tolerance=tolerance, repair=repair), memory=memory, on=on)
        G = rows(model, [batch])
        g, found = take(model, optimizer, rival(batch))
        excess = torch.tensor([0.05 - stored - tolerance], dtype=torch.float64)
        h = repair * excess

        def cap(v, h):
            return torch.minimum(h, G.norm(dim=1) * v.norm())  # noqa: B023

        if on != "step":
            g = project(G, g, h=cap(g, h / rate))
        step = rate * g
        if on != "gradient":
            step = project(G, step, h=cap(step, h))
        torch.testing.assert_close(found, step, rtol=1e-7, atol=1e-10)
        torch.testing.assert_close(gem.last.excess, excess, rtol=1e-9, atol=1e-12)


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
    before = flat(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    promise = Promise(signed, tolerance=0.01, penalty=penalty)
    gem = GEM(model, optimizer, promise, memory=memory, on=on)
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
    ids=str,
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


@pytest.mark.parametrize("on", ["gradient", "step"])
def test_equalities_leave_the_losses_of_masked_rows_where_they_are(on):
    mask = torch.tensor([True, False, True])
    (model, batch), parts = learned(), parts_of(learned()[1], "label")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    gem = GEM(model, optimizer, loss, on=on)
    for part, equal in zip(parts, mask.tolist(), strict=True):
        gem.keep([part], Promise(loss, equal=equal))
    for now, side in ((batch, 1.0), (rival(batch), -1.0)):
        G = rows(model, parts_of(batch, "label"))
        g, step = take(model, optimizer, now)
        assert (side * G[mask] @ g > 0).any()
        slopes = cosines(G, step)
        assert slopes[mask].abs().max() < 1e-9
        assert slopes[~mask] > -1e-9
        assert gem.last.num_active >= 2


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
        model, _ = learned()
        gem = GEM(model, torch.optim.SGD(model.parameters(), lr=0.1), said, **options)
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


def test_a_loss_that_is_at_its_bound_to_rounding_is_left_alone():
    """Where the divergence from the outputs is rounding, and its gradient too, nothing is to be repaired."""
    model, batch = learned(dtype=torch.float32)
    optimizer, memory = torch.optim.SGD(model.parameters(), lr=0.1), EpisodicMemory()
    outputs = SAID.outputs(model, batch)
    memory.add(batch, 0, outputs=outputs, losses=SAID(model, batch, outputs).detach() - 1e-7)
    gem = GEM(model, optimizer, SAID, memory=memory, tolerance=0.0)
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
