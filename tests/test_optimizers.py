"""What is projected is what the optimizers hold; and whose constraints these are."""

import copy
import gc
import pickle
import weakref

import pytest

torch = pytest.importorskip("torch")

from models import begin, cosines, flat, gradient, loss, moved, perceptron, rival, rows, sgd, take, task  # noqa: E402

from gemproj.torch import GEM, EpisodicMemory, GradientProjector, detach  # noqa: E402


def memory():
    """Store a batch of each of two tasks."""
    memory = EpisodicMemory(per_task=12)
    for k in range(2):
        memory.add(task(k), k)
    return memory


def forgets(model):
    """Learn what both tasks forbid, and something else."""
    (loss(model, rival(task(5))) - loss(model, task(0)) - loss(model, task(1))).backward()


def hooks(optimizer):
    return [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]


def attach(kind, optimizer, model):
    """Return the object that was attached, and the function that detaches it."""
    if kind == "GEM":
        gem = GEM(model, optimizer, loss)
        return gem, gem.remove
    projector = GradientProjector(model.parameters())
    return projector, projector.attach(optimizer).remove


kinds = pytest.mark.parametrize("kind", ["GEM", "projector"])


@kinds
def test_what_is_attached_once_waits_for_the_first_one_to_go(kind):
    """Also where nothing refers to it any more: in a notebook, a cell that is run twice."""
    model = perceptron()
    optimizer = sgd(model.parameters())
    attach(kind, optimizer, model)
    with pytest.raises(
        ValueError, match=r"attached to this optimizer already.*gemproj.torch.detach\(optimizer\)"
    ):
        attach(kind, optimizer, model)
    detach(optimizer)
    assert not hooks(optimizer)
    attach(kind, sgd(model.parameters()), model)  # that of the next task
    attach(kind, optimizer, model)[1]()
    assert not hooks(optimizer)
    loss(model, rival(task(1))).backward()
    torch.testing.assert_close(moved(model, optimizer.step), 0.1 * gradient(model))
    attach(kind, optimizer, model)


def test_an_optimizer_with_a_scale_is_no_gradient_scaler():
    class Amos(torch.optim.SGD):
        def get_scale(self, p):
            return p.numel() ** -0.5

    model, optimizer, gem = begin(make=lambda parameters: Amos(parameters, lr=0.1))
    gem.end_task([task(0)])
    take(model, optimizer, rival(task(0)))
    assert gem.last.num_violated == 1


@pytest.mark.parametrize("way", ["never", "removed", "gone", "copied"])
def test_steps_are_projected_where_an_optimizer_is_attached_to(way):
    model, past = perceptron(), memory()
    projector, optimizer = GradientProjector(model.parameters(), on="step"), sgd(model.parameters())
    handle = None if way == "never" else projector.attach(optimizer)
    projector.recall(model, past.batches(), loss)
    if way == "removed":
        handle.remove()
    if way == "copied":
        model, projector = copy.deepcopy((model, projector))
    if way == "gone":
        del handle, optimizer
        gc.collect()
    with pytest.raises(ValueError, match="on='step' projects the steps of an optimizer, and there is none"):
        projector.recall(model, past.batches(), loss)


@kinds
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch's own pytree
def test_a_copy_is_attached_to_nothing(kind, duplicate):
    model = perceptron()
    optimizer = sgd(model.parameters())
    one, _ = attach(kind, optimizer, model)
    projector = one.projector if kind == "GEM" else one
    projector.recall(model, [task(1)], loss)
    other = duplicate(one)
    if kind == "GEM":
        other.remove()
        other = other.projector
    assert torch.equal(other.constraints, projector.constraints)
    assert other.constraints.data_ptr() != projector.constraints.data_ptr()
    assert all(p is not q for p, q in zip(other.parameters, projector.parameters, strict=True))
    other.attach(sgd(other.parameters))
    assert hooks(optimizer)


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
    for first in (True, False):  # with the second step there is momentum
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
        if on == "step" or first:
            assert float(cosines(G, step).min()) > -1e-12
        if first:  # SGD: in each part the margin is added once
            split = flat(model[0]).numel()
            for part in (slice(0, split), slice(split, None)):
                lam = torch.linalg.lstsq(G[:, part].T, step[part] / 0.1 - g[part]).solution
                assert float(lam.min()) > 0.5 - 1e-9


TURNS = {"turns": [0, 1, 0, 1], "another rate": [0, 1, 1, 0, 1, 1, 0]}


@pytest.mark.parametrize("case", [*TURNS, "closures", "an end of a task", "an error"])
def test_optimizers_at_points_of_their_own_have_constraints_of_their_own(case):
    model, failing = perceptron(), []

    def unlucky(model, batch):
        if failing:
            raise RuntimeError("no memory")
        return loss(model, batch)

    both = [sgd(part.parameters(), 0.5) for part in (model[0], model[2])]
    gem = GEM(model, both, unlucky, memory=memory())

    def closure():
        model.zero_grad()
        forgets(model)

    def take(which, within=False):
        """Take a step at a point of its own."""
        G = rows(model, gem.memory.batches())
        if not within:
            closure()
        step = moved(model, lambda: both[which].step(*[closure] * within))
        assert step.any()
        assert gem.last.constraints == len(G)
        assert float((G @ step).min()) > -1e-12

    if case == "an end of a task":
        take(1)
        gem.end_task([task(2)])
    elif case == "an error":
        closure()
        failing.append(True)
        with pytest.raises(RuntimeError, match="no memory"):
            both[0].step()
        failing.clear()
    for which in TURNS.get(case, [0, 1]):
        take(which, case == "closures")


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


CHANGES = {
    "freeze": (
        lambda model, optimizer: model[0].weight.requires_grad_(False),
        r"1 of the 3 parameters of this projector no longer require a gradient.*new projector.*remove",
    ),
    "unfreeze": (
        lambda model, optimizer: model[2].bias.requires_grad_(True),
        "moves 1 parameters that are not projected.*after unfreezing",
    ),
    "add a group": (
        lambda model, optimizer: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]}),
        "moves 1 parameters that are not projected",
    ),
    "narrow": (
        lambda model, optimizer: model.float(),
        "one is torch.float32 on cpu, and was torch.float64",
    ),
}


@pytest.mark.parametrize("on", ["gradient", "step"])
@pytest.mark.parametrize("change", CHANGES)
def test_what_no_longer_fits_is_seen_before_rows_are_due(change, on):
    model = perceptron()
    model[2].bias.requires_grad_(False)

    def in_its_dtype(model, batch):
        return loss(model, (batch[0].to(model[0].weight.dtype), batch[1]))

    _, optimizer, gem = begin(in_its_dtype, model=model, every=4, on=on)
    gem.end_task([task(1)])
    optimizer.step()
    make, text = CHANGES[change]
    make(model, optimizer)
    before = flat(model)
    in_its_dtype(model, rival(task(1))).backward()
    uses = [optimizer.step]
    if "of this projector" in text:  # which knows by itself
        uses += [gem.projector.project_] * (on == "gradient")
        uses += [lambda: gem.projector.constrain([in_its_dtype(model, task(1))])]
    for use in uses:
        with pytest.raises(ValueError, match=text):
            use()
    assert torch.equal(flat(model), before)


def test_nothing_outlives_the_optimizer():
    _, optimizer, gem = begin(memory=memory(), on="step")
    left = [weakref.ref(one) for one in (optimizer, gem.projector)]
    del optimizer, gem
    gc.collect()
    assert [one() for one in left] == [None, None]


# --- which tasks the rows are of ------------------------------------------------------------------


def test_rows_are_those_of_the_tasks_that_are_there_and_not_left_out():
    model, optimizer, gem = begin(make=lambda p: sgd(p, 0.0), memory=memory(), every=5)

    def leave_out(name):
        gem.exclude = name

    for change, left in (  # one row each time
        (lambda: leave_out(0), task(1)),
        (lambda: leave_out(1), task(0)),
        (lambda: gem.memory.remove(0), None),
        (lambda: gem.memory.add(task(2), 0), task(2)),
        (lambda: gem.memory.remove(0) or gem.memory.add(task(3), 0), task(3)),
    ):
        change()
        for _ in range(2):  # computed anew once
            model.zero_grad()
            forgets(model)
            optimizer.step()
            if left is None:
                assert (gem.last.constraints, gem.last.worst_cosine) == (0, None)
            else:
                torch.testing.assert_close(gem.projector.constraints, rows(model, [left]))


def test_names_of_tasks_are_not_taken_twice():
    gem = begin()[2]
    for k, name in enumerate([1, None, "c", None]):
        gem.end_task([task(k)], name)
    assert gem.memory.tasks == [1, 2, "c", 3]
