"""
Watch before you project
========================

Is anything forgotten at all? ``project=False`` measures and changes nothing: the same losses, the same
report. Then turn the projection on and compare.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

from gemproj.torch import Keeper, Promise


def draw(skill, n, seed):
    rule = torch.Generator().manual_seed(skill)
    x = torch.randn(n, 16, generator=torch.Generator().manual_seed(seed))
    labels = (x @ torch.randn(16, 4, generator=rule)).argmax(1)
    return x + 2 * torch.randn(16, generator=rule), labels


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def train(model, optimizer, skill):
    for step in range(200):
        optimizer.zero_grad()
        loss(model, draw(skill, 32, step)).mean().backward()
        optimizer.step()


# %%
# The loss on the kept examples of each skill while the next ones are learned; dashed: its bound.
figure, both = plt.subplots(1, 2, sharey=True)
for project, axes in zip((False, True), both, strict=True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    promise = Promise(loss, examples=None, tolerance=0.05)
    keeper = Keeper(model, optimizer, promise, project=project)
    for skill in range(3):
        train(model, optimizer, skill)
        keeper.keep([draw(skill, 100, -1)], name=f"skill {skill}")
    print(keeper.report(), "\n")
    keeper.report().plot(axes)
    axes.set(title=f"project={project}", ylabel="")
both[0].set_ylabel("loss on the kept examples")
figure.set_label("Losses of three kept skills rise without projection, and stay at their bounds with it")
plt.show()
