"""Projected gradient steps, plain and accelerated, any number of them in one launch.

The steps of `gemproj.methods.pgd` and `gemproj.methods.fista`. Up to 64 rows K stays in registers;
above, in a workspace that the L2 cache holds.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gemproj.backends.triton._access import kernel
from gemproj.backends.triton._unit import clip, copy_cosines, cosines, inverse, linear, product


@triton.jit
def _times(tile, A, v, t, T: tl.constexpr, CHUNK: tl.constexpr):
    """Return K v, for K in registers or in memory."""
    return tl.sum(tile * v[None, :], axis=1) if T == CHUNK else product(A, v, t, T, CHUNK)


@triton.jit
def _bound(K, K_row, t, T: tl.constexpr, CHUNK: tl.constexpr, NORMALIZE: tl.constexpr):
    """Return min(trace, largest absolute row sum, Frobenius norm) of K."""
    i = tl.arange(0, T)
    diagonal = tl.zeros((T,), dtype=tl.float64)
    sums = tl.zeros((T,), dtype=tl.float64)
    squares = tl.zeros((T,), dtype=tl.float64)
    for start in range(0, t, CHUNK):
        j = start + tl.arange(0, CHUNK)
        tile = cosines(K, K_row, i, j, t, NORMALIZE)
        # Rows that only fill up the tile have norm zero, too: not these.
        tile = tl.where((i < t)[:, None] & (j < t)[None, :], tile, 0.0)
        diagonal += tl.sum(tl.where(i[:, None] == j[None, :], tile, 0.0), axis=1)
        sums += tl.sum(tl.abs(tile), axis=1)
        squares += tl.sum(tile * tile, axis=1)
    trace, frobenius = tl.sum(diagonal, axis=0), tl.sqrt(tl.sum(squares, axis=0))
    return tl.minimum(tl.minimum(trace, tl.max(sums, axis=0)), frobenius)


@kernel
def descend(
    K, K_batch, K_row, b, b_batch, b_step, lower, upper, start, lam_out, workspace, count, t, steps,
    T: tl.constexpr, CHUNK: tl.constexpr, SIGNED: tl.constexpr, BOUNDED: tl.constexpr,
    STARTED: tl.constexpr, NORMALIZE: tl.constexpr, ACCELERATED: tl.constexpr, RESTART: tl.constexpr,
    POWER: tl.constexpr, SAFETY: tl.constexpr,
):  # fmt: skip
    """Take `steps` steps on every problem; POWER counts power iterations, 0 is the safe step size."""
    i = tl.arange(0, T)
    A = workspace + tl.program_id(0).to(tl.int64) * t * t
    for p in range(tl.program_id(0), count, tl.num_programs(0)):
        problem = tl.cast(p, tl.int64)
        here = K + problem * K_batch
        c, low, high, first, scale = linear(
            here, K_row, b + problem * b_batch, b_step, lower + problem * t, upper + problem * t,
            start + problem * t, t, T, SIGNED, BOUNDED, STARTED, NORMALIZE,
        )  # fmt: skip
        tile = tl.zeros((1, 1), dtype=tl.float64)
        if T == CHUNK:
            tile = cosines(here, K_row, i, i, t, NORMALIZE)
        else:
            tl.debug_barrier()  # the problem before may still be read
            copy_cosines(here, K_row, A, t, T, CHUNK, NORMALIZE)
        if POWER == 0:
            eta = inverse(_bound(here, K_row, t, T, CHUNK, NORMALIZE))
        else:
            v = tl.where(i < t, 1.0, 0.0) + c * 0.0
            for _ in range(POWER):
                v = tl.where(i < t, _times(tile, A, v, t, T, CHUNK), 0.0)
                v = v * inverse(tl.sqrt(tl.sum(v * v, axis=0)))
            eta = inverse(tl.sum(v * _times(tile, A, v, t, T, CHUNK), axis=0)) * SAFETY
        lam = first
        if ACCELERATED:
            y = first
            momentum = eta * 0.0 + 1.0
            for _ in range(steps):
                new = clip(y - eta * (_times(tile, A, y, t, T, CHUNK) + c), low, high)
                faster = (1.0 + tl.sqrt(1.0 + 4.0 * momentum * momentum)) / 2.0
                if RESTART:
                    uphill = tl.sum((y - new) * (new - lam), axis=0) > 0
                    momentum = tl.where(uphill, 1.0, momentum)
                    faster = tl.where(uphill, 1.0, faster)
                y = new + (momentum - 1.0) / faster * (new - lam)
                lam = new
                momentum = faster
            better = tl.sum(lam * (0.5 * _times(tile, A, lam, t, T, CHUNK) + c), axis=0) <= tl.sum(
                first * (0.5 * _times(tile, A, first, t, T, CHUNK) + c), axis=0
            )
            lam = tl.where(better, lam, first)
        else:
            for _ in range(steps):
                lam = clip(lam - eta * (_times(tile, A, lam, t, T, CHUNK) + c), low, high)
        tl.store(lam_out + problem * t + i, lam * scale, mask=i < t)
