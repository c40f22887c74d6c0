"""Coordinates of the rows: a square factor F with ``[G; g] = F'Q'``, where Q has orthonormal columns.

``F'F`` is the Gram matrix of [G; g]. F resolves angles between rows down to 1e-14, K only down to 1e-7. The
columns of ``A = F[:, :t]`` are the rows of G in the basis Q, and ``a = F[:, t]`` is g. All functions run on
the CPU. They take one problem, unless their shapes have batch dimensions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gemproj._constants import CUTOFF, EPS, HOPELESS, OPTIMAL_WITHIN, SMALL
from gemproj._problem import Problem
from gemproj._tiles import stacked
from gemproj._tspace import Gram, inverse, matvec, normalise, snap
from gemproj.methods._active_set import solve_active_set
from gemproj.methods._faces import Factorisation
from gemproj.methods._method import Status


def from_gram(gram: Gram) -> np.ndarray:
    """Return coordinates (..., t + 1, t + 1) from K, b and |g|^2; they resolve angles of 1e-7.

    ``|g|^2`` is raised to at least ``b' K^+ b``, its smallest value for any g with ``G g = b``: below that
    value the Gram matrix is indefinite and has no factor F. The default `gg` of `solve_gram` may be lower.
    """
    unit = normalise(gram.K, gram.b)
    z = matvec(np.linalg.pinv(unit.K, rcond=1e-14, hermitian=True), unit.b)
    gram = gram._replace(gg=np.maximum(gram.gg, np.sum(gram.b * unit.scale * z, axis=-1)))
    n, cosines = _unit_diagonal(_whole(gram))
    squares, basis = np.linalg.eigh(cosines)
    roots = np.sqrt(np.maximum(squares, 0.0))[..., None]
    return roots * np.swapaxes(basis, -1, -2) * n[..., None, :]


def from_rows(problem: Problem, gram: Gram, rounding: float) -> np.ndarray:
    """Return coordinates (t + 1, t + 1) from one more read of G and g; they resolve angles of 1e-14.

    A small problem is factorised by Householder's QR. In a large problem the rows are preconditioned with the
    eigenvectors of K, and the Gram matrix of the result is factorised, as in CholeskyQR2. Rows that were left
    out, which have norm zero in `gram`, stay zero.
    """
    t = problem.t
    n, cosines = _unit_diagonal(_whole(gram))
    with problem.without_autocast():
        if problem.columns * (t + 1) <= SMALL:
            rows = np.concatenate([tile.T.copy() for _, tile in stacked(problem, problem.wide)])
            rows[:, n == 0] = 0.0
            R: Any = np.linalg.qr(rows, mode="r")
            return np.concatenate([R, np.zeros((t + 1 - len(R), t + 1))])
        squares, basis = np.linalg.eigh(cosines)
        # Eigenvalues below the rounding of K are noise. For their rows, any finite scale suffices.
        scale = np.sqrt(np.maximum(squares, (t + 1) * rounding))
        forward, backward = (basis / scale).T * inverse(n), n[:, None] * basis * scale
        total = np.zeros((t + 1, t + 1))
        for _, tile in stacked(problem, problem.wide):
            tile[n == 0] = 0.0
            rows = forward @ tile
            total += rows @ rows.T
    n, cosines = _unit_diagonal(total)
    squares, basis = np.linalg.eigh(cosines)
    return ((backward * n) @ (basis * np.sqrt(np.maximum(squares, 0.0)))).T


def of_problems(problem: Problem, gram: Gram, rounding: float, chosen: np.ndarray) -> np.ndarray:
    """Return `from_rows` of the chosen problems and zeros for all other problems, (*batch, t + 1, t + 1)."""
    t, batch = problem.t, problem.batch
    K, found = np.broadcast_to(gram.K, (*batch, t, t)), np.zeros((*batch, t + 1, t + 1))
    if not batch or problem.shared or problem.columns * (t + 1) > SMALL:
        for i in map(tuple, np.argwhere(chosen)):
            found[i] = from_rows(problem.at(i), Gram(K[i], gram.b[i], gram.gg[i]), rounding)
        return found
    with problem.without_autocast():
        for lead, tile in stacked(problem, problem.wide):  # a tile holds all columns of its problems
            here = chosen[lead]
            rows = tile[here]
            rows[:, :t][np.diagonal(K[lead][here], axis1=-2, axis2=-1) == 0] = 0.0
            R: Any = np.linalg.qr(np.swapaxes(rows, -1, -2), mode="r")
            found[lead][here, : R.shape[-2]] = R
    return found


class UnitRows(NamedTuple):
    """One problem in coordinates and in standard form, scaled to rows of norm one and size one.

    `used` is the mask (t,) of the rows with a nonzero norm; rows of norm zero are left out. Multipliers of
    the given problem are ``base + lam / scale``, and its vectors are `size` times as long.
    """

    A: np.ndarray
    a: np.ndarray
    h: np.ndarray
    lam: np.ndarray
    lower: np.ndarray
    upper: np.ndarray
    used: np.ndarray
    base: np.ndarray
    scale: np.ndarray
    size: float


def unit_rows(
    F: np.ndarray, h: np.ndarray | None, lower: np.ndarray, upper: np.ndarray, lam: np.ndarray
) -> UnitRows | None:
    """Return a problem and its multipliers as `UnitRows`; None if all its rows or its size are zero."""
    base = np.where(np.isfinite(lower), lower, 0.0)
    A, a = F[:, :-1], F[:, -1] + F[:, :-1] @ base
    n = np.linalg.norm(A, axis=0)
    used, right = n > 0, np.zeros(len(n)) if h is None else h * inverse(n)
    asked = np.where(np.isinf(lower), np.abs(right), np.maximum(right, 0.0))
    asked = np.minimum(asked, (upper - base) * np.where(used, n, 1.0))  # the penalty limits how far x moves
    size = max(float(np.linalg.norm(a)), float(asked.max(initial=0.0)))
    if size == 0.0 or not used.any():
        return None
    n, low = n[used], np.where(np.isinf(lower[used]), -np.inf, 0.0)
    scale = n / size
    high, start = (upper - base)[used] * scale, (lam - base)[used] * scale
    return UnitRows(A[:, used] / n, a / size, right[used] / size, start, low, high, used, base, scale, size)


def solve_in_coordinates(
    F: np.ndarray, h: np.ndarray | None, lower: np.ndarray, upper: np.ndarray, start: np.ndarray
) -> tuple[np.ndarray, int, Status]:
    """Return multipliers, number of pivots and status for coordinates F of rows of any norm."""
    unit = unit_rows(F, h, lower, upper, start)
    lam = np.where(np.isfinite(lower), lower, 0.0)
    if unit is None:
        return lam, 0, Status.OPTIMAL
    A, a, right, first, low, high, *_ = unit
    found, pivots, residual = solve_active_set(
        Factorisation(A, a, right), low, high, np.clip(first, low, high)
    )
    lam[unit.used] += found / unit.scale
    status = Status.OPTIMAL if residual <= OPTIMAL_WITHIN * EPS else Status.STALLED
    # If x must be moved far to satisfy the free rows, float64 multipliers cannot represent the solution.
    if settle(A, a, found, (found > low) & (found < high), right)[1] > HOPELESS:
        status |= Status.UNRESOLVED
    return snap(lam, upper), pivots, status


def span(A: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the singular value decomposition ``A V' = U S`` of A with its columns scaled to norm one.

    Singular values at the level of rounding are left out. U (m, k) is an orthonormal basis of the columns of
    A (m, t), and ``V' S^-2 V`` is the pseudo-inverse of A'A for columns of norm one.
    """
    n = np.linalg.norm(A, axis=0)
    n = np.where(n > 0, n, 1.0)
    U, S, V = np.linalg.svd(A / n, full_matrices=False)
    used = CUTOFF * np.max(S, initial=0.0) < S
    return U[:, used], S[used], V[used] / n


def settle(
    A: np.ndarray, a: np.ndarray, lam: np.ndarray, free: np.ndarray, h: np.ndarray | None
) -> tuple[np.ndarray, float]:
    """Move ``x = a + A lam`` to ``A_P'x = h_P`` for the free rows P; return x and the distance of this move.

    The distance is the rounding error of x, which is large if rows nearly cancel and multipliers are large.
    The new x is the exact projection of a gradient with an error of this size. A projection does not increase
    such an error.
    """
    U, S, V = span(A[:, free])
    target = 0.0 if h is None else (V @ h[free]) / S
    x = a + A @ lam
    moved = U @ (U.T @ x - target)
    x = x - moved
    return x - U @ (U.T @ x - target), float(np.linalg.norm(moved))


def inverse_on(A: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return ``K_PP^+`` for the rows P of a mask (t,) as two factors (2, t, t), zero outside of P.

    The second factor is applied first. The product of the factors would lose digits if rows nearly cancel.
    """
    _, S, V = span(A[:, rows])
    found = np.zeros((2, len(rows), len(rows)))
    found[1, : len(S), rows] = (V / S[:, None]).T
    found[0] = found[1].T
    return found


def _whole(gram: Gram) -> np.ndarray:
    """Return the Gram matrix (..., t + 1, t + 1) of the rows [G; g]."""
    t = gram.b.shape[-1]
    whole = np.empty((*gram.b.shape[:-1], t + 1, t + 1))
    whole[..., :t, :t], whole[..., t, t] = gram.K, gram.gg
    whole[..., :t, t] = whole[..., t, :t] = gram.b
    return whole


def _unit_diagonal(total: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the norms of the rows, and their cosines, from their Gram matrix."""
    n = np.sqrt(np.diagonal(total, axis1=-2, axis2=-1))
    return n, total * inverse(n)[..., :, None] * inverse(n)[..., None, :]
