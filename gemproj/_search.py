"""The active-set search, in coordinates of the rows: one source, run by Python or compiled by numba.

Coordinates are vectors V (t, m) and a (m,) with the inner products of the rows of G and of g. The problem is

    min 1/2 |a + V'lam|^2 - h'lam,  lower <= lam <= upper,    x = a + V'lam,    s = V x - h.

It is solved by the method of Lawson and Hanson (1974), with bounds on both sides. The multipliers of the free
rows P are between their bounds, and ``s_P = 0``; all other rows are held at a bound. A factorisation
``V_P' = Q'R`` of the free rows, with orthonormal rows Q, is updated when a row is released (Gram-Schmidt) or
held (Givens rotations). The rest is read off Q and R:

- x is computed by orthogonal projections, so it does not contain the rounding of large multipliers; with many
  free rows it moves along one vector of Q from pivot to pivot, and is computed anew at the end;
- a row depends on the free rows if it is in their span, to the rounding of the coordinates;
- the rows of ``R^-1`` are the dual basis of the free rows. The inverse of the norm of such a row is the
  distance of a free row from the span of the others: the angle that the coordinates have to resolve;
- a dependent row that is violated is exchanged for the free row whose multiplier is the first to meet a
  bound, as in the dual method of Goldfarb and Idnani (1983). If none meets a bound, the direction is a ray
  along which the dual problem is unbounded: no x satisfies the rows of its nonzero entries (Farkas' lemma).

Coordinates from K = G G', a pivoted Cholesky factor, resolve angles of 1e-7; coordinates from G resolve
1e-14.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from gemproj._constants import EPS

# The function that Python calls, and which makes all arrays.
ENTRIES = ("solve",)

# Rounding error of a slack, in units of 1 + |lam_held|_1, for rows of norm one and a problem of size one.
ROUNDING = 4e-15
# Distances of unit rows from a span that count as zero, for coordinates from G and from a K in float64, whose
# entries hold squared distances.
ROWS_RESOLVE, GRAM_RESOLVES = 45.0 * EPS, (45.0 * EPS) ** 0.5
# A row is nearly active if its slack is below this, in the same units. Smaller weights of a dependent row in
# the free rows count as zero.
NEAR_ZERO = 1e-9
# Contradictions of h that count as rounding of the data, in units of the weights of the rows: from G, and
# relative to what K resolves.
ROWS_CONTRADICT, GRAM_CONTRADICTS = 1e-9, 10.0
# Largest violation of a condition by an optimal solution, in the same units.
OPTIMAL_WITHIN = 1e-9
# Distance by which x is moved to meet the free rows, above which float64 multipliers cannot represent it.
HOPELESS = 1e-7
# Up to so many free rows x is computed anew, which takes little time; after a longer move for its rounding.
FEW, FAR = 8, 4.0
# Pivots per row after which the first violated row enters, which cannot cycle. The search ends after twice as
# many.
BUDGET = 6
OPTIMAL, STALLED, UNRESOLVED, INFEASIBLE = 0, 2, 8, 16  # the last one is no `Status`: lam is a ray


class Search(NamedTuple):
    """One problem of size one, with rows of norm one or zero, and the state of its search."""

    V: Any
    a: Any
    h: Any
    lower: Any
    upper: Any
    lam: Any  # feasible multipliers
    Q: Any
    R: Any  # and two more columns: R[:, -2] @ Q is what the free rows add to x; R[:, -1] is the row last held
    order: Any  # the free rows, in the order of their columns in R
    count: Any  # numbers of free rows, of pivots, and of moves of x since it was computed
    free: Any  # mask of the free rows
    tabu: Any  # mask of rows that may not enter
    x: Any  # at the minimum over the free multipliers
    slack: Any  # there
    trial: Any  # the free multipliers there, in the order of `order`
    outside: Any  # of a row: the component orthogonal to the free rows,
    inside: Any  # its coefficients in the basis Q,
    weights: Any  # and its weights in the free rows
    shift: Any  # the products of the rows with a step of x, or with a vector of Q


def solve(
    first: int, last: int, resolves: float, trust: float, rows: Any, linear: Any, options: Any, lam: Any,
    numbers: Any, total: Any,
) -> None:  # fmt: skip
    """Solve problems ``first .. last - 1`` of a batch; rows may have any norm.

    Parameters
    ----------
    resolves : float
        If `rows` is K (..., t, t) and `linear` is b (..., t), the distances of unit rows from a span that
        the rounding of K hides. 0 if they are V (..., t, m) and a (..., m).
    trust : float
        Distance of an active row from the span of the others below which the solution is UNRESOLVED.
    rows : array, shape (problems, t, m), or (1, t, m) for the same rows in all problems
    linear : array, shape (problems, m)
    options : array, shape (problems, 4, t), or empty for zeros, zeros, infinity and zeros
        Right-hand sides, lower and upper bounds, and multipliers to start from.
    lam : array, shape (problems, t)
        Output: the multipliers; for an infeasible h the ray.
    numbers : array of int64, shape (2, problems)
        Output: status and number of pivots.
    total : array, shape (problems,)
        Output: the sum of ``|lam_i| |g_i|``, relative to the size of the problem.
    """
    t, of_gram, found, status, pivots = lam.shape[1], resolves > 0.0, np.zeros(3), numbers[0], numbers[1]
    low, high, right = np.zeros(t), np.zeros(t), np.zeros(t)
    start, norm, idle = np.zeros(t), np.zeros(t), np.zeros(t)
    for p in range(first, last):
        given = rows[p if len(rows) > 1 else 0]
        plain, finite = True, True
        for i in range(t):
            right[i], low[i], high[i], start[i] = 0.0, 0.0, np.inf, 0.0
            if len(options):
                right[i] = options[p, 0, i] if options[p, 0, i] > -np.inf else 0.0
                low[i], high[i], start[i] = options[p, 1, i], options[p, 2, i], options[p, 3, i]
            norm[i] = np.sqrt(given[i, i] if of_gram else dot(given[i], given[i]))
            lam[p, i] = min(max(0.0, low[i]), high[i])
            if norm[i] == 0.0 and right[i] != 0.0:  # what h asks of this row, x cannot change
                bound = high[i] if right[i] > 0.0 else low[i]
                lam[p, i] = bound if abs(bound) < np.inf else lam[p, i]
            idle[i] = lam[p, i]
            slack = (linear[p, i] if of_gram else dot(given[i], linear[p])) - right[i]
            plain = plain and low[i] == 0.0 and start[i] == 0.0 and slack >= 0.0
            finite = finite and norm[i] < np.inf
        status[p], pivots[p], total[p] = OPTIMAL, 0, 0.0
        if plain:  # g violates no constraint
            continue
        if of_gram:
            unit, a, apart = np.zeros((t, t)), np.zeros(t), np.zeros(t)
            rank = from_gram(given, linear[p], norm, right, resolves, unit, a, apart)
            if rank < t:
                unit, a = unit[:, :rank].copy(), a[:rank].copy()
        else:
            unit, a = np.zeros(given.shape), linear[p].copy()
            of_norm_one(given, norm, right, unit)
        moved = a.copy()  # g + G'margin
        for i in range(t):
            if lam[p, i] != 0.0:
                add(moved, lam[p, i] * norm[i], unit[i])
        size = np.sqrt(dot(moved, moved))
        for i in range(t):  # how far h asks x to move, see `DualSolution._asked`
            wanted = abs(right[i]) if low[i] < 0.0 else right[i]
            if wanted > size:
                size = max(size, min(wanted, (high[i] - max(low[i], 0.0)) * norm[i]))
        if size == 0.0:
            continue
        for i in range(len(a)):
            a[i] /= size
        for i in range(t):
            if norm[i] == 0.0:  # not a constraint
                low[i] = high[i] = 0.0
            stretch, right[i] = norm[i] / size, right[i] / size
            low[i], high[i] = low[i] * stretch, high[i] * stretch if high[i] < np.inf else np.inf
            begin = start[i] * stretch if abs(start[i]) < np.inf else 0.0
            lam[p, i] = min(max(begin if abs(begin) < np.inf else 0.0, low[i]), high[i])
        n, m = min(unit.shape) + 1, unit.shape[1]
        state = Search(
            unit, a, right, low, high, lam[p],
            np.zeros((n, m)), np.zeros((n, n + 2)), np.zeros(n, np.int64), np.zeros(3, np.int64),
            np.zeros(t, np.bool_), np.zeros(t, np.bool_),
            np.zeros(m), np.zeros(t), np.zeros(n), np.zeros(m), np.zeros(n), np.zeros(n), np.zeros(t),
        )  # fmt: skip
        if of_gram:
            search(state, resolves, GRAM_CONTRADICTS * resolves, found)
        else:
            search(state, ROWS_RESOLVE, ROWS_CONTRADICT, found)
        status[p], pivots[p], total[p] = int(found[0]) if finite else STALLED, state.count[1], found[2]
        ray = status[p] == INFEASIBLE
        if found[1] < trust:
            status[p] |= UNRESOLVED
        for i in range(t):
            least = options[p, 1, i] if len(options) else 0.0
            most = options[p, 2, i] if len(options) else np.inf
            if norm[i] == 0.0:
                lam[p, i] = idle[i]
            elif not ray:  # scaling would round multipliers at a bound
                value = lam[p, i] * (size / norm[i])
                at_low, at_high = lam[p, i] <= low[i], lam[p, i] >= high[i]
                lam[p, i] = least if at_low else most if at_high else min(max(value, least), most)
                if not abs(lam[p, i]) < np.inf:  # h is too large for a row as short
                    status[p] = STALLED


def from_gram(K: Any, b: Any, norm: Any, right: Any, resolves: float, V: Any, a: Any, apart: Any) -> int:
    """Write coordinates of rows of norm one and of g, from K and b; `right` becomes their right-hand side.

    Return their number. V is a Cholesky factor of the cosines, pivoted and cut off where the squared distance
    of every row left, in `apart`, is rounding. What is left of b beyond ``V a`` moves to the right-hand side,
    because only ``b - h`` matters.
    """
    t, rank = len(norm), 0
    for i in range(t):
        apart[i] = 1.0 if norm[i] > 0.0 else 0.0
    while rank < t:
        j = 0
        for i in range(1, t):
            if apart[i] > apart[j]:
                j = i
        if apart[j] <= resolves**2:
            break
        pivot = np.sqrt(apart[j])
        for i in range(t):
            if i == j:
                V[i, rank] = pivot
                apart[i] = 0.0
            elif apart[i] > 0.0:
                cosine = K[i, j] / norm[i] / norm[j]
                V[i, rank] = (cosine - dot(V[i, :rank], V[j, :rank])) / pivot
                apart[i] = max(apart[i] - V[i, rank] * V[i, rank], 0.0)
        a[rank] = (b[j] / norm[j] - dot(V[j, :rank], a[:rank])) / pivot
        rank += 1
    for i in range(t):
        right[i] = (right[i] - b[i]) / norm[i] + dot(V[i], a) if norm[i] > 0.0 else 0.0
    return rank


def of_norm_one(rows: Any, norm: Any, right: Any, V: Any) -> None:
    """Write rows scaled to norm one to V, which is zero, with `right` scaled alike."""
    for i in range(len(norm)):
        if norm[i] > 0.0:
            add(V[i], 1.0 / norm[i], rows[i])
            right[i] /= norm[i]
        else:
            right[i] = 0.0


def search(state: Search, resolves: float, contradicts: float, found: Any) -> None:
    """Solve a problem; `state.lam` holds the start, then the solution.

    Write what was `found`: the status, the smallest distance of an active row from the span of the others,
    and the sum of the absolute multipliers.
    """
    lam, t, entered, origin, size = state.lam, len(state.lam), -1, 0.0, 1.0
    release_all(state, resolves)
    minimum(state)
    while True:
        if advance(state):
            for i in range(t):  # a row that returned to its bound at once did so because of rounding
                state.tabu[i] = i == entered and not state.free[i] and lam[i] == origin
        size = 1.0
        for i in range(t):
            if not state.free[i]:
                size += abs(lam[i])
        entered = most_violated(state, ROUNDING * size, state.count[1] > BUDGET * t)
        if entered < 0 or state.count[1] > 2 * BUDGET * t + 20:
            if state.count[2] == 0:
                break
            minimum(state)  # without the rounding of the moves
            entered = -1
            continue
        origin, violated, exchanged = lam[entered], abs(state.slack[entered]), False
        sign = -1.0 if state.slack[entered] > 0.0 else 1.0
        while True:
            distance, weight = from_span(state, state.V[entered])
            if distance > resolves * weight:
                release(state, entered, distance)
                follow(state, entered, distance)
                break
            rounding = violated <= 10.0 * weight * max(ROUNDING * size, resolves)
            step, held = (0.0, False) if rounding else exchange(state, entered, sign)
            if step == np.inf and violated > contradicts * weight * size:
                for i in range(t):
                    lam[i] = 0.0
                for p in range(state.count[0]):
                    lam[state.order[p]] = -sign * state.weights[p]
                lam[entered] = sign
                found[0], found[1], found[2] = INFEASIBLE, 0.0, 0.0
                return
            for i in range(t):
                state.tabu[i] = state.tabu[i] and (rounding or step == np.inf)
            state.tabu[entered] = rounding or step == np.inf
            exchanged = True
            if not held:
                break
        if exchanged:
            minimum(state)
    judge(state, size, found)


def release_all(state: Search, resolves: float) -> None:
    """Release the rows whose multipliers start between their bounds, but for those that depend on the others.

    Equalities come first, and then always the row farthest from the span of the free rows: among dependent
    rows this selects rows at large angles, which keeps multipliers small. Multipliers of dependent rows start
    at zero.
    """
    V, lam, apart, along = state.V, state.lam, state.slack, state.shift
    for i in range(len(lam)):  # squared distances, with 4 added for equalities; negative for other rows
        apart[i] = -1.0
        if state.lower[i] < lam[i] and lam[i] < state.upper[i]:
            apart[i] = dot(V[i], V[i]) + (4.0 if state.lower[i] == -np.inf else 0.0)
    while True:
        j = 0
        for i in range(1, len(lam)):
            if apart[i] > apart[j]:
                j = i
        if apart[j] < 0.0:
            return
        apart[j] = -1.0
        distance, weight = from_span(state, V[j])
        if distance > resolves * weight and state.count[0] + 1 < len(state.Q):
            release(state, j, distance)
            times(V, state.Q[state.count[0] - 1], along)
            for i in range(len(lam)):
                if apart[i] >= 0.0:
                    least = 4.0 if apart[i] >= 4.0 else 0.0
                    apart[i] = max(apart[i] - along[i] * along[i], least)
        else:
            lam[j] = min(max(0.0, state.lower[j]), state.upper[j])


def advance(state: Search) -> bool:
    """Move to the minimum over the free multipliers; return whether a row met a bound and is now held."""
    lam, trial, lower, upper, dropped = state.lam, state.trial, state.lower, state.upper, False
    while True:  # each pass holds a row, or is the last
        assign(trial, state.R[:, -2])
        solve_triangle(state.R, state.count[0], trial)
        step = np.inf
        for p in range(state.count[0]):
            i = state.order[p]
            step = min(step, reach(lam[i], trial[p], lower[i], upper[i]))
        for p in range(state.count[0] - 1, -1, -1):
            i = state.order[p]
            if step == np.inf:
                lam[i] = trial[p]
            elif reach(lam[i], trial[p], lower[i], upper[i]) <= step:
                lam[i] = lower[i] if trial[p] <= lower[i] else upper[i]
                hold(state, p)
                retreat(state, i)
                dropped = True
            else:
                lam[i] = min(max(lam[i] + step * (trial[p] - lam[i]), lower[i]), upper[i])
        if step == np.inf:
            return dropped


def minimum(state: Search) -> None:
    """Compute x and the slacks at the minimum over the free multipliers.

    With the target ``a + V'lam_held``: ``x = target + Q'(y - Q target)``, where ``R'y = h_P``, and
    ``R lam_P = y - Q target``.
    """
    V, lam, x, y, missed, k = state.V, state.lam, state.x, state.inside, state.weights, state.count[0]
    Q, R = state.Q[:k], state.R
    assign(x, state.a)
    for i in range(len(lam)):
        if not state.free[i] and lam[i] != 0.0:
            add(x, lam[i], V[i])
    for p in range(k):
        y[p] = state.h[state.order[p]]
        R[p, -2] = 0.0
    solve_transposed(R, k, y)
    for _ in range(2):  # the second pass removes rounding
        times(Q, x, missed)
        for p in range(k):
            missed[p] = y[p] - missed[p]
            R[p, -2] += missed[p]
        add_rows(missed, Q, x)
    times(V, x, state.slack)
    for i in range(len(lam)):
        state.slack[i] = 0.0 if state.free[i] else state.slack[i] - state.h[i]
    state.count[2] = 0


def follow(state: Search, j: int, distance: float) -> None:
    """Move x to the minimum after row j was released: along its vector of the basis, to a slack of zero.

    What the row added to x while it was held is now a part of what the free rows add.
    """
    R, k, far = state.R, state.count[0] - 1, -state.slack[j] / distance
    R[k, -2] = far
    for p in range(k + 1):
        R[p, -2] += state.lam[j] * R[p, k]
    move(state, far, state.Q[k])


def retreat(state: Search, i: int) -> None:
    """Move x to the minimum after row i was held: along the vector of the basis that is left over.

    What the row adds to x now was a part of what the free rows added; they add nothing along that vector now.
    """
    R, k = state.R, state.count[0]
    for p in range(k + 1):
        R[p, -2] -= state.lam[i] * R[p, -1]
    move(state, -R[k, -2], state.Q[k])


def move(state: Search, far: float, q: Any) -> None:
    """Add a multiple of a vector of norm one to x, which leaves the slacks of the free rows at zero."""
    if abs(far) > FAR or state.count[0] <= FEW:
        minimum(state)
        return
    state.count[2] += 1
    add(state.x, far, q)
    times(state.V, q, state.shift)
    for i in range(len(state.lam)):
        state.slack[i] = 0.0 if state.free[i] else state.slack[i] + far * state.shift[i]


def most_violated(state: Search, worst: float, first: bool) -> int:
    """Return the row of the largest (if `first`, the first) violation above `worst`, or -1."""
    entered = -1
    for i in range(len(state.lam)):
        if not (state.free[i] or state.tabu[i]):
            wrong = violation(state, i)
            if wrong > worst:
                entered, worst = i, wrong
                if first:
                    break
    return entered


def violation(state: Search, i: int) -> float:
    """Return by how much a row that is not free violates its condition; negative if it is met."""
    lam, slack = state.lam[i], state.slack[i]
    if state.lower[i] < lam and lam < state.upper[i]:
        return abs(slack)
    return -slack if lam < state.upper[i] else slack if lam > state.lower[i] else -np.inf


def exchange(state: Search, j: int, sign: float) -> tuple[float, bool]:
    """Move multiplier j, and those of the free rows so that x stays, up to the first bound.

    Return the step, which is infinite if no multiplier meets a bound, and whether a free row met it and is
    now held.
    """
    lam, lower, upper, w, blocking = state.lam, state.lower, state.upper, state.weights, len(state.Q)
    goal = upper[j] if sign > 0.0 else lower[j]
    step = sign * (goal - lam[j])
    for p in range(state.count[0]):
        along, i = -sign * w[p], state.order[p]
        if abs(along) > NEAR_ZERO:
            bound = lower[i] if along < 0.0 else upper[i]
            if (bound - lam[i]) / along < step:
                step, blocking, goal = (bound - lam[i]) / along, p, bound
    if step < np.inf:
        for p in range(state.count[0]):
            i = state.order[p]
            lam[i] = min(max(lam[i] - sign * step * w[p], lower[i]), upper[i])
        if blocking == len(state.Q):
            lam[j] = goal
            state.count[1] += 1
        else:
            lam[j] += sign * step
            lam[state.order[blocking]] = goal
            hold(state, blocking)
    return step, blocking < len(state.Q)


def from_span(state: Search, v: Any) -> tuple[float, float]:
    """Split v into parts in and outside of the span of the free rows; return the length of the part outside.

    Also return ``1 + |w|_1`` for the weights w of v in the free rows, the unit of its rounding error.
    """
    outside, inside, w, k, weight = state.outside, state.inside, state.weights, state.count[0], 1.0
    Q = state.Q[:k]
    assign(outside, v)
    for p in range(k):
        inside[p] = 0.0
    for _ in range(2):  # twice is enough, and once where most of a row, of norm one, is left
        times(Q, outside, w)
        for p in range(k):
            inside[p] += w[p]
            w[p] = -w[p]
        add_rows(w, Q, outside)
        if k > FEW and dot(outside, outside) > 0.5:
            break
    assign(w, inside)
    solve_triangle(state.R, k, w)
    for p in range(k):
        weight += abs(w[p])
    return np.sqrt(dot(outside, outside)), weight


def release(state: Search, j: int, distance: float) -> None:
    """Append row j, which `from_span` has split, to the free rows."""
    k, q = state.count[0], state.Q[state.count[0]]
    for i in range(len(q)):
        q[i] = state.outside[i] / distance
    for p in range(k):
        state.R[p, k] = state.inside[p]
    state.R[k, k], state.order[k], state.free[j] = distance, j, True
    state.count[0] += 1
    state.count[1] += 1


def hold(state: Search, place: int) -> None:
    """Remove a row from the free rows, by its place in `order`; rotations make R triangular again.

    The last vector of the basis is left over, and the last column of R has the row in the whole basis.
    """
    Q, R, order, k = state.Q, state.R, state.order, state.count[0]
    for p in range(k):
        R[p, -1] = R[p, place] if p <= place else 0.0
    state.free[order[place]] = False
    state.count[0] -= 1
    state.count[1] += 1
    for p in range(place, k - 1):
        order[p] = order[p + 1]
        for i in range(p + 2):
            R[i, p] = R[i, p + 1]
    for p in range(place, k - 1):
        size = np.sqrt(R[p, p] * R[p, p] + R[p + 1, p] * R[p + 1, p])
        cosine, sine = R[p, p] / size, R[p + 1, p] / size
        rotate(R[p], R[p + 1], cosine, sine)
        rotate(Q[p], Q[p + 1], cosine, sine)
        R[p + 1, p] = 0.0


def judge(state: Search, size: float, found: Any) -> None:
    """Write what was `found`; UNRESOLVED if ``a + V'lam`` is far from x, which meets the free rows."""
    lam, x, outside, w, k, nearest = state.lam, state.x, state.outside, state.weights, state.count[0], 1.0
    status = OPTIMAL
    for i in range(len(lam)):
        wrong = -np.inf if state.free[i] else violation(state, i)
        if not wrong <= OPTIMAL_WITHIN * size:
            status = STALLED
        if wrong > -NEAR_ZERO * size:
            nearest = min(nearest, from_span(state, state.V[i])[0])
    total = 0.0
    assign(outside, state.a)
    for i in range(len(lam)):
        if lam[i] != 0.0:
            add(outside, lam[i], state.V[i])
            total += abs(lam[i])
    add(outside, -1.0, x)
    moved = np.sqrt(dot(outside, outside))
    for p in range(k):
        for q in range(k):
            w[q] = 1.0 if p == q else 0.0
        solve_transposed(state.R, k, w)
        nearest = min(nearest, 1.0 / np.sqrt(dot(w[:k], w[:k])))
    found[0] = status if moved <= HOPELESS else status | UNRESOLVED
    found[1], found[2] = nearest, total


def reach(here: float, end: float, low: float, high: float) -> float:
    """Return the fraction of the step to `end` that meets a bound; infinity if no bound is met."""
    if low < end and end < high:
        return np.inf
    if end == here:
        return 0.0
    return max(((low if end <= low else high) - here) / (end - here), 0.0)


def solve_triangle(R: Any, k: int, y: Any) -> None:
    """Replace y by the solution w of ``R w = y``, for the k free rows."""
    for p in range(k - 1, -1, -1):
        y[p] = (y[p] - dot(R[p, p + 1 : k], y[p + 1 : k])) / R[p, p]


def solve_transposed(R: Any, k: int, y: Any) -> None:
    """Replace y by the solution w of ``R'w = y``, for the k free rows."""
    for p in range(k):
        if y[p] != 0.0:
            y[p] /= R[p, p]
            add(y[p + 1 : k], -y[p], R[p, p + 1 : k])


# The vector operations: NumPy's here, loops in their compiled form. Outputs may be longer than results.
def dot(u: Any, v: Any) -> float:
    """Return the inner product of two vectors."""
    return float(u @ v)


def assign(to: Any, v: Any) -> None:
    """Write a vector to the beginning of another."""
    to[: len(v)] = v


def add(to: Any, factor: float, v: Any) -> None:
    """Add a multiple of a vector to the beginning of another."""
    to[: len(v)] += factor * v


def times(rows: Any, v: Any, out: Any) -> None:
    """Write the products of rows with the beginning of a vector."""
    out[: len(rows)] = rows @ v[: rows.shape[1]]


def add_rows(weights: Any, rows: Any, to: Any) -> None:
    """Add rows times their weights to a vector."""
    to[: rows.shape[1]] += weights[: len(rows)] @ rows


def rotate(u: Any, v: Any, cosine: float, sine: float) -> None:
    """Rotate two vectors in their plane."""
    before = u.copy()
    u[:] = cosine * before + sine * v
    v[:] = cosine * v - sine * before
