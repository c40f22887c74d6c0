"""Exact solution of few rows on a device, without reading it: all active sets at once."""

from __future__ import annotations

import math

from gemproj._arrays import Array, device_of, is_torch, namespace
from gemproj._constants import DEPENDENT
from gemproj._tspace import clip, drop_rows, matvec, normalise

# Maximum number of entries of the matrices that are held at once.
_MOST = 1 << 22


def solve_few(K: Array, b: Array, margin: Array | None = None) -> Array:
    """Return the minimiser of ``1/2 lam'K lam + b'lam, lam >= margin``; rows that are not finite get zero."""
    if not b.shape[-1]:
        return b * 0.0
    K, b, kept = drop_rows(K, b)
    if margin is None:
        return _solve(K, b)
    return namespace(b).where(kept, margin + _solve(K, b + matvec(K, margin)), 0.0 * margin)


def _solve(K: Array, b: Array) -> Array:
    """Return the solution with the lower bound zero, of a slab of problems at a time."""
    xp, t, batch = namespace(b), b.shape[-1], b.shape[:-1]
    enumerate_sets = _factorise if is_torch(b) else _sweep_all
    count, slab = math.prod(batch), max(1, _MOST // (2**t * t * (t + 1)))
    if count <= slab:
        return enumerate_sets(K, b)
    K, b = xp.reshape(xp.broadcast_to(K, (*batch, t, t)), (count, t, t)), xp.reshape(b, (count, t))
    parts = [enumerate_sets(K[i : i + slab], b[i : i + slab]) for i in range(0, count, slab)]
    return xp.reshape(xp.concat(parts, axis=0), (*batch, t))


def _factorise(K: Array, b: Array) -> Array:
    """Solve with torch, with the fewest launches: one batched Cholesky factorisation of all 2^t submatrices.

    The rows outside of a set are those of the identity.
    """
    xp, t, device = namespace(b), b.shape[-1], b.device
    K = K.expand(*b.shape, t)
    per_norm = xp.linalg.diagonal(K).rsqrt().nan_to_num(nan=0.0, posinf=0.0)
    # Row i is free in set n if bit i of n is one: no row in the first set, all rows in the last set. The bits
    # are not cached, because the next call may run in another CUDA stream or graph.
    sets, rows = xp.arange(2**t, device=device), xp.arange(t, device=device)
    scale = (sets[:, None] >> rows & 1) * per_norm[..., None, :]
    submatrices = K[..., None, :, :] * scale[..., :, None] * scale[..., None, :]
    xp.linalg.diagonal(submatrices).masked_fill_(scale == 0, 1.0)
    linear = b[..., None, :] * scale
    factor, failed = xp.linalg.cholesky_ex(submatrices)
    # `solve_triangular` calls cuBLAS; `cholesky_solve` calls MAGMA for a batch in most versions of torch.
    half = xp.linalg.solve_triangular(factor, linear[..., None], upper=False)
    lam = -xp.linalg.solve_triangular(factor.mT, half, upper=True)[..., 0]
    s = xp.matmul(lam, submatrices[..., -1, :, :]) + linear[..., -1:, :]
    residual = xp.minimum(s, lam).abs().amax(-1)  # the natural residual, |lam - max(0, lam - s)|
    # The root of the smallest pivot; negative if the factorisation has failed.
    root = xp.linalg.diagonal(factor).amin(-1) - failed
    residual = residual.where(root > (DEPENDENT * xp.finfo(b.dtype).eps) ** 0.5, xp.inf)
    # Ties go to the first set: if no constraint is violated this is the empty set, and x is g.
    best = xp.argmin(residual, axis=-1, keepdims=True)[..., None]
    lam = lam.gather(-2, best.expand(*b.shape[:-1], 1, t))[..., 0, :] * per_norm
    return clip(lam, None, None)


def _sweep_all(K: Array, b: Array) -> Array:
    """Solve with any library: the tableau [K | b], swept on the rows of each set.

    For each row, every tableau is copied, and the copy is pivoted on the row's diagonal entry. A set with a
    dependent row is excluded: a set of independent rows gives the same solution more accurately.
    """
    K, b, _, _, _, stretch = normalise(K, b)
    xp, t, device = namespace(b), b.shape[-1], device_of(b)
    K = xp.broadcast_to(K, (*b.shape, t))
    tableau, least = xp.concat([K, b[..., None]], axis=-1)[..., None, :, :], DEPENDENT * xp.finfo(b.dtype).eps
    dependent = xp.zeros(tableau.shape[:-2], dtype=xp.bool, device=device)
    for k in range(t):
        good = tableau[..., k, k] > least
        tableau = xp.concat([tableau, _swept(tableau, k, good)], axis=-3)
        dependent = xp.concat([dependent, dependent | ~good], axis=-1)
    sets, rows = xp.arange(2**t, device=device), xp.arange(t, device=device)
    free = xp.astype(sets[:, None] // 2**rows % 2 == 1, b.dtype)
    lam = clip(-tableau[..., t] * free, None, None)
    s = matvec(K[..., None, :, :], lam) + b[..., None, :]
    residual = xp.max(xp.abs(xp.minimum(s, lam)), axis=-1)
    residual = xp.where(dependent | ~xp.isfinite(residual), xp.full_like(residual, xp.inf), residual)
    best = xp.argmin(residual, axis=-1, keepdims=True)
    chosen = best == xp.arange(residual.shape[-1], device=device)
    return xp.sum(xp.where(chosen[..., None], lam, xp.zeros_like(lam)), axis=-2) * stretch


def _swept(tableau: Array, k: int, good: Array) -> Array:
    """Return the tableau (..., t, t + 1) swept on row k: pivoted on its k-th diagonal entry.

    It holds ``K_PP^-1`` and ``-lam_P`` in the rows P it was swept on, and the Schur complement and the slacks
    in the other rows.
    """
    xp = namespace(tableau)
    pivot = tableau[..., k, k]
    pivot = xp.where(good, pivot, xp.ones_like(pivot))[..., None]
    row, column = tableau[..., k, :] / pivot, tableau[..., :, k] + 0.0
    column[..., k] = 0.0
    swept = tableau - column[..., :, None] * row[..., None, :]
    swept[..., :, k] = -column / pivot
    swept[..., k, :] = row
    swept[..., k, k] = 1.0 / pivot[..., 0]
    return swept
