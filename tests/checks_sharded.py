"""What each process checks of sharded parameters: FSDP2, hybrid sharding, tensor parallelism."""

import io
from functools import partial

import models
import pytest
import torch
import torch.distributed as dist
from models import flat, loss, projector_of, task, whole
from models import perceptron as net
from processes import all_reduces, alone, check, expect, gathered, once, same_everywhere, share
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import gemproj
from gemproj.torch import GEM, GradientProjector
from gemproj.torch.parameters import local


def rival(seed, n, dtype=torch.float64):
    """Draw a batch of a task that wants other answers to the same questions."""
    return models.rival(task(seed, n, dtype))


def train(model, past, now, clip=None, accumulate=1, optimizer=None, **options):
    """Train for some steps; return cosines of what was applied and the constraints, and the size of g."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    projector = projector_of(trainable, **options)
    optimizer = (optimizer or torch.optim.AdamW)(trainable, lr=0.05)
    attached = projector.attach(optimizer)
    found, active = [], 0
    for batch in now:
        projector.recall(model, past, loss)
        optimizer.zero_grad()
        n = len(batch[1]) // accumulate
        for k in range(accumulate):
            part = tuple(leaf[k * n : k * n + n] for leaf in batch)
            (loss(model, part) / accumulate).backward()
        if clip:
            attached.clip_grad_norm_(clip)
        optimizer.step()
        # What is counted twice as a whole changes neither multipliers nor cosines, but this.
        size = projector.last.solution.gram.gg.sum().reshape(1)
        found.append(torch.cat([projector.last.cosines, size]))
        same_everywhere(projector.last.multipliers)
        active += projector.last.num_active
    assert active
    return torch.stack(found)


def fsdp(model, **options):
    for module in model:
        if isinstance(module, nn.Linear):
            fully_shard(module, **options)
    return fully_shard(model, **options)


# Ways to spread a model over processes. Each returns it, and a function for this process's part of a batch.


def data_parallel(model):
    return fsdp(model), share


def hybrid(model):
    return fsdp(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))), share


def tensor_parallel(model, shard=fsdp):
    """Shard over one dimension of the mesh what tensor parallelism splits or repeats over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    place = mesh["data"].get_local_rank()
    model = shard(split(model, mesh["tensor"]), mesh=mesh["data"])
    return model, lambda batch: tuple(leaf.chunk(2)[place] for leaf in batch)


def tensor_only(model):
    # Not "tensor": some versions of torch take groups from an equal mesh, and a check before has destroyed them.
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("all",))
    return split(model, mesh), lambda batch: batch


def split(model, mesh):
    """Split the outputs of the first linear layer, and the inputs of the second."""
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.Linear)]
    wanted = [p.requires_grad for p in model.parameters()]
    layers = dict(zip(names, (ColwiseParallel(), RowwiseParallel()), strict=True))
    for p, trained in zip(parallelize_module(model, mesh, layers).parameters(), wanted, strict=True):
        p.requires_grad_(trained)  # which some versions of torch forget
    return model


def partly(parameters, lr):
    """Make an optimizer that moves the last layer only."""
    groups = [{"params": parameters[:-2], "lr": 0.0}, {"params": parameters[-2:]}]
    return torch.optim.AdamW(groups, lr=lr)


PAST = [8, 12]
OPTIONS = [
    {"optimizer": torch.optim.SGD},
    {"clip": 0.1, "weight": 0.05},
    {"on": "step", "optimizer": torch.optim.Adam},
    {"on": "both", "accumulate": 2},
    {"on": "step", "penalty": 0.5},
    {"on": "step", "optimizer": partly},
]


def past_of_all(dtype=torch.float64):
    """Draw a batch of each past task, alike on every process."""
    return [task(k, n, dtype) for k, n in enumerate(PAST)]


def begin(**options):
    """Return a sharded model, a projector of its parameters, and this process's part of the past and of now."""
    model = fsdp(net())
    past = [share(batch) for batch in past_of_all()]
    return model, projector_of(model.parameters(), **options), past, share(rival(5, 16))


def compare(spread, options, dtype=torch.float64, make=net):
    """Train a model that is spread over processes as one process trains it."""
    data = past_of_all(dtype), [rival(10 + k, 16, dtype) for k in range(4)]
    # In every check: torch finds the groups of meshes by their number, also those of an earlier check.
    group = alone()

    def of_one():
        one = make(dtype)
        return train(one, *data, process_group=group, **options), flat(one)

    expected, weights = once((make, dtype, str(options)), of_one)
    many, part = spread(make(dtype))
    own = [[part(batch) for batch in batches] for batches in data]
    # Of the same size, so that the mean of the means is the mean.
    assert len(own[1][0][1]) % options.get("accumulate", 1) == 0
    close = {torch.float64: (1e-7, 1e-9), torch.float32: (1e-3, 1e-4)}[dtype]
    found = train(many, *own, **options)
    torch.testing.assert_close(found, expected, rtol=close[0], atol=close[1])
    torch.testing.assert_close(flat(many), weights, rtol=close[0], atol=close[1])
    same_everywhere(flat(many))
    return many


@check(2)
def fsdp_trains_as_one_process():
    for options in OPTIONS:
        compare(data_parallel, options)
    compare(data_parallel, OPTIONS[0], torch.float32)


@check(4)
def hybrid_trains_as_one_process():
    for options in OPTIONS:
        for p in compare(hybrid, options).parameters():
            replicas = gathered(local(p).clone())
            assert torch.equal(replicas[0], replicas[2])
            assert torch.equal(replicas[1], replicas[3])


@check(4)
def tensor_parallel_trains_as_one_process():
    for options in OPTIONS:
        compare(tensor_parallel, options)


@check(4)
def two_models_each_on_half_of_the_processes():
    """The processes of a mesh are found, and the state of more of them is told."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "shard"))
    past, now = [task(0, 8)], rival(0, 8)

    def constrained(model, **options):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gem = GEM(model, optimizer, loss, **options)
        gem.end_task(past)
        loss(model, now).backward()
        optimizer.step()
        return gem

    expected = net()
    constrained(expected, process_group=alone())
    model = fully_shard(net(), mesh=mesh["shard"])
    gem = constrained(model)
    assert gem.projector.processes == 2
    torch.testing.assert_close(flat(model), flat(expected), rtol=1e-9, atol=1e-12)
    with pytest.warns(UserWarning, match="one of 4 processes, and here are 2"):
        gem.load_state_dict(gem.state_dict() | {"processes": 4})


class Normed(nn.Module):
    """A layer between others that tensor parallelism repeats, and another one that it splits."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.outer = nn.Linear(6, 8), nn.LayerNorm(6), nn.Linear(8, 3)
        self.to(dtype)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(self.norm(x))))


@check(4)
def what_tensor_parallelism_repeats():
    sharded = partial(tensor_parallel, shard=fully_shard)
    for options in OPTIONS:
        if "clip" in options:
            continue  # torch does not clip tensors of different meshes together
        for spread in (sharded, tensor_only):
            model = compare(spread, options, make=Normed)
            shapes = [tuple(p.shape) for p in GradientProjector(model.parameters())._vector.parameters]
            assert gathered(shapes) == [shapes] * 4
            if spread is sharded:  # neighbours repeat the norm's shards
                shards = gathered(local(model.norm.weight))
                assert torch.equal(shards[0], shards[1])
                assert torch.equal(shards[2], shards[3])


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
    rows = [layer_columns(row, many) for row in gem.projector.constraints]
    torch.testing.assert_close(torch.stack(rows), expected.constraints, rtol=1e-9, atol=1e-12)


@check(2)
def frozen_parameters():
    def make(dtype):
        model = net(dtype)
        model[0].requires_grad_(False)
        return model

    for spread in (data_parallel, tensor_only):
        compare(spread, {"on": "both"}, make=make)


def gradients(model):
    """Return the .grad of all parameters as one vector, zero where there is none."""
    grads = [torch.zeros(p.shape) if p.grad is None else whole(p.grad) for p in model.parameters()]
    return torch.cat([g.reshape(-1) for g in grads])


@check(2)
def mixed_precision():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = fsdp(net(torch.float32), mp_policy=policy)
    rows, past = [], [share(batch) for batch in past_of_all(torch.float32)]
    for batch in past:
        loss(model, batch).backward()
        rows.append(gradients(model))
        model.zero_grad()
    projector = GradientProjector(model.parameters(), on="both")
    projector.recall(model, past, loss)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loss(model, share(rival(5, 16, torch.float32))).backward()
    g, G = gradients(model), torch.stack(rows)
    projector.project_()
    assert projector.last.num_active
    torch.testing.assert_close(gradients(model), gemproj.project(G, g), rtol=1e-5, atol=1e-6)
    projector.attach(optimizer)
    before = flat(model)
    optimizer.step()
    step = (before - flat(model)).float()
    cosines = torch.nn.functional.cosine_similarity(G, step[None])
    torch.testing.assert_close(projector.last.cosines.float(), cosines, rtol=1e-4, atol=1e-6)
    assert projector.last.worst_cosine > -1e-5


@check(2)
def parameters_without_gradient():
    """A second head that no loss of now uses, and a third one that nothing uses."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Linear(6, 8)
            self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))

        def forward(self, x, k):
            return self.heads[k](self.body(x))

    def build():
        torch.manual_seed(0)
        return Heads().double()

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
        return gradients(model)

    many = build()
    for head in many.heads:
        fully_shard(head)
    fully_shard(many)
    expected = run(build(), task(0, 8), rival(3, 8), alone())
    found = run(many, share(task(0, 8)), share(rival(3, 8)))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@check(2)
def recall_disturbs_nothing():
    """Neither gradients that accumulate, nor those of parameters that are not projected, nor modes."""
    model, _, past, _ = begin()
    projector = GradientProjector(model[2].parameters())
    for gradient in (False, True):
        if gradient:
            loss(model, past[0]).backward()
        before = [None if p.grad is None else whole(p.grad).clone() for p in model.parameters()]
        assert all((one is not None) == gradient for one in before)
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
    rows = [layer_columns(row, model[2]) for row in projector.constraints]
    torch.testing.assert_close(torch.stack(rows), expected.constraints, rtol=1e-9, atol=1e-12)


def layer_columns(row, layer):
    """Join the columns that processes hold of a sharded layer."""
    parts = row.split([local(p).numel() for p in layer.parameters()])
    whole_parts = []
    for p, part in zip(layer.parameters(), parts, strict=True):
        spread = DTensor.from_local(
            part.view(local(p).shape), p.device_mesh, p.placements, shape=p.shape, stride=p.stride()
        )
        whole_parts.append(spread.full_tensor().reshape(-1))
    return torch.cat(whole_parts)


@check(2)
def memories_of_unequal_size():
    """Processes wait for each other in every pass, so they make the same number of them."""
    together, one = task(0, 6), net()
    model, projector, *_ = begin()
    expected = GradientProjector(one.parameters(), process_group=alone())
    expected.recall(one, [together], loss)

    def check_row():
        row = layer_columns(projector.constraints[0], model)
        torch.testing.assert_close(row, expected.constraints[0], rtol=1e-9, atol=1e-12)

    for microbatch in (None, 2, 1):
        projector.recall(model, [share(together, [5, 1])], loss, microbatch=microbatch)
        check_row()
    projector.constrain([loss(model, share(together))])
    check_row()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(TypeError, match="must be a list"):
        projector.constrain(loss(model, batch) for batch in [share(together)])


@check(2)
def state_comes_back():
    model, projector, past, now = begin()
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
    expected = gradients(model)
    for p, one in zip(model.parameters(), before, strict=True):
        p.grad = one
    other.project_()
    torch.testing.assert_close(gradients(model), expected, rtol=1e-12, atol=1e-14)
    with pytest.raises(ValueError, match="belongs to another model"):
        GradientProjector(net().parameters()).load_state_dict(projector.state_dict())


@check(2)
def exchanges_t_squared_numbers():
    model, projector, past, now = begin(on="both")
    optimizer = torch.optim.Adam(model.parameters())
    projector.attach(optimizer)
    projector.recall(model, [*past, share(task(2, 8))], loss)
    loss(model, now).backward()
    with all_reduces() as seen:
        projector.project_()
    assert seen == [(torch.float64, 14)]
    with all_reduces() as seen:
        optimizer.step()
    assert seen == [(torch.float64, 14), (torch.float64, 14), (torch.float64, 4)]


@check(2)
def errors_on_every_process():
    """What is wrong on one process stops all of them, and leaves no constraints."""
    for spread, group in ((DistributedDataParallel, None), (fsdp, None), (lambda one: one, dist.group.WORLD)):
        check_errors(spread(net()), group)


def check_errors(model, group):
    odd, own = dist.get_rank() == 1, list(model.parameters())
    sharded, full = isinstance(own[0], DTensor), [share(batch) for batch in past_of_all()]
    x, y = full[0]

    def unlucky(given, batch):
        if odd:
            raise ZeroDivisionError("unlucky")
        return loss(given, batch)

    def empty():
        yield full[0]
        if odd:
            raise OSError("no such memory")
        yield full[1]

    def recall(batches, function=loss):
        projector = GradientProjector(own, process_group=group)
        projector.recall(model, full, loss)
        try:
            projector.recall(model, batches, function)
        finally:
            assert len(projector.constraints) == 0

    with pytest.raises(ValueError, match="disagree on the number of rows"):
        recall(full[odd:])
    with expect(odd, OSError, "no such memory"):
        recall(empty())
    with expect(odd, ValueError, "leading dimension"):
        recall([(x[odd:], y)])
    with pytest.raises(ValueError, match="must have examples of every past task"):
        recall([(x[:0], y[:0]) if odd or not sharded else (x, y)])
    others = {"parameters": own[odd:]}
    if not sharded:
        others["entries of all parameters"] = own[1:] if odd else own[:-1]
        with expect(odd, ZeroDivisionError, "unlucky"):
            recall(full, unlucky)
    for what, parameters in others.items():
        with pytest.raises(ValueError, match=f"disagree on the number of {what}"):
            GradientProjector(parameters, process_group=group).recall(model, full, loss)
    if not (sharded or group):  # of which `constrain` learns nothing
        return
    projector = GradientProjector(own, process_group=group)

    def losses():
        return [loss(model, one) for one in full]

    with pytest.raises(ValueError, match="disagree on the number of losses"):
        projector.constrain(losses()[odd:])
    with expect(odd, ValueError, "losses must be scalars"):
        projector.constrain([one.detach() if odd else one for one in losses()])
    assert len(projector.constraints) == 0
    with pytest.raises(ValueError, match="disagree on the number of parameters"):
        GradientProjector(own[odd:], process_group=group).constrain(losses())


@check(2)
def what_shards_need():
    model, early = net(), GradientProjector(net().parameters())
    past = [share(batch) for batch in past_of_all()]
    with pytest.raises(ValueError, match="after fully_shard"):
        early.recall(fsdp(model), past, loss)
    model, projector, past, _ = begin()
    model.set_requires_gradient_sync(False)
    with pytest.raises(RuntimeError, match="set_requires_gradient_sync"):
        projector.recall(model, past, loss)
    assert len(projector.constraints) == 0
    group, device = dist.group.WORLD, torch.device("cpu")
    adapted = fsdp(net().requires_grad_(False))
    adapted.append(nn.Linear(3, 3).double())
    own, text = list(adapted[-1].parameters()), "not sharded, such as adapters, on frozen ones that are"
    with pytest.raises(ValueError, match=text):
        GEM(adapted, torch.optim.SGD(own, lr=0.1), loss, process_group=group)
    with pytest.raises(ValueError, match=text):
        GradientProjector(own, process_group=group).recall(adapted, past, loss)
    flattened = FullyShardedDataParallel(net(), device_id=device, use_orig_params=True)
    with pytest.raises(ValueError, match="FSDP1"):
        GEM(flattened, torch.optim.SGD(flattened.parameters(), lr=0.1), loss, process_group=group)


@check(2)
def what_is_not_finite_on_one_process():
    odd = dist.get_rank() == 1
    model, projector, past, now = begin()
    projector.recall(model, past, loss)
    loss(model, now).backward()
    if odd:
        projector.constraints[1, 0] = float("nan")
    with pytest.raises(ValueError, match="G is not finite: row 1"):
        projector.project_()
    projector.recall(model, past, loss)
    gradient = local(model[0].weight.grad)
    gradient[0, 0] = float("inf") if odd else 0.0
    with pytest.raises(ValueError, match="g is not finite"):
        projector.project_()
    # Adam's metric is zero where second moment, constraints and eps are: here, on a part of one process.
    gradient[0, 0] = 0.1
    if odd:
        gradient[0] = 0.0
    for options in ({}, {"rows_dtype": torch.float32}):
        projector = projector_of(model.parameters(), on="step", **options)
        projector.recall(model, past, loss)
        if odd:
            projector.constraints.zero_()
        optimizer = torch.optim.Adam(model.parameters(), eps=0.0)
        attached = projector.attach(optimizer)
        with pytest.raises(ValueError, match="metric must be positive" if odd else "is not finite"):
            optimizer.step()
        attached.remove()
