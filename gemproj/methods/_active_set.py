"""Exact solution of one problem of any size: Lawson and Hanson's active-set method, with upper bounds.

The search is one; the linear algebra under it is either a tableau of K, which costs one rank-one
update per pivot, or an orthogonal factorisation of the rows, for which they may be nearly dependent.
"""

from __future__ import annotations

import numpy as np

from gemproj.methods._enumeration import dependent_below, sweep
from gemproj.methods._method import natural_residual

_ROUNDING = 4e-15  # of a residual s, in units of the sizes of its summands


class Tableau:
    """The minimum over any set of free multipliers, from [K | b] swept on that set."""

    def __init__(self, K: np.ndarray, b: np.ndarray) -> None:
        self.K, self.b = K, b
        self.clear()

    def clear(self) -> None:
        """Start from no free multiplier."""
        self.free = np.zeros(len(self.b), dtype=bool)
        self.swept = np.concatenate([self.K, self.b[:, None]], axis=1)

    def set_free(self, free: np.ndarray) -> bool:
        """Sweep on a whole set at once; False, and no set, if its rows are dependent."""
        self.clear()
        if not free.any():
            return True
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

    def pivot(self, j: int) -> None:
        """Move row j into the free set or out of it: the sweep is its own inverse."""
        self.swept = sweep(self.swept, j)
        self.free[j] = not self.free[j]

    def dependent(self, j: int) -> bool:
        """Tell whether row j is a combination of the free rows, to rounding."""
        return bool(self.swept[j, j] <= dependent_below(self.swept))

    def trial(self, held: np.ndarray) -> np.ndarray:
        """Return -lam of the free rows and s of the others, at the minimum over the free multipliers."""
        return self.swept[:, -1] + self.swept[:, :-1] @ held

    def residual(self, lam: np.ndarray, upper: np.ndarray | None) -> float:
        """Return the natural residual of what a search found, from K and b themselves."""
        return float(natural_residual(lam, self.K @ lam + self.b, upper))

    def rounding(self, lam: np.ndarray) -> float:
        """Return what rounding may do to s of `trial`: a constraint counts as violated only beyond."""
        return _ROUNDING * (1.0 + float(np.abs(lam).sum()))


class Factorisation:
    """The same from ``A = [columns: rows of G]`` and a = g in some basis: K = A'A and b = A'a, not formed."""

    def __init__(self, A: np.ndarray, a: np.ndarray) -> None:
        self.A, self.a = A, a
        self.clear()

    def clear(self) -> None:
        self.set_free(np.zeros(self.A.shape[1], dtype=bool))

    def set_free(self, free: np.ndarray) -> bool:
        self.free = free.copy()
        self.Q, self.R = np.linalg.qr(self.A[:, free])
        if not free.any():
            return True
        # Columns of R^-1 are (1 + |w|) / pivot, see `dependent`; a singular R has no inverse.
        pivots = np.abs(np.diagonal(self.R))
        below = dependent_below(self.A)
        if pivots.min() <= below or np.abs(np.linalg.inv(self.R)).sum(axis=0).max() * below >= 1.0:
            self.clear()
            return False
        return True

    def pivot(self, j: int) -> None:
        free = self.free.copy()
        free[j] = not free[j]
        self.free = free
        self.Q, self.R = np.linalg.qr(self.A[:, free])

    def dependent(self, j: int) -> bool:
        # Where free rows nearly cancel, their span is only known to rounding times the weights w of row j.
        w = solve_triangle(self.R, self.Q.T @ self.A[:, j])
        noise = dependent_below(self.A) * (1.0 + np.abs(w).sum())
        return bool(np.linalg.norm(self._outside(self.A[:, j])) <= noise)

    def trial(self, held: np.ndarray) -> np.ndarray:
        target = self.a + self.A @ held
        result = self.A.T @ self._outside(target)
        result[self.free] = solve_triangle(self.R, self.Q.T @ target)
        return result

    def residual(self, lam: np.ndarray, upper: np.ndarray | None) -> float:
        # The s of free rows are zero by construction; from lam itself they come with its rounding.
        s = np.where(self.free, 0.0, self.trial(np.where(self.free, 0.0, lam)))
        return float(natural_residual(lam, s, upper))

    def rounding(self, lam: np.ndarray) -> float:
        # Free multipliers, however large, do not enter x.
        return _ROUNDING * (1.0 + float(np.abs(lam[~self.free]).sum()))

    def _outside(self, v: np.ndarray) -> np.ndarray:
        """Return the part of v that is orthogonal to the free rows; twice is enough."""
        for _ in range(2):
            v = v - self.Q @ (self.Q.T @ v)
        return v


def solve_triangle(R: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Solve R w = b; where R is singular to the last bit, for the smallest w."""
    try:
        return np.linalg.solve(R, b)
    except np.linalg.LinAlgError:
        return np.linalg.lstsq(R, b, rcond=None)[0]


def solve_active_set(
    faces: Tableau | Factorisation, upper: np.ndarray | None, start: np.ndarray | None
) -> tuple[np.ndarray, int, float]:
    """Solve ``min 1/2 lam'K lam + b'lam, 0 <= lam <= upper`` for rows of norm one.

    Updates add rounding, so a search that ends with a violated constraint is resumed from faces made
    afresh.

    Returns
    -------
    lam : ndarray, shape (t,)
        The best iterate: the solution, unless the budget of pivots ran out.
    pivots : int
    residual : float
        The natural residual, max |lam - clip(lam - s, 0, upper)|.
    """
    t = len(faces.free)
    bound = np.full(t, np.inf) if upper is None else upper
    lam = np.zeros(t) if start is None else np.clip(start, 0.0, bound)
    best, pivots = np.zeros(t), 0
    smallest = faces.residual(best, upper)
    for _ in range(3):
        search = _Search(faces, bound, lam)
        search.run(budget=6 * t)
        pivots += search.pivots
        lam = search.lam
        residual = faces.residual(lam, upper)
        if residual < smallest:
            best, smallest = lam, residual
        if smallest <= _ROUNDING * (1.0 + np.abs(best).sum()):
            break
    return best, pivots, smallest


class _Search:
    """The state of one search: a feasible lam, and which of its multipliers are free."""

    def __init__(self, faces: Tableau | Factorisation, bound: np.ndarray, lam: np.ndarray) -> None:
        self.faces, self.bound, self.lam = faces, bound, lam.copy()
        self.pivots = 0
        free = (lam > 0) & (lam < bound)
        if not faces.set_free(free):
            self.lam[free] = 0.0

    def run(self, budget: int) -> None:
        """Pivot until no constraint is violated, with the least-index rule past the budget."""
        barred = np.zeros(len(self.lam), dtype=bool)
        entered = -1
        while True:
            if self._move_to_trial():
                barred[:] = False
                # A row that leaves in the move it entered for did so by rounding: not again at once.
                barred[entered] = entered >= 0 and not self.faces.free[entered]
            s = self._trial()
            at_upper = self.lam >= self.bound
            shut = self.faces.free | barred | (self.bound <= 0)
            violation = np.where(shut, 0.0, np.where(at_upper, s, -s))
            violated = violation > self.faces.rounding(self.lam)
            if not violated.any() or self.pivots > 2 * budget:
                return
            # The most violated row is the fast choice; the first one cannot cycle.
            entered = int(np.argmax(violation if self.pivots <= budget else violated))
            if self.faces.dependent(entered):
                barred[entered] = True
            else:
                self._pivot(entered)

    def _trial(self) -> np.ndarray:
        return self.faces.trial(np.where(self.faces.free, 0.0, self.lam))

    def _move_to_trial(self) -> bool:
        """Go to the minimum over the free multipliers; tell whether any met a bound and was dropped."""
        dropped = False
        while self.faces.free.any():
            free = np.flatnonzero(self.faces.free)
            here, trial, bound = self.lam[free], -self._trial()[free], self.bound[free]
            outside = (trial <= 0) | (trial >= bound)
            if not outside.any():
                self.lam[free] = trial
                break
            target = np.where(trial <= 0, 0.0, bound)
            gap = trial - here
            reach = np.where(
                outside, np.divide(target - here, gap, out=np.zeros_like(gap), where=gap != 0), np.inf
            )
            step = min(max(reach.min(), 0.0), 1.0)
            blocking = reach <= step
            self.lam[free] = np.where(blocking, target, np.clip(here + step * gap, 0.0, bound))
            for j in free[blocking]:
                self._pivot(j)
            dropped = True
        return dropped

    def _pivot(self, j: int) -> None:
        self.faces.pivot(j)
        self.pivots += 1
