"""Lawson and Hanson's method with upper bounds, a whole search in one program.

The search of `gemproj.methods._active_set`, rule by rule. The tableau lies in a workspace, 226 kB at
t = 168 and so in the L1 and L2 caches; its last column, the multipliers and the states are vectors in
registers. Threads of a program read what others wrote only after a barrier.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gemproj import _constants
from gemproj.backends.triton._access import kernel
from gemproj.backends.triton._unit import (
    DEPENDENT,
    at,
    clip,
    copy_cosines,
    first,
    linear,
    magnitude,
    product,
    residual,
    unresolved,
    verdict,
)

_ROUNDING: tl.constexpr = tl.constexpr(_constants.ROUNDING)
_EXCHANGE: tl.constexpr = tl.constexpr(_constants.EXCHANGE)
_BUDGET: tl.constexpr = tl.constexpr(_constants.BUDGET)


@triton.jit
def _copy(source, target, t, CHUNK: tl.constexpr, T: tl.constexpr):
    i = tl.arange(0, T)
    tl.debug_barrier()
    for start in range(0, t, CHUNK):
        r = start + tl.arange(0, CHUNK)
        inside = (r < t)[:, None] & (i < t)[None, :]
        where = r[:, None] * t + i[None, :]
        tl.store(target + where, tl.load(source + where, mask=inside, other=0.0), mask=inside)
    tl.debug_barrier()


@triton.jit
def _sweep(A, c, j, t, T: tl.constexpr, CHUNK: tl.constexpr):
    """Pivot the tableau [A | c] on row j; return the new c."""
    i = tl.arange(0, T)
    inside = i < t
    pivot = tl.load(A + j * (t + 1))
    pivot = tl.where(pivot > DEPENDENT, pivot, 1.0)
    row = tl.load(A + j * t + i, mask=inside, other=0.0) / pivot
    column = tl.load(A + i * t + j, mask=inside, other=0.0)
    # First all that needs row and column j as they were, then these two.
    for start in range(0, t, CHUNK):
        r = start + tl.arange(0, CHUNK)
        other = (r < t) & (r != j)
        factor = tl.load(A + r * t + j, mask=other, other=0.0)
        where = A + r[:, None] * t + i[None, :]
        mask = other[:, None] & (inside & (i != j))[None, :]
        tl.store(where, tl.load(where, mask=mask, other=0.0) - factor[:, None] * row[None, :], mask=mask)
    tl.debug_barrier()
    tl.store(A + j * t + i, tl.where(i == j, 1.0 / pivot, row), mask=inside)
    tl.store(A + i * t + j, -column / pivot, mask=inside & (i != j))
    tl.debug_barrier()
    step = at(c, j, T) / pivot
    return tl.where(i == j, step, c - column * step)


@triton.jit
def _set_free(unit, A, b, lam, lower, upper, t, T: tl.constexpr, CHUNK: tl.constexpr):
    """Sweep on the multipliers between their bounds; rows dependent on those before stay at zero."""
    _copy(unit, A, t, CHUNK, T)
    i = tl.arange(0, T)
    c = b
    inside = (lam > lower) & (lam < upper) & (i < t)
    free = tl.zeros((T,), dtype=tl.int32)
    todo = inside.to(tl.int32)
    while tl.max(todo, axis=0) > 0:
        # Rows of any sign come first.
        signed = tl.where(lower < 0, todo, 0)
        j = first(tl.where(tl.max(signed, axis=0) > 0, signed, todo) > 0, T)
        todo = tl.where(i == j, 0, todo)
        if tl.load(A + j * (t + 1)) > DEPENDENT:
            c = _sweep(A, c, j, t, T, CHUNK)
            free = tl.where(i == j, 1, free)
    return c, tl.where(inside & (free == 0), 0.0, lam), free


@triton.jit
def _exchange(A, c, lam, free, lower, upper, j, sign, t, T: tl.constexpr, CHUNK: tl.constexpr):
    """Exchange row j, dependent on the free rows, for the first of them that meets a bound.

    The objective falls along the null direction: lam_j moves by `sign`, the free multipliers so that
    x stays. Returns the number of pivots, too: none if no multiplier is ever in the way.
    """
    i = tl.arange(0, T)
    column = tl.load(A + i * t + j, mask=i < t, other=0.0)
    diagonal = tl.load(A + i * (t + 1), mask=i < t, other=1.0)
    moves = (free > 0) | (i == j)
    speed = tl.where(i == j, sign, -sign * column)
    target = tl.where(speed < 0, lower, upper)
    # Only without one of these is row j independent of the rest.
    blocks = (i == j) | ((free > 0) & (column * column > DEPENDENT * diagonal))
    reach = tl.where(blocks, (target - lam) / tl.where(blocks, speed, 1.0), float("inf"))
    reach = tl.where(reach < float("inf"), tl.maximum(reach, 0.0), float("inf"))
    step = tl.min(reach, axis=0)
    pivots = 0
    if step < float("inf"):
        k = first(reach == step, T)
        lam = tl.where(moves, clip(lam + step * speed, lower, upper), lam)
        lam = tl.where(i == k, target, lam)
        pivots = 1  # from one bound of its own to the other
        if k != j:
            c = _sweep(A, c, k, t, T, CHUNK)
            c = _sweep(A, c, j, t, T, CHUNK)
            free = tl.where(i == k, 0, tl.where(i == j, 1, free))
            pivots = 2
    return c, lam, free, pivots


@triton.jit
def _search(A, c, lam, free, lower, upper, t, T: tl.constexpr, CHUNK: tl.constexpr, BOUNDED: tl.constexpr):
    """Pivot until no constraint is violated; return the multipliers and the number of pivots."""
    i = tl.arange(0, T)
    budget = _BUDGET * t
    pivots = 0
    barred = free * 0
    entered = -1
    dropped = 0
    searching = 1
    while searching == 1:
        # -lam of the free rows and s of the others, at the minimum over the free multipliers.
        s = c
        if BOUNDED:  # else multipliers that are not free are zero
            s = c + product(A, tl.where(free > 0, 0.0, lam), t, T, CHUNK)
        outside = (free > 0) & ((-s <= lower) | (-s >= upper))
        if tl.max(outside.to(tl.int32), axis=0) > 0:
            # Go there as far as the bounds allow; what blocks the way is set to its bound, exactly.
            target = tl.where(-s <= lower, lower, upper)
            gap = -s - lam
            moves = outside & (gap != 0)
            reach = tl.where(moves, (target - lam) / tl.where(moves, gap, 1.0), 0.0)
            reach = tl.where(outside, reach, float("inf"))
            step = tl.minimum(tl.maximum(tl.min(reach, axis=0), 0.0), 1.0)
            blocking = reach <= step
            moved = tl.where(blocking, target, clip(lam + step * gap, lower, upper))
            lam = tl.where(free > 0, moved, lam)
            todo = blocking.to(tl.int32)
            searching = tl.max(todo, axis=0)  # numbers that are not finite may block nothing: then stop
            while tl.max(todo, axis=0) > 0:
                j = first(todo > 0, T)
                c = _sweep(A, c, j, t, T, CHUNK)
                pivots += 1
                todo = tl.where(i == j, 0, todo)
            free = tl.where(blocking, 0, free)
            dropped = 1
        else:
            lam = tl.where(free > 0, -s, lam)
            if dropped == 1:
                # A row that leaves in the move it entered for did so by rounding: not again at once.
                barred = tl.where((i == entered) & (free == 0), 1, 0)
                dropped = 0
            open_ = (free == 0) & (barred == 0) & (upper > lower) & (i < t)
            open_ = open_ & (((s < 0) & (lam < upper)) | ((s > 0) & (lam > lower)))
            violation = tl.where(open_, tl.abs(s), 0.0)
            violated = violation > _ROUNDING * magnitude(lam)
            if (tl.max(violated.to(tl.int32), axis=0) == 0) | (pivots > 2 * budget):
                searching = 0
            else:
                # The most violated row is the fast choice; the first one cannot cycle.
                entered = first(violated, T)
                if pivots <= budget:
                    entered = first(violation == tl.max(violation, axis=0), T)
                done = 0
                if tl.load(A + entered * (t + 1)) > DEPENDENT:
                    c = _sweep(A, c, entered, t, T, CHUNK)
                    free = tl.where(i == entered, 1, free)
                    done = 1
                elif at(violation, entered, T) > _EXCHANGE * magnitude(lam):
                    sign = tl.where(at(s, entered, T) < 0, 1.0, -1.0)
                    c, lam, free, done = _exchange(A, c, lam, free, lower, upper, entered, sign, t, T, CHUNK)
                pivots += done
                barred = tl.where((i == entered) & (done == 0), 1, barred)
    return lam, pivots


@triton.jit
def _smallest_pivot(A, chosen, t, T: tl.constexpr, CHUNK: tl.constexpr):
    """Return the smallest pivot of the chosen rows, which are eliminated one by one."""
    i = tl.arange(0, T)
    left = chosen.to(tl.int32)
    smallest = tl.sum(tl.zeros((T,), dtype=tl.float64), axis=0) + 1.0
    while tl.max(left, axis=0) > 0:
        k = first(left > 0, T)
        left = tl.where(i == k, 0, left)
        pivot = tl.load(A + k * (t + 1))
        smallest = tl.minimum(smallest, pivot)
        row = tl.load(A + k * t + i, mask=left > 0, other=0.0)
        row = row / tl.where(pivot > DEPENDENT, pivot, 1.0)
        for start in range(0, t, CHUNK):
            r = start + tl.arange(0, CHUNK)
            factor = tl.load(A + k * t + r, mask=r < t, other=0.0)
            where = A + r[:, None] * t + i[None, :]
            # Rows before k are not looked at again, and row k must stay while it is read.
            mask = ((r < t) & (r > k))[:, None] & (left > 0)[None, :]
            tl.store(where, tl.load(where, mask=mask, other=0.0) - factor[:, None] * row[None, :], mask=mask)
        tl.debug_barrier()
    return smallest


@kernel
def search_active_set(
    K, K_batch, K_row, b, b_batch, b_step, lower, upper, start, lam_out, pivots_out, status_out,
    workspace, count, t,
    T: tl.constexpr, CHUNK: tl.constexpr, SIGNED: tl.constexpr, BOUNDED: tl.constexpr,
    STARTED: tl.constexpr, STATUS: tl.constexpr,
):  # fmt: skip
    """Solve problems `program_id`, `program_id + num_programs`, ... in a workspace of 2 t^2 each."""
    i = tl.arange(0, T)
    unit = workspace + tl.program_id(0).to(tl.int64) * 2 * t * t
    A = unit + t * t
    for p in range(tl.program_id(0), count, tl.num_programs(0)):
        problem = tl.cast(p, tl.int64)
        here = K + problem * K_batch
        unit_b, low, high, lam, scale = linear(
            here, K_row, b + problem * b_batch, b_step, lower + problem * t, upper + problem * t,
            start + problem * t, t, T, SIGNED, BOUNDED, STARTED, True,
        )  # fmt: skip
        tl.debug_barrier()  # the problem before may still be read
        copy_cosines(here, K_row, unit, t, T, CHUNK, True)
        best = tl.zeros((T,), dtype=tl.float64)
        smallest = tl.max(residual(best, unit_b, low, high), axis=0)
        pivots = 0
        # Updates add rounding, so a search that ends with a violated constraint starts again, afresh.
        attempts = 3
        while attempts > 0:
            c, lam, free = _set_free(unit, A, unit_b, lam, low, high, t, T, CHUNK)
            lam, more = _search(A, c, lam, free, low, high, t, T, CHUNK, BOUNDED)
            pivots += more
            s = product(unit, lam, t, T, CHUNK) + unit_b
            miss = tl.max(residual(lam, s, low, high), axis=0)
            best = tl.where(miss < smallest, lam, best)
            smallest = tl.minimum(miss, smallest)
            attempts -= 1
            if smallest <= _ROUNDING * magnitude(best):
                attempts = 0
        tl.store(lam_out + problem * t + i, best * scale, mask=i < t)
        tl.store(pivots_out + problem, pivots)
        if STATUS:
            s = product(unit, best, t, T, CHUNK) + unit_b
            status, determining = verdict(best, s, low, high)
            _copy(unit, A, t, CHUNK, T)
            resolution = _smallest_pivot(A, determining & (i < t), t, T, CHUNK)
            tl.store(status_out + problem, status + unresolved(resolution))
