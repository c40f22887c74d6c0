"""Exact solution of small problems: try every active set, keep the one that meets the KKT conditions."""

from __future__ import annotations

from functools import lru_cache
from itertools import product

import numpy as np

from gemproj._array import Array, device_of, namespace
from gemproj.methods._constants import DEPENDENT
from gemproj.methods._method import clip, identity_like, matvec, natural_residual

AT_ZERO, FREE, AT_UPPER = 0, 1, 2


def enumerate_active_sets(K: Array, b: Array, upper: Array | None) -> Array:
    """Solve ``min 1/2 lam'K lam + b'lam, 0 <= lam <= upper`` for rows of norm one.

    The tableau [K | b] is swept row by row with and without each row: after row k there is one copy
    per choice for rows 0 .. k, and in the end 2^t of them (3^t with an upper bound), each with its
    solution. No step depends on a value, so a batch costs no branches and a device
    is never waited for.

    Returns
    -------
    array, shape (..., t)
        The multipliers of the set with the smallest natural residual, computed anew from K and b.
    """
    xp = namespace(K)
    t = b.shape[-1]
    device = device_of(b)
    tableau = xp.concat([K, b[..., None]], axis=-1)[..., None, :, :]
    dependent = xp.zeros(tableau.shape[:-2], dtype=xp.bool, device=device)
    for k in range(t):
        pivot = tableau[..., k, k]
        branches = [tableau, sweep(tableau, k)]
        flags = [dependent, dependent | ~(pivot > dependent_below(tableau))]
        if upper is not None:
            held = xp.concat([tableau[..., :t], _at_upper(tableau, upper, k)], axis=-1)
            branches.append(held)
            flags.append(dependent)
        tableau = xp.concat(branches, axis=-3)
        dependent = xp.concat(flags, axis=-1)

    states = xp.asarray(_states(t, 2 if upper is None else 3), device=device)  # (sets, t)
    free = xp.astype(states == FREE, b.dtype)
    lam = -tableau[..., t] * free
    if upper is not None:
        lam = lam + xp.astype(states == AT_UPPER, b.dtype) * upper[..., None, :]
    K, b = K[..., None, :, :], b[..., None, :]
    upper = None if upper is None else upper[..., None, :]
    lam = clip(lam, upper)
    residual = natural_residual(lam, matvec(K, lam) + b, upper)
    residual = xp.where(dependent | ~xp.isfinite(residual), xp.full_like(residual, xp.inf), residual)
    # Ties go to the first set: where no constraint is violated that is the empty one, and x is g.
    best = xp.argmin(residual, axis=-1, keepdims=True)
    chosen = best == xp.arange(residual.shape[-1], device=device)
    return xp.sum(xp.where(chosen[..., None], lam, xp.zeros_like(lam)), axis=-2)


def sweep(tableau: Array, k: int) -> Array:
    """Move row k into the active set: pivot the tableau (..., t, t + 1) on its k-th diagonal entry.

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


def smallest_pivot(K: Array, rows: Array) -> Array:
    """Return the smallest pivot of K (..., t, t) restricted to a set of `rows`, boolean (..., t)."""
    xp = namespace(K)
    rest, smallest = only(K, rows), xp.ones_like(K[..., 0, 0])
    for k in range(K.shape[-1]):
        pivot = rest[..., k, k]
        smallest = xp.minimum(smallest, pivot)
        pivot = xp.where(pivot > dependent_below(K), pivot, xp.ones_like(pivot))
        column = rest[..., :, k]
        rest = rest - column[..., :, None] * (column / pivot[..., None])[..., None, :]
    return smallest


def solve_on(K: Array, b: Array, rows: Array) -> Array:
    """Return ``K_PP^-1 b_P`` for the chosen rows P, boolean (..., t), and zero for the others."""
    xp = namespace(K)
    b = xp.where(rows, b, xp.zeros_like(b))
    tableau = xp.concat([only(K, rows), b[..., None]], axis=-1)
    for k in range(b.shape[-1]):
        tableau = sweep(tableau, k)
    return xp.where(rows, tableau[..., -1], xp.zeros_like(b))


def only(K: Array, rows: Array) -> Array:
    """Return K for the chosen rows, boolean (..., t), and the identity for the others."""
    xp = namespace(K)
    chosen = rows[..., :, None] & rows[..., None, :]
    return xp.where(chosen, K, identity_like(K) * xp.ones_like(K))


def dependent_below(tableau: Array) -> float:
    """Return the pivot below which a row counts as dependent, for the dtype of the tableau."""
    xp = namespace(tableau)
    return DEPENDENT * float(xp.finfo(tableau.dtype).eps)


def _at_upper(tableau: Array, upper: Array, k: int) -> Array:
    """Return the last column of the tableau with multiplier k held at its upper bound."""
    return tableau[..., -1:] + (tableau[..., k] * upper[..., k][..., None, None])[..., None]


@lru_cache(maxsize=32)
def _states(t: int, choices: int) -> np.ndarray:
    """Return the state of each row in each set, (choices^t, t), in the order of the concatenations."""
    states = np.array(list(product(range(choices), repeat=t)), dtype=np.int64).reshape(choices**t, t)
    return states[:, ::-1].copy()
