"""Exact solution of few rows on a device, without reading it: all active sets at once."""

from __future__ import annotations

import math

from gemproj._arrays import Array, device_of, namespace
from gemproj._constants import DEPENDENT
from gemproj._tspace import clip, drop_rows, identity_like, matvec, normalise

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
    count, slab = math.prod(batch), max(1, _MOST // (2**t * t * (t + 1)))
    if count <= slab:
        return _eliminate(K, b)
    K, b = xp.reshape(xp.broadcast_to(K, (*batch, t, t)), (count, t, t)), xp.reshape(b, (count, t))
    parts = [_eliminate(K[i : i + slab], b[i : i + slab]) for i in range(0, count, slab)]
    return xp.reshape(xp.concat(parts, axis=0), (*batch, t))


def _eliminate(K: Array, b: Array) -> Array:
    """Solve by Gauss-Jordan elimination of the rows of each set.

    A set with a dependent row is excluded: a set of independent rows gives the same solution more accurately.
    """
    K, b, _, _, stretch = normalise(K, b)
    xp, t, device, one = namespace(b), b.shape[-1], device_of(b), identity_like(K)
    K, least = xp.broadcast_to(K, (*b.shape, t)), DEPENDENT * xp.finfo(b.dtype).eps
    sets, rows = xp.arange(2**t, device=device)[:, None], xp.arange(t, device=device)
    free = xp.astype(sets // 2**rows % 2, b.dtype)
    whole = K[..., None, :, :] * free[..., :, None] * free[..., None, :] + (1.0 - free)[..., None] * one
    whole = xp.concat([whole, -(b[..., None, :] * free)[..., None]], axis=-1)
    smallest = xp.full_like(whole[..., 0, 0], math.inf)
    for k in range(t):
        pivot = whole[..., k, k]
        smallest = xp.minimum(smallest, pivot)
        row = whole[..., k, :] / xp.where(pivot > least, pivot, xp.ones_like(pivot))[..., None]
        whole = whole - (whole[..., :, k] - one[:, k])[..., None] * row[..., None, :]
    lam = clip(whole[..., t], None, None)
    s = matvec(K[..., None, :, :], lam) + b[..., None, :]
    residual = xp.max(xp.abs(xp.minimum(s, lam)), axis=-1)
    residual = xp.where((smallest > least) & xp.isfinite(residual), residual, xp.full_like(residual, xp.inf))
    chosen = xp.argmin(residual, axis=-1, keepdims=True) == sets[:, 0]
    return xp.sum(xp.where(chosen[..., None], lam, xp.zeros_like(lam)), axis=-2) * stretch
