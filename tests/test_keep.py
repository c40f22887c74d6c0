"""Sets that are kept: what `keep` looks at and stores, what an error leaves, reports, states, and watching."""

import copy
import itertools
import linecache
import random
import warnings
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loops import begin, flat, sgd, take, through_a_file, unlearn
from models import EACH, SAID, logits, loss, perceptron, rival, task
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from gemproj.torch import Keeper, Promise
from gemproj.torch.keep import undisturbed
from gemproj.torch.keeper import alike
from gemproj.torch.losses import CrossEntropy, Distillation, model_loss


def held(keeper):
    """Return everything that a keeper holds, its random state included."""
    found = [x.tolist() if torch.is_tensor(x) else x for x in tree_leaves(keeper.state_dict())]
    return list(map(str, found))  # where NaN is equal to itself


# --- what is stored of examples -----------------------------------------------------------------


@pytest.mark.parametrize("promised", [EACH, SAID])
def test_adding_to_a_broken_set_never_moves_the_bound_of_its_examples(promised):
    options = {"tolerance": 0.05, "project": False}
    model, optimizer, keeper = begin(promised, {"a": task(0)}, make=lambda p: sgd(p, 0.5), **options)
    stored = copy.deepcopy((keeper.sets["a"].losses, keeper.sets["a"].outputs))
    unlearn(model, optimizer, task(0), 30)
    assert keeper.last.excess.item() > 0.5
    more = task(7, 5)
    expected = EACH(model, more).detach() if promised is EACH else torch.zeros(5, dtype=torch.float64)
    keeper.keep([more], name="a")
    found = keeper.sets["a"]
    assert torch.equal(found.losses[:12], stored[0])
    torch.testing.assert_close(found.losses[12:], expected, rtol=0, atol=1e-12)
    assert promised is EACH or all(map(torch.equal, found.outputs[:12], stored[1]))
    take(model, optimizer, rival(task(0)))
    bound = (keeper.last.losses - keeper.last.excess).item()
    assert bound == pytest.approx(float(torch.cat([stored[0], expected]).mean()) + 0.05)


def test_a_loss_alone_takes_the_other_options_and_a_known_set_its_promise():
    default = Promise(loss, examples=5, weight=0.25)
    keeper = begin(default)[2]
    keeper.keep([task(0)], EACH, name="a")
    assert keeper.sets["a"].promise == Promise(EACH, examples=5, weight=0.25)
    own = Promise(SAID, examples=3)
    keeper.keep([task(0)], own, name="b")
    keeper.keep([task(1)], name="b")
    assert (keeper.sets["b"].promise, len(keeper.sets["b"])) == (own, 24)
    keeper.keep([task(2)])
    keeper.keep([task(3)])
    assert list(keeper.sets) == ["a", "b", 2, 3]  # the first unused integers
    assert keeper.sets[2].promise is default
    keeper.forget("a")
    keeper.keep([task(4)])
    assert list(keeper.sets) == ["b", 2, 3, 4]
    with pytest.raises(KeyError, match=r"no set is named 'a'; found \['b', 2, 3, 4\]"):
        keeper.forget("a")
    with pytest.raises(ValueError, match=r"promise about 'b' must have the loss .* forget\('b'\)"):
        keeper.keep([task(0)], EACH, name="b")
    assert keeper.sets["b"].promise is own
    keeper.keep([task(0)], Promise(Distillation(logits), tolerance=0.1), name="b")  # an equal loss
    keeper.keep([task(0)], Distillation(logits), name="b")
    assert (len(keeper.sets["b"]), keeper.sets["b"].promise.tolerance) == (48, 0.1)


class Scaled:
    """A loss with attributes, one of them a tensor."""

    def __init__(self, factors):
        self.factors = torch.tensor(factors)

    def __call__(self, model, batch):
        return self.factors.sum() * EACH(model, batch)


def scaled(factor, model, batch):
    return factor * EACH(model, batch)


ALIKE = [Scaled([1.0]), Scaled([1.0])]


@pytest.mark.parametrize(
    "make",
    [
        lambda k: Distillation(logits, labels=CrossEntropy(logits, labels=k)),
        lambda k: Distillation(logits, temperature=float(k)),
        lambda k: partial(scaled, k),
        lambda k: partial(scaled, factor=torch.full((2,), k)),
        lambda k: Scaled([1.0, k]),
        lambda k: ALIKE[k - 1].__call__,  # the same object has the same method
        lambda k: lambda model, batch: scaled(k, model, batch),
        lambda k: lambda model, batch, k=k: scaled(k, model, batch),
    ],
)
def test_losses_are_equal_if_they_were_made_alike(make):
    assert alike(make(1), make(1))
    assert not alike(make(1), make(2))


def test_losses_of_others_may_have_a_state_and_stay_those_of_their_sets():
    keeper = begin()[2]
    for own in ALIKE:
        keeper.keep([task(0)], own)
    assert [kept.promise.loss for kept in keeper.sets.values()] == ALIKE


def test_the_set_of_an_adapter_grows_and_is_scored_under_this_adapter():
    model, optimizer, keeper = begin(EACH, tolerance=0.1)
    model.active_adapter = "one"
    keeper.keep([task(0)], name="a", hold_out=0.25)
    take(model, optimizer, task(1))
    model.active_adapter = "two"
    with pytest.raises(ValueError, match="'a' were kept with adapter 'one', and 'two' is active"):
        keeper.keep([task(1)], name="a")
    assert keeper.report()["a"].held_out is None
    assert "No verdict on unseen examples" not in repr(keeper.report())  # there will be one
    model.active_adapter = "one"
    assert keeper.report()["a"].held_out is not None


class Labelled(torch.nn.Module):
    """A model that computes its loss, as those of transformers do."""

    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x, labels):
        z = self.net(x)
        return SimpleNamespace(logits=z, loss=cross_entropy(z, labels))


@pytest.mark.parametrize(
    ("promised", "options"),
    [(CrossEntropy(), {"tolerance": 0.1}), (CrossEntropy(), {"examples": 7}), (model_loss, {})],
)
def test_examples_without_a_label_are_left_out_and_counted(promised, options):
    """Where half of a set has no label, the tolerance allows the others as much as it says, not twice."""
    x, y = task(0)
    y[1::2] = -100
    batch = {"x": x, "labels": y}
    model, optimizer, keeper = begin(promised, model=Labelled(), **options)
    with pytest.warns(UserWarning, match="6 of 12 examples of 'a' have no label .*: number 1, 3, 5,"):
        keeper.keep([batch], name="a")
    assert torch.equal(torch.stack([one["x"] for one in keeper.sets["a"].examples]), x[::2])
    plain = model(x[::2], y[::2]).loss
    assert keeper.report()["a"].stored == pytest.approx(plain.item())
    if "tolerance" in options:
        optimizer.step()
        assert (keeper.last.losses - keeper.last.excess).item() == pytest.approx(plain.item() + 0.1)
    batch["labels"] = y * 0 - 100
    with pytest.raises(ValueError, match="No example of 'b' has a label"):
        keeper.keep([batch], name="b")
    assert list(keeper.sets) == ["a"]


def test_a_training_that_the_keeper_does_not_see_is_told_at_the_next_keep():
    model, optimizer, keeper = begin(EACH, {"a": task(0)})
    take(model, optimizer, rival(task(0)))
    keeper.keep([task(1)])
    keeper.keep([task(2)])
    unlearn(model, sgd(model.parameters(), 0.1), task(0), 1)
    with pytest.warns(UserWarning, match="optimizer of this keeper took no step: .* new.sets.update"):
        keeper.keep([task(3)])
    keeper.keep([task(4)])


def test_a_loss_that_differentiates_and_names_of_numpy_are_kept():
    """The residual of a differential equation needs a graph, also where no gradient is wanted."""

    def residual(model, x):
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        return slope.square().sum(1)

    model, optimizer, keeper = begin(Promise(residual, examples=4, tolerance=1.0))
    for name in np.unique([3, 1]):
        keeper.keep([task(int(name))[0]], name=name, hold_out=0.25)
    take(model, optimizer, task(2))
    assert keeper.report().kept
    assert [one["name"] for one in through_a_file(keeper.state_dict())["sets"]] == [1, 3]
    with pytest.raises(ValueError, match="No example of set 5 has a label"):
        keeper.keep([(task(0)[0], torch.full((12,), -100))], EACH, name=5)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [({}, [12]), ({"examples": 5}, [5, 5, 2]), ({"examples": 9, "microbatch": 4}, [4, 4, 4])],
)
def test_every_example_is_looked_at_in_evaluation_mode(options, sizes):
    seen, model = [], perceptron()

    def watched(model, batch):
        seen.append((len(batch[0]), model.training))
        torch.rand(1)
        return loss(model, batch)

    _, _, keeper = begin(watched, model=model, **options)
    random = torch.get_rng_state()
    keeper.keep([task(0)])
    assert seen == [(size, False) for size in sizes]
    assert torch.equal(random, torch.get_rng_state())
    assert model.training
    assert all(p.grad is None for p in model.parameters())


# --- what is refused at once ------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(BaseException, "add_note"), reason="notes are of Python 3.11")
@pytest.mark.parametrize("wrong", [logits, lambda model, batch: loss(model, batch["x"])])
def test_an_error_of_a_loss_tells_the_shapes_of_its_examples(wrong):
    with pytest.raises((TypeError, ValueError)) as caught:
        begin(wrong, [task(0)])
    assert "[0] Tensor (12, 6) torch.float64, [1] Tensor (12,)" in "".join(caught.value.__notes__)


def squared(model, batch):
    return (model(batch[0])[:, 0] - batch[1]).square()


@pytest.mark.parametrize(
    "promise",
    [Promise(squared), Promise(squared, tolerance=0.1), Promise(lambda *given: squared(*given).mean())],
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_an_example_whose_loss_is_not_finite_is_named(promise, value):
    x, y = task(0, 50)[0], torch.zeros(50).double()
    y[17] = value
    keeper = begin(promise)[2]
    with pytest.raises(ValueError, match=f"The loss of example 17 of 'a' is {value},"):
        keeper.keep(DataLoader(TensorDataset(x, y), batch_size=10), name="a")
    assert keeper.sets == {}


def test_the_number_of_an_example_counts_those_that_were_left_out():
    x, y = task(0)
    y[:2], x[5] = -100, torch.nan
    keeper = begin(EACH)[2]
    with (
        pytest.warns(UserWarning, match="2 of 12 examples"),
        pytest.raises(ValueError, match=r"The loss of example 5 of"),
    ):
        keeper.keep([(x, y)])


def interrupted():
    yield task(1)
    raise KeyboardInterrupt


FAILURES = {
    "interrupted": KeyboardInterrupt(),
    "out of memory": RuntimeError("out of memory"),
    "stream": interrupted,
    "another length": lambda: [task(1), (torch.ones(4, 7, dtype=torch.float64), task(1)[1][:4])],
    "not finite": lambda: [task(1), (task(2)[0] * torch.nan, task(2)[1])],
}


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_an_error_in_keep_changes_nothing(failure, name, monkeypatch):
    said, calls = Distillation(logits), itertools.count()
    model, optimizer, keeper = begin(said, tolerance=0.0, examples=5)
    keeper.keep([task(0), task(3)], name="a", limit=9)
    take(model, optimizer, task(9))
    before, random = held(keeper), torch.get_rng_state()

    def failing(model, batch):
        if next(calls) == 2:  # in the third pass
            raise failure
        return SAID.outputs(model, batch)

    if isinstance(failure, BaseException):
        monkeypatch.setattr(said, "outputs", failing)
    data = [task(1), task(2)] if isinstance(failure, BaseException) else failure()
    with pytest.raises((KeyboardInterrupt, RuntimeError, ValueError)):
        keeper.keep(data, name=name, limit=20)
    assert held(keeper) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert model.training


def test_outputs_that_are_random_in_evaluation_mode_are_told():
    said = Distillation(lambda model, batch: torch.nn.functional.dropout(model(batch[0]), 0.5))
    with pytest.warns(UserWarning, match="Outputs of examples of set 0 are random in evaluation mode"):
        begin(Promise(said), [task(0)])


def test_stored_losses_that_depend_on_the_batch_are_told():
    def contrastive(model, batch):
        similar = model(batch[0]) @ model(batch[0]).mT
        return cross_entropy(similar, torch.arange(len(similar)), reduction="none")

    keeper = begin()[2]
    with pytest.warns(UserWarning, match="depend on the other examples of their batch"):
        keeper.keep([task(0)], Promise(contrastive, tolerance=0.0, examples=4), name="few")

    def drawing(model, batch):
        return EACH(model, (batch[0] + torch.randn_like(batch[0]), batch[1]))

    # No warning if all are used in each step, or each one alone; warnings are errors here.
    keeper.keep([task(0)], Promise(contrastive, tolerance=0.0, examples=None), name="all")
    keeper.keep([task(0)], Promise(drawing, tolerance=0.0, examples=4), name="random")
    keeper.keep([task(0)], Promise(EACH, tolerance=0.0, examples=4), name="apart")


# --- what a run says ----------------------------------------------------------------------------


def test_a_run_that_keeps_nothing_and_moving_statistics_are_told():
    layers = torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)
    model = torch.nn.Sequential(*layers).double()
    optimizer = sgd(model.parameters())
    keeper = Keeper(model, optimizer)
    with pytest.warns(UserWarning, match=r"0 sets kept: this run protects nothing. Call keep"):
        take(model, optimizer, task(0))
    take(model, optimizer, task(0))  # said once
    keeper.remove()
    keeper = Keeper(model, optimizer, loss)  # the first task of a stream, whose promise is given
    take(model, optimizer, task(0))
    keeper.keep([task(0)])
    with pytest.warns(UserWarning, match=r"Layers such as '1' \(1 of them\) move their running"):
        take(model, optimizer, task(1))
    for quiet in (model[1].eval, lambda: setattr(model[1].train(), "momentum", 0.0)):
        quiet()
        keeper.remove()
        keeper = Keeper(model, optimizer, loss)
        keeper.keep([task(1)])
        take(model, optimizer, task(2))


@pytest.mark.parametrize("high", [False, True])
def test_a_rate_that_is_too_high_is_told(high):
    make = lambda p: sgd(p, 30.0 if high else 0.01)  # noqa: E731
    model, optimizer, _ = begin(SAID, {"old": task(0)}, make=make, on="both", tolerance=0.01)
    told = pytest.warns(UserWarning, match="losses of 'old' are above their bounds by more than")
    with told if high else nullcontext():
        unlearn(model, optimizer, task(0), 21)


def test_a_rate_is_judged_again_after_a_warm_up():
    model, optimizer, keeper = begin(EACH, [task(1)], tolerance=0.001, repair=0.01)
    keeper._soon = (5, 20)
    for step in range(20):
        optimizer.param_groups[0]["lr"] = 1e-6 if step < 8 else 2.0
        take(model, optimizer, rival(task(1)))
    with pytest.warns(UserWarning, match="After 20 steps, losses of set 0 are above their bounds"):
        take(model, optimizer, rival(task(1)))


def test_a_loss_that_began_above_its_bound_and_falls_is_not_a_matter_of_the_rate():
    model, optimizer, keeper = begin(EACH, [task(1)], tolerance=0.001, repair=0.05)
    unlearn(model, sgd(model.parameters()), task(1), 30)
    for _ in range(21):
        take(model, optimizer, rival(task(1)))
    points = keeper.history.points()[0]
    excess = [loss - bound for _, loss, bound in points]
    assert 0.01 < excess[-1] < 0.9 * excess[0]


@pytest.mark.parametrize("closure", [False, True])
def test_warnings_point_at_the_line_of_the_user(closure):
    model = perceptron()
    optimizer = sgd(model.parameters())
    Keeper(model, optimizer)

    def evaluate():
        loss(model, task(0)).backward()

    with pytest.warns(UserWarning, match="protects nothing") as told:
        optimizer.step(evaluate if closure else None)
    more, state = begin(loss, {"a": task(1)})[2], begin(loss)[2].state_dict()
    with pytest.warns(UserWarning, match="are dropped") as dropped:
        more.load_state_dict(state)
    for one, line in ((told, "optimizer.step("), (dropped, "more.load_state_dict(")):
        assert one[0].filename == __file__
        assert line in linecache.getline(__file__, one[0].lineno)


def test_a_report_has_what_can_be_measured_from_outside():
    data, make = {"a": task(1), 7: task(2)}, lambda p: torch.optim.Adam(p, lr=0.02)
    model, optimizer, keeper = begin(EACH, data, make=make, tolerance=0.01)
    before = {name: EACH(model, batch).mean().item() for name, batch in data.items()}
    assert {name: line.stored for name, line in keeper.report().items()} == pytest.approx(before)
    assert keeper.logs() == {}
    seen, steps = [], []
    for _ in range(8):
        seen.append({name: EACH(model, batch).mean().item() for name, batch in data.items()})
        take(model, optimizer, rival(data["a"]))
        steps.append(keeper.last)
        keeper.report()  # which counts them one by one
    now = {name: EACH(model, batch).mean().item() for name, batch in data.items()}
    logged, report = keeper.logs(), keeper.report()
    assert keeper.logs() == {}
    assert logged["keep/excess"] == max(float(step.excess.max()) for step in steps)
    assert logged["keep/worst_cosine"] == min(step.worst_cosine for step in steps)
    assert logged["keep/cosine"] == pytest.approx(sum(step.cosine for step in steps) / 8)
    assert logged["keep/violations"] == sum(step.num_violated for step in steps) / 8
    for name in data:
        line, losses = report[name], [one[name] for one in seen]
        assert (line.examples, line.steps) == (12, 8)
        found = (line.stored, line.now, line.worst, line.bound)
        worst = max(*losses, now[name])
        expected = (before[name], now[name], worst, before[name] + 0.01)
        assert found == pytest.approx(expected, rel=1e-9)
        assert line.excess == pytest.approx(worst - before[name] - 0.01, abs=1e-9)
        assert line.broke == pytest.approx(sum(n > before[name] + 0.01 + 1e-6 for n in losses) / 8)
        assert [loss for _, loss, _ in keeper.history.points()[name]] == pytest.approx(losses, rel=1e-9)
    keeper.forget("a")
    assert list(keeper.report()) == [7]
    assert str(report).splitlines()[0].split()[:3] == ["name", "examples", "stored"]
    verdicts = [line.split()[-1] for line in str(report).splitlines()[:3]]
    assert verdicts == ["kept", *("yes" if report[name].kept else "no" for name in data)]
    with pytest.raises(KeyError, match=r"no promise is about 'b'; found \['a', 7\]"):
        report["b"]


def test_a_report_is_drawn():
    pytest.importorskip("matplotlib").use("agg")
    model, optimizer, keeper = begin(EACH, tolerance=0.01)
    assert str(keeper.report()) == "No examples are kept: nothing is promised."
    keeper.keep([task(1)], name="general")
    take(model, optimizer, rival(task(1)))
    axes = keeper.report().plot()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["general"]
    assert len(axes.lines) == 2  # the loss and its bound


def test_a_loss_at_its_bound_to_the_printed_digits_is_kept():
    model = torch.nn.Linear(1, 1, bias=False).double()
    keeper = Keeper(model, sgd(model.parameters()), Promise(lambda model, x: model(x)[:, 0], tolerance=0.05))
    assert not keeper.report().kept  # nothing is promised
    keeper.keep([torch.ones(6, 1, dtype=torch.float64)], name="a")
    start = model.requires_grad_(False).weight.item()  # a model that is frozen has a verdict, too
    for above, kept in ((5e-6, True), (2e-5, False), (torch.nan, False)):
        torch.nn.init.constant_(model.weight, start + 0.05 + above)
        assert keeper.report().kept == keeper.report()["a"].kept == kept


def test_a_history_stays_small():
    model, optimizer, keeper = begin(EACH, {"a": task(1)}, tolerance=0.0)
    take(model, optimizer, rival(task(1)))
    for _ in range(4003):
        keeper.history.add(keeper.last)
    steps = [step for step, _, _ in keeper.history.points()["a"]]
    assert 500 <= len(steps) <= 1000
    assert len({later - one for one, later in itertools.pairwise(steps)}) == 1  # over all of the training
    for step in range(4031, 80_000, 64):  # of looks, none of which is in a step that a power of two divides
        keeper.history.steps = step
        keeper.history.add(keeper.last)
    points = keeper.history.points()["a"]
    assert 500 <= len(points) <= 1000
    assert points[-1][0] > 79_000


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_name_with_another_promise_or_other_examples_begins_a_line(forgotten):
    model, optimizer, keeper = begin(EACH, {"a": task(1)})
    take(model, optimizer, rival(task(1)))
    stored = EACH(model, task(2)).mean().item()
    if forgotten:
        keeper.forget("a")
        keeper.keep([task(2)], name="a")
    else:
        keeper.keep([task(1)], Promise(EACH, tolerance=0.01, examples=None), name="a")
    unlearn(model, optimizer, task(1), 2)
    (now,) = keeper.report().values()
    assert (now.steps, len(keeper.history.points()["a"])) == (2, 2)
    assert now.examples == (12 if forgotten else 24)
    assert not forgotten or now.stored == pytest.approx(stored)
    assert forgotten or now.bound == pytest.approx(now.stored + 0.01)


def test_a_set_that_grows_keeps_its_line():
    """Also if its loss is made anew."""
    model, optimizer, keeper = begin(EACH)
    for k in range(2):
        promise = Promise(CrossEntropy(lambda m, b: m(b[0]), labels=1), tolerance=0.05)
        keeper.keep([task(k)], promise, name=torch.tensor(7))  # as from labels.unique()
        take(model, optimizer, rival(task(1)))
    assert keeper.report()[7].steps == 2


def test_small_losses_are_judged_by_their_tolerance():
    small = Promise(lambda *given: 1e-9 * EACH(*given), tolerance=1e-10)
    model, optimizer, keeper = begin(small, [task(1)], project=False)
    assert keeper.report().kept
    unlearn(model, optimizer, task(1), 20)
    line = keeper.report()[0]
    assert line.now > line.bound
    assert (line.broke > 0.0, line.kept) == (True, False)


def test_an_equality_is_broken_by_a_loss_that_falls():
    model, optimizer, keeper = begin(loss, [task(1)], equal=True, project=False)
    for _ in range(3):
        take(model, optimizer, task(1))
    line = keeper.report()[0]
    assert (line.would_break, line.broke, line.kept) == (1.0, 1.0, False)
    assert line.now < line.stored


# --- only watching --------------------------------------------------------------------------------

CONTRADICTING = [Promise(EACH, equal=True), Promise(EACH, tolerance=0.0)]


@pytest.mark.parametrize(
    ("options", "promises"),
    [
        ({"weight": 0.5}, [None]),
        ({"on": "step"}, [None]),
        ({"on": "both", "look": 2}, [None]),
        ({"tolerance": 0.0}, [None]),
        # A projection would fail.
        ({}, CONTRADICTING),
        ({"on": "step"}, CONTRADICTING),
    ],
)
@pytest.mark.parametrize("make", [sgd, torch.optim.AdamW])
@pytest.mark.filterwarnings("ignore:Not all losses above their bounds")
def test_a_run_that_only_watches_is_the_plain_one_to_the_bit(options, promises, make):
    def train(protect):
        model = perceptron()
        model.append(torch.nn.Dropout(0.2))
        if protect:
            _, optimizer, keeper = begin(EACH, model=model, make=make, project=False, **options)
        else:
            optimizer = make(model.parameters())
        for promise in promises if protect else ():
            keeper.keep([task(1)], promise)
        torch.manual_seed(3)
        for k in range(6):
            take(model, optimizer, rival(task(1), 1 + k % 2))
        if protect and len(promises) == 1:
            line = keeper.report()[0]
            assert line.steps == 6
            assert line.would_break > 0
            assert line.broke > 0
            assert keeper.last.num_active  # it tells what would have been done
        optimizer.zero_grad()
        (float("nan") * loss(model, task(1))).backward()
        before = flat(model)
        optimizer.step()
        return torch.stack([before, flat(model)])

    torch.testing.assert_close(train(False), train(True), rtol=0, atol=0, equal_nan=True)


SET = TensorDataset(*task(1))
ORDERS = {
    "torch's": lambda random: {"batch_size": 4, "shuffle": True},
    "of a loader": lambda random: {"batch_size": 4, "shuffle": True, "generator": random},
    "of a sampler": lambda random: {
        "batch_sampler": BatchSampler(RandomSampler(SET, generator=random), 4, drop_last=False)
    },
    "of workers": lambda random: {
        "batch_size": 4, "shuffle": True, "num_workers": 1, "persistent_workers": True,
        "multiprocessing_context": "fork",
    },
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of a process with threads
def test_a_loader_that_is_kept_changes_nothing_of_a_training_that_only_watches(order):
    def train(protect):
        model = perceptron()
        loader = DataLoader(SET, **ORDERS[order](torch.Generator().manual_seed(0)))
        optimizer = sgd(model.parameters())
        keeper = Keeper(model, optimizer, EACH, project=False) if protect else None
        torch.manual_seed(3)
        for _ in range(2):
            for k, batch in enumerate(loader):
                take(model, optimizer, batch)
                if keeper and k != 1:  # also within an epoch
                    keeper.keep(loader, limit=None if k else 5)
        return flat(model)

    assert torch.equal(train(False), train(True))


def test_the_order_that_accelerate_draws_for_several_processes_stays():
    loader = DataLoader([0])
    loader.synchronized_generator = torch.Generator()
    before = loader.synchronized_generator.get_state()
    with undisturbed(loader):
        torch.rand(1, generator=loader.synchronized_generator)
    assert torch.equal(loader.synchronized_generator.get_state(), before)


def test_a_data_set_draws_from_python_and_numpy_what_training_would():
    def states():
        return random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002

    before = states()
    with undisturbed(DataLoader([0])):
        random.random()
        np.random.rand()  # noqa: NPY002
    assert states() == before


# --- states -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: {}, "state has no '.*': it is not the state of a keeper"),
        (lambda state: None, "it is not the state of a keeper"),
        (lambda state: perceptron().state_dict(), "it is not the state of a keeper"),
        (lambda state: state["sets"][0].update(losses=torch.zeros(3)) or state, "3 losses for 12 examples"),
        (lambda state: state["sets"][0].update(own=True) or state, r"'theirs' had a promise of its own.*keep\(\.\.\., name='theirs'\)"),
        (lambda state: state["sets"][0].update(collated=True) or state, r"'theirs' were kept with a collate function"),
        (lambda state: state["forecast"].clear() or state, "'names'"),
    ],
)  # fmt: skip
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change, text):
    keeper, other = (begin(loss, {name: task(1)})[2] for name in ("ours", "theirs"))
    before, state = held(keeper), change(other.state_dict())
    with pytest.raises((ValueError, KeyError), match=text):
        keeper.load_state_dict(state)
    assert held(keeper) == before


def test_what_a_state_lacks_is_said():
    keeper, more = (begin(loss, dict.fromkeys(names, task(1)))[2] for names in ("a", "ab"))
    with pytest.warns(UserWarning, match="no examples of 'b', which are dropped"):
        more.load_state_dict(keeper.state_dict())
    assert list(more.sets) == ["a"]
    with pytest.warns(UserWarning, match="process 0 of 2, .* is process 0 of 1: it lacks the examples"):
        more.load_state_dict(keeper.state_dict() | {"process": (0, 2)})
    more.keep([task(1)], EACH, name="own")
    more.keep([task(2)], name="own")
    with pytest.raises(ValueError, match="'own' had a promise of its own"):
        keeper.load_state_dict(more.state_dict())
    again = begin(loss)[2]
    again.keep([task(5)], EACH, name="own")  # its promise, which a state has not
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again.load_state_dict(through_a_file(more.state_dict()))
    assert again.sets["own"].promise.loss is EACH
    assert torch.equal(again.sets["own"].examples[0][0], task(1)[0][0])


@pytest.mark.parametrize("function", [loss, EACH])
@pytest.mark.parametrize("removed", [False, True])
@pytest.mark.filterwarnings("ignore:The weights have changed")
def test_the_verdict_is_about_the_weights_as_they_are(function, removed):
    """Whoever moved them: another optimizer, loaded weights, the last step, or steps between two looks."""
    model, optimizer, keeper = begin(function, [task(1)], look=100)
    assert keeper.report().kept
    if removed:
        take(model, optimizer, task(1))
        keeper.remove()
        assert keeper.report().kept
    before = copy.deepcopy(model.state_dict())
    unlearn(model, sgd(model.parameters()), task(1), 50)
    for later in (keeper.remove, lambda: keeper.keep([task(0)], name="b"), lambda: keeper.forget("b")):
        assert not keeper.report().kept
        later()
    model.load_state_dict(before)
    assert keeper.report().kept
    model[0].bias.data += torch.nan
    assert not keeper.report().kept


def test_examples_are_kept_and_judged_in_inference_mode_of_the_caller():
    """A model may keep a tensor from a forward pass for those of training, so none is made in that mode."""
    model, made = perceptron(), []
    model.register_forward_pre_hook(lambda _, x: made.append(x[0].new_ones(1).is_inference()))
    _, optimizer, keeper = begin(EACH, model=model)
    with torch.inference_mode():
        keeper.keep(([leaf + 0 for leaf in task(1)] for _ in range(2)), name="a")
        assert keeper.report().kept
    keeper.keep([list(task(2))], name="a")
    take(model, optimizer, rival(task(1)))
    assert len(keeper.sets["a"]) == 36
    assert keeper.last.num_violated == 1
    assert not any(made)


def test_a_mean_is_judged_in_the_batches_in_which_it_was_kept():
    """Also if they were kept in several calls, one of them of one example, after a resume, in other microbatches."""

    def squared(model, batch):
        return loss(model, batch).square()

    model, _, keeper = begin(squared, examples=5)
    for k, n in enumerate((12, 12, 1)):
        keeper.keep([task(k, n)], name="joined")
    assert keeper.report().kept
    again = begin(squared, {"joined": task(0)}, model=model, microbatch=2)[2]
    again.load_state_dict(through_a_file(keeper.state_dict()))
    line = again.report()["joined"]
    assert line.kept
    assert line.now == pytest.approx(line.stored, rel=1e-12)


def test_a_loss_that_draws_numbers_is_judged_with_the_same_ones():
    def noisy(model, batch):
        return EACH(model, (batch[0] + torch.randn_like(batch[0]), batch[1]))

    _, _, keeper = begin(noisy, [task(1)])
    torch.randn(1)
    before = torch.get_rng_state()
    line = keeper.report()[0]
    assert line.now == pytest.approx(line.stored, rel=1e-12)
    assert torch.equal(torch.get_rng_state(), before)


def test_attention_over_padding_is_judged_as_it_was_kept():
    """Without gradients, torch has another way through these layers, with zeros at the padding."""

    def each(model, batch):
        x, y, padding = batch
        return cross_entropy(model(x, src_key_padding_mask=padding).mean(1), y, reduction="none")

    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 1)
    x, y = torch.randn(8, 5, 16), torch.arange(8)
    padding = torch.arange(5)[None] >= 1 + y[:, None]
    _, _, keeper = begin(each, [(x, y, padding)], model=model)
    line = keeper.report()[0]
    assert line.now == pytest.approx(line.stored, rel=1e-5)


def test_a_report_compiles_nothing_that_was_not_compiled_when_it_was_kept():
    model, passes = perceptron(), []
    model = torch.compile(model, backend=lambda graph, inputs: passes.append(graph) or graph.forward)
    for promise, compiled in ((loss, 0), (Promise(EACH, tolerance=0.1), 1)):
        keeper = begin(promise, [task(1)], model=model)[2]
        assert (len(passes) > 0) == compiled
        keeper.report()
        assert (len(passes) > 0) == compiled


def test_a_set_that_cannot_be_evaluated_is_named():
    model, _, keeper = begin(EACH, {"old": task(1)})
    model[2] = torch.nn.Linear(7, 3)
    with pytest.raises((RuntimeError, ValueError)) as caught:
        keeper.report()
    assert not hasattr(caught.value, "add_note") or "'old' was evaluated" in "".join(caught.value.__notes__)


@pytest.mark.parametrize(("times", "kept"), [(1, False), (2, False), (3, True)])
def test_only_the_mean_of_enough_held_out_examples_has_room_without_a_tolerance(times, kept):
    """The rises of these losses are 3, -1, 1 and -1, so their mean is less than its interval above zero."""
    inputs = torch.tensor([3.0, -1.0, 1.0, -1.0], dtype=torch.float64).repeat(times)[:, None]
    model = torch.nn.Linear(1, 1).double()
    keeper = Keeper(model, sgd(model.parameters()), lambda model, x: model(x)[:, 0])
    keeper.keep([inputs], name="all")
    keeper.keep([inputs], name="held out")
    keeper.sets["held out"].held = keeper.sets["held out"]
    with torch.no_grad():
        model.weight += 1.0
    report = keeper.report()
    assert report["held out"].kept is kept
    assert not report["all"].kept
