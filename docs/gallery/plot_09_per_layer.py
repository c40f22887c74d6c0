"""
One cone for the model, or one for each layer
=============================================

Some methods project layer by layer. Each layer then has constraints of its own, which together are stricter
than one constraint for the whole model: the gradient is changed more than needed. Arrays in a list are one
problem; a projection for each layer is one call for each.
"""

import matplotlib.pyplot as plt
import numpy as np

from gemproj import project

rng = np.random.default_rng(0)
sizes = [200] * 8
old = 3


def moved(g, x):
    squares = [(np.sum((a - b) ** 2), np.sum(a**2)) for a, b in zip(g, x, strict=True)]
    change, size = np.sum(squares, 0)
    return np.sqrt(change / size)


whole, layers = [], []
for _ in range(400):
    g = [rng.standard_normal(d) for d in sizes]
    G = [rng.standard_normal((old, d)) - rng.uniform(0, 0.4) * v for d, v in zip(sizes, g, strict=True)]
    whole.append(moved(g, project(G, g)))
    layers.append(moved(g, [project(rows, v) for rows, v in zip(G, g, strict=True)]))

# %%
# How much of the gradient is changed, in 400 random problems of eight layers and three old losses.
figure, axes = plt.subplots()
axes.scatter(whole, layers, s=10, color="C0", alpha=0.6, lw=0)
top = max(layers)
axes.plot([0, top], [0, top], "--", color="C4", lw=1)
axes.set(xlabel="changed by one cone for the model", ylabel="changed by a cone for each layer")
figure.set_label("All points lie above the diagonal: a cone for each layer changes the gradient more")
plt.show()
