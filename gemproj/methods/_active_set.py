"""Exact solution of one problem of any size: Lawson and Hanson's active-set method, with upper bounds.

The search is one; the linear algebra under it is either a tableau of K, which costs one rank-one
update per pivot, or an orthogonal factorisation of the rows, for which they may be nearly dependent.
"""

from __future__ import annotations

import numpy as np

from gemproj._constants import BUDGET, EXCHANGE, NEGLIGIBLE, ROUNDING
from gemproj._tspace import dependent_below, natural_residual, sweep


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

    def weights(self, j: int) -> np.ndarray:
        """Return the combination of the free rows that is nearest to row j; zero for other rows."""
        return np.where(self.free, self.swept[:, j], 0.0)

    def residual(self, lam: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> float:
        """Return the natural residual of what a search found, from K and b themselves."""
        return float(natural_residual(lam, self.K @ lam + self.b, lower, upper))

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
        self.set_free(np.zeros(self.A.shape[1], dtype=bool))

    def set_free(self, free: np.ndarray) -> bool:
        self._factor(free.copy())
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
        self._factor(free)

    def dependent(self, j: int) -> bool:
        # Where free rows nearly cancel, their span is only known to rounding times the weights of row j.
        w = solve_triangle(self.R, self.Q.T @ self.A[:, j])
        noise = dependent_below(self.A) * (1.0 + np.abs(w).sum())
        return bool(np.linalg.norm(self._outside(self.A[:, j])) <= noise)

    def weights(self, j: int) -> np.ndarray:
        result = np.zeros(len(self.free))
        result[self.free] = solve_triangle(self.R, self.Q.T @ self.A[:, j])
        return result

    def trial(self, held: np.ndarray) -> np.ndarray:
        target = self.a + self.A @ held
        x = self._outside(target) + self.Q @ self.right
        result = self.A.T @ x - self.h
        result[self.free] = solve_triangle(self.R, self.Q.T @ target - self.right)
        return result

    def residual(self, lam: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> float:
        # The s of free rows are zero by construction; from lam itself they come with its rounding.
        s = np.where(self.free, 0.0, self.trial(np.where(self.free, 0.0, lam)))
        return float(natural_residual(lam, s, lower, upper))

    def rounding(self, lam: np.ndarray) -> float:
        # Free multipliers, however large, do not enter x.
        return ROUNDING * (1.0 + float(np.abs(lam[~self.free]).sum()))

    def _factor(self, free: np.ndarray) -> None:
        """Factor the free rows; ``Q'x = right`` where their slack is zero."""
        self.free = free
        self.Q, self.R = np.linalg.qr(self.A[:, free])
        self.right = solve_triangle(self.R.T, self.h[free])

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
    faces: Tableau | Factorisation,
    lower: np.ndarray | None,
    upper: np.ndarray | None,
    start: np.ndarray | None,
) -> tuple[np.ndarray, int, float]:
    """Solve ``min 1/2 lam'K lam + b'lam, lower <= lam <= upper`` for rows of norm one.

    Entries of `lower` are 0 or -inf. Updates add rounding, so a search that ends with a violated
    constraint is resumed from faces made afresh.

    Returns
    -------
    lam : ndarray, shape (t,)
        The best iterate: the solution, unless the budget of pivots ran out or the constraints of which
        b holds the right-hand sides contradict each other.
    pivots : int
    residual : float
        The natural residual, max |lam - clip(lam - s, lower, upper)|.
    """
    t = len(faces.free)
    low = np.zeros(t) if lower is None else lower
    high = np.full(t, np.inf) if upper is None else upper
    lam = np.zeros(t) if start is None else np.clip(start, low, high)
    best, pivots = np.zeros(t), 0
    smallest = faces.residual(best, low, high)
    for _ in range(3):
        search = _Search(faces, low, high, lam)
        search.run(budget=BUDGET * t)
        pivots += search.pivots
        lam = search.lam
        residual = faces.residual(lam, low, high)
        if residual < smallest:
            best, smallest = lam, residual
        if smallest <= ROUNDING * (1.0 + np.abs(best).sum()):
            break
    return best, pivots, smallest


class _Search:
    """The state of one search: a feasible lam, and which of its multipliers are free."""

    def __init__(
        self, faces: Tableau | Factorisation, lower: np.ndarray, upper: np.ndarray, lam: np.ndarray
    ) -> None:
        self.faces, self.lower, self.upper, self.lam = faces, lower, upper, lam.copy()
        self.pivots = 0
        free = (lam > lower) & (lam < upper)
        if not faces.set_free(free):
            self.lam[free] = 0.0

    def run(self, budget: int) -> None:
        """Pivot until no constraint is violated, with the least-index rule past the budget."""
        tabu = np.zeros(len(self.lam), dtype=bool)
        entered = -1
        while True:
            if self._move_to_trial():
                tabu[:] = False
                # A row that leaves in the move it entered for did so by rounding: not again at once.
                tabu[entered] = entered >= 0 and not self.faces.free[entered]
            violation = np.where(self.faces.free | tabu | (self.upper <= 0), 0.0, self._violation())
            violated = violation > self.faces.rounding(self.lam)
            if not violated.any() or self.pivots > 2 * budget:
                return
            # The most violated row is the fast choice; the first one cannot cycle.
            entered = int(np.argmax(violation if self.pivots <= budget else violated))
            if not self.faces.dependent(entered):
                self._pivot(entered)
            elif violation[entered] > EXCHANGE * (1.0 + np.abs(self.lam).sum()) and self._exchange(entered):
                tabu[:] = False
            else:
                tabu[entered] = True

    def _violation(self) -> np.ndarray:
        """Return by how much each constraint that is not free is violated."""
        s = self._trial()
        at_upper = self.lam >= self.upper
        violation = np.where(at_upper, s, -s)
        return np.where(np.isinf(self.lower), np.abs(s), violation)

    def _trial(self) -> np.ndarray:
        return self.faces.trial(np.where(self.faces.free, 0.0, self.lam))

    def _move_to_trial(self) -> bool:
        """Go to the minimum over the free multipliers; return whether any met a bound and was dropped."""
        dropped = False
        while self.faces.free.any():
            free = np.flatnonzero(self.faces.free)
            now, trial = self.lam[free], -self._trial()[free]
            low, high = self.lower[free], self.upper[free]
            outside = (trial <= low) | (trial >= high)
            if not outside.any():
                self.lam[free] = trial
                break
            target = np.where(trial <= low, low, high)
            gap = trial - now
            way = np.where(outside, target - now, 0.0)
            reach = np.where(outside, np.divide(way, gap, out=np.zeros_like(gap), where=gap != 0), np.inf)
            step = min(max(reach.min(), 0.0), 1.0)
            blocking = reach <= step
            self.lam[free] = np.where(blocking, target, np.clip(now + step * gap, low, high))
            for j in free[blocking]:
                self._pivot(j)
            dropped = True
        return dropped

    def _exchange(self, j: int) -> bool:
        """Raise the multiplier of a dependent row along the null direction until a bound is met.

        The slack of row j does not change on the way, but the objective falls. Without a bound to meet
        the dual problem is unbounded: the constraints contradict each other, and False is returned.
        """
        down = self.lam[j] >= self.upper[j] or (np.isinf(self.lower[j]) and self._trial()[j] > 0)
        direction = -self.faces.weights(j)
        direction[j] = 1.0
        # Weights that are rounding must not block: the multipliers would become as large as its inverse.
        direction[np.abs(direction) < NEGLIGIBLE * np.abs(direction).max()] = 0.0
        direction = -direction if down else direction
        limit = np.where(direction > 0, self.upper, self.lower) - self.lam
        moving = direction != 0
        steps = np.full(len(direction), np.inf)
        steps[moving] = np.maximum(limit[moving] / direction[moving], 0.0)
        step = steps.min()
        if not np.isfinite(step):
            return False
        self.lam = np.clip(self.lam + step * direction, self.lower, self.upper)
        for i in np.flatnonzero(steps <= step):
            self.lam[i] = self.upper[i] if direction[i] > 0 else self.lower[i]
            if self.faces.free[i]:
                self._pivot(i)
        self.pivots += 1
        return True

    def _pivot(self, j: int) -> None:
        self.faces.pivot(j)
        self.pivots += 1
