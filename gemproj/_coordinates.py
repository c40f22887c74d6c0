"""Rows in coordinates: F with ``[G; g] = F'Q'``, Q orthonormal, is a square root of K, b and |g|^2.

In F rows may be dependent up to 1e-14 where K resolves 1e-7. The columns of ``A = F[:, :t]`` are the
rows of G, and ``a = F[:, t]`` is g. All on the CPU, and for one problem unless shapes say otherwise.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gemproj._problem import Problem
from gemproj._tiles import stacked
from gemproj._tspace import Gram, inverse, matvec, normalise

# Singular values of unit columns below this many units of rounding, relative to the largest one, are zero.
_CUTOFF = 64.0 * float(np.finfo(np.float64).eps)
# Elements of a problem that is factored directly.
SMALL = 1 << 17


def from_gram(gram: Gram) -> np.ndarray:
    """Return coordinates (..., t + 1, t + 1) from K, b and |g|^2; they resolve angles of 1e-7.

    A ``|g|^2`` below ``b' K^+ b``, the smallest of any g with ``G g = b``, is raised to that, since an
    indefinite matrix has no coordinates: the default of `solve_gram` may be below.
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

    A small problem is factored by Householder's QR. Otherwise the rows are preconditioned with the
    eigenvectors of K and the Gram matrix of the result is factored, as in CholeskyQR2. Rows that are
    zero in `gram`, because they were left out, stay zero.
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
        # Not below the rounding of K: such directions are wrong anyway, and only have to be made larger.
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


def span(A: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return U, S and V with ``A V' = U S`` on unit columns, without singular values that are rounding.

    U (m, k) is an orthonormal basis of the columns of A (m, t), and ``V' S^-2 V = (A'A)^+`` on unit columns.
    """
    n = np.linalg.norm(A, axis=0)
    n = np.where(n > 0, n, 1.0)
    U, S, V = np.linalg.svd(A / n, full_matrices=False)
    used = _CUTOFF * np.max(S, initial=0.0) < S
    return U[:, used], S[used], V[used] / n


def settle(
    A: np.ndarray, a: np.ndarray, lam: np.ndarray, free: np.ndarray, h: np.ndarray | None
) -> tuple[np.ndarray, float]:
    """Return x = a + A lam moved to ``A_P'x = h_P`` for the free rows P, and the distance that it moved.

    That distance is the rounding of x, large where rows nearly cancel and multipliers are large. The
    result is the projection of a gradient that is as much off, and projections do not expand that.
    """
    U, S, V = span(A[:, free])
    target = 0.0 if h is None else (V @ h[free]) / S
    x = a + A @ lam
    moved = U @ (U.T @ x - target)
    x = x - moved
    return x - U @ (U.T @ x - target), float(np.linalg.norm(moved))


def solve_on_rows(A: np.ndarray, u: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the smallest ``K_PP^-1 u_P`` for the chosen rows P, and zero for the others."""
    _, S, V = span(A[:, rows])
    z = np.zeros(len(u))
    z[rows] = V.T @ ((V @ u[rows]) / S**2)
    return z


def _whole(gram: Gram) -> np.ndarray:
    """Return the Gram matrix (..., t + 1, t + 1) of the rows [G; g]."""
    t = gram.b.shape[-1]
    whole = np.empty((*gram.b.shape[:-1], t + 1, t + 1))
    whole[..., :t, :t], whole[..., t, t] = gram.K, gram.gg
    whole[..., :t, t] = whole[..., t, :t] = gram.b
    return whole


def _unit_diagonal(total: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split a Gram matrix into norms and cosines."""
    n = np.sqrt(np.diagonal(total, axis1=-2, axis2=-1))
    return n, total * inverse(n)[..., :, None] * inverse(n)[..., None, :]
