"""FSDP2, without and with a keeper: ``torchrun --nproc-per-node 2 -m examples.fsdp2``.

Parameters, gradients, constraints and AdamW's moments stay in shards; a projection exchanges
t * t + t + 1 numbers, where t is the number of past tasks.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gemproj.torch import Keeper, Promise

from .common.toy import TASKS, accuracies, compare, draw, loss, network


def learn(kept: bool, steps: int = 60) -> list[float]:
    """Learn one task after the other; return the accuracy on each of them at the end."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = network()  # the same weights everywhere, before they are sharded
    mesh = init_device_mesh("cpu", (world,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # The optimizer and the keeper come after fully_shard, which replaces the parameters.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    keeper = Keeper(model, optimizer, Promise(loss, examples=None)) if kept else None
    for task in range(TASKS):
        for step in range(steps):
            optimizer.zero_grad()
            loss(model, draw(task, 16, seed=1 + rank + world * step)).backward()
            optimizer.step()  # projected
        if keeper:  # each process keeps its own examples
            keeper.keep([draw(task, 50, seed=-2 - rank)])
    return accuracies(model)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    compare(learn, show=dist.get_rank() == 0)
    dist.destroy_process_group()
