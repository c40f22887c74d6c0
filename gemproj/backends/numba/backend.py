"""The numba backend: the three stages in compiled loops, on a table of addresses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gemproj._arrays import Array
from gemproj._constants import CHUNK, CLOSE, FEW_ROWS, LARGE, NARROW_ROUNDING, RESOLVED, WIDE_ROUNDING
from gemproj._problem import Problem
from gemproj._tspace import Gram, Standard, matvec, normalise
from gemproj.backends import portable
from gemproj.backends.numba.addresses import locate, locate_output
from gemproj.backends.numba.lanes import HEIGHT
from gemproj.backends.numba.loops import add_pieces, sum_products, sum_shared_products, write_combination
from gemproj.backends.numba.scratch import (
    for_combination,
    for_products,
    for_shared_products,
    make,
)
from gemproj.backends.numba.search import solve_active_set
from gemproj.backends.numba.threads import cores, share
from gemproj.methods import Exact, Method, Outcome, Status
from gemproj.methods.exact import nearly_active, resolution

# Most and fewest columns of a piece, the unit of work of a thread. Between these limits a piece has a
# sixteenth of all columns, so the bits of sums do not depend on the number of threads.
_PIECE, _LEAST = 1 << 17, 1 << 13
# Most columns of a chunk in float64. The products of a chunk are summed before they are added to the total.
_WIDE_CHUNK = 1024
# Jobs per thread: handing over a job takes as long as reading 100 kB.
_JOBS = 4
# Elements of G and g below which a problem is one piece; and elements below which the work takes less time
# than waking threads.
_SMALL, _WORTH_THREADS = 1 << 17, 1 << 21
# Most entries of the Gram matrices of one piece for a shared G: there is one matrix per gradient.
_MOST_SHARED = 1 << 20
# Entries of K in one job of stage 2.
_WORK = 1 << 14
_FLOAT64 = np.dtype(np.float64)
_NONE = np.empty((0, 0))


def bind(problem: Problem) -> Numba | None:
    """Return the backend for a problem on the CPU; None where the loops cannot read its arrays."""
    if problem.shared and not 0 < math.prod(problem.batch) * (problem.t + 1) ** 2 <= _MOST_SHARED:
        return None
    found = locate(problem)
    return None if found is None else Numba(problem, *found)


def solve(method: Method, dual: Standard, start: Array | None) -> Outcome:
    """Return the outcome for a batch: from compiled loops for `Exact`, from `portable` for other methods."""
    K, b, lower, upper = dual
    if type(method) is not Exact or not b.shape[-1]:
        return portable.solve(method, dual, start)
    shape, t = b.shape, b.shape[-1]
    Ks, bs = _float64(K, (-1, t, t)), _float64(b, (-1, t))
    count = len(bs)
    bounds = [
        _NONE if a is None else _float64(np.broadcast_to(a, shape), (-1, t)) for a in (lower, upper, start)
    ]
    lam, resolved = np.empty((count, t)), np.empty(count)
    pivots, status = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    step, to_resolve = max(1, _WORK // t**2), []

    def work(i: int) -> None:
        first, last = i * step, min(count, (i + 1) * step)
        found = (lam, pivots, status, resolved)
        to_resolve.append(solve_active_set(Ks, bs, *bounds, first, last, *found))

    share(work, -(-count // step))
    if any(to_resolve):
        if len(Ks) == 1 and count > 1:
            # No principal submatrix has a smaller eigenvalue than the whole (Cauchy's interlacing).
            whole = normalise(Ks[0], bs[0]).K
            resolved = np.maximum(resolved, np.linalg.eigvalsh(whole)[0])
        if len(close := np.flatnonzero(resolved < CLOSE)):
            low = None if lower is None else bounds[0][close]
            one = normalise(Ks[close] if len(Ks) > 1 else Ks, bs[close], low, start=lam[close])
            near = nearly_active(one.start, matvec(one.K, one.start) + one.b, low)
            resolved[close] = resolution(one.K, near)
            status[close] |= np.where(resolved[close] < RESOLVED, int(Status.UNRESOLVED), 0)
    batch = shape[:-1]
    return Outcome(lam.reshape(shape), pivots.reshape(batch), status.reshape(batch), resolved.reshape(batch))


def _float64(a: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array, reshaped, as the type that the loops are compiled for: float64, C-contiguous."""
    if a.dtype is not _FLOAT64 or not a.flags.carray:  # `is not` is faster than `!=`
        a = np.array(a, np.float64, order="C")
    return a.reshape(shape)


class Numba:
    """Stages 1 and 3 in compiled loops that read arrays by address; see `Backend` and `locate`."""

    name = "numba"

    def __init__(self, problem: Problem, lines: np.ndarray, dtype: Any, by_rows: bool) -> None:
        self.lines, self.like, self.columns = lines, np.empty(0, dtype), None if by_rows else True
        self.problems = len(lines) // len(problem.rows)
        piece = _PIECE
        if problem.columns * (problem.t + 1) >= _SMALL:
            piece = min(piece, max(_LEAST, -(-problem.columns // (16 * 1024)) * 1024))
        self.piece, self.pieces = piece, max(1, -(-problem.columns // piece))
        self.wide = dtype is np.float64 or problem.t <= FEW_ROWS or problem.columns < LARGE

    def gram(self, problem: Problem) -> tuple[Gram, float]:
        """Return K, b and |g|^2, and their rounding error, summed chunk by chunk in threads."""
        t, n, shared, blocks = problem.t, problem.t + 1, problem.shared, len(problem.rows)
        chunk, dtype, itemsize = (_WIDE_CHUNK, np.float64, 8) if self.wide else (CHUNK, np.float32, 4)
        totals = np.empty((self.problems, self.pieces, n, n))
        shapes = for_shared_products(t, chunk) if shared else for_products(n, chunk, itemsize)

        def work(first: int, last: int) -> None:
            arrays = (self.like, self.columns, *make(*shapes, dtype), totals)
            if shared:
                sum_shared_products(self.lines, blocks, first, last, self.piece, *arrays)
            else:
                sum_products(self.lines, blocks, first, last, self.pieces, self.piece, *arrays)

        # The work, in units of the time to read a number, which is also the time of eight products. Each
        # number is read once and multiplied by n numbers. With a shared G the work is about one unit per row,
        # column and group of gradients.
        count = -(-self.problems // HEIGHT) if shared else self.problems
        numbers = count * problem.columns * n * (1 if shared else (8 + n) // 8)
        _in_threads(work, count * self.pieces, numbers, problem)
        if self.pieces > 1:
            add_pieces(totals)
        total = totals[:, 0].reshape((*problem.batch, n, n)) if problem.batch else totals[0, 0]
        # With a shared G only the first matrix is complete; all other matrices have only their last row.
        K = totals[0, 0, :t, :t] if shared else total[..., :t, :t]
        gram = Gram(K, total[..., t, :t], total[..., t, t])
        return (gram, WIDE_ROUNDING) if self.wide else _remake_out_of_range(gram, problem)

    def combine(self, problem: Problem, lam: Array, x: list[Array]) -> None:
        """Write ``g + G'lam`` to x, chunk by chunk in float64, rounded once."""
        if not locate_output(self.lines, problem.batch, x):
            portable.Portable().combine(problem, lam, x)
            return
        lam = _float64(lam, (self.problems, problem.t))
        blocks, shared = len(problem.rows), problem.shared

        def work(first: int, last: int) -> None:
            pieces, loops = (self.pieces, self.piece), (self.like, self.columns)
            scratch = for_combination(problem.t)
            write_combination(self.lines, blocks, first, last, *pieces, shared, *loops, lam, *scratch)

        numbers = self.problems * problem.columns * (problem.t + 2)
        _in_threads(work, self.problems * self.pieces, numbers, problem, x)


def _remake_out_of_range(gram: Gram, problem: Problem) -> tuple[Gram, float]:
    """Return K, b and |g|^2, recomputed in `portable` for problems whose float32 sums left the range.

    Problem by problem, so that the bits of all other problems do not change.
    """
    fits = portable.fits_float32(gram)
    if problem.shared and not fits.all():
        return portable.Portable().gram(problem)
    for i in map(tuple, np.argwhere(~fits)):
        one = portable.Portable().gram(problem.at(i))[0]
        for to, value in zip(gram, one, strict=True):
            to[i] = value
    return gram, NARROW_ROUNDING


def _in_threads(
    work: Callable[[int, int], None], count: int, numbers: int, problem: Problem, x: Any = None
) -> None:
    """Call ``work(first, last)`` for `count` pieces, in threads if there are enough `numbers` to read.

    The threads hold a reference to the problem and x, because the loops have only addresses of the arrays.
    """
    threads = 1
    if numbers >= _WORTH_THREADS:
        threads = int(problem.xp.get_num_threads()) if problem.is_torch else cores()
    if threads == 1:
        work(0, count)
        return
    step = -(-count // (_JOBS * threads))
    share(lambda i: work(i * step, min((i + 1) * step, count)), -(-count // step), threads, (problem, x))
