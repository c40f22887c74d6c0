"""
The cone
========

What a projection does, in the plane. Each old loss has a gradient, a row of ``G``. A step along ``-x`` raises
no old loss, to first order, where ``G @ x >= 0``: that is a cone. ``project`` returns the point of it that is
closest to ``g``.

A-GEM replaces the rows by their mean. Its answer is closer to ``g``, and still violates one constraint.
"""

import matplotlib.pyplot as plt
import numpy as np

from gemproj import project

G = np.array([[0.9, 0.45], [-0.6, 0.8]])
g = np.array([-1.2, -0.1])
x = project(G, g)
a = project(G, g, method="agem")
print("G @ g    ", (G @ g).round(3))
print("exact    ", (G @ x).round(3))
print("A-GEM    ", (G @ a).round(3))

# %%
# The edges of the cone are orthogonal to the rows.
figure, axes = plt.subplots(figsize=(6, 4.2))
edges = [3 * np.array([-r[1], r[0]]) * s for r, s in zip(G, (1, -1), strict=True)]
axes.fill(*np.array([[0, 0], *edges]).T, color="C2", alpha=0.15, lw=0)
arrow = {"angles": "xy", "scale_units": "xy", "scale": 1, "width": 0.008}
names = ["row 1", "row 2", "g", "x", "A-GEM"]
for vector, name, colour in zip([*G, g, x, a], names, ["C2", "C2", "C1", "C0", "C3"], strict=True):
    axes.quiver(0, 0, *vector, color=colour, **arrow)
    axes.annotate(name, vector * (1 + 0.13 / np.linalg.norm(vector)), color=colour, ha="center", va="center")
axes.plot(*np.array([g, x]).T, ":", color="C1", lw=1)
axes.set(xlim=(-1.7, 1.4), ylim=(-0.5, 1.4), aspect="equal", xticks=[], yticks=[])
axes.spines[:].set_visible(False)
figure.set_label("A shaded cone between two rows; g outside, x on its edge, A-GEM's answer outside")
plt.show()
