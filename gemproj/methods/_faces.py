"""Linear algebra of the active-set search on a face of the feasible box, where some multipliers are free.

The other multipliers are held at a bound. Two classes compute the minimum over the free multipliers, and the
slacks of the other rows at this minimum: `Tableau` from K, with one rank-one update per pivot, and
`Factorisation` from a QR factorisation of the rows, which may be nearly dependent.
"""

from __future__ import annotations

import numpy as np

from gemproj._constants import EXCHANGE, ROUNDING
from gemproj._tspace import dependent_below, sweep


class Tableau:
    """The tableau [K | b], swept on the free rows."""

    def __init__(self, K: np.ndarray, b: np.ndarray) -> None:
        self.K, self.b = K, b
        self.clear()

    def clear(self) -> None:
        """Restart with no free row."""
        self.free = np.zeros(len(self.b), dtype=bool)
        self.swept = np.concatenate([self.K, self.b[:, None]], axis=1)

    def set_free(self, free: np.ndarray, first: np.ndarray) -> None:
        """Free the rows of a mask, except rows that depend on freed rows; rows in `first` are freed first."""
        self.clear()
        if free.any() and not self._set_independent(free):
            _free_one_by_one(self, free, first)

    def _set_independent(self, free: np.ndarray) -> bool:
        """Sweep on the rows of a mask at once; if they are dependent, change nothing and return False."""
        inside, outside = np.flatnonzero(free), np.flatnonzero(~free)
        try:
            factor = np.linalg.cholesky(self.K[np.ix_(inside, inside)])
        except np.linalg.LinAlgError:
            return False
        if np.diagonal(factor).min() ** 2 <= dependent_below(self.swept):
            return False
        half = np.linalg.solve(factor, np.eye(len(inside)))
        inverse = half.T @ half
        solved = np.linalg.solve(factor.T, np.linalg.solve(factor, self.swept[inside]))
        self.swept[outside] -= self.K[np.ix_(outside, inside)] @ solved
        self.swept[inside] = solved
        self.swept[np.ix_(inside, inside)] = inverse
        self.swept[np.ix_(outside, inside)] = -solved[:, outside].T
        self.free = free.copy()
        return True

    def distances(self) -> np.ndarray:
        """Return the squared distances (t,) of the rows that are not free from the span of the free rows."""
        return np.diagonal(self.swept)

    def pivot(self, j: int) -> None:
        """Add row j to the free rows or remove it: the sweep is its own inverse."""
        self.swept = sweep(self.swept, j)
        self.free[j] = not self.free[j]

    def dependent(self, j: int) -> bool:
        """Return whether row j is a combination of the free rows, to rounding."""
        return bool(self.swept[j, j] <= dependent_below(self.swept))

    def weights(self, j: int) -> np.ndarray:
        """Return w with ``G[j] = w @ G[free]`` for a row that depends on the free rows."""
        return self.swept[self.free, j]

    def trial(self, held: np.ndarray) -> np.ndarray:
        """Return -lam of the free rows and s of the other rows, at the minimum over the free multipliers."""
        return self.swept[:, -1] + self.swept[:, :-1] @ held

    def slack(self, lam: np.ndarray) -> np.ndarray:
        """Return the slack ``K lam + b``, without the rounding of the tableau."""
        return self.K @ lam + self.b

    def rounding(self, lam: np.ndarray) -> float:
        """Return the rounding error of the slacks of `trial`; only larger violations count."""
        return ROUNDING * (1.0 + float(np.abs(lam).sum()))

    def uncertainty(self, j: int, lam: np.ndarray) -> float:
        """Return the slack error of a dependent row j."""
        return EXCHANGE * (1.0 + float(np.abs(lam).sum()))


class Factorisation:
    """A QR factorisation of the free columns of A, where ``K = A'A`` and ``b = A'a - h``.

    Its methods return the same values as those of `Tableau`.
    """

    def __init__(self, A: np.ndarray, a: np.ndarray, h: np.ndarray | None = None) -> None:
        self.A, self.a = A, a
        self.h = np.zeros(A.shape[1]) if h is None else h
        self.clear()

    def clear(self) -> None:
        self._factor(np.arange(0))

    def _factor(self, rows: np.ndarray) -> None:
        """Factorise the free rows, given by their indices; their slack is zero if ``Q'x = right``."""
        self.rows, self.free = rows, np.zeros(self.A.shape[1], dtype=bool)
        self.free[rows] = True
        self.Q, self.R = np.linalg.qr(self.A[:, rows])
        self.right = solve_triangle(self.R.T, self.h[rows])
        self._taken = 0  # number of columns of Q that `distances` has projected out

    def set_free(self, free: np.ndarray, first: np.ndarray) -> None:
        self._factor(np.flatnonzero(free))
        if free.any() and not self._independent():
            self.clear()
            _free_one_by_one(self, free, first)

    def _independent(self) -> bool:
        # Column sums of |R^-1| are (1 + |w|_1) / pivot, see `dependent`; a singular R has no inverse.
        pivots = np.abs(np.diagonal(self.R))
        below = dependent_below(self.A)
        if len(pivots) < self.R.shape[1] or pivots.min() <= below:
            return False
        return bool(np.abs(np.linalg.inv(self.R)).sum(axis=0).max() * below < 1.0)

    def distances(self) -> np.ndarray:
        if not self._taken:
            self._apart = self.A.copy()
        new = self.Q[:, self._taken :]
        self._apart -= new @ (new.T @ self._apart)
        self._taken = self.Q.shape[1]
        return np.sum(self._apart * self._apart, axis=0)

    def pivot(self, j: int) -> None:
        if self.free[j]:
            self._factor(self.rows[self.rows != j])
            return
        # One step of Gram-Schmidt, because a new factorisation for each added row would take t times as long.
        outside, inside = self._outside(self.A[:, j]), self.Q.T @ self.A[:, j]
        pivot, k = float(np.linalg.norm(outside)), len(self.rows)
        R = np.zeros((k + 1, k + 1))
        R[:k, :k], R[:k, k], R[k, k] = self.R, inside, pivot
        self.Q, self.R = np.column_stack([self.Q, outside / pivot]), R
        self.right = np.append(self.right, (self.h[j] - inside @ self.right) / pivot)
        self.rows = np.append(self.rows, j)
        self.free[j] = True

    def dependent(self, j: int) -> bool:
        # If free rows nearly cancel, the error of their span is rounding times the weights of row j.
        noise = dependent_below(self.A) * (1.0 + np.abs(self.weights(j)).sum())
        return bool(np.linalg.norm(self._outside(self.A[:, j])) <= noise)

    def weights(self, j: int) -> np.ndarray:
        return solve_triangle(self.R, self.Q.T @ self.A[:, j])[np.argsort(self.rows)]

    def trial(self, held: np.ndarray) -> np.ndarray:
        target = self.a + self.A @ held
        x = self._outside(target) + self.Q @ self.right
        result = self.A.T @ x - self.h
        result[self.rows] = solve_triangle(self.R, self.Q.T @ target - self.right)
        return result

    def slack(self, lam: np.ndarray) -> np.ndarray:
        # Free rows have slack zero by construction; a slack computed from lam would contain rounding of lam.
        return np.where(self.free, 0.0, self.trial(np.where(self.free, 0.0, lam)))

    def rounding(self, lam: np.ndarray) -> float:
        # x is computed without the free multipliers, so they may be large without adding rounding.
        return ROUNDING * (1.0 + float(np.abs(lam[~self.free]).sum()))

    def uncertainty(self, j: int, lam: np.ndarray) -> float:
        return 10 * self.rounding(lam) * (1.0 + float(np.abs(self.weights(j)).sum()))

    def _outside(self, v: np.ndarray) -> np.ndarray:
        """Return the component of v orthogonal to the free rows; the second pass removes rounding."""
        for _ in range(2):
            v = v - self.Q @ (self.Q.T @ v)
        return v


def _free_one_by_one(faces: Tableau | Factorisation, wanted: np.ndarray, first: np.ndarray) -> None:
    """Free independent rows of `wanted`; each step frees the row farthest from the span of the free rows.

    Rows in `first` are freed before all other rows. Among dependent rows, this order selects rows at large
    angles, which keeps the multipliers small.
    """
    for group in (wanted & first, wanted & ~first):
        left = group.copy()
        while left.any():
            j = int(np.argmax(np.where(left, faces.distances(), -1.0)))
            if faces.dependent(j):
                break
            faces.pivot(j)
            left[j] = False


def solve_triangle(R: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the solution w of ``R w = b``; if R is exactly singular, the least-squares solution."""
    try:
        return np.linalg.solve(R, b)
    except np.linalg.LinAlgError:
        return np.linalg.lstsq(R, b, rcond=None)[0]
