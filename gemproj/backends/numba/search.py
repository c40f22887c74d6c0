"""The active-set search of `gemproj.methods._active_set` on a tableau, for a batch, without Python in it."""

from __future__ import annotations

import numpy as np

from gemproj import _constants
from gemproj._constants import BUDGET, CLOSE, EXCHANGE, NEAR_ZERO, PATIENCE, ROUNDING, SEARCHES
from gemproj.backends.numba.conditions import (
    find_near,
    norm1,
    normalise,
    residual,
    resolution,
    slackness,
    slope,
)
from gemproj.backends.numba.jit import strict
from gemproj.methods._method import Status

_DEPENDENT = _constants.DEPENDENT * _constants.EPS
_OPTIMAL_WITHIN = _constants.OPTIMAL_WITHIN * _constants.EPS
_STALLED = int(Status.STALLED)


@strict
def _sweep(T, k):
    """Pivot the tableau (t, t + 1) on its k-th diagonal entry, which moves row k in or out of the set."""
    t = T.shape[0]
    pivot = T[k, k] if T[k, k] > _DEPENDENT else 1.0
    for j in range(t + 1):
        T[k, j] /= pivot
    for i in range(t):
        if i == k:
            continue
        factor = T[i, k]
        if factor != 0.0:
            for j in range(t + 1):
                T[i, j] -= factor * T[k, j]
        T[i, k] = -factor / pivot
    T[k, k] = 1.0 / pivot


# Loops, because whole arrays at once take numba seconds to compile.
@strict
def _clear(flags):
    for i in range(flags.size):
        flags[i] = False


@strict
def _start(T, K, b, lower, free, lam):
    """Sweep a fresh tableau on a set, equalities first; rows that depend on others leave it, with lam = 0.

    The row that is farthest from the span of the swept ones is next: of dependent rows, those that are
    far apart are taken, and multipliers stay small.
    """
    t = b.size
    for i in range(t):
        for j in range(t):
            T[i, j] = K[i, j]
        T[i, t] = b[i]
    swept = np.zeros(t, np.bool_)
    for equality in (True, False):
        while True:
            best, k = _DEPENDENT, -1
            for i in range(t):
                if free[i] and not swept[i] and (lower[i] == -np.inf) == equality and T[i, i] > best:
                    best, k = T[i, i], i
            if k < 0:
                break
            _sweep(T, k)
            swept[k] = True
    for k in range(t):
        if free[k] and not swept[k]:
            free[k] = False
            lam[k] = 0.0


@strict
def _trial(T, lam, free, s):
    """Write -lam of the free rows and s of the others to s, at the minimum over the free multipliers."""
    t = lam.size
    for i in range(t):
        s[i] = T[i, t]
    for j in range(t):
        if not free[j] and lam[j] != 0.0:
            for i in range(t):
                s[i] += T[i, j] * lam[j]


@strict
def _move(T, lam, lower, upper, free, s):
    """Go to the minimum over the free multipliers; return how many met a bound and were dropped."""
    dropped = 0
    for _ in range(lam.size + 1):  # each time at least one is dropped
        _trial(T, lam, free, s)
        step, outside = 1.0, False
        for i in range(lam.size):
            if free[i] and (-s[i] <= lower[i] or -s[i] >= upper[i]):
                outside = True
                gap = -s[i] - lam[i]
                target = lower[i] if -s[i] <= lower[i] else upper[i]
                reach = (target - lam[i]) / gap if gap != 0.0 else 0.0
                step = min(step, max(reach, 0.0))
        if not outside:
            for i in range(lam.size):
                if free[i]:
                    lam[i] = -s[i]
            break
        # The bounds that are met first are met exactly, all others are not overstepped by rounding.
        for i in range(lam.size):
            if not free[i]:
                continue
            gap = -s[i] - lam[i]
            if -s[i] <= lower[i] or -s[i] >= upper[i]:
                target = lower[i] if -s[i] <= lower[i] else upper[i]
                reach = (target - lam[i]) / gap if gap != 0.0 else 0.0
                if reach <= step:
                    lam[i] = target
                    free[i] = False
                    _sweep(T, i)
                    dropped += 1
                    continue
            lam[i] = min(max(lam[i] + step * gap, lower[i]), upper[i])
    return dropped


@strict
def _exchange(T, lam, lower, upper, free, j, sign):
    """Move multiplier j of a dependent row until a free one meets a bound and makes room.

    Returns the number of pivots, negative if in the end nothing was in the way: the dual is unbounded.
    """
    pivots = 0
    while T[j, j] <= _DEPENDENT:
        end = upper[j] if sign > 0.0 else lower[j]
        step, blocking = sign * (end - lam[j]), j
        for i in range(lam.size):
            along = -sign * T[i, j]
            if free[i] and abs(along) > NEAR_ZERO:
                reach = ((lower[i] if along < 0.0 else upper[i]) - lam[i]) / along
                if reach < step:
                    step, blocking = reach, i
        if step == np.inf:
            return -1 - pivots
        for i in range(lam.size):
            if free[i]:
                lam[i] = min(max(lam[i] - sign * step * T[i, j], lower[i]), upper[i])
        pivots += 1
        if blocking == j:
            lam[j] = end
            return pivots
        lam[j] += sign * step
        lam[blocking] = lower[blocking] if -sign * T[blocking, j] < 0.0 else upper[blocking]
        free[blocking] = False
        _sweep(T, blocking)
    _sweep(T, j)
    free[j] = True
    return pivots + 1


@strict
def _run(T, lam, lower, upper, free, tabu, s):
    """Pivot until no constraint is violated, with the least-index rule past the budget; return the pivots."""
    t = lam.size
    pivots, budget, entered = 0, BUDGET * t, -1
    _clear(tabu)
    while True:
        dropped = _move(T, lam, lower, upper, free, s)
        pivots += dropped
        if dropped:
            _clear(tabu)
            # A row that leaves in the move it entered for did so by rounding: not again at once.
            if entered >= 0 and not free[entered]:
                tabu[entered] = True
        worst, entered = ROUNDING * (1.0 + norm1(lam)), -1
        for i in range(t):
            if free[i] or tabu[i] or upper[i] <= lower[i]:
                continue
            violation = s[i] if lam[i] >= upper[i] else abs(s[i]) if lower[i] == -np.inf else -s[i]
            if violation > worst:
                entered = i
                if pivots > budget:
                    break
                worst = violation
        if entered < 0 or pivots > PATIENCE * budget:
            return pivots
        if T[entered, entered] > _DEPENDENT:
            _sweep(T, entered)
            free[entered] = True
            pivots += 1
            continue
        made = -1
        if abs(s[entered]) > EXCHANGE * (1.0 + norm1(lam)):
            made = _exchange(T, lam, lower, upper, free, entered, -1.0 if s[entered] > 0.0 else 1.0)
        if made > 0:
            _clear(tabu)
            pivots += made
        else:
            pivots += -1 - made
            tabu[entered] = True


@strict
def search(Ks, bs, lowers, uppers, starts, first, last, lams, pivots, status, resolved):
    """Solve problems ``first .. last - 1`` of a batch, of rows of any norm, as `solve_active_set` does.

    Problems are K (problems, t, t), or one K for all, and b (problems, t); `lowers`, `uppers` and `starts`
    may be empty. Writes the multipliers, the number of pivots, the status, and how well K resolves the active
    and nearly active rows: a lower bound of its smallest eigenvalue on them, which is good where it is not
    small. Returns for how many problems that is below CLOSE, so that a closer look is wanted.
    """
    t, to_resolve = bs.shape[1], 0
    T, K, b, s = np.empty((t, t + 1)), np.empty((t, t)), np.empty(t), np.empty(t)
    now, best, per_norm = np.empty(t), np.empty(t), np.empty(t)
    lower, upper = np.empty(t), np.empty(t)
    free, tabu = np.empty(t, np.bool_), np.empty(t, np.bool_)
    near = np.empty(t, np.int64)
    for p in range(first, last):
        given = Ks[p if len(Ks) > 1 else 0]
        size = normalise(given, bs[p], K, b, per_norm)
        for i in range(t):
            stretch = 1.0 / per_norm[i] / size if per_norm[i] > 0.0 else 0.0
            lower[i] = lowers[p, i] if len(lowers) else 0.0
            upper[i] = np.inf
            if len(uppers) and uppers[p, i] < np.inf:
                upper[i] = uppers[p, i] * stretch
            now[i] = min(max(starts[p, i] * stretch, lower[i]), upper[i]) if len(starts) else 0.0
            now[i] = now[i] if abs(now[i]) < np.inf else 0.0
            best[i] = 0.0
        slope(K, b, best, s)
        smallest, pivots[p] = residual(best, s, lower, upper), 0
        # Updates add rounding, so a search that ends with a violated constraint is resumed afresh.
        for _ in range(SEARCHES):
            for i in range(t):
                free[i] = now[i] > lower[i] and now[i] < upper[i]
            _start(T, K, b, lower, free, now)
            pivots[p] += _run(T, now, lower, upper, free, tabu, s)
            slope(K, b, now, s)
            found = residual(now, s, lower, upper)
            if found < smallest:
                smallest = found
                for i in range(t):
                    best[i] = now[i]
            if smallest <= ROUNDING * (1.0 + norm1(best)):
                break
        slope(K, b, best, s)
        met = smallest <= _OPTIMAL_WITHIN and slackness(best, s, upper) <= _OPTIMAL_WITHIN
        for i in range(t):
            met = met and given[i, i] < np.inf
        status[p] = 0 if met else _STALLED
        resolved[p] = resolution(K, near[: find_near(best, s, lower, near)], T)
        to_resolve += 1 if resolved[p] < CLOSE else 0
        for i in range(t):
            lams[p, i] = best[i] * (size * per_norm[i])
    return to_resolve
