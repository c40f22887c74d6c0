"""Gradients of past tasks in passing: equal to the plain ones, and the model is left as it was."""

import pytest

torch = pytest.importorskip("torch")

from models import begin, loss, rows  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from gemproj.torch import EpisodicMemory, GradientProjector, Promise  # noqa: E402


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6)
        self.drop, self.last = torch.nn.Dropout(0.5), torch.nn.Linear(6, 3)
        self.reentrant = None

    def body(self, x):
        return self.drop(self.norm(self.first(x)).tanh())

    def forward(self, x):
        if self.reentrant is None:
            return self.last(self.body(x))
        return self.last(checkpoint(self.body, x, use_reentrant=self.reentrant))


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().double()


def batch(seed, n=8):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randint(3, (n,), generator=generator)}


def each(model, data):
    return cross_entropy(model(data["x"]), data["y"], reduction="none")


def recalled(net, data, function=loss):
    projector = GradientProjector(net.parameters())
    projector.recall(net, data, function)
    return projector.constraints


TASKS = [batch(1), batch(2, n=5), batch(3, n=11)]


@pytest.mark.parametrize("scale", [1.0, 2.0**10])
@pytest.mark.parametrize("microbatch", [None, 1, 3, 5, 100])
@pytest.mark.parametrize("function", [loss, each])
def test_rows_are_the_gradients_of_the_means(net, microbatch, function, scale):
    net.eval()
    expected = rows(net, TASKS)
    net.train()
    projector = GradientProjector(net.parameters())
    with torch.no_grad():
        assert projector.recall(net, iter(TASKS), function, microbatch=microbatch, scale=scale)
    torch.testing.assert_close(projector.constraints, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_parts_compute_in_evaluation_mode_too(net):
    """They keep their mode in C++, behind a `__setattr__` of their own."""
    expected = rows(net.eval(), TASKS)
    net.drop = torch.jit.script(torch.nn.Dropout(0.5))
    torch.testing.assert_close(recalled(net.train(), TASKS), expected)
    assert net.drop.training


def failing(model, data):
    torch.rand(1)
    if len(data["x"]) == 5:
        raise RuntimeError("no such task")
    return loss(model, data)


def broken():
    yield TASKS[0]
    raise OSError("no such task")


@pytest.mark.parametrize(
    ("batches", "function", "error"),
    [(lambda: TASKS, loss, None), (lambda: TASKS, failing, RuntimeError), (broken, loss, OSError)],
)
def test_the_model_is_left_as_it_was_and_a_failure_leaves_no_constraints(net, batches, function, error):
    projector = GradientProjector(net.parameters(), every=2)
    for _ in range(2):
        projector.recall(net, TASKS, loss)
    net.norm.eval()  # frozen by the caller
    loss(net, batch(7)).backward()
    gradients = [(p.grad, p.grad.clone()) for p in net.parameters()]
    statistics, random = [b.clone() for b in net.buffers()], torch.get_rng_state()
    for _ in range(2 if error else 1):  # what has failed is still due
        if error is None:
            projector.recall(net, batches(), function)
            continue
        with pytest.raises(error, match="no such task"):
            projector.recall(net, batches(), function)
        assert len(projector.constraints) == 0
    assert torch.equal(torch.get_rng_state(), random)
    assert [m.training for m in (net, net.first, net.norm, net.drop)] == [True, True, False, True]
    assert all(map(torch.equal, net.buffers(), statistics))
    for p, (gradient, kept) in zip(net.parameters(), gradients, strict=True):
        assert p.grad is gradient
        assert torch.equal(gradient, kept)


def test_an_interval_uses_rows_again_until_the_next_task(net):
    seen = []

    def counting(model, data):
        seen.append(len(data["x"]))
        return loss(model, data)

    projector, resumed = (GradientProjector(net.parameters(), every=3) for _ in range(2))
    computed = [projector.recall(net, TASKS, counting) for _ in range(7)]
    assert computed == [True, False, False, True, False, False, True]
    assert len(seen) == 9
    resumed.load_state_dict(projector.state_dict())
    assert [resumed.recall(net, TASKS, counting) for _ in range(3)] == [False, False, True]
    projector.reset()
    assert projector.recall(net, TASKS, counting)


def test_autocast_of_the_caller_holds(net):
    net, seen = net.float(), []
    data = batch(1) | {"x": batch(1)["x"].float()}

    def typed(model, data):
        out = model(data["x"])
        seen.append(out.dtype)
        return cross_entropy(out.float(), data["y"])

    with torch.autocast("cpu", torch.bfloat16):
        found = recalled(net, [data], typed)
    assert seen == [torch.bfloat16]
    assert found.dtype == torch.float32
    assert float(torch.cosine_similarity(found, recalled(net, [data]))) > 0.99


def test_gradient_checkpointing(net):
    expected = recalled(net, TASKS)
    net.reentrant = False
    torch.testing.assert_close(recalled(net, TASKS), expected)
    net.reentrant = True
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        recalled(net, [batch(1) | {"x": batch(1)["x"].requires_grad_()}])


@pytest.mark.filterwarnings("ignore:.*running statistics")
def test_masks_of_hooks_on_parameters_hold_under_a_margin(net):
    mask = (torch.arange(6) > 2).double()[:, None]
    net.first.weight.register_hook(lambda gradient: gradient * mask)
    before = net.first.weight.detach().clone()
    _, optimizer, gem = begin(model=net, weight=0.5)
    gem.end_task([batch(1)])
    for k in range(3):
        optimizer.zero_grad()
        loss(net, batch(k)).backward()
        optimizer.step()
    assert torch.equal(net.first.weight != before, mask.bool().expand(6, 4))


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (([batch(1), batch(2, n=0)], loss), ValueError, r"examples of every past task; found \[8, 0\]"),
        (([batch(1), {"x": torch.ones(3, 4), "y": torch.ones(2)}], loss), ValueError, r"batches\[1\]: All tensors"),
        ((TASKS, lambda model, data: 1.0), TypeError, r"loss.* must return a tensor.*found float"),
        ((TASKS, lambda model, data: torch.ones(())), ValueError, "require a gradient"),
        ((TASKS, torch.ones(())), TypeError, "loss must be a function of model and batch; found Tensor"),
        ((batch(1), loss), TypeError, r"memory.batches\(\).*found dict"),
        ((EpisodicMemory(), loss), TypeError, r"memory.batches\(\).*found EpisodicMemory"),
        (([list(batch(1).values())],), TypeError, r"batches must be mappings.*found list.*Pass loss"),
    ],
)  # fmt: skip
def test_errors_of_what_is_recalled(net, given, error, text):
    with pytest.raises(error, match=text):
        GradientProjector(net.parameters()).recall(net, *given)


def test_parameters_that_were_frozen_since_are_an_error(net):
    projector = GradientProjector(net.parameters())
    projector.recall(net, TASKS, loss)
    next(net.parameters()).requires_grad_(False)
    loss(net, batch(3)).backward()
    for use in (projector.project_, lambda: projector.recall(net, TASKS, loss)):
        with pytest.raises(
            ValueError, match=r"1 of the \d+ parameters .* no longer require.*new projector.*remove"
        ):
            use()
    assert not len(projector.constraints)


@pytest.mark.parametrize("on", ["step", "both"])
def test_steps_need_an_optimizer_by_the_second_call(net, on):
    projector = GradientProjector(net.parameters(), on=on)
    projector.recall(net, TASKS, loss)
    with pytest.raises(ValueError, match=r"attach\(optimizer\) once"):
        projector.recall(net, TASKS, loss)
    projector.attach(torch.optim.SGD(net.parameters(), lr=0.1))
    projector.recall(net, TASKS, loss)


def test_rows_of_losses_whose_number_is_not_known_ahead(net):
    listed, streamed = (GradientProjector(net.eval().parameters(), Promise(loss)) for _ in range(2))
    for t in (2, 9):
        batches = [batch(k) for k in range(t)]
        listed.constrain([loss(net, one) for one in batches])
        streamed.constrain(loss(net, one) for one in batches)
        assert streamed.count == t
        assert torch.equal(listed.constraints, streamed.constraints)
