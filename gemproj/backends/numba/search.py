"""The compiled version of `gemproj.methods._active_set`, for a batch of problems."""

from __future__ import annotations

import numpy as np

from gemproj import _constants
from gemproj._arrays import Array
from gemproj._constants import BUDGET, CLOSE, EXCHANGE, NEAR_ZERO, PATIENCE, RESOLVED, ROUNDING, SEARCHES
from gemproj._tspace import Standard, matvec
from gemproj._tspace import normalise as normalised
from gemproj.backends import portable
from gemproj.backends.numba.jit import entry as strict_entry
from gemproj.backends.numba.jit import fast as strict
from gemproj.backends.numba.tableau import (
    DEPENDENT,
    clip,
    normalise,
    optimality,
    pivot,
    resolution,
    rounding,
    set_free,
    trial,
)
from gemproj.backends.numba.threads import share_pieces
from gemproj.methods import Exact, Method, Outcome, Status
from gemproj.methods.exact import nearly_active
from gemproj.methods.exact import resolution as resolution_of

_READS = 128  # search time per entry of K, in units of the time to read a number
_FLOAT64 = np.dtype(np.float64)
_NONE = np.empty((0, 0))

_OPTIMAL_WITHIN = _constants.OPTIMAL_WITHIN * _constants.EPS
_STALLED = int(Status.STALLED)


@strict_entry
def solve_active_set(
    first, last, Ks, bs, lowers, uppers, starts, lams, resolved, ended, T, K, vectors, flags
):
    """Write the solutions of problems ``first .. last - 1``; return how many may have to be solved from G.

    The count includes problems whose solution is not optimal or whose rows K may not resolve.

    Rows may have any norm. `Ks` is (problems, t, t), or (1, t, t) for one K, and `bs` is (problems, t);
    `lowers`, `uppers` and `starts` may be empty. The outputs are `lams`, the multipliers; `resolved`, the
    `resolution` of the active and nearly active rows; and `ended`, the numbers of pivots and the status.
    Scratch arrays are T (t, t + 1), K (t, t), `vectors` (6, t) and `flags` (2, t).
    """
    t, in_question = bs.shape[1], 0
    b, s, lam, lower, upper, per_norm = (
        vectors[0], vectors[1], vectors[2], vectors[3], vectors[4], vectors[5]
    )  # fmt: skip
    free, tabu = flags[0], flags[1]
    for p in range(first, last):
        given, best = Ks[p if len(Ks) > 1 else 0], lams[p]
        size, finite = normalise(given, bs[p], K, b, per_norm), True
        for i in range(t):
            stretch = 1.0 / per_norm[i] / size if per_norm[i] > 0.0 else 0.0
            lower[i] = lowers[p, i] if len(lowers) else 0.0
            upper[i] = uppers[p, i] if len(uppers) else np.inf
            if upper[i] < np.inf:
                upper[i] *= stretch
            lam[i] = clip(starts[p, i] * stretch, lower[i], upper[i]) if len(starts) else 0.0
            if not abs(lam[i]) < np.inf:
                lam[i] = 0.0
            best[i], finite = 0.0, finite and given[i, i] < np.inf
        smallest, products = optimality(K, b, best, lower, upper, s)
        ended[0, p] = 0
        # Updates add rounding, so a search that ends with a violated constraint is restarted.
        for _ in range(SEARCHES):
            for i in range(t):
                tabu[i] = lower[i] < lam[i] and lam[i] < upper[i]
            set_free(T, K, b, lower, tabu, free, lam)
            ended[0, p] += run(T, lam, lower, upper, free, tabu, s)
            residual, complementarity = optimality(K, b, lam, lower, upper, s)
            if residual < smallest:
                smallest, products = residual, complementarity
                for i in range(t):
                    best[i] = lam[i]
            if smallest <= ROUNDING * rounding(best):
                break
        optimality(K, b, best, lower, upper, s)
        met = finite and smallest <= _OPTIMAL_WITHIN and products <= _OPTIMAL_WITHIN
        ended[1, p] = 0 if met else _STALLED
        resolved[p] = resolution(K, best, s, lower, free, T)
        if resolved[p] < CLOSE or not met:
            in_question += 1
        for i in range(t):
            best[i] *= size * per_norm[i]
    return in_question


@strict
def run(T, lam, lower, upper, free, tabu, s):
    """Pivot until no constraint is violated (least-index rule after the budget); return the pivot count."""
    pivots, budget, entered = 0, BUDGET * lam.size, -1
    clear(tabu)
    while True:
        dropped = move_to_trial(T, lam, lower, upper, free, s)
        pivots += dropped
        if dropped:
            clear(tabu)
            # A row that leaves right after it entered leaves because of rounding; it is blocked for now.
            if entered >= 0 and not free[entered]:
                tabu[entered] = True
        size = rounding(lam)
        entered = most_violated(lam, lower, upper, free, tabu, s, ROUNDING * size, pivots > budget)
        if entered < 0 or pivots > PATIENCE * budget:
            return pivots
        made = -1
        if T[entered, entered] > DEPENDENT:
            pivot(T, free, entered)
            pivots += 1
            continue
        if abs(s[entered]) > EXCHANGE * size:
            made = exchange(T, lam, lower, upper, free, entered, -1.0 if s[entered] > 0.0 else 1.0)
        if made > 0:
            clear(tabu)
            pivots += made
        else:
            pivots += -1 - made
            tabu[entered] = True


@strict
def most_violated(lam, lower, upper, free, tabu, s, worst, first):
    """Return the row of the largest (if `first`, the first) violation above `worst`; -1 if there is none."""
    entered = -1
    for i in range(lam.size):
        if not (free[i] or tabu[i] or upper[i] <= lower[i]):
            violation = s[i] if lam[i] >= upper[i] else abs(s[i]) if lower[i] == -np.inf else -s[i]
            if violation > worst:
                entered, worst = i, violation
                if first:
                    break
    return entered


@strict
def move_to_trial(T, lam, lower, upper, free, s):
    """Move to the minimum over the free multipliers; return how many rows met a bound and were dropped."""
    dropped = 0
    while True:  # each pass drops at least one row or returns
        trial(T, lam, free, s)
        step = np.inf
        for i in range(lam.size):
            if free[i]:
                step = min(step, reach(lam[i], -s[i], lower[i], upper[i]))
        for i in range(lam.size):
            if not free[i]:
                continue
            end = -s[i]
            if step == np.inf:
                lam[i] = end
            elif reach(lam[i], end, lower[i], upper[i]) <= step:
                lam[i] = lower[i] if end <= lower[i] else upper[i]
                pivot(T, free, i)
                dropped += 1
            else:
                lam[i] = clip(lam[i] + step * (end - lam[i]), lower[i], upper[i])
        if step == np.inf:
            return dropped


@strict
def exchange(T, lam, lower, upper, free, j, sign):
    """Add the dependent row j to the free rows, in exchange for the free row that first meets a bound.

    Returns the number of pivots p, or -1 - p if no multiplier meets a bound: then the dual is unbounded.
    """
    pivots = 0
    while T[j, j] <= DEPENDENT:
        end = upper[j] if sign > 0.0 else lower[j]
        step, blocking = sign * (end - lam[j]), j
        for i in range(lam.size):
            along = -sign * T[i, j]
            if free[i] and abs(along) > NEAR_ZERO:
                bound = lower[i] if along < 0.0 else upper[i]
                if (bound - lam[i]) / along < step:
                    step, blocking, end = (bound - lam[i]) / along, i, bound
        if step == np.inf:
            return -1 - pivots
        for i in range(lam.size):
            if free[i]:
                lam[i] = clip(lam[i] - sign * step * T[i, j], lower[i], upper[i])
        lam[j] += sign * step
        lam[blocking] = end
        pivots += 1
        if blocking == j:
            return pivots
        pivot(T, free, blocking)
    pivot(T, free, j)
    return pivots + 1


@strict
def reach(here, end, low, high):
    """Return the fraction of the step to `end` that meets a bound; infinity if no bound is met."""
    if low < end and end < high:
        return np.inf
    if end == here:
        return 0.0
    part = ((low if end <= low else high) - here) / (end - here)
    return part if part > 0.0 else 0.0


@strict
def clear(flags):
    """Set all flags to False."""
    for i in range(flags.size):
        flags[i] = False


def solve(method: Method, dual: Standard, start: Array | None) -> Outcome:
    """Return the outcome for a batch: from compiled loops for `Exact`, from `portable` for other methods."""
    K, b, lower, upper = dual
    if type(method) is not Exact or not b.shape[-1]:
        return portable.solve(method, dual, start)
    batch, t = b.shape[:-1], b.shape[-1]
    Ks, bs = _float64(K, (-1, t, t)), _float64(b, (-1, t))
    lowers, *others = [_NONE if a is None else _float64(a, (-1, t)) for a in (lower, upper, start)]
    count = len(bs)
    lam, resolved, ended = np.empty((count, t)), np.empty(count), np.empty((2, count), np.int64)
    arrays = (Ks, bs, lowers, *others, lam, resolved, ended)
    in_question: list[int] = []

    def run(begin: int, end: int) -> None:
        scratch = np.empty((t, t + 1)), np.empty((t, t)), np.empty((6, t)), np.empty((2, t), np.bool_)
        in_question.append(solve_active_set(begin, end, *arrays, *scratch))

    share_pieces(run, count, count * _READS * t * t)
    lam, (pivots, status) = lam.reshape(b.shape), ended
    pivots = pivots.reshape(batch)
    if not any(in_question):
        return Outcome(lam, pivots, int(Status.OPTIMAL))
    if len(Ks) == 1 and count > 1:
        # By Cauchy's interlacing, no principal submatrix has a smaller eigenvalue than the whole matrix.
        whole = normalised(Ks[0], bs[0]).K
        resolved = np.maximum(resolved, np.linalg.eigvalsh(whole)[0])
    if len(close := np.flatnonzero(resolved < CLOSE)):
        low, found = None if lower is None else lowers[close], lam.reshape(-1, t)[close]
        one = normalised(Ks[close] if len(Ks) > 1 else Ks, bs[close], low, start=found)
        near = nearly_active(one.start, matvec(one.K, one.start) + one.b, low)
        resolved[close] = resolution_of(one.K, near)
        status[close] |= np.where(resolved[close] < RESOLVED, int(Status.UNRESOLVED), 0)
    return Outcome(lam, pivots, status.reshape(batch), resolved.reshape(batch))


def _float64(a: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array in a new shape, in the type that the loops are compiled for: C-contiguous float64."""
    if a.dtype is not _FLOAT64 or not a.flags.carray:  # `is not` is faster than `!=`
        a = np.array(a, np.float64, order="C")
    return a.reshape(shape)
