"""Exact solution of one problem of any size: Lawson and Hanson's active-set method, with bounds.

The search is one; the linear algebra under it is either a tableau of K, which costs one rank-one
update per pivot, or an orthogonal factorisation of the rows, for which they may be nearly dependent.
"""

from __future__ import annotations

import numpy as np

from gemproj._constants import BUDGET, EXCHANGE, NEAR_ZERO, PATIENCE, ROUNDING, SEARCHES
from gemproj._tspace import dependent_below, sweep


class Tableau:
    """The minimum over any set of free multipliers, from [K | b] swept on that set."""

    def __init__(self, K: np.ndarray, b: np.ndarray) -> None:
        self.K, self.b = K, b
        self.clear()

    def clear(self) -> None:
        """Start from no free multiplier."""
        self.free = np.zeros(len(self.b), dtype=bool)
        self.swept = np.concatenate([self.K, self.b[:, None]], axis=1)

    def set_free(self, free: np.ndarray, first: np.ndarray) -> None:
        """Sweep on a whole set at once, without rows that depend on others of it; rows `first` come first."""
        self.clear()
        if free.any() and not self._set_independent(free):
            _free_one_by_one(self, free, first)

    def _set_independent(self, free: np.ndarray) -> bool:
        """Sweep on a set of independent rows; False, and nothing done, if they are dependent."""
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

    def distance(self, j: int) -> float:
        """Return the squared distance of row j from the span of the free rows."""
        return float(self.swept[j, j])

    def pivot(self, j: int) -> None:
        """Move row j into the free set or out of it: the sweep is its own inverse."""
        self.swept = sweep(self.swept, j)
        self.free[j] = not self.free[j]

    def dependent(self, j: int) -> bool:
        """Tell whether row j is a combination of the free rows, to rounding."""
        return bool(self.swept[j, j] <= dependent_below(self.swept))

    def weights(self, j: int) -> np.ndarray:
        """Return w with ``G[j] = w @ G[free]`` for a row that depends on the free rows."""
        return self.swept[self.free, j]

    def trial(self, held: np.ndarray) -> np.ndarray:
        """Return -lam of the free rows and s of the others, at the minimum over the free multipliers."""
        return self.swept[:, -1] + self.swept[:, :-1] @ held

    def slack(self, lam: np.ndarray) -> np.ndarray:
        """Return s of what a search found, from K and b themselves."""
        return self.K @ lam + self.b

    def rounding(self, lam: np.ndarray) -> float:
        """Return the rounding of s of `trial`: a constraint is violated only beyond it."""
        return ROUNDING * (1.0 + float(np.abs(lam).sum()))


class Factorisation:
    """The same in coordinates: K = A'A and b = A'a - h, not formed."""

    def __init__(self, A: np.ndarray, a: np.ndarray, h: np.ndarray | None = None) -> None:
        self.A, self.a = A, a
        self.h = np.zeros(A.shape[1]) if h is None else h
        self.clear()

    def clear(self) -> None:
        self._factor(np.zeros(self.A.shape[1], dtype=bool))

    def _factor(self, free: np.ndarray) -> None:
        """Factor the free rows; ``Q'x = right`` where their slack is zero."""
        self.free = free
        self.Q, self.R = np.linalg.qr(self.A[:, free])
        self.right = solve_triangle(self.R.T, self.h[free])

    def set_free(self, free: np.ndarray, first: np.ndarray) -> None:
        self._factor(free.copy())
        if free.any() and not self._independent():
            self.clear()
            _free_one_by_one(self, free, first)

    def _independent(self) -> bool:
        # Columns of R^-1 are (1 + |w|) / pivot, see `dependent`; a singular R has no inverse.
        pivots = np.abs(np.diagonal(self.R))
        below = dependent_below(self.A)
        if len(pivots) < self.R.shape[1] or pivots.min() <= below:
            return False
        return bool(np.abs(np.linalg.inv(self.R)).sum(axis=0).max() * below < 1.0)

    def distance(self, j: int) -> float:
        outside = self._outside(self.A[:, j])
        return float(outside @ outside)

    def pivot(self, j: int) -> None:
        free = self.free.copy()
        free[j] = not free[j]
        self._factor(free)

    def dependent(self, j: int) -> bool:
        # Where free rows nearly cancel, their span is only known to rounding times the weights of row j.
        noise = dependent_below(self.A) * (1.0 + np.abs(self.weights(j)).sum())
        return bool(np.linalg.norm(self._outside(self.A[:, j])) <= noise)

    def weights(self, j: int) -> np.ndarray:
        return solve_triangle(self.R, self.Q.T @ self.A[:, j])

    def trial(self, held: np.ndarray) -> np.ndarray:
        target = self.a + self.A @ held
        x = self._outside(target) + self.Q @ self.right
        result = self.A.T @ x - self.h
        result[self.free] = solve_triangle(self.R, self.Q.T @ target - self.right)
        return result

    def slack(self, lam: np.ndarray) -> np.ndarray:
        # Of free rows it is zero by construction; from lam itself it comes with its rounding.
        return np.where(self.free, 0.0, self.trial(np.where(self.free, 0.0, lam)))

    def rounding(self, lam: np.ndarray) -> float:
        # Free multipliers, however large, do not enter x.
        return ROUNDING * (1.0 + float(np.abs(lam[~self.free]).sum()))

    def _outside(self, v: np.ndarray) -> np.ndarray:
        """Return the part of v that is orthogonal to the free rows; twice is enough."""
        for _ in range(2):
            v = v - self.Q @ (self.Q.T @ v)
        return v


def _free_one_by_one(faces: Tableau | Factorisation, wanted: np.ndarray, first: np.ndarray) -> None:
    """Free the rows that are independent, rows `first` first, the one farthest from the free rows next.

    Of dependent rows those that are far apart are taken, and multipliers stay small.
    """
    for group in (wanted & first, wanted & ~first):
        left = set(np.flatnonzero(group).tolist())
        while left:
            j = max(left, key=faces.distance)
            if faces.dependent(j):
                break
            faces.pivot(j)
            left.remove(j)


def solve_triangle(R: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Solve R w = b; where R is singular to the last bit, for the smallest w."""
    try:
        return np.linalg.solve(R, b)
    except np.linalg.LinAlgError:
        return np.linalg.lstsq(R, b, rcond=None)[0]


def solve_active_set(
    faces: Tableau | Factorisation,
    lower: np.ndarray | None,
    upper: np.ndarray | None,
    start: np.ndarray | None,
) -> tuple[np.ndarray, int, float]:
    """Solve ``min 1/2 lam'K lam + b'lam, lower <= lam <= upper`` for rows of norm one.

    Updates add rounding, so a search that ends with a violated constraint is resumed from faces made
    afresh.

    Parameters
    ----------
    faces : Tableau or Factorisation
    lower : ndarray, shape (t,), or None
        0, or -inf for an equality; None stands for zeros.
    upper : ndarray, shape (t,), or None
        None stands for infinity.
    start : ndarray, shape (t,), or None
        Multipliers to start from.

    Returns
    -------
    lam : ndarray, shape (t,)
        The best iterate: the solution, unless the budget of pivots ran out or there is none.
    pivots : int
    residual : float
        The natural residual, max |lam - clip(lam - s, lower, upper)|.
    """
    t = len(faces.free)
    lower = np.zeros(t) if lower is None else lower
    upper = np.full(t, np.inf) if upper is None else upper
    lam = np.zeros(t) if start is None else np.clip(start, lower, upper)
    best, pivots = np.zeros(t), 0
    smallest = _residual(best, faces.slack(best), lower, upper)
    for _ in range(SEARCHES):
        search = _Search(faces, lower, upper, lam)
        search.run(budget=BUDGET * t)
        pivots += search.pivots
        lam = search.lam
        residual = _residual(lam, faces.slack(lam), lower, upper)
        if residual < smallest:
            best, smallest = lam, residual
        if smallest <= ROUNDING * (1.0 + np.abs(best).sum()):
            break
    return best, pivots, smallest


def _residual(lam: np.ndarray, s: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> float:
    return float(np.max(np.abs(lam - np.clip(lam - s, lower, upper)), initial=0.0))


class _Search:
    """The state of one search: a feasible lam, and which of its multipliers are free."""

    def __init__(
        self, faces: Tableau | Factorisation, lower: np.ndarray, upper: np.ndarray, lam: np.ndarray
    ) -> None:
        self.faces, self.lower, self.upper, self.lam = faces, lower, upper, lam.copy()
        self.pivots = 0
        free = (lam > lower) & (lam < upper)
        faces.set_free(free, np.isinf(lower))
        self.lam[free & ~faces.free] = 0.0

    def run(self, budget: int) -> None:
        """Pivot until no constraint is violated, with the least-index rule past the budget."""
        tabu = np.zeros(len(self.lam), dtype=bool)
        entered = -1
        while True:
            if self._move_to_trial():
                tabu[:] = False
                # A row that leaves in the move it entered for did so by rounding: not again at once.
                tabu[entered] = entered >= 0 and not self.faces.free[entered]
            s = self._trial()
            shut = self.faces.free | tabu | (self.upper <= self.lower)
            violation = np.where(self.lam >= self.upper, s, np.where(np.isinf(self.lower), np.abs(s), -s))
            violation = np.where(shut, 0.0, violation)
            violated = violation > self.faces.rounding(self.lam)
            if not violated.any() or self.pivots > PATIENCE * budget:
                return
            # The most violated row is the fast choice; the first one cannot cycle.
            entered = int(np.argmax(violation if self.pivots <= budget else violated))
            if not self.faces.dependent(entered):
                self._pivot(entered)
            elif violation[entered] <= EXCHANGE * (1.0 + np.abs(self.lam).sum()):
                tabu[entered] = True
            elif self._exchange(entered, -1.0 if s[entered] > 0 else 1.0):
                tabu[:] = False
            else:
                tabu[entered] = True

    def _trial(self) -> np.ndarray:
        return self.faces.trial(np.where(self.faces.free, 0.0, self.lam))

    def _move_to_trial(self) -> bool:
        """Go to the minimum over the free multipliers; tell whether any met a bound and was dropped."""
        dropped = False
        while self.faces.free.any():
            free = np.flatnonzero(self.faces.free)
            here, trial = self.lam[free], -self._trial()[free]
            lower, upper = self.lower[free], self.upper[free]
            outside = (trial <= lower) | (trial >= upper)
            if not outside.any():
                self.lam[free] = trial
                break
            target = np.where(trial <= lower, lower, upper)
            gap = trial - here
            apart = np.where(outside, target - here, 0.0)
            reach = np.where(outside, np.divide(apart, gap, out=np.zeros_like(gap), where=gap != 0), np.inf)
            step = min(max(reach.min(), 0.0), 1.0)
            blocking = reach <= step
            self.lam[free] = np.where(blocking, target, np.clip(here + step * gap, lower, upper))
            for j in free[blocking]:
                self._pivot(j)
            dropped = True
        return dropped

    def _exchange(self, j: int, sign: float) -> bool:
        """Move the multiplier of a dependent row until one of the free ones meets a bound and makes room.

        x stays where it is on the way, so this is the step of the dual active-set method. False if nothing
        is in the way: then the dual is unbounded, and no x meets all constraints.
        """
        while self.faces.dependent(j):
            free, along = np.flatnonzero(self.faces.free), -sign * self.faces.weights(j)
            end = self.upper[j] if sign > 0 else self.lower[j]
            target = np.where(along < 0, self.lower[free], self.upper[free])
            reach = np.full(len(free), np.inf)
            moving = np.abs(along) > NEAR_ZERO
            reach[moving] = (target[moving] - self.lam[free][moving]) / along[moving]
            step = min(sign * (end - self.lam[j]), reach.min(initial=np.inf))
            if step == np.inf:
                return False
            self.lam[free] = np.clip(self.lam[free] + step * along, self.lower[free], self.upper[free])
            if step == sign * (end - self.lam[j]):
                self.lam[j] = end
                self.pivots += 1
                return True
            self.lam[j] += sign * step
            blocking = int(np.argmin(reach))
            self.lam[free[blocking]] = target[blocking]
            self._pivot(int(free[blocking]))
        self._pivot(j)
        return True

    def _pivot(self, j: int) -> None:
        self.faces.pivot(j)
        self.pivots += 1
