"""Exact solution of one problem of any size: Lawson and Hanson's active-set method, with bounds.

This file has the search; its linear algebra is in `gemproj.methods._faces`.
"""

from __future__ import annotations

import numpy as np

from gemproj._constants import BUDGET, NEAR_ZERO, PATIENCE, ROUNDING, SEARCHES
from gemproj._tspace import natural_residual
from gemproj.methods._faces import Factorisation, Tableau


def solve_active_set(
    faces: Tableau | Factorisation,
    lower: np.ndarray | None,
    upper: np.ndarray | None,
    start: np.ndarray | None,
) -> tuple[np.ndarray, int, float]:
    """Return the multipliers, the number of pivots and the natural residual, for rows of norm one.

    Solves ``min 1/2 lam'K lam + b'lam, lower <= lam <= upper``. A lower bound is 0, or -inf for an equality.
    ``lower=None`` stands for zeros, ``upper=None`` for infinity. Updates accumulate rounding, so a search
    that ends with a violated constraint is restarted with a fresh factorisation. The multipliers are the best
    iterate, which is the solution unless the budget of pivots ran out or no solution exists. The natural
    residual is ``max |lam - clip(lam - s, lower, upper)|``.
    """
    t = len(faces.free)
    lower = np.zeros(t) if lower is None else lower
    upper = np.full(t, np.inf) if upper is None else upper
    lam = np.zeros(t) if start is None else np.clip(start, lower, upper)
    best, pivots = np.zeros(t), 0
    smallest = natural_residual(best, faces.slack(best), lower, upper)
    for _ in range(SEARCHES):
        search = _Search(faces, lower, upper, lam)
        search.run(budget=BUDGET * t)
        pivots += search.pivots
        lam = search.lam
        residual = natural_residual(lam, faces.slack(lam), lower, upper)
        if residual < smallest:
            best, smallest = lam, residual
        if smallest <= ROUNDING * (1.0 + np.abs(best).sum()):
            break
    return best, pivots, smallest


class _Search:
    """The state of one search: feasible multipliers lam, and the set of free rows."""

    def __init__(
        self, faces: Tableau | Factorisation, lower: np.ndarray, upper: np.ndarray, lam: np.ndarray
    ) -> None:
        self.faces, self.lower, self.upper, self.lam = faces, lower, upper, lam.copy()
        self.pivots = 0
        free = (lam > lower) & (lam < upper)
        faces.set_free(free, np.isinf(lower))
        self.lam[free & ~faces.free] = 0.0

    def run(self, budget: int) -> None:
        """Pivot until no constraint is violated; after `budget` pivots, use the least-index rule."""
        tabu = np.zeros(len(self.lam), dtype=bool)
        entered = -1
        while True:
            if self.move_to_trial():
                tabu[:] = False
                # A row that leaves right after it entered leaves because of rounding; it is blocked for now.
                tabu[entered] = entered >= 0 and not self.faces.free[entered]
            s = self.trial()
            entered = self.most_violated(s, tabu, first=self.pivots > budget)
            if entered < 0 or self.pivots > PATIENCE * budget:
                return
            if not self.faces.dependent(entered):
                self.pivot(entered)
            elif abs(s[entered]) <= self.faces.uncertainty(entered, self.lam):
                tabu[entered] = True
            elif self.exchange(entered, -1.0 if s[entered] > 0 else 1.0):
                tabu[:] = False
            else:
                tabu[entered] = True

    def most_violated(self, s: np.ndarray, tabu: np.ndarray, first: bool) -> int:
        """Return the row with the largest (if `first`, the first) violation; -1 if no constraint is violated.

        The first violated row is the choice of the least-index rule, which cannot cycle.
        """
        violation = np.where(self.lam >= self.upper, s, np.where(np.isinf(self.lower), np.abs(s), -s))
        violation[self.faces.free | tabu | (self.upper <= self.lower)] = 0.0
        violated = violation > self.faces.rounding(self.lam)
        return int(np.argmax(violated if first else violation)) if violated.any() else -1

    def trial(self) -> np.ndarray:
        """Return -lam of the free rows and s of the other rows, at the minimum over the free multipliers."""
        return self.faces.trial(np.where(self.faces.free, 0.0, self.lam))

    def move_to_trial(self) -> bool:
        """Move to the minimum over the free multipliers; return whether a row met a bound and was dropped."""
        dropped = False
        while self.faces.free.any():  # each pass drops at least one row or ends the loop
            free = np.flatnonzero(self.faces.free)
            here, end = self.lam[free], -self.trial()[free]
            lower, upper = self.lower[free], self.upper[free]
            part = reach(here, end, lower, upper)
            step = part.min()
            if step == np.inf:
                self.lam[free] = end
                break
            blocking = part <= step
            target = np.where(end <= lower, lower, upper)
            moved = np.clip(here + step * (end - here), lower, upper)
            self.lam[free] = np.where(blocking, target, moved)
            for j in free[blocking]:
                self.pivot(j)
            dropped = True
        return dropped

    def exchange(self, j: int, sign: float) -> bool:
        """Add the dependent row j to the free rows, in exchange for the free row that first meets a bound.

        Multiplier j moves, and the free multipliers compensate so that x stays the same: a step of the dual
        active-set method. Returns False if no multiplier meets a bound. Then the dual is unbounded, and no x
        satisfies all constraints.
        """
        while self.faces.dependent(j):
            free, along = np.flatnonzero(self.faces.free), -sign * self.faces.weights(j)
            end = self.upper[j] if sign > 0 else self.lower[j]
            bound = np.where(along < 0, self.lower[free], self.upper[free])
            part = np.full(len(free), np.inf)
            moving = np.abs(along) > NEAR_ZERO
            part[moving] = (bound[moving] - self.lam[free][moving]) / along[moving]
            step = min(sign * (end - self.lam[j]), part.min(initial=np.inf))
            if step == np.inf:
                return False
            self.lam[free] = np.clip(self.lam[free] + step * along, self.lower[free], self.upper[free])
            if step == sign * (end - self.lam[j]):
                self.lam[j] = end
                self.pivots += 1
                return True
            self.lam[j] += sign * step
            blocking = int(np.argmin(part))
            self.lam[free[blocking]] = bound[blocking]
            self.pivot(int(free[blocking]))
        self.pivot(j)
        return True

    def pivot(self, j: int) -> None:
        """Add row j to the free rows or remove it, and count the pivot."""
        self.faces.pivot(j)
        self.pivots += 1


def reach(here: np.ndarray, end: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Return, per row, the fraction of the step to `end` that meets a bound; infinity if no bound is met."""
    gap, target = end - here, np.where(end <= low, low, high)
    apart = np.where(np.isinf(target), 0.0, target) - here
    part = np.maximum(np.divide(apart, gap, out=np.zeros_like(gap), where=gap != 0), 0.0)
    return np.where((low < end) & (end < high), np.inf, part)
