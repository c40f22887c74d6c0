"""The t x t dual problem: what is measured, what is solved, and the linear algebra of all methods.

The standard form of the dual problem is ``min 1/2 lam'K lam + b'lam, lower <= lam <= upper`` where
every entry of `lower` is 0, or -inf for an equality constraint. ``lower=None`` stands for zeros and
``upper=None`` for infinity. K may have fewer leading dimensions than b: one K for many b.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gemproj._arrays import Array, device_of, namespace, to_numpy, wide_dtype


class Gram(NamedTuple):
    """The projection problem in t-space, in float64 (float32 on devices without float64).

    Attributes
    ----------
    K : array, shape (..., t, t)
        Gram matrix of the constraints, ``G @ G.T`` (``G @ diag(1/w) @ G.T`` with a metric w). It has no
        leading dimensions if all problems of a batch have the same G.
    b : array, shape (..., t)
        Linear term, ``G @ g``: negative for constraints that g violates.
    gg : array, shape (...)
        Squared norm of g, ``g @ g`` (``g @ diag(w) @ g`` with a metric w).
    """

    K: Array
    b: Array
    gg: Array


class Measured(NamedTuple):
    """The result of stage 1: K, b and |g|^2, and the problem they were computed from.

    Attributes
    ----------
    gram : Gram
        K, b and |g|^2: on the CPU NumPy arrays, because NumPy calls take a fifth of the time of torch calls.
    eps : float
        Machine epsilon of the sums in `gram`, or of the narrower dtype in which they are given.
    to_caller : callable
        Converts an array of t-space to the library and device of the caller's arrays.
    problem : Problem or None
        The problem with G and g, used to read G again if K is ill-conditioned. None if only K is given, or
        if this process has only a shard of G.
    own : Coordinates or None
        G and g themselves as coordinates, for a problem with no more columns than rows.
    """

    gram: Gram
    eps: float
    to_caller: Callable[[Array], Array]
    problem: Any = None
    own: Any = None


class Dual(NamedTuple):
    """Dual problems: K and b (..., t), or coordinates V (..., t, m) and a (..., m); None for defaults.

    K resolves distances of unit rows from a span down to `resolves`, which is 0 for coordinates. Solutions
    are unresolved if an active row is closer to the span of the others than `trust`.
    """

    resolves: float
    trust: float
    rows: np.ndarray
    linear: Any
    h: Any = None
    lower: Any = None
    upper: Any = None
    start: Any = None


def normalise(K: Array, b: Array, upper: Array | None = None, start: Array | None = None) -> tuple[Any, ...]:
    """Return K, b, the upper bound and start for rows of norm one and b of maximum one, and their unit.

    The lower bound, zero or -inf, has no unit. A row of norm zero is not a constraint: it is decoupled from
    the other rows, and its multiplier is zero.
    """
    xp = namespace(K)
    norm = xp.sqrt(xp.linalg.diagonal(K))
    one, per_norm = xp.ones_like(norm), inverse(norm)
    unit_K = (K * per_norm[..., :, None]) * per_norm[..., None, :]
    unit_K = unit_K + xp.where(norm > 0, xp.zeros_like(norm), one)[..., None] * identity_like(K)
    unit_b = b * per_norm
    # Without rows, b is empty and has no maximum.
    size = xp.max(xp.abs(unit_b), axis=-1, keepdims=True) if b.shape[-1] else xp.ones_like(b)
    size = xp.where(size > 0, size, xp.ones_like(size))
    stretch = norm / size
    if upper is not None:
        finite = xp.isfinite(upper)
        upper = xp.where(finite, xp.where(finite, upper, xp.zeros_like(upper)) * stretch, upper)
    start = None if start is None else start * stretch
    return unit_K, unit_b / size, upper, start, size * per_norm


def inverse(a: Array) -> Array:
    """Return 1/a, and 0 where a is 0."""
    xp = namespace(a)
    return 1.0 / xp.where(a > 0, a, xp.full_like(a, math.inf))


def identity_like(K: Array) -> Array:
    """Return the identity matrix (t, t) of the library, dtype and device of K."""
    xp = namespace(K)
    return xp.eye(K.shape[-1], dtype=K.dtype, device=device_of(K))


def matvec(K: Array, v: Array) -> Array:
    """Return K v for every problem of a batch; the order of summation does not depend on the batch."""
    xp = namespace(K)
    return xp.sum(K * v[..., None, :], axis=-1)


def times_rows(weights: Array, rows: Array) -> Array:
    """Return weights (..., m, t) times rows (..., t, n), without the rows whose weights are all zero.

    The excluded rows may hold NaN or infinity, and zero times NaN or infinity is NaN.
    """
    xp = namespace(weights)
    used = xp.any(weights != 0, axis=-2)[..., None]
    if isinstance(used, np.ndarray) and used.all():
        return np.matmul(weights, rows)
    return xp.matmul(weights, xp.where(used, rows, xp.zeros_like(rows[..., :1, :1])))


def clip(lam: Array, lower: Array | None, upper: Array | None) -> Array:
    """Return lam clipped to its bounds."""
    xp = namespace(lam)
    lam = xp.maximum(lam, xp.zeros_like(lam) if lower is None else lower)
    return lam if upper is None else xp.minimum(lam, upper)


def drop_rows(K: Array, b: Array, off: Array | None = None) -> tuple[Array, Array, Array]:
    """Return K and b with zeros for rows that are not finite or `off`, and the mask of other rows.

    No value is read, so a device is not synchronised. If g is not finite, no entry of b is finite: all rows
    are left out, and x is g.
    """
    xp = namespace(b)
    if off is not None:  # of each problem
        K = xp.broadcast_to(K, (*b.shape, b.shape[-1]))
    kept, zero = xp.isfinite(xp.linalg.diagonal(K) + xp.abs(b)), xp.zeros_like(b)
    rows = kept
    if K.ndim <= b.ndim:  # one K for many b: if row i is finite but b_i is not, g is not finite
        rows = xp.isfinite(xp.linalg.diagonal(K))
        kept = rows & xp.all(kept | ~rows, axis=-1, keepdims=True)
    if off is not None:
        rows = kept = kept & ~off
    K = xp.where(rows[..., :, None] & rows[..., None, :], K, xp.zeros_like(K))
    return K, xp.where(kept, b, zero), kept


def fetch(arrays: list[Array | None]) -> list[Any]:
    """Return arrays of a device as NumPy arrays, in one copy: numbers in float64, masks as masks."""
    given = [a for a in arrays if a is not None]
    xp, wide = namespace(given[0]), wide_dtype(namespace(given[0]), device_of(given[0]))
    whole = xp.concat([xp.astype(xp.reshape(a, (-1,)), wide, copy=False) for a in given])
    ends = np.cumsum([math.prod(a.shape) for a in given])
    parts = [p.reshape(a.shape) for p, a in zip(np.split(to_numpy(whole), ends[:-1]), given, strict=True)]
    masks = [xp.isdtype(a.dtype, "bool") for a in given]
    found = (p.astype(bool if m else np.float64) for p, m in zip(parts, masks, strict=True))
    return [a if a is None else next(found) for a in arrays]
