"""
Many gradients under one set of rows
====================================

Per-example gradients, or the gradients of several heads, often share their constraints. Pass them together:
the Gram matrix is measured once, and rows are read once for all.
"""

import time

import matplotlib.pyplot as plt
import numpy as np

from gemproj import project

rng = np.random.default_rng(0)
G = rng.standard_normal((8, 20_000))
counts = [1, 2, 4, 8, 16, 32, 64]


def milliseconds(call):
    call()
    times = []
    for _ in range(7):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1e3 * min(times)


one_by_one, together = [], []
for m in counts:
    gs = rng.standard_normal((m, 20_000))
    one_by_one.append(milliseconds(lambda gs=gs: [project(G, g) for g in gs]))
    together.append(milliseconds(lambda gs=gs: project(G, gs)))
    assert np.allclose(project(G, gs), [project(G, g) for g in gs])

# %%
# Measured when these pages were built: ratios mean something, milliseconds are those of that machine.
figure, axes = plt.subplots()
axes.loglog(counts, one_by_one, "s-", color="C1", label="one by one")
axes.loglog(counts, together, "o-", color="C0", label="project(G, gs)")
axes.set(xlabel="gradients", ylabel="time (ms)")
axes.legend()
figure.set_label("Time over the number of gradients, one by one and together")
plt.show()
