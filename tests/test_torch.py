"""The projector and the memory inside a training loop."""

import copy
from functools import partial

import pytest

torch = pytest.importorskip("torch")

import models  # noqa: E402
from models import flat, gradient, loss, perceptron, rival, rows, sgd, take, trainable  # noqa: E402

from gemproj import project, solve_dual  # noqa: E402
from gemproj.torch import GradientProjector, Promise  # noqa: E402
from gemproj.torch.constraints import ConstraintMatrix  # noqa: E402


@pytest.fixture
def model():
    net = perceptron(torch.float32)
    net[0].bias.requires_grad_(False)
    return net


task = partial(models.task, dtype=torch.float32)


PAST = [task(1), task(2)]
NOW = rival(PAST[0])  # its gradient violates at least one of theirs


def test_projects_the_gradients_of_the_trainable_parameters(model):
    G = rows(model, PAST).float()
    g = rows(model, [NOW]).float()[0]
    projector = GradientProjector(model.parameters())
    loss(model, NOW).backward()
    before = model[0].weight.grad
    projector.constrain(loss(model, batch) for batch in PAST)  # leaves .grad alone
    torch.testing.assert_close(projector.constraints, G)
    stats = projector.project_()
    x = gradient(model).float()
    torch.testing.assert_close(x, project(G, g))
    assert model[0].weight.grad is before
    assert model[0].bias.grad is None
    expected = solve_dual(G, g)
    assert stats.constraints == 2
    assert stats.num_violated == int((G @ g < 0).sum()) >= 1
    assert stats.num_active == int((expected.multipliers > 0).sum()) >= 1
    torch.testing.assert_close(stats.multipliers, expected.multipliers, rtol=1e-4, atol=1e-6)
    assert stats.cosine == pytest.approx(float(torch.cosine_similarity(x, g, dim=0)), abs=1e-5)
    assert projector.last is stats
    assert repr(stats).startswith(f"Projection({stats.num_violated} of 2 constraints violated, cosine 0.")
    assert repr(projector).startswith("GradientProjector(3 parameters, d=75, t=2, Promise(loss=")


def test_nothing_changes_without_constraints_or_violation(model):
    loss(model, NOW).backward()
    before = gradient(model)
    projector = GradientProjector(model.parameters())
    nothing = projector.project_()
    assert (nothing.constraints, nothing.cosine) == (0, None)
    assert "nothing is promised" in repr(nothing)
    projector.constrain([loss(model, NOW)])  # the gradient itself: never violated
    stats = projector.project_()
    assert (stats.num_violated, stats.num_active, stats.cosine) == (0, 0, 1.0)
    assert torch.equal(gradient(model), before)


@pytest.mark.parametrize("metric", [None, torch.ones(1000)])  # the second is for the portable backend
def test_autocast_of_the_caller_does_not_reach_the_projection(metric, rng):
    G, g = torch.from_numpy(rng.standard_normal((2, 1000)) - 0.2).float(), torch.full((1000,), 0.2)
    expected = project(G, g, metric=metric)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(project(G, g, metric=metric), expected)


def test_a_failing_loss_leaves_no_constraints(model):
    projector = GradientProjector(model.parameters())
    projector.constrain(loss(model, batch) for batch in PAST)

    def losses():
        yield loss(model, PAST[0])
        raise MemoryError("out of memory")

    with pytest.raises(MemoryError):
        projector.constrain(losses())
    assert len(projector.constraints) == 0
    assert projector.project_().solution is None


def test_gradients_appear_only_where_the_present_constraints_reach():
    own, reached, other = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    projector = GradientProjector([own, reached, other])
    projector.constrain([own.sum() + reached.sum() + other.sum()])
    projector.constrain([own.sum() + reached.sum()])
    own.grad = -torch.ones(2)
    stats = projector.project_()
    assert other.grad is None
    assert stats.multipliers.tolist() == [0.5]
    assert own.grad.tolist() == [-0.5, -0.5]
    assert reached.grad.tolist() == [0.5, 0.5]


def test_gradient_and_step_each_start_from_their_own_multipliers_within_a_task(model):
    starts = []

    def spy(K, b, warm_start):
        starts.append(None if warm_start is None else warm_start.tolist())
        return torch.full_like(b, float(len(starts)))

    projector, optimizer = GradientProjector(model.parameters(), method=spy, on="both"), sgd(trainable(model))
    projector.attach(optimizer)
    # One more constraint is another problem, and so is what comes after the end of a task.
    for batches in (PAST, PAST, [*PAST, task(3)], None, [*PAST, task(3)]):
        if batches is None:
            projector.reset()
            assert len(projector.constraints) == 0
            assert projector.last is None
            continue
        projector.constrain(loss(model, batch) for batch in batches)
        take(model, optimizer, NOW)
    assert starts == [None, None, [1.0, 1.0], [2.0, 2.0], *[None] * 4]


@pytest.mark.parametrize("active", [False, True])
def test_old_heads_take_part_in_every_step_on_every_device(active, monkeypatch):
    """A device writes gradients without asking whether a multiplier is zero, and the CPU need not ask."""
    weights = []
    plain = ConstraintMatrix.project
    for device in (False, True):
        if device:
            monkeypatch.setattr(ConstraintMatrix, "project", lambda *a, **b: (plain(*a, **b)[0], True))
        body, old, new = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
        optimizer = torch.optim.AdamW([body, old, new], lr=0.1)
        projector = GradientProjector([body, old, new])
        projector.attach(optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            projector.constrain([(body * old).sum()])
            ((-1 if active else 1) * body * new).sum().backward()
            optimizer.step()
            assert projector.last.num_active == active
            assert bool(old.grad.any()) == active
        weights.append(flat([body, old, new]))
    assert torch.equal(*weights)


def test_a_gradient_that_appears_lies_in_memory_as_its_parameter_does():
    weights = []
    for fused in (False, True):
        torch.manual_seed(0)
        image = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
        parameters = [torch.nn.Parameter(p) for p in (image, torch.randn(3, 4).T, torch.randn(3))]
        projector = GradientProjector(parameters)
        optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=fused)
        projector.attach(optimizer)
        factors = [*(torch.randn(p.shape) for p in parameters[:2]), torch.ones(3)]
        projector.constrain([sum((p * f).sum() for p, f in zip(parameters, factors, strict=True))])
        parameters[2].grad = -torch.ones(3)
        optimizer.step()
        assert [p.grad.stride() for p in parameters] == [p.stride() for p in parameters]
        weights.append(flat(parameters))
    torch.testing.assert_close(*weights)


def test_mixed_dtypes_and_shared_parameters(model):
    half = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    parameters = [half, half, model[0].weight]
    projector = GradientProjector(parameters)
    projector.constrain([(half.float() ** 2).sum() + model[0].weight.sum()])
    assert projector.constraints.shape == (1, 51)
    assert projector.constraints.dtype == torch.float32
    half.grad, model[0].weight.grad = -torch.ones_like(half), torch.zeros_like(model[0].weight)
    projector.project_()
    assert half.grad.dtype == torch.bfloat16
    assert abs(float(2 * half.grad.sum() + model[0].weight.grad.sum())) < 0.05


def test_states_are_copies(model):
    projector, other = (GradientProjector(model.parameters(), method="gem2017") for _ in range(2))
    projector.constrain(loss(model, batch) for batch in PAST)
    loss(model, NOW).backward()
    projector.project_()
    state = projector.state_dict()
    other.load_state_dict(state)
    expected = copy.deepcopy(state)
    for part in (state["constraints"]["rows"], *state["warm"].values()):
        part.fill_(7.0)
    for one in (projector, other):
        torch.testing.assert_close(one.state_dict(), expected, rtol=0, atol=0, equal_nan=True)


def test_gradients_that_are_not_finite_stay_as_they_are(model):
    projector = GradientProjector(model.parameters())
    projector.constrain([loss(model, task(1))])
    loss(model, task(2)).backward()
    model[0].weight.grad[0, 0] = float("nan")
    before = model[2].weight.grad.clone()
    with pytest.raises(ValueError, match="g is not finite"):
        projector.project_()
    assert torch.equal(model[2].weight.grad, before)


def test_losses_come_in_a_list_or_one_by_one_and_each_may_have_a_promise(model):
    listed, streamed = (GradientProjector(model.parameters()) for _ in range(2))
    for weights in ([0.5], [0.1, 0.3], [0.0] * 9):
        past = [task(k + 1) for k in range(len(weights))]
        promises = [Promise(weight=weight) for weight in weights]
        listed.constrain([loss(model, batch) for batch in past], promises)
        streamed.constrain((loss(model, batch) for batch in past), promises)
        assert listed.count == streamed.count == len(past)
        assert torch.equal(listed.constraints, streamed.constraints)
        model.zero_grad()
        loss(model, NOW).backward()
        expected = project(listed.constraints, gradient(model).float(), margin=torch.tensor(weights))
        streamed.project_()
        torch.testing.assert_close(gradient(model).float(), expected)
