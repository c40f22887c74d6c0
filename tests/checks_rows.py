"""What each process checks of rows: they are those of all examples, whatever each process remembers and holds."""

import copy
import io

import pytest
import torch
import torch.distributed as dist
from checks_training import fsdp
from models import EACH, begin, cosines, flat, gradient, loss, moved, rival, take, task, whole
from models import perceptron as net
from processes import all_reduces, alone, check, same_everywhere, share
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gemproj
from gemproj.torch import GEM, EpisodicMemory, GradientProjector
from gemproj.torch.parameters import local

PAST = [8, 12]


def past_of_all(dtype=torch.float64):
    """Draw a batch of each past task, alike on every process."""
    return [task(k, n, dtype) for k, n in enumerate(PAST)]


def sharded(**options):
    """Return a sharded model, a projector of its parameters, and this process's part of the past and of now."""
    model = fsdp(net())
    past = [share(batch) for batch in past_of_all()]
    return model, GradientProjector(model.parameters(), **options), past, share(rival(task(5, 16)))


def as_one(projector, expected, model):
    """Check that rows are those of one process that has all examples and parameters."""
    rows = torch.stack([columns(row, model) for row in projector.constraints])
    torch.testing.assert_close(rows, expected.constraints, rtol=1e-9, atol=1e-12)
    same_everywhere(rows)


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
    """Though memories differ in size; a process may have none of a task, unless all wait for it in every pass."""
    losses = [task(k, 6) for k in range(2)]
    for spread, group, sizes in (
        (DistributedDataParallel, None, [[5, 0], [0, 4]]),
        (lambda model: model, dist.group.WORLD, [[5, 0], [0, 4]]),
        (fsdp, None, [[5, 1], [2, 4]]),
    ):
        together = [task(k, sum(one)) for k, one in enumerate(sizes)]
        mine = [share(batch, one) for batch, one in zip(together, sizes, strict=True)]
        one, many = net(), spread(net())
        expected = GradientProjector(one.parameters(), process_group=alone())
        projector = GradientProjector(many.parameters(), process_group=group)
        expected.recall(one, together, loss)
        for options in ({}, {"microbatch": 2}, {"microbatch": 1}, {"scale": 4.0}):
            projector.recall(many, mine, loss, **options)
            as_one(projector, expected, many)
        if spread is DistributedDataParallel:
            projector.recall(torch.compile(many), mine, loss)
            as_one(projector, expected, many)
            with pytest.raises(ValueError, match="a part that is wrapped in DistributedDataParallel"):
                projector.recall(nn.Sequential(many), mine, loss)
        else:
            expected.constrain([loss(one, batch) for batch in losses])
            projector.constrain([loss(many, share(batch)) for batch in losses])
            as_one(projector, expected, many)
        assert all(p.grad is None for p in many.parameters())


@check(2)
def rows_share_passes():
    """With weights of their own where the other process has other numbers of examples."""
    sizes = [[3, 1], [3, 5], [3, 3]]
    together = [task(k, sum(one)) for k, one in enumerate(sizes)]
    memory = EpisodicMemory(per_task=10)
    for k, (batch, one) in enumerate(zip(together, sizes, strict=True)):
        memory.add(share(batch, one), k)
    one, many = net(), DistributedDataParallel(net())
    expected = GradientProjector(one.parameters(), process_group=alone())
    projector = GradientProjector(many.parameters())
    expected.recall(one, together, EACH)
    for _ in range(2):
        projector.recall(many, memory.batches(), EACH)
        as_one(projector, expected, many)
    # Rows of the second process differ in size, so that each has a pass, and none could have shared one.
    assert projector.why_row_by_row is None


@check(2)
def rows_of_examples_are_as_many_though_stored_examples_are_not():
    _, optimizer, gem = begin(process_group=dist.group.WORLD, per="example", examples=3)
    gem.end_task([task(0, 10 - 2 * dist.get_rank())])
    optimizer.step()
    assert gem.last.constraints == 3


@check(2)
def which_parameters_a_row_reaches():
    """All know it, though only one process's loss depends on the last layer."""
    model = net()
    projector = GradientProjector(model.parameters(), process_group=dist.group.WORLD)
    projector.constrain([model[0](task(0, 3)[0]).sum() if dist.get_rank() else loss(model, task(0, 3))])
    model[0](task(5, 4)[0]).sum().neg().backward()
    projector.project_()
    same_everywhere(torch.stack([torch.tensor(float(p.grad is not None)) for p in model.parameters()]))
    projector.constrain([])
    assert len(projector.constraints) == 0
    with all_reduces() as seen:
        projector.project_()
    assert not seen


@check(2)
def losses_that_are_sharded():
    """Tensor parallelism leaves them so, where the outputs of a layer are."""

    def squares(model, batch):
        return model(batch[0]).square().mean()

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("all",))
    outputs = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    one, many = (nn.Linear(6, 4).double() for _ in range(2))
    many.load_state_dict(one.state_dict())
    many = parallelize_module(many, mesh, outputs)
    expected = GradientProjector(one.parameters(), process_group=alone())
    expected.recall(one, past_of_all(), squares)
    optimizer = torch.optim.SGD(many.parameters(), lr=0.1)
    gem = GEM(many, optimizer, squares)
    for batch in past_of_all():
        gem.keep([batch])
    optimizer.step()
    as_one(gem.projector, expected, many)


@check(2)
def an_optimizer_that_has_moments_of_some_parameters_only():
    """Also when those of the others were loaded as None: all processes measure distances alike."""

    def make(parameters):
        return ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=0.03)

    model, optimizer, gem = begin(model=DistributedDataParallel(net()), make=make, on="step")
    gem.end_task([share(task(0, 8))])
    take(model, optimizer, share(rival(task(0, 8))))
    optimizer.consolidate_state_dict()
    state = [optimizer.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(state)
    optimizer.load_state_dict(state[0])
    take(model, optimizer, share(rival(task(0, 8))))
    assert gem.last.num_active
    assert gem.last.worst_cosine > -1e-6
    same_everywhere(flat(model))


@check(2)
def mixed_precision():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = fsdp(net(torch.float32), mp_policy=policy)
    rows, past = [], [share(batch) for batch in past_of_all(torch.float32)]
    for batch in past:
        loss(model, batch).backward()
        rows.append(gradient(model))
        model.zero_grad()
    projector = GradientProjector(model.parameters(), on="both")
    projector.recall(model, past, loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss(model, share(rival(task(5, 16, torch.float32)))).backward()
    g, G = gradient(model), torch.stack(rows)
    projector.project_()
    assert projector.last.num_active
    torch.testing.assert_close(gradient(model), gemproj.project(G, g), rtol=1e-5, atol=1e-6)
    projector.attach(optimizer)
    step = moved(model, optimizer.step)
    torch.testing.assert_close(projector.last.cosines, cosines(G, step), rtol=1e-4, atol=1e-6)
    assert projector.last.worst_cosine > -1e-5


@check(2)
def parameters_without_gradient():
    """A second head that no loss of now uses, and a third one that nothing uses."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Linear(6, 8)
            self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

        def forward(self, x, k):
            return self.heads[k](self.body(x))

    def run(model, past, now, group=None):
        projector = GradientProjector(model.parameters(), process_group=group)
        by_head = nn.functional.cross_entropy
        projector.recall(model, [past], lambda m, b: by_head(m(b[0], 1), b[1]) + by_head(m(b[0], 0), b[1]))
        by_head(model(now[0], 0), now[1]).backward()
        assert all(p.grad is None for p in model.heads[1].parameters())
        projector.project_()
        assert projector.last.num_active
        assert all(p.grad is not None for p in model.heads[1].parameters())
        assert all(p.grad is None for p in model.heads[2].parameters())
        return gradient(model)

    many = Heads().double()
    for head in many.heads:
        fully_shard(head)
    fully_shard(many)
    expected = run(Heads().double(), task(0, 8), rival(task(3, 8)), alone())
    found = run(many, share(task(0, 8)), share(rival(task(3, 8))))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@check(2)
def recall_disturbs_nothing():
    """Neither gradients that accumulate, nor those of parameters that are not projected, nor modes."""
    model, _, past, _ = sharded()
    projector = GradientProjector(model[2].parameters())
    for accumulated in (False, True):
        if accumulated:
            loss(model, past[0]).backward()
        before = [None if p.grad is None else whole(p.grad).clone() for p in model.parameters()]
        assert all((one is not None) == accumulated for one in before)
        with torch.no_grad():  # after an evaluation, FSDP leaves the outer module unsharded
            model(past[0][0])
        state = torch.get_rng_state()
        projector.recall(model, past, loss, microbatch=2)
        for p, one in zip(model.parameters(), before, strict=True):
            assert (p.grad is None) == (one is None)
            assert one is None or torch.equal(whole(p.grad), one)
        assert model.training
        assert torch.equal(torch.get_rng_state(), state)
    one = net()
    expected = GradientProjector(one[2].parameters(), process_group=alone())
    expected.recall(one, past_of_all(), loss)
    as_one(projector, expected, model[2])


@check(2)
def state_comes_back():
    model, projector, past, now = sharded()
    projector.recall(model, past, loss)
    loss(model, now).backward()
    before = [p.grad.clone() for p in model.parameters()]
    projector.project_()
    stream = io.BytesIO()
    torch.save(projector.state_dict(), stream)
    stream.seek(0)
    other = GradientProjector(model.parameters())
    other.load_state_dict(torch.load(stream, weights_only=True))
    assert torch.equal(other.constraints, projector.constraints)
    expected = gradient(model)
    for p, one in zip(model.parameters(), before, strict=True):
        p.grad = one
    other.project_()
    torch.testing.assert_close(gradient(model), expected, rtol=1e-12, atol=1e-14)
    with pytest.raises(ValueError, match="belongs to another model"):
        GradientProjector(net().parameters()).load_state_dict(projector.state_dict())


@check(2)
def copies_are_made_without_a_group():
    for spread, group in ((DistributedDataParallel, None), (lambda model: model, dist.group.WORLD)):
        _, optimizer, gem = begin(model=spread(net()), process_group=group)
        gem.end_task([task(0, 3)])
        optimizer.step()
        other = copy.deepcopy(gem)
        assert other.memory.counts == gem.memory.counts
        assert other.projector.processes == 2


@check(2)
def exchanges_t_squared_numbers():
    model, projector, past, now = sharded(on="both")
    optimizer = torch.optim.Adam(model.parameters())
    projector.attach(optimizer)
    projector.recall(model, [*past, share(task(2, 8))], loss)
    loss(model, now).backward()
    with all_reduces() as seen:
        projector.project_()
    assert seen == [(torch.float64, 13)]
    with all_reduces() as seen:
        optimizer.step()
    assert seen == [(torch.float64, 13), (torch.float64, 13), (torch.float64, 4)]
