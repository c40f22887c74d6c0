"""Gradients of past tasks in passing: equal to the plain ones, and the model is left as it was."""

import pytest

torch = pytest.importorskip("torch")

from models import EACH, begin, loss, rival, rows, take, task  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from gemproj.torch import GradientProjector, Remembered  # noqa: E402


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6)
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


def recalled(net, data, function=loss):
    projector = GradientProjector(net.parameters())
    projector.recall(net, data, function)
    return projector.constraints


TASKS = [task(1, 8), task(2, 5), task(3, 11)]


@pytest.mark.parametrize("scale", [1.0, 2.0**10])
@pytest.mark.parametrize("microbatch", [None, 1, 3, 5, 100])
@pytest.mark.parametrize("function", [loss, EACH])
def test_rows_are_the_gradients_of_the_means_and_come_with_losses(net, microbatch, function, scale):
    expected = rows(net.eval(), TASKS)
    losses = [EACH(net, one).detach() for one in TASKS]
    net.train()
    projector = GradientProjector(net.parameters())
    examples = [Remembered(TASKS[0], losses=losses[0] + 1.0), *TASKS[1:]]
    with torch.no_grad():
        assert projector.recall(net, iter(examples), function, microbatch=microbatch, scale=scale)
    torch.testing.assert_close(projector.constraints, expected, rtol=1e-12, atol=1e-14)
    last = projector.project_()
    torch.testing.assert_close(last.losses, torch.stack([one.mean() for one in losses]))
    torch.testing.assert_close(last.stored[0], losses[0].mean() + 1.0)
    assert last.stored[1:].isnan().all()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_scripted_parts_compute_in_evaluation_mode_too(net):
    """They keep their mode in C++, behind a `__setattr__` of their own."""
    expected = rows(net.eval(), TASKS)
    net.drop = torch.jit.script(torch.nn.Dropout(0.5))
    torch.testing.assert_close(recalled(net.train(), TASKS), expected)
    assert net.drop.training


def failing(model, data):
    torch.rand(1)
    if len(data[0]) == 5:
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
    loss(net, task(7)).backward()
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
        seen.append(len(data[0]))
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
    data = task(1, dtype=torch.float32)

    def typed(model, data):
        out = model(data[0])
        seen.append(out.dtype)
        return cross_entropy(out.float(), data[1])

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
        recalled(net, [(task(1)[0].requires_grad_(), task(1)[1])])


@pytest.mark.parametrize("later", [False, True])
def test_masks_of_hooks_on_parameters_hold_under_a_margin(later):
    model, optimizer, gem = begin(EACH, weight=0.5)
    for seed in range(3):
        gem.end_task([task(seed)])
    if later:
        take(model, optimizer, rival(task(1)))
        assert gem.projector.why_row_by_row is None
    weight, mask = model[0].weight, (torch.arange(8) > 2)[:, None]
    before = weight.detach().clone()
    weight.register_hook(lambda gradient: gradient * mask)
    for _ in range(3):
        take(model, optimizer, rival(task(1)))
    assert "hooks" in gem.projector.why_row_by_row
    assert torch.equal(weight != before, mask.expand(8, 6))


@pytest.mark.parametrize("on", ["step", "both"])
def test_steps_need_an_optimizer_by_the_second_call(net, on):
    projector = GradientProjector(net.parameters(), on=on)
    projector.recall(net, TASKS, loss)
    with pytest.raises(ValueError, match=r"attach\(optimizer\) once"):
        projector.recall(net, TASKS, loss)
    projector.attach(torch.optim.SGD(net.parameters(), lr=0.1))
    projector.recall(net, TASKS, loss)
