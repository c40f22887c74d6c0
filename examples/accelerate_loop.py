"""A loop of Accelerate, without and with a keeper: ``python -m examples.accelerate_loop``.

Gradients are accumulated over two batches and clipped. ``accelerate launch -m`` runs the same file in several
processes.
"""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

from gemproj.integrations.accelerate import Keeper
from gemproj.torch import Promise

from .common.toy import TASKS, accuracies, compare, draw, loss, network


def learn(kept: bool, epochs: int = 4) -> list[float]:
    """Learn one task after the other; return the accuracy on each of them at the end."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model: torch.nn.Module = network()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sets = [TensorDataset(*draw(task, 512, seed=0)) for task in range(TASKS)]
    loaders = [DataLoader(one, batch_size=16, shuffle=True) for one in sets]
    model, optimizer, *loaders = accelerator.prepare(model, optimizer, *loaders)
    keeper = Keeper(accelerator, model, optimizer, Promise(loss, examples=None)) if kept else None
    for loader in loaders:
        for _ in range(epochs):
            for batch in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss(model, batch))
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()  # projected
                    optimizer.zero_grad()
        if keeper:
            keeper.keep(loader, limit=100)
    if keeper:
        keeper.remove()
    return accuracies(model)


if __name__ == "__main__":
    compare(learn, show=Accelerator(cpu=True).is_main_process)
