"""An Accelerate loop that learns three tasks, one after the other, with and without a keeper.

Each task has two classes, each a cloud of points; the model chooses among all six. Gradients are accumulated
over two batches and clipped. ``accelerate launch`` runs the same file in several processes.

    python examples/accelerate_loop.py
"""

from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, TensorDataset

from gemproj.integrations.accelerate import Keeper
from gemproj.torch import Promise

TASKS, CLASSES, FEATURES = 3, 6, 20
CENTRES = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))


def draw(task: int, count: int, seed: int) -> TensorDataset:
    """Draw points of a task's two classes."""
    generator = torch.Generator().manual_seed(100 * task + seed)
    labels = torch.randint(2 * task, 2 * task + 2, (count,), generator=generator)
    noise = torch.randn(count, FEATURES, generator=generator)
    return TensorDataset(CENTRES[labels] + noise, labels)


def loss(model: torch.nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    """Return the loss on a batch of the current task or of kept examples."""
    points, labels = batch
    return torch.nn.functional.cross_entropy(model(points), labels)


def learn(on: Any, epochs: int) -> list[float]:
    """Learn all tasks in turn; return the accuracy on each of them at the end."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, 64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loaders = [DataLoader(draw(task, 512, seed=0), batch_size=16, shuffle=True) for task in range(TASKS)]
    model, optimizer, *loaders = accelerator.prepare(model, optimizer, *loaders)
    keeper = Keeper(accelerator, model, optimizer, Promise(loss, examples=None), on=on) if on else None
    for loader in loaders:
        for _ in range(epochs):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss(model, batch))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()  # projected, then clipped
                    optimizer.zero_grad()
        if keeper:
            keeper.keep(loader, limit=40)
    if keeper:
        keeper.remove()
    return [accuracy(model, task) for task in range(TASKS)]


@torch.no_grad()
def accuracy(model: torch.nn.Module, task: int) -> float:
    """Return the accuracy on unseen points of a task, among all six classes."""
    points, labels = draw(task, 500, seed=1).tensors
    return float((model(points).argmax(1) == labels).float().mean())


def main(epochs: int = 4) -> Table:
    """Compare three ways to learn the tasks."""
    table = Table("", *(f"task {task + 1}" for task in range(TASKS)), "mean", title="Accuracy at the end")
    for on in (None, "gradient", "both"):
        name = f'kept, on="{on}"' if on else "fine-tuning"
        if Accelerator(cpu=True).is_main_process:
            print(f"{name}: {TASKS} tasks of {epochs} epochs ...", flush=True)
        found = learn(on, epochs)
        table.add_row(name, *(f"{a:.0%}" for a in [*found, sum(found) / TASKS]))
    if Accelerator(cpu=True).is_main_process:
        Console().print(table)
    return table


if __name__ == "__main__":
    torch.set_num_threads(1)  # the matrices are small: more threads would only wait for each other
    main()
