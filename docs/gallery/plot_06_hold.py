"""
Holding a loss at its bound
===========================

A step that does not raise a loss to first order raises it a little to second order, and small rises add up.
With a ``tolerance``, later steps undo the small rises that earlier ones caused.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

from gemproj.torch import Keeper, Promise

torch.set_num_threads(1)  # the matrices are tiny


def draw(skill, n, seed):
    x = torch.randn(n, 8, generator=torch.Generator().manual_seed(seed))
    return x, torch.sin(x @ torch.randn(8, 2, generator=torch.Generator().manual_seed(skill)))


def loss(model, batch):
    return (model(batch[0]) - batch[1]).square().mean(-1)  # one number for each example


def train(model, optimizer, skill, steps):
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, draw(skill, 32, step)).mean().backward()
        optimizer.step()


# %%
# The loss on the kept examples while the network learns something that contradicts it. Dashed: the bounds.
figure, axes = plt.subplots()
for tolerance, colour, name in (
    (None, "C1", "no tolerance"),
    (0.0, "C0", "tolerance=0.0"),
    (0.1, "C3", "tolerance=0.1"),
):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 2))
    train(model, torch.optim.Adam(model.parameters(), lr=1e-2), 0, 400)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    keeper = Keeper(model, optimizer)
    keeper.keep([draw(0, 64, -1)], Promise(loss, examples=None, tolerance=tolerance), name="old")
    train(model, optimizer, 1, 500)
    steps, losses, bounds = zip(*keeper.history.points()["old"], strict=True)
    axes.plot(steps, losses, color=colour, label=name)
    axes.plot(steps, bounds, "--", color=colour, lw=1)
axes.set(xlabel="step", ylabel="loss on the kept examples")
axes.legend()
figure.set_label("Stored loss over the steps: drifting up without a tolerance, at the dashed bound with one")
plt.show()
