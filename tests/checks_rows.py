"""What each process checks of rows: they are those of all examples, whatever each process keeps and holds."""

import copy
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from checks_training import fsdp
from loops import begin, cosines, flat, gradient, moved, protect, sgd, take, through_a_file, whole
from loops import rows as expected_rows
from models import EACH, SAID, loss, rival, task
from models import perceptron as net
from processes import all_reduces, alone, check, everything, gathered, same_everywhere, share
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import default_collate

import gemproj
from gemproj.torch import Promise
from gemproj.torch.vector import local


def past_of_all(dtype=torch.float64):
    """Draw a batch of each past task, alike on every process."""
    return [task(k, n, dtype) for k, n in enumerate([8, 12])]


def kept(model, past, loss=loss, make=sgd, **options):
    """Return an optimizer, and a keeper of this process's part of past tasks."""
    return begin(loss, past, model=model, make=make, **options)[1:]


def sharded(**options):
    """Return a sharded model, its optimizer and keeper, and this process's part of a batch."""
    model = fsdp(net())
    return model, *kept(model, map(share, past_of_all()), **options), share(rival(task(5, 16)))


def as_one(keeper, expected, layer):
    """Check that rows are those of one process that has all examples and parameters."""
    found = torch.stack([columns(row, layer) for row in keeper.rows.G])
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    same_everywhere(found)


def columns(row, layer):
    """Join the columns that processes hold of a layer."""
    found, parts = [], row.split([local(p).numel() for p in layer.parameters()])
    for p, part in zip(layer.parameters(), parts, strict=True):
        if isinstance(p, DTensor):
            part = part.view(local(p).shape)
            part = DTensor.from_local(part, p.device_mesh, p.placements, shape=p.shape, stride=p.stride())
        found.append(whole(part).reshape(-1))
    return torch.cat(found)


@check(2)
def rows_are_those_of_one_process():
    """Also if processes keep different numbers of examples, and rows share a pass."""
    sizes = [[3, 1], [2, 4], [2, 4]]
    together = [task(k, sum(one)) for k, one in enumerate(sizes)]
    mine = [share(batch, one) for batch, one in zip(together, sizes, strict=True)]
    expected = expected_rows(net(), together)
    for spread, group in (
        (DistributedDataParallel, None),
        (lambda model: torch.compile(DistributedDataParallel(model)), None),
        (lambda model: model, dist.group.WORLD),
        (fsdp, None),
    ):
        for options in ({}, {"microbatch": 2}, {"loss": EACH}, {"loss": EACH, "microbatch": 1}):
            many = spread(net())
            optimizer, keeper = kept(many, mine, process_group=group, **options)
            optimizer.step()
            as_one(keeper, expected, many)
            assert all(p.grad is None for p in many.parameters())
            if group is not None and options == {"loss": EACH}:
                assert keeper._training.joint.reason is None


@check(2)
def which_parameters_a_row_reaches():
    """All know it, though only one process's loss depends on the last layer."""
    model = net()

    def partial_loss(model, batch):
        return model[0](batch[0]).sum() + (0.0 if dist.get_rank() else loss(model, batch))

    optimizer, _ = kept(model, [task(0, 3)], partial_loss, process_group=dist.group.WORLD)
    model[0](task(5, 4)[0]).sum().neg().backward()
    optimizer.step()
    assert all(p.grad is not None for p in model.parameters())


@check(2)
def losses_that_are_sharded():
    """Tensor parallelism leaves them so if the outputs of a layer are."""

    def squares(model, batch):
        return model(batch[0]).square().mean()

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("all",))
    outputs = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    one, many = (nn.Linear(6, 4).double() for _ in range(2))
    many.load_state_dict(one.state_dict())
    many = parallelize_module(many, mesh, outputs)
    optimizer, keeper = kept(many, past_of_all(), squares)
    optimizer.step()
    as_one(keeper, expected_rows(one, past_of_all(), squares), many)


@check(2)
def an_optimizer_that_has_moments_of_some_parameters_only():
    """Also when those of the others were loaded as None: all processes measure distances alike."""

    def make(parameters):
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.03)

    model = DistributedDataParallel(net())
    optimizer, keeper = kept(model, [share(task(0, 8))], make=make, on="step")
    take(model, optimizer, share(rival(task(0, 8))))
    optimizer.consolidate_state_dict()
    state = [optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(state)
    optimizer.load_state_dict(state[0])
    take(model, optimizer, share(rival(task(0, 8))))
    assert keeper.last.num_active
    assert keeper.last.worst_cosine > -1e-6
    same_everywhere(flat(model))


@check(2)
def mixed_precision():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = fsdp(net(torch.float32), mp_policy=policy)
    G, past = [], [share(batch) for batch in past_of_all(torch.float32)]
    for batch in past:
        loss(model, batch).backward()
        G.append(gradient(model))
        model.zero_grad()
    optimizer, keeper = kept(model, past, on="both", make=lambda p: torch.optim.AdamW(p, lr=0.1))
    loss(model, share(rival(task(5, 16, torch.float32)))).backward()
    g, G = gradient(model), torch.stack(G)
    step = moved(model, optimizer.step)
    torch.testing.assert_close(gradient(model), gemproj.project(G, g), rtol=1e-5, atol=1e-6)
    assert keeper.last.num_active
    torch.testing.assert_close(keeper.last.cosines, cosines(G, step), rtol=1e-4, atol=1e-6)
    assert keeper.last.worst_cosine > -1e-5


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))
        self.double()

    def forward(self, x, k):
        return self.heads[k](self.body(x))


@check(2)
def parameters_without_gradient():
    """A second head that no new loss uses, and a third one that nothing uses."""

    def by_head(model, batch, heads=(1, 0)):
        return sum(nn.functional.cross_entropy(model(batch[0], k), batch[1]) for k in heads)

    def run(model, past, now, group=None):
        optimizer, keeper = kept(model, [past], by_head, process_group=group)
        by_head(model, now, (0,)).backward()
        assert all(p.grad is None for p in model.heads[1].parameters())
        optimizer.step()
        assert keeper.last.num_active
        assert all(p.grad is not None for p in model.heads[1].parameters())
        assert all(p.grad is None for p in model.heads[2].parameters())
        return gradient(model)

    many = Heads()
    for head in many.heads:
        fully_shard(head)
    fully_shard(many)
    expected = run(Heads(), task(0, 8), rival(task(3, 8)), alone())
    found = run(many, share(task(0, 8)), share(rival(task(3, 8))))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@check(2)
def a_look_disturbs_nothing():
    """Neither gradients that accumulate, nor modes and random state; also right after an evaluation."""
    model = fsdp(net())
    past = [share(batch) for batch in past_of_all()]
    optimizer, keeper = kept(model, past, microbatch=2, project=False, make=lambda p: sgd(p, 0.0))
    for accumulated in (False, True):
        if accumulated:
            loss(model, past[0]).backward()
        before = [None if p.grad is None else whole(p.grad).clone() for p in model.parameters()]
        assert all((one is not None) == accumulated for one in before)
        with torch.no_grad():  # after an evaluation, FSDP leaves the outer module unsharded
            model(past[0][0])
        state = torch.get_rng_state()
        optimizer.step()
        for p, one in zip(model.parameters(), before, strict=True):
            assert (p.grad is None) == (one is None)
            assert one is None or torch.equal(whole(p.grad), one)
        assert model.training
        assert torch.equal(torch.get_rng_state(), state)
    as_one(keeper, expected_rows(net(), past_of_all()), model)


@check(2)
def state_comes_back_and_copies_have_no_group():
    model, optimizer, keeper, now = sharded(examples=3, on="both")
    take(model, optimizer, now)
    state = through_a_file(keeper.state_dict())
    other = copy.deepcopy(keeper)
    assert {name: len(one) for name, one in other.sets.items()} == {0: 4, 1: 6}
    weights, found = copy.deepcopy(model.state_dict()), []
    for one in (keeper, None):
        if one is None:
            keeper.remove()
            keeper = protect(model, optimizer, examples=3, on="both")
            keeper.load_state_dict(state)
            model.load_state_dict(weights)
        for _ in range(3):
            take(model, optimizer, now)
        assert keeper.report()[0].steps == 4
        found.append(flat(model))
    assert torch.equal(*found)


@check(2)
def exchanges_t_squared_numbers():
    model, optimizer, keeper, now = sharded(on="both", make=torch.optim.Adam, look=2)
    keeper.keep([share(task(2, 8))])
    take(model, optimizer, now)
    loss(model, now).backward()
    with all_reduces() as seen:
        optimizer.step()
    numbers = [n for dtype, n in seen if dtype == torch.float64]
    assert numbers[:2] == [13, 13], seen  # K, b and |g|^2, for the gradient and for the step
    assert sum(numbers[2:]) <= 7, seen  # products and norms of the applied step


@check(2)
def looks_are_in_the_steps_of_one_process():
    """Each process has half of the examples of two sets; one alone has all of them."""
    found = []
    for spread, part, group in (
        (DistributedDataParallel, share, None),
        (lambda model: model, everything, alone()),
    ):
        options = {"look": "auto", "on": "both", "process_group": group}
        make = partial(torch.optim.AdamW, lr=3e-3)
        model, optimizer, keeper = begin(SAID, model=spread(net()), make=make, **options)
        for name, tolerance in (("a", 0.02), ("b", 0.2)):
            keeper.keep([part(task(1, 32))], Promise(SAID, examples=None, tolerance=tolerance), name=name)
        looks = []
        for step in range(40):
            take(model, optimizer, part(rival(task(100 + step, 16))))
            looks.append([line.looks for line in keeper.report().values()])
        found.append((looks, flat(model)))
    (looks, weights), (expected, one) = found
    assert looks == expected
    assert looks[-1][1] < looks[-1][0] < 40  # or there would have been nothing to decide
    torch.testing.assert_close(weights, one, rtol=1e-7, atol=1e-9)
    same_everywhere(weights)


@check(2)
def one_process_may_save():
    """The next steps look when they would have looked."""
    model = DistributedDataParallel(net())
    (optimizer, keeper), looked = kept(model, [task(0)], EACH, look=4), []
    for step in range(6):
        take(model, optimizer, share(task(step, 8)))
        looked.append(keeper.last.age == 0)
        if step == 1 and dist.get_rank() == 0:
            keeper.state_dict()
    assert looked == [True, False, False, False, True, False]


@check(2)
def one_process_may_save_between_models():
    """All of them look at everything in the next step, and know as much about the losses after it."""
    looked = []
    for saves in (False, True):
        model = DistributedDataParallel(net())
        promise = Promise(SAID, tolerance=0.2, examples=4)
        optimizer, keeper = kept(model, [share(task(k, 16)) for k in range(2)], promise, look="auto")
        for step in range(24):
            take(model, optimizer, share(task(5, 16)))
            if step >= 22:
                looked.append(keeper.rows.ages == [step - 22] * 2)
            if step == 21 and saves and dist.get_rank() == 0:
                keeper.state_dict()
        same_everywhere(keeper._forecast.known)
    assert looked == [False, False, True, True]


@check(2)
def a_state_of_fewer_sets_comes_back_while_training():
    """On a device one process may save alone, as there all know one step later who looks."""
    model = DistributedDataParallel(net())
    promise = Promise(SAID, examples=None, tolerance=0.2)
    optimizer, keeper = kept(model, [share(task(0, 16))], promise, look="auto")
    take(model, optimizer, share(task(5, 16)))
    state, vector = through_a_file(keeper.state_dict()), keeper.rows.vector
    assert keeper._training._again
    keeper.keep([share(task(1, 16))])
    for _ in range(2):
        take(model, optimizer, share(task(6, 16)))
    with patch.object(vector, "device", torch.device("cuda")):
        keeper.state_dict()
    assert not keeper._training._again
    with pytest.warns(UserWarning, match="which are dropped"):
        keeper.load_state_dict(state)
    take(model, optimizer, share(task(7, 16)))
    assert keeper.rows.names == [0]


@check(2)
def held_out_examples_are_those_of_all_processes():
    """Which keep different numbers of them, and make as many passes."""
    x, y = share(task(0, 24), [18, 6])
    _, keeper = kept(DistributedDataParallel(net()), [], EACH, examples=5)
    keeper.keep([(x, y)], name="old", hold_out=0.5)
    every = torch.cat(gathered(EACH(net(), default_collate(keeper.sets["old"].held.examples)).detach()))
    line = keeper.report()["old"]
    mean, low, high = line.held_out
    assert line.kept
    assert gathered(line.held_bound) == [line.held_bound] * 2
    assert len(every) == 12
    assert low <= mean <= high < low + 1e-9  # nothing has moved
    assert abs(mean - float(every.mean())) < 1e-12


@check(2)
def a_process_with_many_examples_counts_for_more_than_one_with_few():
    """Both draw two, with losses of one here and zero there."""

    def told(model, batch):
        return 0.0 * model(batch[0]).sum(1) + batch[2]

    for spread in (DistributedDataParallel, fsdp):
        x, y = task(0, 8)
        part = share((x, y, torch.ones(8, dtype=x.dtype).index_fill(0, torch.tensor([6, 7]), 0.0)), [6, 2])
        for microbatch in (None, 1):
            model = spread(net())
            optimizer, keeper = kept(model, [], told, microbatch=microbatch)
            keeper.keep([part], Promise(told, examples=2, tolerance=0.1))
            take(model, optimizer, share(task(1, 8)))
            assert keeper.last.losses.tolist() == keeper.last.stored.tolist() == [0.75]
    calls = []

    def counted(model, batch):
        calls.append(len(batch[0]))
        return EACH(model, batch)

    model = DistributedDataParallel(net())
    optimizer, keeper = kept(model, [], counted)
    for few in (1, 2, 3):  # of eight, so that each row has other weights
        keeper.keep([share(task(few, 8), [8 - few, few])], Promise(counted, examples=1), name=few)
    for _ in range(2):
        calls.clear()
        take(model, optimizer, share(task(1, 8)))
    assert calls == [3]


@check(2)
def a_mean_has_the_same_verdict_everywhere():
    """Processes have kept different numbers of examples, in another number of batches."""
    _, optimizer, keeper, batch = sharded()

    def squared(model, batch):  # the mean over batches would hide which ones
        return loss(model, batch).square()

    for n, each in ((8, 1), (10, 4)):
        keeper.keep([share(task(n, n), [3, n - 3])], Promise(squared, examples=each), name="joined")
    assert keeper.report()["joined"].kept
    take(keeper._training.model, optimizer, batch)
    line = keeper.report()["joined"]
    assert gathered([line.stored, line.now, line.kept]) == [[line.stored, line.now, line.kept]] * 2
