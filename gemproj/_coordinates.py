"""Coordinates of the rows, on the CPU: vectors V and a with the inner products of the rows of G and of g.

Coordinates from one more read of G resolve angles between rows of 1e-14: the search of stage 2, the
correction of x in stage 3 and the error bound use the same ones. Coordinates from K resolve 1e-7: the search
makes its own, in `gemproj._search.from_gram`, with the part of g in the span of the rows; those of the error
bound, in `whole_from_gram`, have all of g.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gemproj._arrays import namespace, to_numpy
from gemproj._constants import EPS, SMALL, WIDE_RANGE
from gemproj._problem import Problem
from gemproj._tiles import stacked
from gemproj._tspace import Gram, inverse


class Coordinates(NamedTuple):
    """Coordinates of the n problems of a batch whose G was read again.

    Attributes
    ----------
    where : array, shape (...)
        Mask of these problems.
    V : array, shape (n, t, m), or (1, t, m) if they have the same G
    a : array, shape (n, m)
    basis : array, shape (n, t, t), or None
        The dual bases of the free rows, see `dual_basis`, of problems whose ``g + G'lam`` loses digits. Other
        problems have zeros.
    loses : array, shape (...), or None
        Mask of the problems that have a dual basis, if there is any.
    """

    where: np.ndarray
    V: np.ndarray
    a: np.ndarray
    basis: np.ndarray | None = None
    loses: np.ndarray | None = None

    def gram(self, problem: Problem) -> Gram:
        """Return K, b and |g|^2 of a problem, from coordinates of the whole batch."""
        V, a, shape = self.V, self.a, (*problem.batch, problem.t)
        with np.errstate(all="ignore"):  # stage 2 raises an error that names the row
            K, b, gg = V @ V.swapaxes(-1, -2), V @ a[..., None], a[:, None] @ a[..., None]
        K = K[0] if problem.shared else K.reshape((*shape, problem.t))
        return Gram(K, b.reshape(shape), gg.reshape(problem.batch))

    def without_zeros(self, gram: Gram) -> Coordinates:
        """Write zeros for rows and gradients that count as zero in K, and return these coordinates."""
        diagonal = gram.K.diagonal(0, -2, -1)
        if np.count_nonzero(diagonal) < diagonal.size:
            rows = diagonal[None] if diagonal.ndim == 1 else diagonal[self.where]
            self.V[...] *= (rows != 0.0)[..., None]
        if not gram.gg.all():
            self.a[gram.gg[self.where].reshape(-1) == 0] = 0.0
        return self

    def corrected(self, free: np.ndarray, loses: np.ndarray) -> Coordinates:
        """Return these coordinates with the dual bases of the problems of a mask (...)."""
        V = np.broadcast_to(self.V, (len(self.a), *self.V.shape[1:]))
        loses = loses & self.where & free.any(axis=-1)
        basis, free = np.zeros((*V.shape[:2], V.shape[1])), free[self.where]
        for i in np.flatnonzero(loses[self.where]):
            basis[i] = dual_basis(V[i], free[i])
        return self._replace(basis=basis, loses=loses)

    def step(self, s: np.ndarray) -> np.ndarray:
        """Return the multipliers (n, t) of the step that makes slacks s (n, t) of free rows zero."""
        if self.basis is None:
            return 0.0 * s
        step = -np.einsum("nji,nj->ni", self.basis, np.einsum("nij,nj->ni", self.basis, s))
        return np.where(np.isfinite(step), step, 0.0)


def own_coordinates(problem: Problem) -> Coordinates | None:
    """Return G and g themselves, in float64, for a problem with no more columns than rows; else None.

    A large batch has its coordinates computed where K does not resolve the rows.
    """
    t, d, batch, G, g = problem.t, problem.columns, problem.batch, problem.rows[0], problem.vector[0]
    if not (problem.host and 0 < d <= t) or 0 in batch or (batch and d * (t + 1) > SMALL):
        return None
    if type(g) is np.ndarray and len(problem.rows) == 1 and problem.weight is None and not batch:
        whole = np.concatenate([a.reshape(-1, d) for a in (G, g)], dtype=np.float64)
    else:
        with problem.without_autocast():
            parts = [to_numpy(tile).copy() for _, tile in stacked(problem)]
        whole = np.concatenate(parts, axis=-1 if problem.shared or not batch else 0)
    where = np.ones(batch, dtype=bool)
    V, a = (whole[None, :t], whole[t:]) if problem.shared else (whole[..., :t, :], whole[..., t, :])
    return Coordinates(where, V.reshape(-1, t, d), a.reshape(-1, d))


def from_rows(problem: Problem, where: np.ndarray) -> Coordinates:
    """Return coordinates of the problems of a mask (...), from one more read of G and g.

    They are R' of a QR factorisation of the columns [G; g]', which takes one tile after the other.
    """
    if problem.batch and (problem.shared or not problem.host):
        each = [from_rows(problem.at(tuple(i)), np.array(True)) for i in np.argwhere(where)]
        return Coordinates(where, np.concatenate([r.V for r in each]), np.concatenate([r.a for r in each]))
    factors: dict[int, Any] = {}  # by the first problem
    with problem.without_autocast():
        for lead, tile in stacked(problem):
            first, xp = lead[0].start if lead else 0, namespace(tile)
            columns = xp.matrix_transpose(tile[where[lead]] if problem.batch else tile[None])
            if first in factors:
                columns = xp.concat([factors[first], columns], axis=-2)
            factors[first] = np.linalg.qr(columns, "r") if problem.host else xp.linalg.qr(columns)[1]
    whole = np.concatenate([np.swapaxes(to_numpy(R), -1, -2) for R in factors.values()])
    return Coordinates(where, np.ascontiguousarray(whole[:, :-1]), np.ascontiguousarray(whole[:, -1]))


def whole_from_gram(gram: Gram) -> np.ndarray:
    """Return coordinates [V; a] (..., t + 1, t + 1) from K, b and |g|^2.

    ``|g|^2`` is raised to at least ``b' K^+ b``, its smallest value for any g with ``G g = b``: below that
    value the Gram matrix is indefinite and has no such factor. The default `gg` of `solve_gram` may be lower.
    """
    n, cosines = unit_diagonal(gram.K)
    # g is scaled by a power of two, because the product with the pseudoinverse may overflow.
    size = np.exp2(-np.floor(np.log2(np.maximum(gram.gg, WIDE_RANGE[0])) / 2.0))
    b, gg = gram.b * size[..., None], gram.gg * size * size
    unit_b = b * inverse(n)
    z = np.sum(np.linalg.pinv(cosines, rcond=1e-14, hermitian=True) * unit_b[..., None, :], axis=-1)
    t = gram.b.shape[-1]
    whole = np.empty((*gram.b.shape[:-1], t + 1, t + 1))  # of the rows [G; g]
    whole[..., :t, :t], whole[..., t, t] = gram.K, np.maximum(gg, np.sum(unit_b * z, axis=-1))
    whole[..., :t, t] = whole[..., t, :t] = b
    n, cosines = unit_diagonal(whole)
    squares, basis = np.linalg.eigh(cosines)
    n[..., t] /= size
    return basis * np.sqrt(np.maximum(squares, 0.0))[..., None, :] * n[..., None]


def dual_basis(V: np.ndarray, free: np.ndarray) -> np.ndarray:
    """Return F (t, t) with ``F'F = K_PP^+`` for the free rows P of a mask (t,), and zeros elsewhere.

    The product would lose digits if rows nearly cancel. Singular values at the level of rounding are left
    out.
    """
    found, n = np.zeros((len(free), len(free))), np.linalg.norm(V[free], axis=1)
    U, S, _ = np.linalg.svd(V[free] / np.where(n > 0, n, 1.0)[:, None], full_matrices=False)
    used = 64.0 * EPS * np.max(S, initial=0.0) < S
    found[: np.count_nonzero(used), free] = (U[:, used] / S[used]).T * inverse(n)
    return found


def unit_diagonal(total: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the norms of the rows, and their cosines, from their Gram matrix."""
    n = np.sqrt(np.diagonal(total, axis1=-2, axis2=-1))
    return n, total * inverse(n)[..., :, None] * inverse(n)[..., None, :]
