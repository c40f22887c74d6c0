"""What the loops of frameworks learn: generated tasks, a small network, and the table of accuracies."""

from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

TASKS, FEATURES, CLASSES = 4, 32, 4
Batch = Sequence[Tensor]  # inputs and labels


def draw(task: int, n: int, seed: int) -> Batch:
    """Draw examples of a task, which has its own part of the input space and its own labels."""
    rule = torch.Generator().manual_seed(task)
    centre = torch.randn(FEATURES, generator=rule)
    weight = torch.randn(FEATURES, CLASSES, generator=rule)
    noise = torch.randn(n, FEATURES, generator=torch.Generator().manual_seed(1000 * seed + task))
    return centre + noise, (noise @ weight).argmax(1)


def network() -> nn.Sequential:
    """Return the network that learns all tasks, with the same weights in every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss of a batch."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@torch.no_grad()
def accuracies(model: nn.Module) -> list[float]:
    """Return the share of right answers on unseen examples of each task."""
    tests = [draw(task, 500, seed=-1) for task in range(TASKS)]
    return [float((model(x).argmax(1) == y).float().mean()) for x, y in tests]


def compare(learn: Callable[[bool], Sequence[float]], show: bool = True) -> dict[str, Sequence[float]]:
    """Learn all tasks without and with a keeper; return and print the accuracies at the end."""
    torch.set_num_threads(1)  # the matrices are small: more threads would only wait for each other
    found = {name: learn(kept) for name, kept in (("fine-tuning", False), ("kept", True))}
    tasks = range(len(found["kept"]))
    table = Table("", *(f"task {task}" for task in tasks), title="Accuracy after the last task (%)")
    for name, shares in found.items():
        table.add_row(name, *(f"{100 * share:.0f}" for share in shares))
    if show:
        Console().print(table)
    return found
