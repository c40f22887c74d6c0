"""Every active set at once: one lane of a vector sweeps the tableau on each, `gemproj.methods._enumeration`.

Lane n holds the set whose states of the rows are the digits of n, row 0 first: 0 at zero, 1 free and,
with an upper bound, 2 at the bound. No step depends on a value.
"""

from __future__ import annotations

import triton.language as tl

from gemproj.backends.triton._access import kernel
from gemproj.backends.triton._unit import DEPENDENT, clip, cosines, linear, residual, unresolved, verdict


@kernel
def enumerate_sets(
    K, K_batch, K_row, b, b_batch, b_step, lower, upper, lam_out, status_out, t,
    T: tl.constexpr, SETS: tl.constexpr, SIGNED: tl.constexpr, BOUNDED: tl.constexpr, STATUS: tl.constexpr,
):  # fmt: skip
    """Solve problem `program_id`, of t <= T rows; SETS is a power of two of at least 2^t (3^t) lanes."""
    CHOICES: tl.constexpr = 3 if BOUNDED else 2
    problem = tl.program_id(0).to(tl.int64)
    K += problem * K_batch
    i, n = tl.arange(0, T), tl.arange(0, SETS)
    unit_b, low, high, _, scale = linear(
        K, K_row, b + problem * b_batch, b_step, lower + problem * t, upper + problem * t, upper, t,
        T, SIGNED, BOUNDED, False, True,
    )  # fmt: skip
    unit = cosines(K, K_row, i, i, t, True)
    # Lanes come last, which gives each to one thread, and k is known when this is compiled: rows and columns
    # of a tableau are then registers, and what later steps do not need is not computed.
    A = unit[:, :, None] + tl.zeros((T, T, SETS), dtype=tl.float64)
    c = unit_b[:, None] + tl.zeros((T, SETS), dtype=tl.float64)
    states = tl.zeros((T, SETS), dtype=tl.int32)
    dependent = tl.zeros((SETS,), dtype=tl.int32)
    rest = n
    for k in tl.static_range(T):
        state = rest % CHOICES
        rest = rest // CHOICES
        here = (i == k)[:, None]
        states = tl.where(here, state[None, :], states)
        free = (state == 1)[None, :]
        row = tl.sum(tl.where(here[:, :, None], A, 0.0), axis=0)
        column = tl.sum(tl.where((i == k)[None, :, None], A, 0.0), axis=1)
        pivot = tl.sum(tl.where(here, column, 0.0), axis=0)
        c_k = tl.sum(tl.where(here, c, 0.0), axis=0)
        dependent = tl.where((state == 1) & (pivot <= DEPENDENT), 1, dependent)
        pivot = tl.where(pivot > DEPENDENT, pivot, 1.0)[None, :]
        row = row / pivot
        c_k = c_k[None, :] / pivot
        swept = A - tl.where(here, 0.0, column)[:, None, :] * row[None, :, :]
        swept = tl.where((i == k)[None, :, None], (-column / pivot)[:, None, :], swept)
        swept = tl.where(here[:, :, None], tl.where(here, 1.0 / pivot, row)[None, :, :], swept)
        A = tl.where(free[:, None, :], swept, A)
        stepped = tl.where(here, c_k, c - column * c_k)
        if BOUNDED:
            u_k = tl.sum(tl.where(i == k, tl.where(i < t, high, 0.0), 0.0), axis=0)
            c = tl.where((state == 2)[None, :], c + column * u_k, c)
        c = tl.where(free, stepped, c)
    lam = tl.where(states == 1, -c, 0.0)
    if BOUNDED:
        lam = tl.where(states == 2, high[:, None], lam)
    lam = clip(lam, low[:, None], high[:, None])
    s = tl.sum(unit[:, :, None] * lam[None, :, :], axis=1) + unit_b[:, None]
    miss = tl.max(residual(lam, s, low[:, None], high[:, None]), axis=0)
    # A lane past the last set has digits left over, or says something of rows past the last.
    odd = (rest > 0) | (tl.max(tl.where((i >= t)[:, None], states, 0), axis=0) > 0)
    miss = tl.where((dependent > 0) | odd, float("inf"), miss)
    # Ties go to the first set: where no constraint is violated that is the empty one, and x is g.
    best = tl.min(tl.where(miss == tl.min(miss, axis=0), n, SETS), axis=0)
    lam = tl.sum(tl.where((n == best)[None, :], lam, 0.0), axis=1)
    tl.store(lam_out + problem * t + i, lam * scale, mask=i < t)
    if STATUS:
        s = tl.sum(unit * lam[None, :], axis=1) + unit_b
        status, determining = verdict(lam, s, low, high)
        resolution = 1.0 + tl.sum(lam * 0.0, axis=0)
        both = determining[:, None] & determining[None, :]
        left = tl.where(both, unit, tl.where(i[:, None] == i[None, :], 1.0, 0.0))
        for k in range(t):
            # K is symmetric, and so are its Schur complements.
            across = tl.sum(tl.where((i == k)[None, :], left, 0.0), axis=1)
            down = tl.sum(tl.where((i == k)[:, None], left, 0.0), axis=0)
            least = tl.sum(tl.where(i == k, across, 0.0), axis=0)
            resolution = tl.minimum(resolution, least)
            left -= across[:, None] * (down / tl.where(least > DEPENDENT, least, 1.0))[None, :]
        tl.store(status_out + problem, status + unresolved(resolution))
