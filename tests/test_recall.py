"""Gradients of past tasks in passing: equal to the plain ones, and the model is left as it was."""

import pytest

torch = pytest.importorskip("torch")

from models import loss, rows  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from gemproj.torch import GEM, EpisodicMemory, GradientProjector  # noqa: E402


class Net(torch.nn.Module):
    def __init__(self, dropout=0.5, reentrant=None):
        super().__init__()
        self.first = torch.nn.Linear(4, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        self.drop = torch.nn.Dropout(dropout)
        self.last = torch.nn.Linear(6, 3)
        self.reentrant = reentrant

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
    return torch.nn.functional.cross_entropy(model(data["x"]), data["y"], reduction="none")


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
    assert all(p.grad is None for p in net.parameters())


def test_the_model_is_left_as_it_was(net):
    net.norm.eval()  # frozen by the caller
    loss(net, batch(7)).backward()
    gradients = [p.grad for p in net.parameters()]
    copies = [g.clone() for g in gradients]
    statistics = {name: b.clone() for name, b in net.named_buffers()}
    random = torch.get_rng_state()
    GradientProjector(net.parameters()).recall(net, TASKS, loss)
    assert torch.equal(torch.get_rng_state(), random)
    assert [m.training for m in (net, net.first, net.norm, net.drop)] == [True, True, False, True]
    assert all(torch.equal(b, statistics[name]) for name, b in net.named_buffers())
    for p, gradient, kept in zip(net.parameters(), gradients, copies, strict=True):
        assert p.grad is gradient
        assert torch.equal(gradient, kept)


def failing(model, data):
    torch.rand(1)
    if len(data["x"]) == 5:
        raise RuntimeError("no such task")
    return loss(model, data)


def broken():
    yield TASKS[0]
    raise OSError("no such task")


@pytest.mark.parametrize(
    ("batches", "function", "error"), [(lambda: TASKS, failing, RuntimeError), (broken, loss, OSError)]
)
def test_a_failing_loss_or_batch_leaves_no_constraints_and_no_traces(net, batches, function, error):
    projector = GradientProjector(net.parameters(), every=2)
    for _ in range(2):
        projector.recall(net, TASKS, loss)
    assert len(projector.constraints) == 3
    random = torch.get_rng_state()
    for _ in range(2):  # what has failed is still due
        with pytest.raises(error, match="no such task"):
            projector.recall(net, batches(), function)
        assert len(projector.constraints) == 0
    assert net.training
    assert net.drop.training
    assert torch.equal(torch.get_rng_state(), random)


def test_an_interval_uses_rows_again_until_the_next_task(net):
    projector = GradientProjector(net.parameters(), every=3)
    seen = []

    def counting(model, data):
        seen.append(len(data["x"]))
        return loss(model, data)

    computed = [projector.recall(net, TASKS, counting) for _ in range(7)]
    assert computed == [True, False, False, True, False, False, True]
    assert len(seen) == 9
    state = projector.state_dict()
    resumed = GradientProjector(net.parameters(), every=3)
    resumed.load_state_dict(state)
    assert [resumed.recall(net, TASKS, counting) for _ in range(3)] == [False, False, True]
    projector.reset()
    assert projector.recall(net, TASKS, counting)


def test_autocast_of_the_caller_holds(net):
    net = net.float()
    data = {"x": batch(1)["x"].float(), "y": batch(1)["y"]}
    seen = []

    def typed(model, data):
        out = model(data["x"])
        seen.append(out.dtype)
        return torch.nn.functional.cross_entropy(out.float(), data["y"])

    projector = GradientProjector(net.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        projector.recall(net, [data], typed)
    assert seen == [torch.bfloat16]
    assert projector.constraints.dtype == torch.float32
    expected = GradientProjector(net.parameters())
    expected.recall(net, [data], loss)
    a, b = projector.constraints[0], expected.constraints[0]
    assert float(torch.cosine_similarity(a, b, dim=0)) > 0.99


def test_gradient_checkpointing():
    torch.manual_seed(0)
    net = Net(dropout=0.5, reentrant=False).double()
    plain = Net(dropout=0.5).double()
    plain.load_state_dict(net.state_dict())
    projectors = [GradientProjector(m.parameters()) for m in (net, plain)]
    for projector, model in zip(projectors, (net, plain), strict=True):
        projector.recall(model, TASKS, loss)
    torch.testing.assert_close(projectors[0].constraints, projectors[1].constraints)
    net.reentrant = True
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        projectors[0].recall(net, [batch(1) | {"x": batch(1)["x"].requires_grad_()}], loss)


def test_masks_of_hooks_on_parameters_hold_under_a_margin(net):
    mask = (torch.arange(6) > 2).double()[:, None]
    net.first.weight.register_hook(lambda gradient: gradient * mask)
    before = net.first.weight.detach().clone()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    gem = GEM(net, optimizer, loss, weight=0.5)
    gem.end_task([batch(1)])
    for k in range(3):
        optimizer.zero_grad()
        loss(net, batch(k)).backward()
        optimizer.step()
    moved = net.first.weight != before
    assert torch.equal(moved, mask.bool().expand(6, 4))


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
        ((EpisodicMemory().batches, loss), TypeError, r"memory.batches\(\).*found method"),
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
    text = r"1 of the \d+ parameters .* no longer require.*new projector.*remove"
    loss(net, batch(3)).backward()
    with pytest.raises(ValueError, match=text):
        projector.project_()
    with pytest.raises(ValueError, match=text):
        projector.recall(net, TASKS, loss)
    assert not len(projector.constraints)


@pytest.mark.parametrize("on", ["step", "both"])
def test_steps_need_an_optimizer_by_the_second_call(net, on):
    projector = GradientProjector(net.parameters(), on=on)
    projector.recall(net, TASKS, loss)
    with pytest.raises(ValueError, match=r"attach\(optimizer\) once"):
        projector.recall(net, TASKS, loss)
    projector.attach(torch.optim.SGD(net.parameters(), lr=0.1))
    projector.recall(net, TASKS, loss)
