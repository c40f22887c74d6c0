"""
I-GEM under its bound
=====================

I-GEM takes a few projected gradient steps on the multipliers instead of solving for them. With a safe step
size the dual objective approaches its optimum at least like ``1/k``, whatever the tasks are. A step on t x t
numbers costs microseconds, and so does the exact answer.
"""

import matplotlib.pyplot as plt
import numpy as np

from gemproj import PGD, gram, solve_gram
from gemproj.methods import Exact

rng = np.random.default_rng(1)
steps = np.unique(np.geomspace(1, 300, 24).astype(int))


def objective(K, b, lam):
    return 0.5 * lam @ K @ lam + b @ lam


curves = []
for conflict in (0.0, 0.9):
    G = rng.standard_normal((9, 400))
    G /= np.linalg.norm(G, axis=1, keepdims=True)
    G[1::2] -= conflict * G[:-1:2]  # what helps one task hurts the next
    G /= np.linalg.norm(G, axis=1, keepdims=True)
    K, b, _ = gram(G, -G.sum(0))
    best = Exact()(K, b)
    gaps = [objective(K, b, solve_gram(K, b, method=PGD(steps=int(k))).multipliers) for k in steps]
    L = min(np.trace(K), abs(K).sum(1).max(), np.linalg.norm(K))
    curves.append((conflict, np.array(gaps) - objective(K, b, best), L * best @ best / 2))

# %%
# Nine old tasks, once in random directions and once in conflict by pairs. Dashed: the bound.
figure, axes = plt.subplots()
for (conflict, gap, factor), colour in zip(curves, ("C0", "C1"), strict=True):
    axes.loglog(steps, np.maximum(gap, 1e-16), "o-", ms=4, color=colour, label=f"conflict {conflict}")
    axes.loglog(steps, factor / steps, "--", color=colour)
axes.set(xlabel="projected gradient steps k", ylabel="objective above the optimum", ylim=(1e-9, None))
axes.legend()
figure.set_label("Distance of I-GEM's objective to the optimum over its steps, below the dashed bound of 1/k")
plt.show()
