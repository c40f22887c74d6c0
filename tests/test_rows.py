"""The rows of G: gradients of losses at hand, and of kept examples; the pass leaves the model as it was."""

import copy
import random
import sys

import numpy as np
import pytest
import torch
from loops import begin, flat, sgd, take
from loops import rows as expected_rows
from models import EACH, loss, rival, task
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from gemproj import project
from gemproj.torch import rows


def test_rows_of_losses_of_one_forward_pass():
    """Of a physics-informed network with a learnable coefficient."""
    torch.manual_seed(0)
    net, nu = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)), nn.Parameter(torch.tensor(0.3))
    x, parameters = torch.randn(7, 2), [*net.parameters(), nu]
    u = net(x)
    losses = [(nu * u - x[:, :1]).square().mean(), u.square().mean(), (nu - 1.0) ** 2]
    blocks, matrix = rows(losses, parameters), rows(iter(losses), parameters, flat=True)
    assert [block.shape for block in blocks] == [(3, *p.shape) for p in parameters]
    torch.testing.assert_close(torch.cat([block.reshape(3, -1) for block in blocks], 1), matrix)
    assert not matrix[2, :-1].any()  # its loss depends on the coefficient alone
    assert matrix[1, -1] == 0
    assert all(p.grad is None for p in parameters)
    (0.1 * losses[0] - losses[1]).backward()  # the graphs are still there
    gradient = [p.grad for p in parameters]
    assert (matrix @ flat(gradient).float() < 0).any()
    assert project(blocks, gradient, out=gradient) is gradient
    assert float((matrix @ flat(gradient).float()).min()) > -1e-6
    assert parameters[0].grad is gradient[0]


def test_sparse_gradients_are_dense_rows():
    table = nn.Embedding(3, 1, sparse=True)
    (block,) = rows([table(torch.tensor([1, 1])).sum()], table.parameters())
    assert block.tolist() == [[[0.0], [2.0], [0.0]]]


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(6, 3)
        self.reentrant = None
        self.double()

    def body(self, x):
        return self.drop(self.norm(self.first(x)).tanh())

    def forward(self, x):
        if self.reentrant is None:
            return self.last(self.body(x))
        return self.last(checkpoint(self.body, x, use_reentrant=self.reentrant))


TASKS = [task(1, 8), task(2, 5), task(3, 11)]
frozen_statistics = pytest.mark.filterwarnings("ignore:Layers such as 'norm'")


def kept(model, loss=loss, tasks=TASKS, **options):
    """Return an optimizer that does not move the model, and a keeper of these tasks."""
    return begin(loss, tasks, model=model, make=lambda p: sgd(p, 0.0), **options)[1:]


def found(model, *args, **options):
    optimizer, keeper = kept(model, *args, **options)
    optimizer.step()
    keeper.remove()
    return keeper.rows.G


@frozen_statistics
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("microbatch", [None, 1, 3, 5, 100])
@pytest.mark.parametrize("function", [loss, EACH])
def test_rows_are_the_gradients_of_the_means_in_evaluation_mode(microbatch, function):
    model = Net()
    expected = expected_rows(model.eval(), TASKS)
    model.drop = torch.jit.script(model.drop)  # keeps its mode in C++
    scaler = torch.amp.GradScaler("cpu")
    optimizer, keeper = kept(model.train(), function, microbatch=microbatch, scaler=scaler)
    with torch.no_grad():
        optimizer.step()
    torch.testing.assert_close(keeper.rows.G, expected, rtol=1e-12, atol=1e-14)
    losses = [float(loss(model.eval(), one).detach()) for one in TASKS]
    assert keeper.rows.losses.tolist() == pytest.approx(losses)
    assert keeper.rows.stored.tolist() == pytest.approx(losses)


@pytest.mark.parametrize("microbatch", [None, 5])
def test_means_of_losses_in_half_precision_are_those_that_were_stored(microbatch):
    half = lambda model, batch: EACH(model, batch).bfloat16()  # noqa: E731
    model, optimizer, keeper = begin(half, TASKS, tolerance=0.01, microbatch=microbatch)
    take(model, optimizer, rival(TASKS[0]))
    torch.testing.assert_close(keeper.last.losses, keeper.last.stored, rtol=1e-6, atol=0.0)


@frozen_statistics
@pytest.mark.parametrize("config", [torch.ones(2), {}, None], ids=["tensor", "empty", "none"])
def test_a_config_that_is_not_of_transformers_is_left_alone(config):
    model = Net()
    model.config = config
    optimizer, keeper = kept(model)
    optimizer.step()
    assert model.config is config
    assert len(keeper.rows) == len(TASKS)


@frozen_statistics
@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails):
    model, faults = Net(), []

    def drawn():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002

    def failing(model, data):
        torch.rand(1), random.random(), np.random.rand()  # noqa: NPY002
        model.training = True  # restored, too
        if faults and len(data[0]) == 5:
            raise RuntimeError("no such task")
        return loss(model, data)

    model.norm.eval()  # frozen by the caller
    optimizer, keeper = kept(model, failing)
    optimizer.step()
    before = flat(model)
    for training in (True, False):
        model.training = training
        loss(model, task(7)).backward()
        gradients = [(p.grad, p.grad.clone()) for p in model.parameters()]
        statistics, states = [b.clone() for b in model.buffers()], drawn()
        if fails:
            faults.append(1)
            with pytest.raises(RuntimeError, match="no such task"):
                optimizer.step()
            assert len(keeper.rows) == 0
        else:
            keeper.project = False
            optimizer.step()
        assert drawn() == states
        modes = [m.training for m in (model, model.first, model.norm, model.drop)]
        assert modes == [training, True, False, True]
        assert all(map(torch.equal, model.buffers(), statistics))
        for p, (gradient, same) in zip(model.parameters(), gradients, strict=True):
            assert p.grad is gradient
            assert torch.equal(gradient, same)
        assert torch.equal(flat(model), before)


class Counting(nn.Module):
    """Its forward pass counts in a buffer, and follows its largest input, in whatever mode; it tells its input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.line, self.got = nn.Linear(6, 3), None
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("most", torch.full((), float("nan")))
        self.register_buffer("graph", torch.eye(3).to_sparse())

    def forward(self, x):
        self.got = x + 0.0
        self.count += 1
        self.most.data.copy_(x.detach().max())  # no version counts this
        return self.line(x)


@pytest.mark.parametrize("project", [True, False])
@pytest.mark.parametrize("sets", [1, 4])  # four may share a pass
def test_buffers_are_those_of_training(project, sets):
    tasks = [task(k) for k in range(sets)]
    model, optimizer, keeper = begin(loss, tasks, model=Counting().double(), project=project)
    assert (model.count, bool(model.most.isnan())) == (0.0, True)
    for k in range(3):
        optimizer.zero_grad()
        loss(model, rival(task(7))).backward()
        most, expected = model.most.clone(), expected_rows(model.line, tasks)
        optimizer.step()
        assert (model.count, model.most) == (k + 1, most)
        torch.testing.assert_close(keeper.rows.G, expected)
        assert model.got.sum().isfinite()  # it can be read


class Rescaled(nn.Linear):
    """It halves its weight for evaluation, and doubles it for training, as RWKV does."""

    def forward(self, x):
        if self.training != getattr(self, "trains", True):
            self.weight.data.mul_(2.0 if self.training else 0.5)
            self.weight.detach().add_(0.0)  # seen by autograd
            self.trains = self.training
        return super().forward(x)


def test_a_pass_that_changes_weights_is_refused():
    with pytest.raises(ValueError, match=r"model changes 1\.weight in place in its forward pass"):
        begin(loss, TASKS, model=nn.Sequential(nn.Linear(6, 6), Rescaled(6, 3)).double())
    model = nn.Sequential(nn.Linear(6, 6), Rescaled(6, 3)).double()
    before = flat(model)
    with pytest.raises(ValueError, match="in place"):
        begin(loss, TASKS, model=model)
    loss(model, TASKS[0])  # in training mode
    assert torch.equal(flat(model), before)
    # Rows of an embedding are shortened where they are looked up, in training as well.
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=0.5), nn.Flatten(), nn.Linear(8, 3))
    begin(loss, [(torch.randint(9, (5, 2)), torch.randint(3, (5,)))], model=model)


class Trained(torch.autograd.Function):
    """The identity; like cuDNN's recurrent layers, it has a backward pass in training mode only."""

    @staticmethod
    def forward(ctx, x, training):
        ctx.training = training
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if not ctx.training:
            raise RuntimeError("cudnn RNN backward can only be called in training mode")
        return gradient, None


class Recurrent(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.out = nn.LSTM(6, 8, 2, batch_first=True, dropout=dropout), nn.Linear(8, 3)
        self.double()

    def forward(self, x):
        return self.out(Trained.apply(self.rnn(x)[0], self.rnn.training)[:, -1])


def test_recurrent_layers_stay_in_training_mode_without_dropout():
    torch.manual_seed(1)
    past = torch.randn(12, 4, 6).double(), task(1)[1]
    plain, model = Recurrent(0.0), Recurrent(0.5)
    with pytest.raises(RuntimeError, match="cudnn"):
        expected_rows(plain.eval(), [past])
    expected = expected_rows(plain.train(), [past])
    optimizer, keeper = kept(model, EACH, [past], tolerance=0.0, on="both")
    for training in (True, False):
        model.train(training)
        optimizer.step()
        torch.testing.assert_close(keeper.rows.G, expected)
        assert (model.rnn.dropout, model.rnn.training) == (0.5, training)


class Detector(nn.Module):
    """Returns losses in training mode, and predictions else, as detectors of torchvision do."""

    def __init__(self):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.double()

    def forward(self, x, target):
        z = self.head(self.norm(x))
        return {"box": (z - target).square().mean()} if self.training else [z]


@frozen_statistics
def test_losses_that_exist_in_training_mode_only():
    def naive(model, batch):
        return sum(model(*batch).values())

    def told(model, batch):
        model.training = True
        return naive(model, batch)

    model, past = Detector(), (task(1)[0], torch.ones(12, 3).double())
    with pytest.raises(AttributeError) as error:
        kept(model, naive, [past])
    if sys.version_info >= (3, 11):
        assert "evaluation mode" in error.value.__notes__[0]
        assert "model.training = True" in error.value.__notes__[1]
    before = [one.clone() for one in model.buffers()]
    expected = copy.deepcopy(model).eval()
    optimizer, keeper = kept(model, told, [past])
    optimizer.step()
    assert all(map(torch.equal, model.buffers(), before))
    torch.testing.assert_close(keeper.rows.G, expected_rows(expected, [past], told))


def test_autocast_of_the_caller_and_gradient_checkpointing():
    model, seen = Net().float(), []
    model.norm = nn.LayerNorm(6)
    data = task(1, dtype=torch.float32)

    def typed(model, data):
        out = model(data[0])
        seen.append(out.dtype)
        return cross_entropy(out.float(), data[1])

    expected = found(model, tasks=[data])
    with torch.autocast("cpu", torch.bfloat16):
        half = found(model, typed, [data])
    assert set(seen) == {torch.bfloat16}
    assert half.dtype == torch.float32
    assert float(torch.cosine_similarity(half, expected)) > 0.99
    model.reentrant = False
    torch.testing.assert_close(found(model, tasks=[data]), expected)
    model.reentrant = True
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        found(model, lambda model, data: loss(model, (data[0].requires_grad_(), data[1])), [data])
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        rows([loss(model, (data[0].requires_grad_(), data[1]))], [*model.parameters()])


def test_masks_of_hooks_on_parameters_hold_under_a_weight():
    model, optimizer, keeper = begin(EACH, map(task, range(3)), weight=0.5)
    take(model, optimizer, rival(task(1)))
    assert keeper._training.joint.reason is None
    weight, mask = model[0].weight, (torch.arange(8) > 2)[:, None]
    before = weight.detach().clone()
    weight.register_hook(lambda gradient: gradient * mask)
    for _ in range(3):
        take(model, optimizer, rival(task(1)))
    assert "hooks" in keeper._training.joint.reason
    assert torch.equal(weight != before, mask.expand(8, 6))
