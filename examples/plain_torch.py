"""A plain torch loop, without and with a keeper: ``python -m examples.plain_torch``."""

import torch

from gemproj.torch import Keeper, Promise

from .common.toy import TASKS, accuracies, compare, draw, loss, network


def learn(kept: bool, steps: int = 300) -> list[float]:
    """Learn one task after the other; return the accuracy on each of them at the end."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    keeper = Keeper(model, optimizer, Promise(loss, examples=None)) if kept else None
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


if __name__ == "__main__":
    compare(learn)
