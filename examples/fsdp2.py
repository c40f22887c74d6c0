"""FSDP2 on generated tasks, without and with projection: ``torchrun --nproc-per-node 2 examples/fsdp2.py``.

Parameters, gradients, constraints and AdamW's moments stay in shards; a projection exchanges
t * t + t + 1 numbers, where t is the number of past tasks.
"""

import argparse

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gemproj.torch import Keeper, Promise

TASKS, TOKENS, LENGTH, CLASSES, WIDTH = 3, 48, 8, 3, 32
Batch = dict[str, Tensor]


def draw(task: int, n: int, seed: int) -> Batch:
    """Draw sequences from a task's part of the vocabulary; each token votes for a class."""
    part = TOKENS // TASKS
    votes = torch.randn(part, CLASSES, generator=torch.Generator().manual_seed(task))
    generator = torch.Generator().manual_seed(TASKS * seed + task)
    tokens = torch.randint(part, (n, LENGTH), generator=generator)
    return {"x": part * task + tokens, "y": votes[tokens].sum(1).argmax(1)}


class Classifier(nn.Module):
    """A small transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.1, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of each class."""
        return self.head(self.blocks(self.embed(x)).mean(1))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss of a batch."""
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


@torch.no_grad()
def accuracies(model: nn.Module) -> list[float]:
    """Return the share of right answers on unseen examples of each task; all processes must call it."""
    model.eval()
    tests = [draw(task, 300, seed=10**6) for task in range(TASKS)]
    shares = [float((model(test["x"]).argmax(1) == test["y"]).float().mean()) for test in tests]
    model.train()
    return shares


def train(project: bool, steps: int) -> list[float]:
    """Learn one task after the other; return the accuracy on each of them at the end."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights everywhere, before they are sharded
    model = Classifier()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    # The optimizer and the keeper come after fully_shard, which replaces the parameters.
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    keeper = Keeper(model, optimizer, Promise(loss, examples=None)) if project else None
    for task in range(TASKS):
        for step in range(steps):
            optimizer.zero_grad()
            loss(model, draw(task, 16, seed=1 + rank + world * step)).backward()
            optimizer.step()  # projected
        if keeper:  # each process keeps its own examples
            keeper.keep([draw(task, 64, seed=-1 - rank)])
    return accuracies(model)


def main(steps: int) -> None:
    """Train without and with projection; the first process prints the accuracies."""
    dist.init_process_group("gloo")
    table = Table("", *(f"task {task}" for task in range(TASKS)), title="Accuracy after the last task (%)")
    for name, project in (("without projection", False), ("with projection", True)):
        if dist.get_rank() == 0:
            print(f"{name}: {TASKS} tasks of {steps} steps ...", flush=True)
        table.add_row(name, *(f"{100 * share:.0f}" for share in train(project, steps)))
    if dist.get_rank() == 0:
        Console().print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)  # the matrices are small: more threads would only wait for each other
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("steps", nargs="?", type=int, default=80, help="for each task")
    main(**vars(parser.parse_args()))
