"""How far multipliers are from the solution, from t-space numbers alone and free of scale.

Everything is relative to a `size`, the norm of the gradient that is projected. With ``s = G x - h``,
no result changes when g and h, or a row of G with its h, are multiplied by a positive number.
"""

from __future__ import annotations

import math

import numpy as np

from gemproj._arrays import Array, namespace
from gemproj._constants import NEAR_ZERO, ROUNDING
from gemproj._coordinates import settle
from gemproj._tspace import Gram, inverse, matvec
from gemproj.methods._active_set import solve_active_set
from gemproj.methods._faces import Factorisation


def kkt_residual(norms: Array, s: Array, size: Array, lam: Array, lower: Array, upper: Array) -> Array:
    """Return the largest violation of the optimality conditions, shape (...).

    The maximum of primal feasibility ``-s_i / (|g_i| size)``, dual feasibility ``(lower_i - lam_i) |g_i| /
    size`` and complementarity ``(lam_i - lower_i) |s_i| / size^2``. Without a lower bound a positive slack is
    infeasible, too. With an upper bound c, s_i may be negative at lam_i = c, so feasibility gives way to
    ``max(0, -s_i)`` times the distance of lam_i to c, or to one where that is larger: the rounding of
    s must not grow with c. The lower bound -c of an equality is treated alike.
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
    # An equality with a penalty is bounded by it from both sides.
    weight = xp.where(lower < 0, xp.minimum(weight, one), weight)
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
    Then weak duality bounds the error: by ``|x|`` for h = 0, or by the root of the duality gap. Where they
    come from K, it is K that is perturbed by rounding, and that moves all slacks.
    """
    mu = inside = np.clip(lam, lower, upper)
    error = _conditions(A.T @ (a + A @ mu) - h, mu, lower, upper)[2]
    if error.max() > ROUNDING * (1.0 + float(np.abs(mu).sum())):
        mu = solve_active_set(Factorisation(A, a, h), lower, upper, mu)[0]
    x, moved = settle(A, a, mu, (mu > lower) & (mu < upper), h)
    free, s, error = _conditions(A.T @ x - h, mu, lower, upper)
    fuzz = rounding * (1.0 + float(np.abs(mu).sum()))
    near = free | ((s <= NEAR_ZERO) & (upper > 0))
    basis, weights = _basis(A, free, near, resolves)
    from_rows = resolves < 1e-10
    bound = math.inf
    if from_rows or len(basis) == np.count_nonzero(near):
        known = rounding * (1.0 + float(np.abs(mu[~free]).sum())) if from_rows else fuzz
        sigma = float(np.linalg.svd(A[:, basis], compute_uv=False)[-1]) if basis else 1.0
        if not from_rows:
            sigma = math.sqrt(max(0.0, sigma**2 - len(mu) * rounding))
        missed = _missed(error, basis, weights, known, fuzz)
        bound = missed / sigma + moved + 2.0 * fuzz if sigma else math.inf
    apart = lam - mu
    step, much = float(np.linalg.norm(A @ apart)), float(np.abs(apart).sum())
    step = step + rounding * much if from_rows else math.hypot(step, math.sqrt(rounding) * much)
    return min(bound + step, _weak_duality(A, a, h, lam, inside, lower, upper, rounding, from_rows))


def _conditions(
    s: np.ndarray, lam: np.ndarray, lower: np.ndarray, upper: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return which rows are free, slacks, below zero where a row at a bound is wrong, and what they miss."""
    free, held = (lam > lower) & (lam < upper), (lam >= upper) & (upper > 0)
    s = np.where(held, -s, s)
    return free, s, np.where(free, np.abs(s), np.maximum(-s, 0.0))


def _missed(error: np.ndarray, basis: list[int], weights: np.ndarray, known: float, fuzz: float) -> float:
    """Return by how much the rows of the basis miss their h, or rows that depend on them do in their place.

    What such a row misses beyond rounding, e, stands for ``e / |w_i|`` of the row i whose place it
    may take. Far more than rounding is infinite.
    """
    w, worst = np.abs(weights), error[basis]
    size = 1.0 + w.sum(axis=0)
    if (error + known > 4.0 * fuzz * size)[w.any(axis=0)].any():
        return math.inf
    more = np.where(error > ROUNDING * size + worst @ w, error + worst @ w, 0.0)
    swapped = np.divide(more, w, out=np.zeros_like(w), where=w > NEAR_ZERO)
    return float(np.linalg.norm(worst + known + swapped.max(axis=1, initial=0.0)))


def _basis(
    A: np.ndarray, free: np.ndarray, near: np.ndarray, resolves: float
) -> tuple[list[int], np.ndarray]:
    """Choose independent rows among the near ones, free ones first; return weights of the others in them.

    The row farthest from those chosen is next. That distance is only known to rounding times its weights.
    """
    basis: list[int] = []
    rest, Q, weights = A.copy(), np.zeros((len(A), 0)), np.zeros((0, len(near)))
    for group in (np.flatnonzero(free), np.flatnonzero(near & ~free)):
        for _ in group:
            lengths = np.linalg.norm(rest[:, group], axis=0)
            apart = lengths / (1.0 + np.abs(weights[:, group]).sum(axis=0))
            if apart.max() <= resolves:
                break
            k = int(np.argmax(apart))
            q, j = rest[:, group[k]] / lengths[k], int(group[k])
            q -= Q @ (Q.T @ q)
            q /= np.linalg.norm(q)
            along = q @ rest
            Q, basis = np.concatenate([Q, q[:, None]], axis=1), [*basis, j]
            rest -= np.outer(q, along)
            along /= lengths[k]
            weights = np.concatenate([weights - np.outer(weights[:, j], along), along[None]])
    weights[:, basis] = 0.0
    weights[:, ~near] = 0.0
    return basis, weights


def _weak_duality(
    A: np.ndarray,
    a: np.ndarray,
    h: np.ndarray,
    lam: np.ndarray,
    inside: np.ndarray,
    lower: np.ndarray,
    upper: np.ndarray,
    rounding: float,
    from_rows: bool,
) -> float:
    """Bound the error by the distance of the dual objective at lam from a known primal value."""
    x, squared = a + A @ inside, []
    size = 1.0 + float(np.abs(inside).sum())
    fuzz = rounding * size
    if np.all(np.where(lower < 0, h == 0.0, h <= 0.0)):  # zero is feasible
        squared.append(float(x @ x) - 2.0 * float(h @ inside))
    if np.isfinite(upper).all() and not np.any(lower < 0):
        s = A.T @ x - h
        gap = inside * (np.maximum(s, 0.0) + fuzz) + (upper - inside) * (np.maximum(-s, 0.0) + fuzz)
        squared.append(float(gap.sum()))
    if not squared:
        return math.inf
    known = 0.0 if from_rows else fuzz * size  # what K knows of |x|^2
    return math.sqrt(max(0.0, min(squared)) + known) + float(np.linalg.norm(A @ (lam - inside))) + fuzz
