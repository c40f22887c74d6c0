"""Algebra on the t x t problem that all methods share: scaling, residuals, sweeps.

The standard form of the dual problem is ``min 1/2 lam'K lam + b'lam, lower <= lam <= upper`` where
every entry of `lower` is 0, or -inf for an equality constraint. ``lower=None`` stands for zeros and
``upper=None`` for infinity. K may have fewer leading dimensions than b: one K for many b.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from gemproj._arrays import Array, device_of, namespace
from gemproj._constants import DEPENDENT


class Gram(NamedTuple):
    """The projection problem in t-space, in float64 (float32 on devices that have no float64).

    Attributes
    ----------
    K : array, shape (..., t, t)
        Gram matrix of the constraints, ``G @ G.T`` (``G @ diag(1/w) @ G.T`` with a metric w). Without
        leading dimensions where all problems of a batch have the same G.
    b : array, shape (..., t)
        Linear term, ``G @ g``: negative where g violates a constraint.
    gg : array, shape (...)
        Squared norm of g, ``g @ g`` (``g @ diag(w) @ g`` with a metric w).
    """

    K: Array
    b: Array
    gg: Array


class Measured(NamedTuple):
    """What stage 1 hands on.

    Attributes
    ----------
    gram : Gram
        On the CPU its arrays are NumPy's, whatever the library of G: a call costs a fifth of torch's.
    rounding : float
        Relative rounding of its entries.
    to_caller : callable
        Returns an array of t-space in the library and on the device of the caller's arrays.
    rows : Problem or None
        G and g, for what K has lost; None where there is only K, or only a part of G here.
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
    scale: Array  # multipliers of the given problem = scale * multipliers of this one


def normalise(
    K: Array,
    b: Array,
    lower: Array | None = None,
    upper: Array | None = None,
    start: Array | None = None,
) -> Unit:
    """Scale the rows of G to norm one and b to maximum one; neither the feasible set nor x moves.

    A row of norm zero constrains nothing: its multiplier is decoupled and ends at zero.
    """
    xp = namespace(K)
    norm = xp.sqrt(xp.linalg.diagonal(K))
    one, per_norm = xp.ones_like(norm), inverse(norm)
    unit_K = (K * per_norm[..., :, None]) * per_norm[..., None, :]
    unit_K = unit_K + xp.where(norm > 0, xp.zeros_like(norm), one)[..., None] * identity_like(K)
    unit_b = b * per_norm
    # Without rows there is nothing to take the maximum of.
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
    xp = namespace(a)
    positive = a > 0
    return xp.where(positive, 1.0 / xp.where(positive, a, xp.ones_like(a)), xp.zeros_like(a))


def identity_like(K: Array) -> Array:
    """Return the identity matrix (t, t) of the library, dtype and device of K."""
    xp = namespace(K)
    return xp.eye(K.shape[-1], dtype=K.dtype, device=device_of(K))


def matvec(K: Array, v: Array) -> Array:
    """Return K v for every problem of a batch, summed in the same order for each of them."""
    xp = namespace(K)
    return xp.sum(K * v[..., None, :], axis=-1)


def times_rows(weights: Array, rows: Array) -> Array:
    """Return weights (..., m, t) times rows (..., t, n), without rows that no weight uses.

    Zero times what is not finite is not zero, and a row that was left out may hold that.
    """
    xp = namespace(weights)
    used = xp.any(weights != 0, axis=-2)[..., None]
    return xp.matmul(weights, xp.where(used, rows, xp.zeros_like(rows[..., :1, :1])))


def clip(lam: Array, lower: Array | None, upper: Array | None) -> Array:
    """Return lam moved into its bounds."""
    xp = namespace(lam)
    lam = xp.maximum(lam, xp.zeros_like(lam) if lower is None else lower)
    return lam if upper is None else xp.minimum(lam, upper)


def natural_residual(lam: Array, s: Array, lower: Array | None, upper: Array | None) -> Array:
    """Return max |lam - clip(lam - s)| for s = K lam + b, shape (...): zero exactly at the solution."""
    xp = namespace(lam)
    return xp.max(xp.abs(lam - clip(lam - s, lower, upper)), axis=-1)


def complementarity(lam: Array, s: Array, upper: Array | None) -> Array:
    """Return the largest product of a multiplier and a slack of which one should be zero, shape (...)."""
    xp = namespace(lam)
    if upper is not None:  # at the upper bound a negative slack is right
        s = xp.where(lam >= upper, xp.maximum(s, xp.zeros_like(s)), s)
    return xp.max(xp.abs(lam * s), axis=-1)


def snap(lam: Array, upper: Array) -> Array:
    """Return lam with multipliers that miss their upper bound by the rounding of scales moved onto it."""
    xp = namespace(lam)
    return xp.where(lam >= upper * (1.0 - 1e-15), upper, lam)


def dependent_below(tableau: Array) -> float:
    """Return the pivot below which a row counts as numerically dependent, for the dtype of the tableau."""
    return DEPENDENT * float(namespace(tableau).finfo(tableau.dtype).eps)


def sweep(tableau: Array, k: int) -> Array:
    """Move row k into the free set: pivot the tableau (..., t, t + 1) on its k-th diagonal entry.

    Swept on a set P the tableau holds ``K_PP^-1`` and ``K_PP^-1 b_P = -lam_P`` in the rows of P, and
    the Schur complement and s = K lam + b in the others.
    """
    xp = namespace(tableau)
    pivot = tableau[..., k, k]
    pivot = xp.where(pivot > dependent_below(tableau), pivot, xp.ones_like(pivot))[..., None]
    row = tableau[..., k, :] / pivot
    column = tableau[..., :, k] + 0.0
    column[..., k] = 0.0
    swept = tableau - column[..., :, None] * row[..., None, :]
    swept[..., :, k] = -column / pivot
    swept[..., k, :] = row
    swept[..., k, k] = 1.0 / pivot[..., 0]
    return swept


def inverse_of(K: Array, rows: Array) -> Array:
    """Return ``K_PP^-1`` (..., t, t) for the chosen rows P, boolean (..., t), and zero for the others."""
    xp = namespace(K)
    per_norm = inverse(xp.sqrt(xp.linalg.diagonal(K)))
    rows = rows & (per_norm > 0)
    scale = per_norm[..., :, None] * per_norm[..., None, :]
    tableau = submatrix(K * scale, rows)
    for k in range(K.shape[-1]):
        tableau = sweep(tableau, k)
    return xp.where(rows[..., :, None] & rows[..., None, :], tableau * scale, xp.zeros_like(tableau))


def smallest_pivot(K: Array, rows: Array) -> Array:
    """Return the smallest pivot of K (..., t, t) restricted to the chosen rows, boolean (..., t)."""
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
    """Return K for the chosen rows, boolean (..., t), and the identity for the others."""
    xp = namespace(K)
    chosen = rows[..., :, None] & rows[..., None, :]
    return xp.where(chosen, K, identity_like(K))
