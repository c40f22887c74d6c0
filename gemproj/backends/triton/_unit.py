"""Shared by the kernels of stage 2: normalisation, products with the cosines, and the status.

Twins of functions in `gemproj._tspace` and `gemproj.methods`: change both.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gemproj import _constants
from gemproj.methods._method import Status

_EPS = 2.0**-52
DEPENDENT: tl.constexpr = tl.constexpr(_constants.DEPENDENT * _EPS)
_OPTIMAL_WITHIN: tl.constexpr = tl.constexpr(_constants.OPTIMAL_WITHIN * _EPS)
_NEAR_ZERO: tl.constexpr = tl.constexpr(_constants.NEAR_ZERO)
_RESOLVED: tl.constexpr = tl.constexpr(_constants.RESOLVED)
_STALLED: tl.constexpr = tl.constexpr(int(Status.STALLED))
_UNRESOLVED: tl.constexpr = tl.constexpr(int(Status.UNRESOLVED))


@triton.jit
def inverse(a):
    """Return 1/a, and 0 where a is 0."""
    used = a > 0
    return tl.where(used, 1.0 / tl.where(used, a, 1.0), 0.0)


@triton.jit
def at(v, j, T: tl.constexpr):
    """Return v[j]."""
    return tl.sum(tl.where(tl.arange(0, T) == j, v, 0.0), axis=0)


@triton.jit
def first(chosen, T: tl.constexpr):
    """Return the smallest index that is chosen, T if none is."""
    return tl.min(tl.where(chosen, tl.arange(0, T), T), axis=0)


@triton.jit
def clip(lam, lower, upper):
    """Return lam moved into lower <= lam <= upper; NaN stays."""
    lam = tl.maximum(lam, lower, propagate_nan=tl.PropagateNan.ALL)
    return tl.minimum(lam, upper, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def magnitude(lam):
    """Return 1 + sum |lam|, which bounds the summands of a slack."""
    return 1.0 + tl.sum(tl.abs(lam), axis=0)


@triton.jit
def linear(
    K, K_row, b, b_step, lower, upper, start, t,
    T: tl.constexpr, SIGNED: tl.constexpr, BOUNDED: tl.constexpr, STARTED: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """Return b, bounds, start and scale of the problem with rows of norm one and max |b| = 1."""
    i = tl.arange(0, T)
    inside = i < t
    unit_b = tl.load(b + i * b_step, mask=inside, other=0.0)
    norm = _norm(K, K_row, i, t, NORMALIZE)
    scale = inverse(norm)
    unit_b = tl.where((norm > 0) & (tl.abs(unit_b) < float("inf")), unit_b * scale, 0.0)
    stretch = norm
    if NORMALIZE:
        size = tl.max(tl.abs(unit_b), axis=0)
        size = tl.where(size > 0, size, 1.0)
        unit_b = unit_b / size
        scale = size * scale
        stretch = norm / size
    low = tl.zeros((T,), dtype=tl.float64)
    if SIGNED:  # 0 or -inf, which no scale moves
        low = tl.load(lower + i, mask=inside, other=0.0)
    high = tl.full((T,), float("inf"), dtype=tl.float64)
    if BOUNDED:
        high = tl.load(upper + i, mask=inside, other=0.0)
        high = tl.where(stretch > 0, high * tl.where(stretch > 0, stretch, 1.0), 0.0)
    lam = tl.zeros((T,), dtype=tl.float64)
    if STARTED:
        lam = tl.load(start + i, mask=inside, other=0.0) * stretch
    return unit_b, low, high, clip(lam, low, high), scale


@triton.jit
def _norm(K, K_row, i, t, NORMALIZE: tl.constexpr):
    """Return what rows i are divided by, or zero for one that is not finite, which so constrains nothing."""
    squared = tl.load(K + i * (K_row + 1), mask=i < t, other=0.0)
    finite = squared < float("inf")
    if not NORMALIZE:
        squared = tl.full(squared.shape, 1.0, dtype=tl.float64)
    return tl.sqrt(tl.where(finite, squared, 0.0))


@triton.jit
def cosines(K, K_row, i, j, t, NORMALIZE: tl.constexpr):
    """Return K between rows i and j, divided by their norms; a row of no norm is orthogonal to others."""
    inside = (i < t)[:, None] & (j < t)[None, :]
    tile = tl.load(K + i[:, None] * K_row + j[None, :], mask=inside, other=0.0)
    per_i, per_j = inverse(_norm(K, K_row, i, t, NORMALIZE)), inverse(_norm(K, K_row, j, t, NORMALIZE))
    used = (per_i > 0)[:, None] & (per_j > 0)[None, :]
    alone = tl.where((i[:, None] == j[None, :]) & (per_i == 0)[:, None], 1.0 if NORMALIZE else 0.0, 0.0)
    return tl.where(used, tile * per_i[:, None] * per_j[None, :], alone)


@triton.jit
def copy_cosines(K, K_row, target, t, T: tl.constexpr, CHUNK: tl.constexpr, NORMALIZE: tl.constexpr):
    """Write the cosines to a workspace, (t, t) without gaps."""
    i = tl.arange(0, T)
    for start in range(0, t, CHUNK):
        r = start + tl.arange(0, CHUNK)
        inside = (r < t)[:, None] & (i < t)[None, :]
        tl.store(target + r[:, None] * t + i[None, :], cosines(K, K_row, r, i, t, NORMALIZE), mask=inside)
    tl.debug_barrier()


@triton.jit
def product(A, v, t, T: tl.constexpr, CHUNK: tl.constexpr):
    """Return A v for a matrix (t, t) in memory."""
    i = tl.arange(0, T)
    result = tl.zeros((T,), dtype=tl.float64)
    for start in range(0, t, CHUNK):
        j = start + tl.arange(0, CHUNK)
        inside = (i < t)[:, None] & (j < t)[None, :]
        tile = tl.load(A + i[:, None] * t + j[None, :], mask=inside, other=0.0)
        result += tl.sum(tile * tl.gather(v, j, 0)[None, :], axis=1)
    return result


@triton.jit
def residual(lam, s, lower, upper):
    """Return the natural residual |lam - clip(lam - s, lower, upper)| of every row, infinite for NaN."""
    r = tl.abs(lam - clip(lam - s, lower, upper))
    return tl.where(r < float("inf"), r, float("inf"))


@triton.jit
def verdict(lam, s, lower, upper):
    """Return the status without `UNRESOLVED`, and the active and nearly active rows."""
    slack = tl.abs(lam) * tl.where(lam >= upper, tl.maximum(s, 0.0), tl.abs(s))
    met = (residual(lam, s, lower, upper) <= _OPTIMAL_WITHIN) & (slack <= _OPTIMAL_WITHIN)
    status = tl.max(tl.where(met, 0, _STALLED), axis=0)
    determining = (lam != 0) | (lower < 0) | (s <= _NEAR_ZERO * magnitude(lam))
    return status, determining


@triton.jit
def unresolved(resolution):
    """Return `UNRESOLVED` where the resolution is too low, else 0."""
    return tl.where(resolution < _RESOLVED, _UNRESOLVED, 0)
