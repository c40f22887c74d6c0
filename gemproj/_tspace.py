"""Linear algebra of the t x t dual problem, shared by all methods: scaling, residuals, sweeps.

The standard form of the dual problem is ``min 1/2 lam'K lam + b'lam, lower <= lam <= upper`` where
every entry of `lower` is 0, or -inf for an equality constraint. ``lower=None`` stands for zeros and
``upper=None`` for infinity. K may have fewer leading dimensions than b: one K for many b.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gemproj._arrays import Array, device_of, namespace
from gemproj._constants import DEPENDENT


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
    rounding : float
        Relative rounding error of the entries of `gram`.
    to_caller : callable
        Converts an array of t-space to the library and device of the caller's arrays.
    rows : Problem or None
        The problem with G and g, used to read G again if K is ill-conditioned. None if only K is given, or
        if this process has only a shard of G.
    """

    gram: Gram
    rounding: float
    to_caller: Callable[[Array], Array]
    rows: Any = None


class Standard(NamedTuple):
    """The dual problem in its standard form."""

    K: Array
    b: Array
    lower: Array | None
    upper: Array | None


class Unit(NamedTuple):
    """The dual problem with constraint gradients of norm one and a linear term of size one."""

    K: Array
    b: Array
    lower: Array | None
    upper: Array | None
    start: Array | None
    scale: Array  # multipliers of the given problem = scale * multipliers of the unit problem


def normalise(
    K: Array,
    b: Array,
    lower: Array | None = None,
    upper: Array | None = None,
    start: Array | None = None,
) -> Unit:
    """Return the problem with the rows of G scaled to norm one and b scaled to maximum one.

    A row of norm zero is not a constraint: it is decoupled from the other rows, and its multiplier is zero.
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
    return Unit(unit_K, unit_b / size, lower, upper, start, size * per_norm)


def inverse(a: Array) -> Array:
    """Return 1/a, and 0 where a is 0."""
    if type(a) is np.ndarray:
        return np.divide(1.0, a, out=np.zeros_like(a), where=a > 0)
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


def natural_residual(lam: Array, s: Array, lower: Array | None, upper: Array | None) -> Array:
    """Return the natural residual, max |lam - clip(lam - s)| for s = K lam + b, shape (...)."""
    xp = namespace(lam)
    return xp.max(xp.abs(lam - clip(lam - s, lower, upper)), axis=-1)


def complementarity(lam: Array, s: Array, upper: Array | None) -> Array:
    """Return the complementarity, max |lam s|, shape (...); zero at the solution."""
    xp = namespace(lam)
    if upper is not None:  # at the upper bound a negative slack is optimal
        s = xp.where(snap(lam, upper) >= upper, xp.maximum(s, xp.zeros_like(s)), s)
    return xp.max(xp.abs(lam * s), axis=-1)


def snap(lam: Array, upper: Array) -> Array:
    """Return lam, with multipliers that equal their upper bound to rounding set to this bound."""
    xp = namespace(lam)
    return xp.where(lam >= upper * (1.0 - 1e-15), upper, lam)


def dependent_below(tableau: Array) -> float:
    """Return the pivot below which a row counts as numerically dependent, for the dtype of the tableau."""
    return DEPENDENT * float(namespace(tableau).finfo(tableau.dtype).eps)


def sweep(tableau: Array, k: int) -> Array:
    """Return the tableau (..., t, t + 1) swept on row k: pivoted on its k-th diagonal entry.

    This adds row k to the free rows P. The tableau holds ``K_PP^-1`` and ``K_PP^-1 b_P = -lam_P`` in the rows
    of P, and the Schur complement and s = K lam + b in the other rows.
    """
    xp = namespace(tableau)
    pivot = tableau[..., k, k]
    pivot = xp.where(pivot > dependent_below(tableau), pivot, xp.ones_like(pivot))[..., None]
    row = tableau[..., k, :] / pivot
    column = tableau[..., :, k] + 0.0
    column[..., k : k + 1] = 0.0  # with the index k, torch would copy 0.0 from the host and synchronise
    swept = tableau - column[..., :, None] * row[..., None, :]
    swept[..., :, k] = -column / pivot
    swept[..., k, :] = row
    swept[..., k, k] = 1.0 / pivot[..., 0]
    return swept


def inverse_of(K: Array, rows: Array) -> Array:
    """Return ``K_PP^-1`` (..., t, t) for the rows P of a mask (..., t), zero outside of P."""
    xp = namespace(K)
    per_norm = inverse(xp.sqrt(xp.linalg.diagonal(K)))
    rows = rows & (per_norm > 0)
    scale = per_norm[..., :, None] * per_norm[..., None, :]
    tableau = submatrix(K * scale, rows)
    for k in range(K.shape[-1]):
        tableau = sweep(tableau, k)
    return xp.where(rows[..., :, None] & rows[..., None, :], tableau * scale, xp.zeros_like(tableau))


def smallest_pivot(K: Array, rows: Array) -> Array:
    """Return the smallest pivot of K (..., t, t) restricted to the rows of a mask (..., t)."""
    rest = submatrix(K, rows)
    xp = namespace(rest)
    smallest = xp.ones_like(rest[..., 0, 0])
    for k in range(K.shape[-1]):
        pivot = rest[..., k, k]
        smallest = xp.minimum(smallest, pivot)
        pivot = xp.where(pivot > dependent_below(K), pivot, xp.ones_like(pivot))
        column = rest[..., :, k]
        rest = rest - column[..., :, None] * (column / pivot[..., None])[..., None, :]
    return smallest


def submatrix(K: Array, rows: Array) -> Array:
    """Return K with the identity in place of the rows and columns outside of a mask (..., t)."""
    xp = namespace(K)
    chosen = rows[..., :, None] & rows[..., None, :]
    return xp.where(chosen, K, identity_like(K))
