"""
Three promises of three kinds
=============================

A model must keep several things at once: what it said about general inputs, its accuracy on an older task,
and the loss on a small safety set. Each is a set of examples with a promise of its own, and all are kept by
one projection.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

from gemproj.torch import Keeper, Promise
from gemproj.torch.losses import CrossEntropy, Distillation

torch.set_num_threads(1)  # the matrices are tiny
torch.manual_seed(0)
RULES = torch.randn(3, 8, 4)


def draw(task, n):
    x = torch.randn(n, 8)
    return x + 2 * task - 2, (x @ RULES[task]).argmax(1)


def logits(model, batch):
    return model(batch[0])


loss = CrossEntropy(logits, labels=1)
model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)


def train(*tasks):
    for _ in range(200):
        optimizer.zero_grad()
        sum(loss(model, draw(task, 32)).mean() for task in tasks).backward()
        optimizer.step()


train(0, 1)
keeper = Keeper(model, optimizer)
said = Promise(Distillation(logits), examples=None, tolerance=0.05)
keeper.keep([draw(0, 100)], said, name="what it said")
keeper.keep([draw(1, 100)], Promise(loss, weight=0.5), name="older task")
keeper.keep([draw(1, 20)], Promise(loss, examples=None, tolerance=0.0), name="safety set")
train(2)
print(keeper.report())

# %%
# The report draws itself: loss, or divergence from what the model said, over the steps; dashed: the bounds.
figure, axes = plt.subplots(figsize=(6.0, 4.2), layout="constrained")
keeper.report().plot(axes)
axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0))
axes.set_ylabel("loss on kept examples")
figure.set_label("Three losses over the steps, two of them near their dashed bounds")
plt.show()
