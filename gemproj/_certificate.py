"""How far multipliers are from the solution, from t-space numbers alone and free of scale.

All functions judge ``min 1/2 lam'K lam + b'lam, 0 <= lam <= upper`` for a gradient of squared norm
gg. With s = K lam + b = G x, none of the results changes when g, or any row of G, is multiplied by
a positive number.
"""

from __future__ import annotations

import math

import array_api_compat
import numpy as np

from gemproj._array import Array
from gemproj.methods._method import matvec, normalise
from gemproj.methods.exact import Exact

_EPS = float(np.finfo(np.float64).eps)


def kkt_residual(K: Array, b: Array, gg: Array, lam: Array, upper: float) -> Array:
    """Return the largest violation of the optimality conditions, shape (...).

    The maximum of primal feasibility ``-s_i / (|g_i||g|)``, dual feasibility ``-lam_i |g_i| / |g|``
    and complementarity ``|lam_i s_i| / |g|^2``. With an upper bound c, s_i may be negative at
    lam_i = c, so feasibility gives way to ``max(0, -s_i)`` times the distance of lam_i to c, or
    to one where that is larger: the rounding of s must not grow with c.
    """
    xp = array_api_compat.array_namespace(K, b)
    if not b.shape[-1]:
        return gg * 0.0
    unit, per_gradient = _scales(K, gg)
    s = (matvec(K, lam) + b) * unit * per_gradient
    scaled = lam * xp.sqrt(xp.linalg.diagonal(K)) * per_gradient
    down, zero = xp.maximum(-s, xp.zeros_like(s)), xp.zeros_like(s)
    parts = [xp.maximum(-scaled, zero)]
    if math.isinf(upper):
        parts += [down, xp.abs(scaled * s)]
    else:
        bound = upper * xp.sqrt(xp.linalg.diagonal(K)) * per_gradient
        apart = xp.minimum(xp.abs(bound - scaled), xp.ones_like(bound))
        parts += [apart * down, xp.abs(scaled) * xp.maximum(s, zero)]
        parts += [xp.maximum(scaled - bound, zero)]
    return xp.max(xp.stack([xp.max(part, axis=-1) for part in parts]), axis=0)


def duality_gap(K: Array, b: Array, gg: Array, lam: Array, upper: float) -> Array:
    """Return (primal - dual objective) / |g|^2, shape (...).

    Equal to ``lam's / |g|^2``, and to ``(lam's + c sum max(0, -s)) / |g|^2`` for hinge penalties of
    weight c. Where x is feasible it bounds the squared error: ``|x - x*|^2 <= gap |g|^2``.
    """
    xp = array_api_compat.array_namespace(K, b)
    s = matvec(K, lam) + b
    gap = lam * s
    if math.isfinite(upper):
        gap = gap + upper * xp.maximum(-s, xp.zeros_like(s))
    _, per_gradient = _scales(K, gg)
    return xp.sum(gap * per_gradient * per_gradient, axis=-1) if b.shape[-1] else gg * 0.0


def cosine(K: Array, b: Array, gg: Array, lam: Array) -> Array:
    """Return the cosine between g and x = g + G'lam, shape (...); 1 where either is zero."""
    xp = array_api_compat.array_namespace(K, b)
    inner = gg + xp.sum(b * lam, axis=-1)
    xx = inner + xp.sum(lam * (matvec(K, lam) + b), axis=-1)
    used = (gg > 0) & (xx > 0)
    one = xp.ones_like(gg)
    return xp.where(used, inner / xp.where(used, xp.sqrt(gg) * xp.sqrt(xp.maximum(xx, one * 0.0)), one), one)


def error_bound(
    K: np.ndarray, b: np.ndarray, gg: np.ndarray, lam: np.ndarray, upper: float, rounding: float
) -> np.ndarray:
    """Return an upper bound of ``|x - x*| / |g|``, shape (...), on the CPU.

    `rounding` is that of the entries of K and b, in units of ``|g_i| |g_j|`` and ``|g_i| |g|``.

    t-space is small, so the bound comes from a solution mu of the dual problem itself:
    ``|x - x*| <= |G'(lam - mu)| + |x(mu) - x*|``. The first term is exact. The second is the error
    of a solution that meets the conditions to rounding: what its residual on the active set, and
    the rounding of s, can move x. Where no such solution is at hand, ``|x| `` bounds the distance of
    any x = g + G'lam, lam >= 0 (weak duality at the feasible point 0).
    """
    batch = b.shape[:-1]
    bound = np.zeros(batch)
    for i in np.ndindex(batch) if b.shape[-1] else ():
        if gg[i] > 0:
            bound[i] = _bound_one(K[i], b[i], float(gg[i]), lam[i], upper, rounding)
    return bound


def _bound_one(
    K: np.ndarray, b: np.ndarray, gg: float, lam: np.ndarray, upper: float, rounding: float
) -> float:
    rounding += (4.0 + len(b)) * _EPS  # of the sums below
    n = np.sqrt(np.diagonal(K))
    size = math.sqrt(gg)
    unit = normalise(K, b, None, None if math.isinf(upper) else np.full_like(b, upper))
    K, b, lam = unit.K, b * np.divide(1.0, n, out=np.zeros_like(n), where=n > 0) / size, lam * n / size
    bound = np.full_like(b, np.inf) if math.isinf(upper) else upper * n / size
    mu = Exact().solve(K, b, None, None if math.isinf(upper) else bound).multipliers
    apart, taxicab = lam - mu, float(np.abs(lam).sum())
    # Squares are known to rounding only, which counts where lam - mu lies along dependent rows, or x near 0.
    distance = math.sqrt(max(0.0, float(apart @ K @ apart)) + rounding * float(np.abs(apart).sum()) ** 2)
    length = math.inf
    if math.isinf(upper):
        length = math.sqrt(max(0.0, 1.0 + float(lam @ (K @ lam + 2.0 * b))) + rounding * (1.0 + taxicab) ** 2)

    s = K @ mu + b
    # What float64 does to s, and to x itself when it is put together.
    fuzz = rounding * (1.0 + float(np.abs(mu).sum()))
    free = (mu > 0) & (mu < bound)
    # How far the other conditions may be violated, for all that rounding lets one see.
    slack = np.where(mu > 0, -s, s)
    excess = np.where(free | (bound <= 0) | (n == 0), 0.0, np.maximum(0.0, fuzz - slack))
    if excess.max() > 1e2 * fuzz:
        return length
    moved = fuzz
    if free.any():
        smallest = float(np.linalg.eigvalsh(K[np.ix_(free, free)])[0])
        moved += (float(np.linalg.norm(s[free])) + fuzz * math.sqrt(free.sum())) / math.sqrt(
            max(smallest, rounding)
        )
    if excess.any():
        moved += float(np.linalg.norm(excess)) / math.sqrt(
            max(_smallest_pivot(K, free, excess > 0), rounding)
        )
    return min(distance + moved, length)


def _smallest_pivot(K: np.ndarray, free: np.ndarray, rows: np.ndarray) -> float:
    """Return the smallest squared distance of `rows` from the span of the free rows."""
    across = K[np.ix_(free, rows)]
    schur = 1.0 - np.sum(across * np.linalg.lstsq(K[np.ix_(free, free)], across, rcond=None)[0], axis=0)
    return float(schur.min())


def _scales(K: Array, gg: Array) -> tuple[Array, Array]:
    """Return 1/|g_i| (..., t) and 1/|g| (..., 1), with 0 for what is zero."""
    xp = array_api_compat.array_namespace(K, gg)
    result = []
    for squared in (xp.linalg.diagonal(K), gg[..., None]):
        used = squared > 0
        root = xp.sqrt(xp.where(used, squared, xp.ones_like(squared)))
        result.append(xp.where(used, 1.0 / root, xp.zeros_like(root)))
    return result[0], result[1]
