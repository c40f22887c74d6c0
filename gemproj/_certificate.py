"""How far multipliers are from the solution, from t-space numbers alone and free of scale.

Everything is relative to a `size`, the norm of the gradient that is projected. With ``s = G x - h``,
no result changes when g and h, or a row of G with its h, are multiplied by a positive number.
"""

from __future__ import annotations

import math

import numpy as np

from gemproj._arrays import Array, namespace
from gemproj._constants import NEAR_ZERO
from gemproj._coordinates import settle
from gemproj._tspace import Gram, inverse, matvec
from gemproj.methods._active_set import solve_active_set
from gemproj.methods._faces import Factorisation
from gemproj.methods.exact import Exact


def kkt_residual(norms: Array, s: Array, size: Array, lam: Array, lower: Array, upper: Array) -> Array:
    """Return the largest violation of the optimality conditions, shape (...).

    The maximum of primal feasibility ``-s_i / (|g_i| size)``, dual feasibility ``(lower_i - lam_i) |g_i| /
    size`` and complementarity ``(lam_i - lower_i) |s_i| / size^2``. Without a lower bound a positive slack is
    infeasible, too. With an upper bound c, s_i may be negative at lam_i = c, so feasibility gives way to
    ``max(0, -s_i)`` times the distance of lam_i to c, or to one where that is larger: the rounding of
    s must not grow with c.
    """
    xp = namespace(s)
    if not s.shape[-1]:
        return size * 0.0
    per_size = inverse(size)[..., None]
    s = s * inverse(norms) * per_size
    one, zero = xp.ones_like(s), xp.zeros_like(s)
    bounded, open_above = xp.isfinite(lower), xp.isinf(upper)
    above = xp.where(bounded, lam - lower, zero) * norms * per_size
    below = xp.where(open_above, zero, upper - lam) * norms * per_size
    high, low = xp.maximum(s, zero), xp.maximum(-s, zero)
    weight = xp.where(bounded, xp.abs(above), one)
    parts = [
        high * weight,
        low * xp.where(open_above, one, xp.minimum(xp.abs(below), one)),
        low * xp.where(open_above & bounded, weight, zero),
        xp.maximum(-above, zero),
        xp.maximum(-below, zero),
    ]
    return xp.max(xp.stack([xp.max(part, axis=-1) for part in parts]), axis=0)


def duality_gap(s: Array, size: Array, lam: Array, lower: Array, upper: Array) -> Array:
    """Return (primal - dual objective) / size^2, shape (...).

    ``sum (lam - lower) max(0, s) + (upper - lam) max(0, -s)``; where there is no upper bound a violated
    constraint adds the negative ``(lam - lower) s`` instead, as the primal objective does not see it.
    Where x is feasible, ``|x - x*|^2 <= gap size^2``.
    """
    xp = namespace(s)
    zero = xp.zeros_like(s)
    base = xp.where(xp.isfinite(lower), lower, zero)
    hinge = xp.where(xp.isfinite(upper), upper - base, zero) * xp.maximum(-s, zero)
    per_size = inverse(size)[..., None]
    return xp.sum(((lam - base) * s + hinge) * per_size * per_size, axis=-1)


def cosine(gram: Gram, lam: Array) -> Array:
    """Return the cosine between g and x = g + G'lam, shape (...); 1 where either is zero."""
    K, b, gg = gram
    xp = namespace(gg)
    inner = gg + xp.sum(b * lam, axis=-1)
    xx = inner + xp.sum(lam * (matvec(K, lam) + b), axis=-1)
    used, one = (gg > 0) & (xx > 0), xp.ones_like(gg)
    gg, xx, inner = (xp.where(used, v, one) for v in (gg, xx, inner))
    return inner / gg / xp.sqrt(xx / gg)


def error_bound(
    A: np.ndarray,
    a: np.ndarray,
    h: np.ndarray,
    lam: np.ndarray,
    lower: np.ndarray,
    upper: np.ndarray,
    *,
    rounding: float,
    resolves: float,
) -> float:
    """Return an upper bound of ``|x - x*|`` for one problem in standard form, of unit rows and unit size.

    x* is the projection for rows and a gradient that are perturbed by rounding: a backward error, as
    in LAPACK. With multipliers mu that solve the problem, ``|x - x*| <= |A (lam - mu)| + |x(mu) - x*|``.
    x(mu) is the projection for a right-hand side that is off by e, what the slacks of the active and
    nearly active rows miss of zero, so the second term is at most ``|e| / sigma``, where sigma is the
    smallest singular value of a basis chosen from these rows, active ones first. The others depend
    on the basis to rounding, and are satisfied with it by rows that do so exactly, unless h differs: then
    only weak duality is left.

    Coordinates that resolve angles only down to `resolves` cannot tell such rows from independent ones.
    Then weak duality bounds the error: by ``|x|`` for h = 0, or by the root of the duality gap.
    """
    mu = solve_active_set(Factorisation(A, a, h), lower, upper, np.clip(lam, lower, upper))[0]
    free, held = (mu > lower) & (mu < upper), (mu >= upper) & (upper > 0)
    x, moved = settle(A, a, mu, free, h)
    s = np.where(held, -1.0, 1.0) * (A.T @ x - h)
    fuzz = rounding * (1.0 + float(np.abs(mu).sum()))
    near = free | ((s <= NEAR_ZERO) & (upper > 0))
    basis, dependent = _basis(A, free, near, resolves)
    bound = math.inf
    if not dependent or resolves < 1e-10:
        # The slack of a row at a bound only matters where it has the wrong sign.
        error = np.where(free, np.abs(s), np.maximum(-s, 0.0)) + rounding * (
            1.0 + float(np.abs(mu[~free]).sum())
        )
        sigma = float(np.linalg.svd(A[:, basis], compute_uv=False)[-1]) if basis else 1.0
        bound = float(np.linalg.norm(error[basis])) / sigma + moved + 2.0 * fuzz
        if _any_missed(A, error, basis, near, fuzz):
            bound = math.inf
    step = float(np.linalg.norm(A @ (lam - mu)))
    return min(bound + step, _weak_duality(A, a, h, lam, lower, upper, fuzz))


def _any_missed(A: np.ndarray, error: np.ndarray, basis: list[int], near: np.ndarray, fuzz: float) -> bool:
    """Tell whether a near row outside of the basis misses its h by more than rounding times its weights."""
    rest = near.copy()
    rest[basis] = False
    if not (rest.any() and basis):
        return False
    weights = np.abs(np.linalg.lstsq(A[:, basis], A[:, rest], rcond=None)[0]).sum(axis=0)
    return bool((error[rest] > 4.0 * fuzz * (1.0 + weights)).any())


def _basis(A: np.ndarray, free: np.ndarray, near: np.ndarray, resolves: float) -> tuple[list[int], bool]:
    """Choose independent rows among the near ones, free ones first; tell whether any was left out."""
    basis: list[int] = []
    Q = np.zeros((len(A), 0))
    dependent = False
    for i in [*np.flatnonzero(free), *np.flatnonzero(near & ~free)]:
        rest = A[:, i]
        for _ in range(2):
            rest = rest - Q @ (Q.T @ rest)
        length = float(np.linalg.norm(rest))
        if length <= resolves:
            dependent = True
            continue
        Q = np.concatenate([Q, rest[:, None] / length], axis=1)
        basis.append(int(i))
    return basis, dependent


def _weak_duality(
    A: np.ndarray,
    a: np.ndarray,
    h: np.ndarray,
    lam: np.ndarray,
    lower: np.ndarray,
    upper: np.ndarray,
    fuzz: float,
) -> float:
    """Bound the error by the distance of the dual objective at lam from a known primal value."""
    inside = np.clip(lam, lower, upper)
    x, squared = a + A @ inside, []
    if np.all(np.where(lower < 0, h == 0.0, h <= 0.0)):  # zero is feasible
        squared.append(float(x @ x) - 2.0 * float(h @ inside))
    if np.isfinite(upper).all() and not np.any(lower < 0):
        s = A.T @ x - h
        gap = inside * (np.maximum(s, 0.0) + fuzz) + (upper - inside) * (np.maximum(-s, 0.0) + fuzz)
        squared.append(float(gap.sum()))
    if not squared:
        return math.inf
    return math.sqrt(max(0.0, min(squared))) + float(np.linalg.norm(A @ (lam - inside))) + fuzz


def infeasible_rows(K: np.ndarray, h: np.ndarray, hard: np.ndarray, equality: np.ndarray) -> np.ndarray:
    """Return the rows (indices) that contradict each other in ``G x >= h``; none if that is not certain.

    Farkas: multipliers d with ``G'd = 0`` and ``h'd > 0``. They solve a problem of bounds one whose linear
    term is so small that only null directions of K reach the bounds. Then ``|x| >= h'd / |G'd|`` for
    every feasible x, and beyond 1e6 times the size of h there is none.
    """
    n = np.sqrt(np.diagonal(K))
    impossible = hard & (n == 0) & np.where(equality, h != 0, h > 0)
    if impossible.any():
        return np.flatnonzero(impossible)
    per_norm = inverse(n)
    cosines, unit_h = K * per_norm[:, None] * per_norm, np.where(hard, h * per_norm, 0.0)
    size = float(np.abs(unit_h).max(initial=0.0))
    if size == 0.0:
        return np.empty(0, dtype=np.int64)
    base = np.where(equality, -1.0, 0.0)
    top = np.where(hard, 1.0, 0.0) - base
    linear = -1e-9 * unit_h / size
    d = base + Exact().solve(cosines, linear + cosines @ base, None, top).multipliers
    d = np.where(np.abs(d) > 1e-3, d, 0.0)
    gain, length = float(unit_h @ d), math.sqrt(max(0.0, float(d @ cosines @ d)))
    return np.flatnonzero(d) if gain > 1e6 * size * length else np.empty(0, dtype=np.int64)
