"""What each process checks of training: a model that is spread over processes learns what one process learns."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from loops import flat, protect, sgd, take, trainable
from models import BOTH, EACH, SAID, loss, rival, task
from models import perceptron as net
from processes import alone, check, everything, learn, once, same_everywhere, share
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


def fsdp(model, **options):
    for module in model:
        if isinstance(module, nn.Linear):
            fully_shard(module, **options)
    return fully_shard(model, **options)


# Ways to spread a model over processes. Each returns it, and a function for this process's part of a batch, of
# which processes have so many examples each.


def replicas(model):
    return DistributedDataParallel(model), share


def shards(model):
    return fsdp(model), share


def hybrid(model):
    return fsdp(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))), share


def tensor_parallel(model, shard=fsdp):
    """Shard over one dimension of the mesh what tensor parallelism splits or repeats over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    place = mesh["data"].get_local_rank()
    model = shard(split(model, mesh["tensor"]), mesh=mesh["data"])
    return model, lambda batch, sizes=None: tuple(leaf.chunk(2)[place] for leaf in batch)


def tensor_only(model):
    # Not "tensor": some versions of torch take groups from an equal mesh, and a check before has destroyed them.
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("all",))
    return split(model, mesh), everything


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


OPTIONS = [
    {"optimizer": torch.optim.SGD, "clip": 0.1, "weight": 0.05},
    {"on": "step", "optimizer": torch.optim.Adam, "penalty": 0.5},
    {"on": "both", "accumulate": 2},
    {"on": "step", "optimizer": partly},
]
PROMISES = [
    {"on": "both", "look": 2, "microbatch": 2},
    {"equal": True, "microbatch": 3},
    {"promise": BOTH, "on": "both", "tolerance": 0.0, "repair": 0.5},
    {"promise": EACH, "on": "step", "tolerance": 0.01, "microbatch": 3, "look": 2},
    {"promise": EACH, "weight": 0.02},
]


def train(model, part, dtype, promise=loss, optimizer=torch.optim.AdamW, clip=None, accumulate=1, **options):
    """Learn some tasks; return the keeper, and for every step the applied cosines, and the size of g."""
    optimizer = optimizer(trainable(model), lr=0.05)
    keeper, found = protect(model, optimizer, promise, **options), []

    def take_step(batch):
        optimizer.zero_grad()
        for piece in zip(*(leaf.chunk(accumulate) for leaf in batch), strict=True):
            (loss(model, piece) / accumulate).backward()
        if clip:
            keeper.clip_grad_norm_(clip)
        optimizer.step()
        if keeper.last is not None:
            same_everywhere(keeper.last.multipliers)
            # What is counted twice as a whole changes neither multipliers nor cosines, but this.
            size = keeper.last.solution.gram.gg.sum().reshape(1)
            found.extend([keeper.last.cosines, size])

    learn(keeper, take_step, part, dtype)
    return keeper, torch.cat(found)


def compare(spread, options, dtype=torch.float64, make=net, group=None):
    """Train a model that is spread over processes as one process trains it; return the keeper."""
    # In every check: torch finds the groups of meshes by their number, also those of an earlier check.
    single = alone()

    def of_one():
        one = make(dtype)
        return train(one, everything, dtype, process_group=single, **options)[1], flat(one)

    expected, weights = once((make, dtype, str(options)), of_one)
    many, part = spread(make(dtype))
    keeper, found = train(many, part, dtype, process_group=group, **options)
    close = {torch.float64: (1e-7, 1e-9), torch.float32: (1e-3, 1e-4)}[dtype]
    torch.testing.assert_close(found, expected, rtol=close[0], atol=close[1])
    torch.testing.assert_close(flat(many), weights, rtol=close[0], atol=close[1])
    same_everywhere(flat(many))  # also what is held twice
    return keeper


@check(2, 4)
def replicas_and_shards_train_as_one_process():
    """On four processes, which are slow, some of the promises; these train as hybrid, too."""
    for options in PROMISES[::3] if dist.get_world_size() > 2 else OPTIONS + PROMISES:
        for spread in (replicas, shards):
            compare(spread, options)
    compare(shards, OPTIONS[0], torch.float32)


@check(4)
def hybrid_trains_as_one_process():
    for options in OPTIONS:
        compare(hybrid, options)


@check(4)
def tensor_parallel_trains_as_one_process():
    for options in OPTIONS:
        compare(tensor_parallel, options)


@check(4)
def two_models_each_on_half_of_the_processes():
    """Which must be said, and the state of more of them is told."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("model", "shard"))
    group = mesh["shard"].get_group()
    keeper = compare(lambda model: (fully_shard(model, mesh=mesh["shard"]), everything), {}, group=group)
    assert keeper.rows.vector.topology.world == 2
    with pytest.warns(UserWarning, match="process . of 4, and this is process . of 2"):
        keeper.load_state_dict(keeper.state_dict() | {"process": (0, 4)})


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
def replicas_that_only_the_user_knows_of():
    """The others may train this model, too, on other data."""
    alone()  # as in `compare`
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = split(net(), mesh["tensor"])
    for group, text in (
        (None, "pass process_group="),
        (dist.group.WORLD, "how others share them is unknown"),
    ):
        with pytest.raises(ValueError, match=rf"sharded over 2 of 4 processes.*{text}"):
            protect(model, sgd(model.parameters()), process_group=group)


@check(2)
def tensor_parallelism_counts_held_out_examples_once():
    found, group = [], alone()
    for spread, one in ((lambda model: tensor_only(model)[0], None), (lambda model: model, group)):
        model = spread(net())
        optimizer = sgd(model.parameters())
        keeper = protect(model, optimizer, EACH, process_group=one, tolerance=0.1)
        keeper.keep([task(0, 40)], hold_out=0.5)
        take(model, optimizer, rival(task(0)))
        found.append(keeper.report()[0].held_out)
    assert found[0] == pytest.approx(found[1], rel=1e-7)


@check(4)
def what_tensor_parallelism_repeats():
    spreads = partial(tensor_parallel, shard=fully_shard), tensor_only
    for k, options in enumerate(OPTIONS):
        if "clip" not in options:  # torch does not clip tensors of different meshes together
            compare(spreads[1 - k % 2], options, make=Normed)


def frozen(dtype=torch.float64):
    model = net(dtype)
    model[0].requires_grad_(False)
    return model


@check(2)
def frozen_parameters():
    for spread in (shards, tensor_only):
        compare(spread, {"on": "both"}, make=frozen)


def short(model, promise, take_step, part=share, **options):
    """Keep a task, and take three steps; return the weights, which all processes share."""
    optimizer = sgd(model.parameters())
    keeper = protect(model, optimizer, promise, **options)
    keeper.keep([part(task(0, 8))])
    for k in range(3):
        take_step(model, optimizer, k, part(rival(task(0, 8))))
    same_everywhere(flat(model))
    return flat(model)


def as_one(take_step, spread, promise=loss, make=net, **options):
    """Check that a model that is spread over processes takes the steps of one process."""
    expected = short(make(), promise, take_step, everything, process_group=alone(), **options)
    model, part = spread(make())
    found = short(model, promise, take_step, part, **options)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@check(2)
def parameters_that_train_later():
    def take_step(model, optimizer, k, batch):
        model[0].requires_grad_(k > 0)
        take(model, optimizer, batch)

    as_one(take_step, shards, make=frozen)


@check(2)
def a_layer_that_is_not_sharded():
    """Whose gradients a user averages, and a keeper those of its losses."""

    def take_step(model, optimizer, k, batch):
        loss(model, batch).backward()
        for p in model[2].parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()

    def partly_sharded(model):
        fully_shard(model[0])
        return model, share

    as_one(take_step, partly_sharded, weight=0.5)


@check(2)
def logits_that_are_sharded():
    """Tensor parallelism leaves them so if the outputs of the last layer are."""

    def last(model):
        mesh = init_device_mesh(
            "cpu", (dist.get_world_size(),), mesh_dim_names=("last",)
        )  # see `tensor_only`
        outputs = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        return parallelize_module(model, mesh, {"2": outputs}), everything

    def take_step(model, optimizer, k, batch):
        EACH(model, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for promise in (EACH, SAID):
        as_one(take_step, last, promise, tolerance=0.001, on="both")
