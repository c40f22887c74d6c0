"""Problems whose projection is known, because the answer is drawn first and the problem around it."""

from fractions import Fraction
from functools import partial
from itertools import combinations, product
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st

KINDS = ["generic", "parallel", "repeated", "opposite", "more rows than columns", "mixed norms", "zero row"]

# NumPy's own adds a relative tolerance of 1e-7 to every absolute one.
assert_close = partial(np.testing.assert_allclose, rtol=0)


def skip_without(method):
    """Skip the test of a method, or of its name, if its solver is missing."""
    name = method if isinstance(method, str) else type(method).__name__.lower()
    for module in {"quadprog": ["quadprog"], "gem2017": ["quadprog"], "osqp": ["osqp"]}.get(name, ()):
        pytest.importorskip(module)


class Known(NamedTuple):
    """Constraints, gradient, projection, and one choice of optimal multipliers."""

    G: np.ndarray
    g: np.ndarray
    x: np.ndarray
    multipliers: np.ndarray


def draw(rng: np.random.Generator, kind: str, t: int, d: int) -> Known:
    """Draw x*, active rows (orthogonal to x*), other rows, and multipliers; then ``g = x* - G'lam*``."""
    if kind == "more rows than columns":
        d = max(2, t // 2)
    x = rng.standard_normal(d)
    G = rng.standard_normal((t, d))
    if kind == "parallel":
        G = rng.standard_normal(d) + 0.03 * G
    active = rng.random(t) < 0.6
    x_unit = x / np.linalg.norm(x)
    for _ in range(2):  # twice, because the first pass loses digits of rows nearly parallel to x
        G[active] -= np.outer(G[active] @ x_unit, x_unit)
    G[~active] *= np.where(G[~active] @ x < 0, -1.0, 1.0)[:, None]
    if kind == "repeated" and t > 1:
        G[t // 2 :], active[t // 2 :] = G[: t - t // 2], active[: t - t // 2]
    if kind == "opposite" and t > 1:
        G[0] -= G[0] @ x_unit * x_unit
        G[-1], active[0], active[-1] = -G[0], True, True
    if kind == "mixed norms":
        G *= 10.0 ** rng.uniform(-6, 6, (t, 1))
    if kind == "zero row":
        G[rng.integers(t)] = 0.0
    norms = np.linalg.norm(G, axis=1)
    lam = np.where(active, rng.random(t), 0.0) / np.where(norms > 0, norms, 1.0)
    return Known(G, x - G.T @ lam, x, lam)


def draw_options(rng: np.random.Generator, G: np.ndarray) -> dict[str, np.ndarray]:
    """Draw a random choice of options: a feasible h, equalities, margins, penalties and a metric."""
    t, d = G.shape
    n = np.linalg.norm(G, axis=1)
    per_norm = 1.0 / np.where(n > 0, n, 1.0)
    equality = rng.random(t) < 0.3
    room = np.where(equality | (rng.random(t) < 0.3), 0.0, n * rng.random(t))
    options = {
        "h": G @ rng.standard_normal(d) - room,
        "equality": equality,
        "margin": 0.3 * rng.random(t) * per_norm,
        "penalty": np.where(rng.random(t) < 0.5, np.inf, (0.3 + rng.random(t)) * per_norm),
        "metric": 10.0 ** rng.uniform(-1, 1, d),
    }
    return {name: value for name, value in options.items() if rng.random() < 0.5}


@st.composite
def known(draw_from, kinds=tuple(KINDS), max_t: int = 12, max_d: int = 24) -> Known:
    """Hypothesis strategy of problems with a known projection."""
    kind = draw_from(st.sampled_from(kinds))
    t = draw_from(st.integers(1, max_t))
    d = draw_from(st.integers(2, max_d))
    return draw(np.random.default_rng(draw_from(st.integers(0, 2**32 - 1))), kind, t, d)


@st.composite
def arbitrary(draw_from, max_t: int = 10, max_d: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Hypothesis strategy of problems with nothing known: dense, or with small integer entries.

    Without those whose rows are dependent up to a tilt that a float64 Gram matrix cannot resolve.
    """
    rng = np.random.default_rng(draw_from(st.integers(0, 2**32 - 1)))
    t, d = draw_from(st.integers(1, max_t)), draw_from(st.integers(1, max_d))
    if draw_from(st.booleans()):
        G = rng.standard_normal((t, d))
        spectrum = np.linalg.svd(G, compute_uv=False)
        assume(spectrum[-1] > 1e-2 * spectrum[0])
        return G, rng.standard_normal(d)
    return rng.integers(-2, 3, (t, d)).astype(float), rng.integers(-3, 4, d).astype(float)


@st.composite
def mixed(draw_from, max_t: int = 12) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Hypothesis strategy of rows of all kinds, a gradient, and some of all options, a warm start included."""
    rng = np.random.default_rng(draw_from(st.integers(0, 2**32 - 1)))
    t, d = draw_from(st.integers(1, max_t)), draw_from(st.integers(2, 16))
    G = draw(rng, draw_from(st.sampled_from(KINDS)), t, d).G
    options = draw_options(rng, G)
    if "penalty" in options:  # which is the margin for some rows: their multipliers cannot move
        held = rng.random(t) < 0.2
        options["penalty"] = np.where(held, options.get("margin", 0.0), options["penalty"])
    if draw_from(st.booleans()):
        options["warm_start"] = rng.standard_normal(t) / lengths(G)
    return G, rng.standard_normal((G.shape[1],)), options


def enumerate_projection(
    G: np.ndarray,
    g: np.ndarray,
    *,
    h: Any = 0.0,
    equality: Any = False,
    margin: Any = 0.0,
    penalty: Any = np.inf,
    metric: Any = 1.0,
) -> np.ndarray:
    """Return the projection, from the active set with the smallest violation of the optimality conditions.

    It shares no code with the library and forms no Gram matrix.
    """
    root, t = np.sqrt(metric), len(G)
    A, a = G / root, g * root
    n = np.linalg.norm(A, axis=1)
    n[n == 0] = 1.0
    A, h, upper = A / n[:, None], h / n, np.broadcast_to(penalty, t) * n
    lower = np.where(equality, -upper, margin * n)
    at_bounds = [[v for v in {*bounds} if np.isfinite(v)] for bounds in zip(lower, upper, strict=True)]
    least, answer = np.inf, a
    for values in product(*[[*bounds, np.nan] for bounds in at_bounds]):  # NaN marks free multipliers
        lam = np.array(values)
        free = np.isnan(lam)
        x, inverse = a + A[~free].T @ lam[~free], np.linalg.pinv(A[free])
        step = inverse @ (h[free] - A[free] @ x)
        x, lam[free] = x + step, inverse.T @ step
        s = A @ x - h
        off = [lower - lam, lam - upper, np.where(lam < upper, -s, 0.0), np.where(lam > lower, s, 0.0)]
        if (missed := np.max(off)) < least:
            least, answer = missed, x
    return answer / root


def lengths(G):
    """Return the norms of the rows of G, and one for rows of norm zero."""
    n = np.linalg.norm(G, axis=1)
    return np.where(n > 0, n, 1.0)


def kkt(G, g, h, lower, upper, lam):
    """Return by how much the projection misses its optimality conditions, which are free of the scale of rows.

    The natural residual, from x itself, over 1 where nothing is longer than that.
    """
    n, x = lengths(G), g + G.T @ lam
    size = np.linalg.norm(g) + np.linalg.norm(x) + np.abs(lam * n).sum()
    s, lam = (G @ x - h) / n, lam * n
    return np.max(np.abs(lam - np.clip(lam - s, lower * n, upper * n)), initial=0.0) / size


exactly = np.vectorize(Fraction, otypes=[object])  # floats are rationals


def rational_projection(G, g, h=None):
    """Project by trying every active set in exact arithmetic. For a handful of rows."""
    G, g, h = exactly(G), exactly(g), exactly(np.zeros(len(G)) if h is None else h)
    for size in range(len(G) + 1):
        for P in map(list, combinations(range(len(G)), size)):
            lam = rational_solution(G[P] @ G[P].T, h[P] - G[P] @ g)
            if lam is not None and np.all(lam >= 0) and np.all(G @ (x := g + lam @ G[P]) >= h):
                return x
    raise AssertionError("every problem has a solution")


def rational_solution(A, b):
    """Solve a system by elimination; None if it is singular."""
    table = np.column_stack([A, b])
    for k in range(len(A)):
        pivots = np.flatnonzero(table[k:, k])
        if not len(pivots):
            return None
        table[[k, k + pivots[0]]] = table[[k + pivots[0], k]]
        table[k] = table[k] / table[k, k]
        others = np.arange(len(A)) != k
        table[others] = table[others] - np.outer(table[others, k], table[k])
    return table[:, -1]


def rational_feasible(G, h, equality):
    """Tell whether some x satisfies ``G x >= h``: the first phase of the simplex method, in exact arithmetic.

    With x = u - v, the sum of what is missing is minimised by Bland's rule, which cannot cycle.
    """
    G, h = exactly(G), exactly(h)
    t, n = len(G), 2 * G.shape[1] + len(G)
    surplus = np.where(np.asarray(equality), 0, -1) * np.eye(t, dtype=int)
    table = np.column_stack([G, -G, surplus + Fraction(0), h])
    table[h < 0] *= -1
    basis, cost = np.arange(n, n + t), -table.sum(axis=0)
    while np.any(cost[:n] < 0):
        j = int(np.flatnonzero(cost[:n] < 0)[0])
        rows = np.flatnonzero(table[:, j] > 0)
        i = min(rows, key=lambda i: (table[i, n] / table[i, j], basis[i]))
        table[i], basis[i] = table[i] / table[i, j], j
        for k in range(t):
            if k != i:
                table[k] = table[k] - table[k, j] * table[i]
        cost = cost - cost[j] * table[i]
    return cost[n] == 0


def small_integers(rng):
    """Draw G, g, h and equalities of up to 8 rows, of which some 40 % contradict each other."""
    t, d, m = int(rng.integers(2, 9)), int(rng.integers(1, 5)), int(rng.choice([3, 9, 99]))
    equality = rng.random(t) < rng.choice([0.0, 0.4])
    G, h = (rng.integers(-m, m + 1, shape).astype(float) for shape in ((t, d), t))
    return G, rng.standard_normal(d) * rng.integers(2), h, equality
