"""One keeper and its optimizers: attaching, several optimizers, parameters that change, and copies."""

import copy
import gc
import pickle
import weakref

import pytest

torch = pytest.importorskip("torch")

from models import (  # noqa: E402
    EACH,
    begin,
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
    task,
)
from torch import nn  # noqa: E402

from gemproj.torch import detach  # noqa: E402


def keep_two(keeper):
    for k in range(2):
        keeper.keep([task(k)], name=k)
    return keeper


def forgets(model):
    """Compute the gradient of learning what both tasks forbid, and something else."""
    model.zero_grad()
    (loss(model, rival(task(5))) - loss(model, task(0)) - loss(model, task(1))).backward()


def hooks(optimizer):
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def test_a_second_keeper_waits_for_the_first_one_to_go():
    """Also if nothing refers to it any more: in a notebook, a cell that is run twice."""
    model, optimizer, _ = begin()
    with pytest.raises(ValueError, match=r"attached to this optimizer .*gemproj.torch.detach\(optimizer\)"):
        protect(model, optimizer)
    detach(optimizer)
    assert not hooks(optimizer)
    keeper = keep_two(protect(model, optimizer))
    keeper.remove()
    assert not hooks(optimizer)
    forgets(model)
    torch.testing.assert_close(moved(model, optimizer.step), 0.1 * gradient(model))
    protect(model, optimizer)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_copy_is_attached_to_nothing(duplicate):
    model, optimizer, keeper = begin(EACH)
    keep_two(keeper)
    forgets(model)
    optimizer.step()
    other = duplicate(keeper)
    other.remove()
    assert len(hooks(optimizer)) == 2
    assert str(other.report()) == str(keeper.report())
    assert torch.equal(other.sets[1].losses, keeper.sets[1].losses)
    with pytest.raises(ValueError, match="has no model yet"):
        other.keep([task(2)])
    assert other.state_dict()["sets"][0]["examples"][0] is not keeper.sets[0].examples[0]


def test_nothing_outlives_the_optimizer():
    model = perceptron()
    optimizers = [sgd(model[0].parameters()), sgd(model[2].parameters())]
    keeper = keep_two(protect(model, optimizers))
    for optimizer in optimizers:
        optimizer.step()
    left = [weakref.ref(one) for one in (*optimizers, keeper)]
    del optimizers, optimizer, keeper
    gc.collect()
    assert [one() for one in left] == [None, None, None]


# --- several optimizers ---------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["gradient", "step", "both"])
@pytest.mark.parametrize("turned", [False, True])
def test_several_optimizers_keep_promises_together_and_count_one_step(on, turned):
    model = perceptron()
    optimizers = [sgd(model[0].parameters()), torch.optim.AdamW(model[2].parameters(), lr=0.01)]
    if turned:
        optimizers.reverse()
    keeper = keep_two(protect(model, optimizers, on=on))
    for _ in range(3):
        G = rows(model, [task(0), task(1)])
        forgets(model)
        assert (G @ gradient(model) < 0).any()
        before = flat(model)
        for optimizer in optimizers:
            optimizer.step()
        assert keeper.last.age == 0
        torch.testing.assert_close(keeper.rows.G, G)  # one look for both
        step = before - flat(model)
        torch.testing.assert_close(keeper.last.cosines, cosines(G, step))
        assert on == "gradient" or keeper.last.worst_cosine > -1e-12
    report = keeper.report()
    assert [line.steps for line in report.values()] == [3, 3]
    assert report[0].would_break == 1.0
    assert on == "gradient" or report[0].broke == 0.0


@pytest.mark.parametrize("on", ["gradient", "step", "both"])
def test_no_part_of_a_step_is_taken_if_the_gradient_of_another_is_not_finite(on):
    model = perceptron()
    optimizers = [sgd(model[0].parameters()), sgd(model[2].parameters())]
    keep_two(protect(model, optimizers, on=on))
    forgets(model)
    model[2].bias.grad[0] = torch.inf
    before = flat(model)
    with pytest.raises(ValueError, match=r"The gradient of 2.bias is not finite"):
        optimizers[0].step()
    assert torch.equal(flat(model), before)


@pytest.mark.parametrize("look", [1, "auto"])
def test_the_parts_of_a_step_keep_a_tolerance_together(look):
    """The part of the second optimizer gets the slack that the first one has left."""
    excess = {}
    for project in (False, True):
        model = perceptron()
        both = [torch.optim.AdamW(part.parameters(), lr=0.003) for part in (model[0], model[2])]
        keeper = protect(model, both, EACH, tolerance=0.02, on="both", look=look, project=project)
        keeper.keep([task(0)])
        bound = float(EACH(model, task(0)).detach().mean()) + 0.02
        excess[project] = []
        for _ in range(60):
            model.zero_grad()
            loss(model, rival(task(0))).backward()
            for optimizer in both:
                optimizer.step()
            excess[project].append(float(EACH(model, task(0)).detach().mean()) - bound)
    assert excess[False][-1] > 0.1
    assert max(excess[True]) < 0.002
    line = keeper.report()[0]
    assert (line.steps, line.looks) == (60, 60)


def test_a_weight_is_added_once_in_each_part():
    model = perceptron()
    both = [sgd(model[0].parameters()), sgd(model[2].parameters())]
    keep_two(keeper := protect(model, both, weight=0.5))
    G = rows(model, [task(0), task(1)])
    forgets(model)
    before, g, split = flat(model), gradient(model), flat(model[0]).numel()
    for optimizer in both:
        optimizer.step()
    assert keeper.last.num_violated
    for part in (slice(0, split), slice(split, None)):
        lam = torch.linalg.lstsq(G[:, part].T, ((before - flat(model)) / 0.1 - g)[part]).solution
        assert float(lam.min()) > 0.5 - 1e-9


TURNS = {"turns": [0, 1, 0, 1], "another rate": [0, 1, 1, 0, 1, 1, 0]}


@pytest.mark.parametrize("case", [*TURNS, "closures", "a new set", "an error"])
def test_optimizers_with_backward_passes_of_their_own_have_rows_of_their_own(case):
    model, failing = perceptron(), []

    def unlucky(model, batch):
        if failing:
            raise RuntimeError("no memory")
        return loss(model, batch)

    both = [sgd(part.parameters(), 0.5) for part in (model[0], model[2])]
    keeper, tasks = keep_two(protect(model, both, unlucky)), [task(0), task(1)]

    def step(which, within=False):
        """Take a step after a backward pass of its own, perhaps in a closure."""
        G = rows(model, tasks)
        if not within:
            forgets(model)
        step = moved(model, lambda: both[which].step(*[lambda: forgets(model)] * within))
        assert step.any()
        assert len(keeper.last.names) == len(G)
        assert float((G @ step).min()) > -1e-12

    if case == "a new set":
        step(1)
        keeper.keep([task(2)])
        tasks.append(task(2))
    elif case == "an error":
        forgets(model)
        failing.append(True)
        with pytest.raises(RuntimeError, match="no memory"):
            both[0].step()
        failing.clear()
    for which in TURNS.get(case, [0, 1]):
        step(which, case == "closures")


# --- parameters that change -----------------------------------------------------------------------


def replace_head(model, optimizer):
    torch.manual_seed(3)
    model[2] = nn.Linear(8, 3).double()


def add_head(model, optimizer):
    optimizer.add_param_group({"params": list(model[2].parameters())})


CHANGES = {
    "freeze": (lambda model, _: model[0].weight.requires_grad_(False), None, None),
    "unfreeze": (lambda model, _: model[2].bias.requires_grad_(True), None, None),
    "narrow": (lambda model, _: model.float(), None, None),
    "replace the head": (replace_head, r"lacks 2 of the 3 trainable.*'2.weight'.*add_param_group", add_head),
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

    model, optimizer, keeper = begin(in_its_dtype, model=model, make=sgd, look=4, on=on)
    keeper.keep([task(1)], name="old")
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


def test_rows_grow_older_by_one_in_a_step_of_several_optimizers():
    model = perceptron()
    optimizers = [sgd(model[0].parameters()), sgd(model[2].parameters())]
    keeper = keep_two(protect(model, optimizers, look=3))
    for step in range(5):
        forgets(model)
        for optimizer in optimizers:
            optimizer.step()
            assert keeper.last.age == step % 3


def test_rows_are_those_of_the_sets_at_hand():
    model, optimizer, keeper = begin(make=lambda p: sgd(p, 0.0), look=5)
    keep_two(keeper)
    for change, left in (
        (lambda: keeper.forget(0), [task(1)]),
        (lambda: keeper.keep([task(2)], name=0), [task(1), task(2)]),
        (lambda: (keeper.forget(0), keeper.keep([task(3)], name=0)), [task(1), task(3)]),
        (lambda: keeper.sets.clear() or [keeper.keep([task(4)])], [task(4)]),
    ):
        change()
        for _ in range(2):  # computed anew once
            forgets(model)
            optimizer.step()
            torch.testing.assert_close(keeper.rows.G, rows(model, left))
    with pytest.raises(KeyError, match="no set is named 'x'"):
        keeper.forget("x")
