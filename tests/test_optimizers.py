"""What is projected is what the optimizers hold; and whose constraints these are."""

import copy
import gc
import weakref

import pytest

torch = pytest.importorskip("torch")

from models import EACH, begin, cosines, flat, gradient, loss, moved, perceptron, rival, rows, sgd, task  # noqa: E402

from gemproj.torch import GEM, EpisodicMemory, GradientProjector  # noqa: E402
from gemproj.torch.losses import CrossEntropy  # noqa: E402


def memory():
    """Store a batch of each of two tasks."""
    memory = EpisodicMemory(per_task=12)
    for k in range(2):
        memory.add(task(k), k)
    return memory


def forgets(model):
    """Learn what both tasks forbid, and something else."""
    (loss(model, rival(task(5))) - loss(model, task(0)) - loss(model, task(1))).backward()


def test_only_what_the_optimizer_holds_is_projected():
    """What it lacks does not move, whatever its gradient is."""
    model = perceptron()
    optimizer, projector = sgd(model[2].parameters()), GradientProjector(model.parameters())
    projector.attach(optimizer)
    forgets(model)
    for p in model[0].parameters():  # which hides the conflict from a projection of everything
        p.grad = -10 * p.grad if p.ndim > 1 else None
    left = model[0].weight.grad.clone()
    projector.recall(model, memory().batches(), loss)
    held = flat(model[2].parameters()).numel()
    G = projector.constraints[:, -held:].clone()
    assert (G @ gradient(model[2]) < 0).any()
    step = moved(model[2], optimizer.step)
    assert float((G @ step).min()) > -1e-14
    assert torch.equal(model[0].weight.grad, left)
    assert model[0].bias.grad is None


@pytest.mark.parametrize("on", ["gradient", "step"])
@pytest.mark.parametrize("turned", [False, True])
def test_several_optimizers_keep_the_promise_together(on, turned):
    model, calls = perceptron(), []

    def counting(model, batch):
        calls.append(len(batch))
        return loss(model, batch)

    optimizers = [sgd(model[0].parameters()), sgd(model[2].parameters(), momentum=0.9)]
    if turned:
        optimizers.reverse()
    GEM(model, optimizers, counting, memory=memory(), on=on, weight=0.5)
    plain = perceptron()
    for _ in range(2):  # with the second step there is momentum
        calls.clear()
        G = rows(model, [task(0), task(1)])
        model.zero_grad()
        forgets(model)
        before, g = flat(model), gradient(model)
        for optimizer in optimizers:
            optimizer.step()
        assert len(calls) == 2  # one for each task, not for each optimizer
        step = before - flat(model)
        assert (G @ g < 0).any()
        if on == "step" or torch.equal(before, flat(plain)):
            assert float(cosines(G, step).min()) > -1e-12
        if torch.equal(before, flat(plain)):  # SGD: in each part the margin is added once
            split = flat(model[0]).numel()
            for part in (slice(0, split), slice(split, None)):
                lam = torch.linalg.lstsq(G[:, part].T, step[part] / 0.1 - g[part]).solution
                assert float(lam.min()) > 0.5 - 1e-9


def fresh_slacks(model, *steps):
    """Take steps, each at a point of its own; return the least product of each with rows at its point."""
    least = []
    for step in steps:
        G, before = rows(model, [task(0), task(1)]), flat(model)
        step()
        assert not torch.equal(flat(model), before)
        least.append(float((G @ (before - flat(model))).min()))
    return min(least)


@pytest.mark.parametrize("case", ["turns", "another rate", "closures", "an end of a task", "an error"])
def test_optimizers_at_points_of_their_own_have_constraints_of_their_own(case):
    model, failing = perceptron(), []

    def unlucky(model, batch):
        if failing:
            raise RuntimeError("no memory")
        return loss(model, batch)

    body, head = sgd(model[0].parameters(), 0.5), sgd(model[2].parameters(), 0.5)
    gem = GEM(model, [body, head], unlucky, memory=memory())

    def closure():
        model.zero_grad()
        forgets(model)

    def step(one):
        def take():
            closure()
            one.step()

        return take

    if case == "turns":
        assert fresh_slacks(model, *map(step, (body, head, body, head))) > -1e-12
    elif case == "another rate":
        assert fresh_slacks(model, *map(step, (body, head, head, body, head, head, body))) > -1e-12
    elif case == "closures":
        assert fresh_slacks(model, lambda: body.step(closure), lambda: head.step(closure)) > -1e-12
    elif case == "an end of a task":
        step(head)()
        gem.end_task([task(2)])
        body.step()
        assert gem.last.constraints == 3
    else:
        closure()
        failing.append(True)
        with pytest.raises(RuntimeError, match="no memory"):
            body.step()
        failing.clear()
        assert fresh_slacks(model, head.step) > -1e-12
        assert gem.last.constraints == 2


def test_optimizers_may_not_overlap():
    model = perceptron()
    optimizer = sgd(model.parameters())
    with pytest.raises(ValueError, match="in several optimizers"):
        GEM(model, [optimizer, sgd(model[2].parameters())], loss)
    with pytest.raises(ValueError, match="in several optimizers"):
        GEM(model, [optimizer, optimizer], loss)
    unfit = sgd(model[2].parameters(), maximize=True)
    first = sgd(model[0].parameters())
    with pytest.raises(ValueError, match="maximize=True"):
        GEM(model, [first, unfit], loss)
    assert not first._optimizer_step_pre_hooks
    GEM(model, optimizer, loss)  # nothing is left of them


def test_projectors_of_other_parameters_share_an_optimizer():
    model = perceptron()
    optimizer = sgd(model.parameters())
    projectors = [GradientProjector(part.parameters()) for part in (model[0], model[2])]
    for projector in projectors:
        projector.attach(optimizer)
        projector.recall(model, memory().batches(), loss)
    forgets(model)
    optimizer.step()
    for projector in projectors:
        assert projector.last.worst_cosine > -1e-12


def test_a_bound_is_about_one_step():
    model = perceptron()
    with pytest.raises(ValueError, match="tolerance is about a whole step"):
        GEM(model, [sgd(model[0].parameters()), sgd(model[2].parameters())], EACH, tolerance=0.0)


def test_what_the_optimizers_lack_is_an_error():
    model = perceptron()
    with pytest.raises(ValueError, match=r"lacks 2 of the 4 .*'0.weight'.*requires_grad_\(False\)"):
        GEM(model, sgd(model[2].parameters()), loss)
    model[0].requires_grad_(False)
    GEM(model, sgd(model[2].parameters()), loss)


def test_what_nothing_projects_is_an_error():
    model = perceptron()
    with pytest.raises(ValueError, match="moves 2 parameters that are not projected"):
        GEM(model[0], sgd(model.parameters()), loss)
    model[0].requires_grad_(False)
    optimizer = sgd(model.parameters())
    GEM(model, optimizer, loss, memory=memory())
    model[0].requires_grad_(True)
    forgets(model)
    before = flat(model)
    with pytest.raises(ValueError, match="after unfreezing"):
        optimizer.step()
    assert torch.equal(flat(model), before)


def freeze(model, optimizer):
    model[0].weight.requires_grad_(False)


def unfreeze(model, optimizer):
    model[2].bias.requires_grad_(True)


def add_a_group(model, optimizer):
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})


def narrow(model, optimizer):
    model.float()


@pytest.mark.parametrize("on", ["gradient", "step"])
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (freeze, "1 of the 3 parameters .* no longer require a gradient"),
        (unfreeze, "moves 1 parameters that are not projected"),
        (add_a_group, "moves 1 parameters that are not projected"),
        (narrow, "one is torch.float32 on cpu, and was torch.float64"),
    ],
)
def test_what_no_longer_fits_is_seen_before_rows_are_due(change, text, on):
    model = perceptron()
    model[2].bias.requires_grad_(False)
    optimizer = sgd(model.parameters())
    gem = GEM(model, optimizer, lambda m, b: loss(m, (b[0].to(m[0].weight.dtype), b[1])), every=4, on=on)
    gem.end_task([task(1)])
    optimizer.step()
    change(model, optimizer)
    before = flat(model)
    loss(model, rival(task(1, dtype=model[0].weight.dtype))).backward()
    with pytest.raises(ValueError, match=text):
        optimizer.step()
    assert torch.equal(flat(model), before)


def test_a_second_gem_waits_for_the_first_one():
    model = perceptron()
    optimizer = sgd(model.parameters())
    first = GEM(model, optimizer, loss)
    with pytest.raises(ValueError, match=r"Another projector is attached.*remove\(\)"):
        GEM(model, optimizer, loss)
    first.remove()
    GEM(model, optimizer, loss)


def test_nothing_outlives_the_optimizer():
    _, optimizer, gem = begin(memory=memory(), on="step")
    left = [weakref.ref(one) for one in (optimizer, gem.projector)]
    del optimizer, gem
    gc.collect()
    assert [one() for one in left] == [None, None]


def test_rows_are_those_of_the_tasks_that_are_not_left_out():
    model = perceptron()
    optimizer = sgd(model.parameters(), 0.0)
    gem = GEM(model, optimizer, loss, memory=memory(), every=5)
    for exclude, left in ((0, 1), (1, 0)):  # one row each time
        gem.exclude = exclude
        forgets(model)
        optimizer.step()
        torch.testing.assert_close(gem.projector.constraints, rows(model, [task(left)]))
    assert gem.last.constraints == 1


@pytest.mark.parametrize("later", [False, True])
def test_what_is_left_out_is_part_of_the_state(later):
    """Also where another task is left out right after the state was saved or loaded."""
    ends = []
    for resumed in (False, True):
        model, optimizer, gem = begin(memory=memory(), every=5)
        gem.exclude, ages = 1, []
        for k in range(6):
            if k == 3:
                if resumed:
                    state = copy.deepcopy(gem.state_dict())
                    gem.remove()
                    gem = GEM(model, optimizer, loss, per_task=12, every=5)
                    gem.load_state_dict(state)
                assert gem.exclude == 1
                gem.exclude = 2 if later else gem.exclude
            model.zero_grad()
            forgets(model)
            optimizer.step()
            ages.append((gem.last.age, gem.last.constraints))
        ends.append((ages, flat(model)))
    assert ends[0][0] == ends[1][0]
    assert torch.equal(ends[0][1], ends[1][1])


def test_names_of_tasks_are_not_taken_twice():
    gem = begin()[2]
    gem.end_task([task(0)], task=1)
    gem.end_task([task(1)])
    gem.end_task([task(2)], "c")
    gem.end_task([task(3)])
    assert gem.memory.tasks == [1, 2, "c", 3]


@pytest.mark.parametrize("bound", [None, 0.0])
def test_an_end_without_examples_is_an_error(bound):
    gem = begin(EACH, tolerance=bound)[2]
    loader = iter([task(0)])
    gem.end_task(loader)
    with pytest.raises(ValueError, match=r"no example.*read once"):
        gem.end_task(loader)
    with pytest.raises(ValueError, match="no example"):
        gem.end_task(())
    for one in (task(0), task(0)[0], {"x": task(0)[0]}):
        with pytest.raises(TypeError, match=r"one batch.*Pass \[batch\]"):
            gem.end_task(one)
    assert gem.memory.tasks == [0]


def test_the_losses_stored_are_those_of_the_model_that_is_named():
    model, other = perceptron(), perceptron(seed=1)
    gem = GEM(model, sgd(model.parameters()), CrossEntropy(lambda m, b: m(b[0]), labels=1), tolerance=0.0)
    gem.end_task([task(0)], model=other)
    stored = gem.memory.batch(0)
    torch.testing.assert_close(stored.losses.mean(), loss(other, stored.batch).detach())
