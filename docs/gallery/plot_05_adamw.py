"""
AdamW breaks the promise, and ``on="both"`` keeps it
====================================================

GEM projects the gradient. AdamW then takes a step that is something else: it divides by the root of the
second moments, remembers older gradients, and decays weights. The default, ``on="both"``, projects the step,
too. Here each step's cosine with the gradient of the old loss: below zero the step raises it.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

from gemproj.torch import Keeper, Promise

torch.set_num_threads(1)  # the matrices are tiny


def draw(task, n, seed):
    rule = torch.Generator().manual_seed(task)
    x = torch.randn(n, 16, generator=torch.Generator().manual_seed(seed))
    labels = (x @ torch.randn(16, 4, generator=rule)).argmax(1)
    return x + 2 * torch.randn(16, generator=rule), labels


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(model, optimizer, task):
    for step in range(300):
        optimizer.zero_grad()
        loss(model, draw(task, 32, 1 + step)).backward()
        optimizer.step()
        yield


def cosines(on):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in train(model, optimizer, 0):
        pass
    keeper = Keeper(model, optimizer, on=on)
    keeper.keep([draw(0, 100, 0)], Promise(loss, examples=None))
    return [float(keeper.last.worst_cosine) for _ in train(model, optimizer, 1)]


# %%
# All 300 steps of the second task, with the gradient alone projected and with the step projected, too.
figure, axes = plt.subplots()
for on, colour, name in (("gradient", "C1", 'on="gradient"'), ("both", "C0", 'on="both"')):
    found = cosines(on)
    share = sum(cosine < -1e-6 for cosine in found) / len(found)
    text = f"{name}: {share:.0%} of the steps raise it"
    axes.plot(found, ".", color=colour, label=text)
axes.axhline(0, color="C4", lw=1)
axes.set(xlabel="step", ylabel="cosine with the old loss's gradient")
axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0))
figure.set_label("Cosine of each step: some below zero with the gradient projected, none with both")
plt.show()
