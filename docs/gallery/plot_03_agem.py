"""
A-GEM against the exact answer as tasks grow
============================================

A-GEM protects the mean of the old losses. With one old task that is all of them. With more tasks a step may
raise some old losses while it lowers others: about half of them rise, and the more tasks there are, the more
the worst one rises.
"""

import matplotlib.pyplot as plt
import numpy as np

from gemproj import project

rng = np.random.default_rng(0)
tasks = [1, 2, 3, 5, 8, 12, 20, 30]
worst = {"nothing": [], "agem": [], "exact": []}
moved = {"agem": [], "exact": []}
for t in tasks:
    G = rng.standard_normal((300, t, 100)) + 0.5 * rng.standard_normal((300, 1, 100))
    g = rng.standard_normal((300, 100)) - 0.3 * G.mean(1)
    for method in worst:
        x = g if method == "nothing" else project(G, g, method=method)
        s = np.einsum("ntd,nd->nt", G, x) / np.linalg.norm(G, axis=-1) / np.linalg.norm(g, axis=-1)[:, None]
        worst[method].append(np.maximum(0, -s.min(1)).mean())
        if method in moved:
            moved[method].append((np.linalg.norm(x - g, axis=-1) / np.linalg.norm(g, axis=-1)).mean())

# %%
# A rise is the cosine of the step with a row. The price of keeping all of them: the exact answer is farther
# from ``g``. 300 random problems for each number of tasks.
figure, (left, right) = plt.subplots(1, 2, layout="constrained")
looks = {"nothing": ("C1", "no projection"), "agem": ("C3", "A-GEM"), "exact": ("C0", "exact")}
for method, (colour, name) in looks.items():
    left.plot(tasks, worst[method], "o-", color=colour, label=name)
    if method in moved:
        right.plot(tasks, moved[method], "o-", color=colour)
left.set(xlabel="old tasks", ylabel="rise of the worst old loss")
right.set(xlabel="old tasks", ylabel="|x - g| / |g|", ylim=(0, None))
left.legend(loc="upper right")
left.set_ylim(-0.02, 0.5)
figure.set_label(
    "Rise of the worst old loss over the tasks: exact none, A-GEM more and more; how far each moves g"
)
plt.show()
