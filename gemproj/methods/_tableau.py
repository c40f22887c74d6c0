"""Exact solution of one problem of any size: Lawson and Hanson's active-set method on a swept tableau."""

from __future__ import annotations

import numpy as np

from gemproj.methods._enumeration import dependent_below, sweep
from gemproj.methods._method import natural_residual

# A constraint counts as violated only beyond the rounding of K lam + b.
ROUNDING = 4e-15


def solve_tableau(
    K: np.ndarray, b: np.ndarray, upper: np.ndarray | None, start: np.ndarray | None
) -> tuple[np.ndarray, int]:
    """Solve ``min 1/2 lam'K lam + b'lam, 0 <= lam <= upper`` for rows of norm one.

    Adding a row to the active set, or dropping one, is one sweep of the tableau [K | b]; all
    multipliers of the trial solution and all residuals of the other rows then stand in its last
    column. Sweeps add rounding, so a search that ends with a violated constraint is resumed from a
    tableau made afresh.

    Returns
    -------
    lam : ndarray, shape (t,)
    pivots : int
    """
    t = len(b)
    bound = np.full(t, np.inf) if upper is None else upper
    lam = np.zeros(t) if start is None else np.clip(start, 0.0, bound)
    best, best_residual, pivots = np.zeros(t), float(natural_residual(K, b, np.zeros(t), upper)), 0
    for _ in range(3):
        search = _Search(K, b, bound, lam)
        search.run(budget=6 * t)
        pivots += search.pivots
        lam = search.lam
        residual = float(natural_residual(K, b, lam, upper))
        if residual < best_residual:
            best, best_residual = lam, residual
        if best_residual <= ROUNDING * (1.0 + np.abs(best).sum()):
            break
    return best, pivots


class _Search:
    """The state of one search: a feasible lam, which multipliers are free, and the tableau swept on them."""

    def __init__(self, K: np.ndarray, b: np.ndarray, bound: np.ndarray, lam: np.ndarray) -> None:
        self.K, self.b, self.bound, self.lam = K, b, bound, lam.copy()
        self.free = (lam > 0) & (lam < bound)
        self.pivots = 0
        self.tableau = np.concatenate([K, b[:, None]], axis=1)
        if self.free.any() and not self._sweep_free():
            self.lam[self.free] = 0.0
            self.free[:] = False

    def run(self, budget: int) -> None:
        """Pivot until no constraint is violated, with the least-index rule past the budget."""
        barred = np.zeros(len(self.b), dtype=bool)
        entered = -1
        while True:
            if self._move_to_trial():
                barred[:] = False
                # A row that leaves in the move it entered for did so by rounding: not again at once.
                barred[entered] = entered >= 0 and not self.free[entered]
            s = self._trial()
            at_upper = self.lam >= self.bound
            shut = self.free | barred | (self.bound <= 0)
            violation = np.where(shut, 0.0, np.where(at_upper, s, -s))
            violated = violation > ROUNDING * (1.0 + np.abs(self.lam).sum())
            if not violated.any() or self.pivots > 2 * budget:
                return
            # The most violated row is the fast choice; the first one cannot cycle.
            entered = int(np.argmax(violation if self.pivots <= budget else violated))
            if self.tableau[entered, entered] > dependent_below(self.tableau):
                self._pivot(entered)
            else:
                barred[entered] = True

    def _trial(self) -> np.ndarray:
        """Return -lam for the free multipliers and s for the others, at the minimum over the free ones."""
        held = np.where(self.free, 0.0, self.lam)
        return self.tableau[:, -1] + self.tableau[:, :-1] @ held

    def _move_to_trial(self) -> bool:
        """Go to the minimum over the free multipliers; tell whether any met a bound and was dropped."""
        dropped = False
        while self.free.any():
            free = np.flatnonzero(self.free)
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
        """Move row j into the free set or out of it: the sweep is its own inverse."""
        self.tableau = sweep(self.tableau, j)
        self.free[j] = not self.free[j]
        self.pivots += 1

    def _sweep_free(self) -> bool:
        """Sweep the tableau on the whole free set at once; False if its rows are dependent."""
        inside, outside = np.flatnonzero(self.free), np.flatnonzero(~self.free)
        try:
            factor = np.linalg.cholesky(self.K[np.ix_(inside, inside)])
        except np.linalg.LinAlgError:
            return False
        if np.diagonal(factor).min() ** 2 <= dependent_below(self.tableau):
            return False
        whole = np.concatenate([self.K, self.b[:, None]], axis=1)
        solved = np.linalg.solve(factor.T, np.linalg.solve(factor, whole[inside]))
        self.tableau[outside] = whole[outside] - self.K[np.ix_(outside, inside)] @ solved
        self.tableau[inside] = solved
        half = np.linalg.solve(factor, np.eye(len(inside)))
        self.tableau[np.ix_(inside, inside)] = half.T @ half
        self.tableau[np.ix_(outside, inside)] = -solved[:, outside].T
        return True
