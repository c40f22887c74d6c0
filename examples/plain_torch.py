"""A plain torch loop on generated tasks, without and with projection: ``python examples/plain_torch.py``."""

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from gemproj.torch import Keeper, Promise

TASKS, FEATURES, CLASSES = 4, 32, 4
Batch = dict[str, Tensor]


def draw(task: int, n: int, seed: int) -> Batch:
    """Draw examples of a task, which has its own part of the input space and its own labels."""
    rule = torch.Generator().manual_seed(task)
    centre = torch.randn(FEATURES, generator=rule)
    weight = torch.randn(FEATURES, CLASSES, generator=rule)
    noise = torch.randn(n, FEATURES, generator=torch.Generator().manual_seed(1000 * seed + task))
    return {"x": centre + noise, "y": (noise @ weight).argmax(1)}


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean loss of a batch."""
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


@torch.no_grad()
def accuracies(model: nn.Module) -> list[float]:
    """Return the share of right answers on unseen examples of each task."""
    tests = [draw(task, 500, seed=-1) for task in range(TASKS)]
    return [float((model(test["x"]).argmax(1) == test["y"]).float().mean()) for test in tests]


def train(project: bool, steps: int) -> list[float]:
    """Learn one task after the other; return the accuracy on each of them at the end."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    keeper = Keeper(model, optimizer, Promise(loss, examples=None)) if project else None
    for task in range(TASKS):
        for step in range(steps):
            optimizer.zero_grad()
            loss(model, draw(task, 32, seed=1 + step)).backward()
            optimizer.step()  # projected
        if keeper:
            keeper.keep([draw(task, 100, seed=0)], name=f"task {task}")
    if keeper:
        print(keeper.report())
    return accuracies(model)


def main(steps: int = 300) -> None:
    """Train without and with projection, and print the accuracies."""
    table = Table("", *(f"task {task}" for task in range(TASKS)), title="Accuracy after the last task (%)")
    for name, project in (("without projection", False), ("with projection", True)):
        print(f"{name}: {TASKS} tasks of {steps} steps ...", flush=True)
        table.add_row(name, *(f"{100 * share:.0f}" for share in train(project, steps)))
    Console().print(table)


if __name__ == "__main__":
    torch.set_num_threads(1)  # the matrices are small: more threads would only wait for each other
    main()
