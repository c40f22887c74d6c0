"""
Certificates on nearly dependent rows
=====================================

Two old losses ask for nearly opposite things: row 2 is row 1 turned around, tilted by a small angle.
Everything depends on the tilt, and in the Gram matrix its square is lost in rounding. ``project`` then reads
the rows again, and ``error_bound`` says how far the answer can be off.
"""

import matplotlib.pyplot as plt
import numpy as np

from gemproj import GEM2017, combine, solve_dual

rng = np.random.default_rng(0)
tilts = 10.0 ** np.linspace(-12, -1, 34)


def problem(tilt, d=50):
    """Rows, a gradient, and its projection: the answer is drawn first, so it is known."""
    u, v, answer = np.linalg.qr(rng.standard_normal((d, 3)))[0].T
    rows = np.array([u, -np.cos(tilt) * u + np.sin(tilt) * v])
    return rows, answer - u - v, answer  # multipliers of 1 / tilt


errors = {"bound": [], "exact": [], "gram only": []}
for tilt in tilts:
    G, g, answer = problem(tilt)
    size = np.linalg.norm(g)
    solution = solve_dual(G, g)
    x = combine(G, g, solution.multipliers)
    errors["bound"].append(solution.error_bound())
    errors["exact"].append(np.linalg.norm(x - answer) / size)
    K, b = G @ G.T, G @ g
    ridge = GEM2017(memory_strength=0.0, eps=1e-14)(K, b)
    errors["gram only"].append(np.linalg.norm(g + ridge @ G - answer) / size)

# %%
# Errors are relative to the norm of ``g``. The exact answer stays below its bound.
figure, axes = plt.subplots()
axes.loglog(tilts, errors["gram only"], "s-", ms=4, color="C1", label="from the Gram matrix alone")
axes.loglog(tilts, errors["exact"], "o-", ms=4, color="C0", label="project")
axes.loglog(tilts, errors["bound"], "--", color="C4", label="error_bound()")
axes.set(xlabel="angle between row 2 and the opposite of row 1", ylabel="error")
axes.legend()
figure.set_label(
    "Error over the angle of the rows: of project up to rounding over the angle, always below the bound"
)
plt.show()
