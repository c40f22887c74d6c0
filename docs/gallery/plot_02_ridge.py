"""
A ridge turns the projection off at small gradients
===================================================

GEM's own code adds ``1e-3`` to the diagonal of the gradients' Gram matrix. For gradients of norm 1 that is
harmless. At a norm of 0.01 it outweighs the matrix, and hardly anything is projected. ``project`` has no
ridge, so its answer does not depend on the scale.
"""

import matplotlib.pyplot as plt
import numpy as np

from gemproj import GEM2017, project

rng = np.random.default_rng(0)
recipe = GEM2017(memory_strength=0.0, eps=1e-3)
scales = 10.0 ** np.linspace(-4, 1, 40)


def violation_left(G, g, method):
    """The largest violation after the projection, as a share of the largest before."""
    x = project(G, g, method=method)
    return max(0.0, -(G @ x).min()) / -(G @ g).min()


left = {"recipe": [], "exact": []}
for scale in scales:
    shares = []
    for _ in range(20):
        G = scale * rng.standard_normal((4, 200)) / np.sqrt(200)
        g = scale * rng.standard_normal(200) / np.sqrt(200) - 0.5 * G.mean(0)
        shares.append([violation_left(G, g, method) for method in (recipe, "exact")])
    for name, share in zip(left, np.mean(shares, 0), strict=True):
        left[name].append(100 * share)

# %%
# The mean of twenty random problems at each scale, four old losses and 200 parameters.
figure, axes = plt.subplots()
axes.semilogx(scales, left["recipe"], "C1", label="GEM's recipe, ridge of 1e-3")
axes.semilogx(scales, left["exact"], "C0", label="project")
axes.set(xlabel="norm of the gradients", ylabel="violation that is left (%)", ylim=(-3, 103))
axes.legend()
figure.set_label(
    "Violation left over the norm of the gradients: near 100 % for the recipe below 0.01, 0 for project"
)
plt.show()
