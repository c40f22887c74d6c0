"""One keeper and its optimizers: attaching, several optimizers, parameters that change, and copies."""

import copy
import gc
import pickle
import weakref
from functools import partial

import pytest
import torch
from loops import begin, cosines, flat, gradient, moved, protect, rows, sgd
from models import EACH, loss, perceptron, rival, task
from torch import nn

from gemproj.torch import detach

BOTH = [task(0), task(1)]


def halves(parameters, first=sgd, second=sgd):
    """Make an optimizer for each layer."""
    held = list(parameters)
    return [first(held[:2]), second(held[2:])]


def forget(model, optimizers=()):
    """Compute the gradient of learning what both tasks forbid, and something else; take a step with each."""
    model.zero_grad()
    (loss(model, rival(task(5))) - loss(model, task(0)) - loss(model, task(1))).backward()
    return moved(model, lambda: [optimizer.step() for optimizer in optimizers])


def hooks(optimizer):
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def test_a_second_keeper_waits_for_the_first_one_to_go():
    """Also if nothing refers to it any more: in a notebook, a cell that is run twice."""
    model, optimizer, _ = begin()
    with pytest.raises(ValueError, match=r"attached to this optimizer .*gemproj.torch.detach\(optimizer\)"):
        protect(model, optimizer)
    detach(optimizer)
    assert not hooks(optimizer)
    keeper = protect(model, optimizer)
    keeper.keep([task(0)])
    keeper.remove()
    assert not hooks(optimizer)
    torch.testing.assert_close(forget(model, [optimizer]), 0.1 * gradient(model))
    protect(model, optimizer)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_is_attached_to_nothing(duplicate):
    model, optimizer, keeper = begin(EACH, BOTH)
    forget(model, [optimizer])
    other = duplicate(keeper)
    other.remove()
    assert len(hooks(optimizer)) == 2
    assert [line.kept for line in other.report().values()] == [None, None]
    assert not other.report().kept
    assert str(other.history.state_dict()) == str(keeper.history.state_dict())
    assert torch.equal(other.sets[1].losses, keeper.sets[1].losses)
    with pytest.raises(ValueError, match="has no model yet"):
        other.keep([task(2)])
    assert other.state_dict()["sets"][0]["examples"][0] is not keeper.sets[0].examples[0]


def test_nothing_outlives_the_optimizer():
    model, optimizers, keeper = begin(loss, BOTH, make=halves)
    forget(model, optimizers)
    left = [weakref.ref(one) for one in (*optimizers, keeper)]
    del optimizers, keeper
    gc.collect()
    assert [one() for one in left] == [None, None, None]


# --- several optimizers ---------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["gradient", "step", "both"])
@pytest.mark.parametrize(("turned", "look"), [(False, 1), (True, 1), (False, 3)])
def test_several_optimizers_keep_promises_together_and_count_one_step(on, turned, look):
    def make(parameters):
        return halves(parameters, second=partial(torch.optim.AdamW, lr=0.01))[:: -1 if turned else 1]

    model, optimizers, keeper = begin(loss, BOTH, make=make, on=on, look=look)
    for k in range(4):
        G = rows(model, BOTH)
        forget(model)
        assert (G @ gradient(model) < 0).any()
        step = forget(model, optimizers)
        assert keeper.last.age == k % look
        if keeper.last.age == 0:
            torch.testing.assert_close(keeper.rows.G, G)  # one look for both
        torch.testing.assert_close(keeper.last.cosines, cosines(keeper.rows.G, step))
        assert on == "gradient" or keeper.last.worst_cosine > -1e-12
    report = keeper.report()
    assert [line.steps for line in report.values()] == [4, 4]
    assert report[0].would_break == 1.0
    assert on == "gradient" or report[0].broke == 0.0


def with_a_rate_of_zero(parameters):
    """Make an optimizer that would multiply the gradient of the first parameter by zero, which may give NaN."""
    first, *others = parameters
    return [torch.optim.AdamW([{"params": [first], "lr": 0.0}, {"params": others}])]


@pytest.mark.parametrize("on", ["gradient", "step", "both"])
@pytest.mark.parametrize(
    ("make", "name", "scaler"),
    [
        (halves, "2.bias", None),  # which is the other optimizer's
        (halves, "2.bias", torch.amp.GradScaler("cpu", enabled=False)),
        (with_a_rate_of_zero, "0.weight", None),
    ],
)
def test_no_part_of_a_step_is_taken_if_any_gradient_is_not_finite(on, make, name, scaler):
    model, optimizers, _ = begin(loss, BOTH, make=make, on=on, scaler=scaler)
    forget(model)
    model.get_parameter(name).grad.view(-1)[0] = torch.inf
    before = flat(model)
    with pytest.raises(ValueError, match=f"The gradient of {name} is not finite"):
        optimizers[0].step()
    assert torch.equal(flat(model), before)


@pytest.mark.parametrize("on", ["gradient", "step", "both"])
def test_a_scaler_skips_the_part_of_the_optimizer_that_overflows(on):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    model, optimizers, _ = begin(loss, BOTH, make=halves, on=on, scaler=scaler)
    before = flat(model)
    scaler.scale(loss(model, rival(task(0)))).backward()
    model[2].bias.grad[0] = torch.inf
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    moved = flat(model) != before
    assert moved.any()
    assert not moved[-sum(p.numel() for p in model[2].parameters()) :].any()


@pytest.mark.parametrize("look", [1, "auto"])
def test_the_parts_of_a_step_keep_a_tolerance_together(look):
    """The part of the second optimizer gets the slack that the first one has left."""
    excess = {}
    for project in (False, True):
        slow = partial(torch.optim.AdamW, lr=0.003)
        options = {"tolerance": 0.02, "on": "both", "look": look, "project": project}
        model, both, keeper = begin(EACH, [task(0)], make=partial(halves, first=slow, second=slow), **options)
        bound = float(EACH(model, task(0)).detach().mean()) + 0.02
        excess[project] = [-0.02]
        for _ in range(60):
            model.zero_grad()
            loss(model, rival(task(0))).backward()
            for optimizer in both:
                optimizer.step()
                keeper.logs()  # numbers that are read in between do not make it two steps
            # The excess is that at the beginning of the step.
            assert float(keeper.last.excess) == pytest.approx(excess[project][-1], abs=1e-9)
            excess[project].append(float(EACH(model, task(0)).detach().mean()) - bound)
    assert excess[False][-1] > 0.1
    assert max(excess[True]) < 0.002
    line = keeper.report()[0]
    assert (line.steps, line.looks) == (60, 60)


def test_a_weight_is_added_once_in_each_part():
    model, both, keeper = begin(loss, BOTH, make=halves, weight=0.5)
    G, split = rows(model, BOTH), flat(model[0]).numel()
    forget(model)
    g = gradient(model)
    step = forget(model, both)
    assert keeper.last.num_violated
    for part in (slice(0, split), slice(split, None)):
        lam = torch.linalg.lstsq(G[:, part].T, (step / 0.1 - g)[part]).solution
        assert float(lam.min()) > 0.5 - 1e-9


TURNS = {"turns": [0, 1, 0, 1], "another rate": [0, 1, 1, 0, 1, 1, 0]}


@pytest.mark.parametrize("case", [*TURNS, "closures", "a new set", "an error"])
def test_optimizers_with_backward_passes_of_their_own_have_rows_of_their_own(case):
    failing, tasks = [], [*BOTH]

    def unlucky(model, batch):
        if failing:
            raise RuntimeError("no memory")
        return loss(model, batch)

    fast = partial(sgd, rate=0.5)
    model, both, keeper = begin(unlucky, BOTH, make=partial(halves, first=fast, second=fast))

    def step(which, within=False):
        """Take a step after a backward pass of its own, perhaps in a closure."""
        G = rows(model, tasks)
        if not within:
            forget(model)
        step = moved(model, lambda: both[which].step(*[lambda: forget(model)] * within))
        assert step.any()
        assert len(keeper.last.names) == len(G)
        assert float((G @ step).min()) > -1e-12

    if case == "a new set":
        step(1)
        keeper.keep([task(2)])
        tasks.append(task(2))
    elif case == "an error":
        forget(model)
        failing.append(True)
        with pytest.raises(RuntimeError, match="no memory"):
            both[0].step()
        failing.clear()
    for which in TURNS.get(case, [0, 1]):
        step(which, case == "closures")


# --- parameters that change -----------------------------------------------------------------------


CHANGES = {
    "freeze": (lambda model, _: model[0].weight.requires_grad_(False), None, None),
    "unfreeze": (lambda model, _: model[2].bias.requires_grad_(True), None, None),
    "narrow": (lambda model, _: model.float(), None, None),
    "replace the head": (
        lambda model, _: model.register_module("2", nn.Linear(8, 3).double()),
        r"lacks 2 of the 3 trainable.*'2.weight'.*add_param_group",
        lambda model, optimizer: optimizer.add_param_group({"params": list(model[2].parameters())}),
    ),
    "a parameter of no model": (
        lambda model, optimizer: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
        "moves 1 parameters that are not the model's",
        lambda model, optimizer: optimizer.param_groups.pop(),
    ),
}


@pytest.mark.parametrize("on", ["gradient", "step", "both"])
@pytest.mark.parametrize("change", CHANGES)
def test_parameters_that_change_are_seen_at_the_next_step(change, on):
    model = perceptron()
    model[2].bias.requires_grad_(False)
    model[0].bias.requires_grad_(False)

    def in_its_dtype(model, batch):
        return loss(model, (batch[0].to(model[0].weight.dtype), batch[1]))

    model, optimizer, keeper = begin(in_its_dtype, {"old": task(1)}, model=model, look=4, on=on)
    loss(model, task(5)).backward()
    optimizer.step()
    optimizer.zero_grad()
    make, text, remedy = CHANGES[change]
    make(model, optimizer)
    in_its_dtype(model, rival(task(1))).backward()
    before = flat(model)
    if text:
        for _ in range(2):
            with pytest.raises(ValueError, match=text):
                optimizer.step()
        remedy(model, optimizer)
    assert torch.equal(flat(model), before)
    for _ in range(3):
        model.zero_grad()
        in_its_dtype(model, rival(task(1))).backward()
        G = rows(model, [task(1)], in_its_dtype)
        step = moved(model, optimizer.step)
        assert keeper.rows.G.shape == G.shape
        assert keeper.last.num_violated == 1
        if keeper.last.age == 0:
            assert float(cosines(G, step)) > (-1e-6 if change == "narrow" else -1e-12)
    assert keeper.last.age == 2 + (change == "a parameter of no model")
    assert keeper.report()["old"].steps == 4


def test_rows_are_those_of_the_sets_at_hand():
    model, optimizer, keeper = begin(loss, BOTH, make=lambda p: sgd(p, 0.0), look=5)
    for change, left in (
        (lambda: keeper.forget(0), [task(1)]),
        (lambda: keeper.keep([task(2)], name=0), [task(1), task(2)]),
        (lambda: (keeper.forget(0), keeper.keep([task(3)], name=0)), [task(1), task(3)]),
        (lambda: keeper.sets.clear() or [keeper.keep([task(4)])], [task(4)]),
    ):
        change()
        for _ in range(2):  # computed anew once
            forget(model, [optimizer])
            torch.testing.assert_close(keeper.rows.G, rows(model, left))
