"""The numba backend: the three stages in compiled loops, on a table of addresses."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np

from gemproj._arrays import Array
from gemproj._constants import CHUNK, CLOSE, FEW_ROWS, LARGE, NARROW_ROUNDING, RESOLVED, WIDE_ROUNDING
from gemproj._problem import Problem
from gemproj._tspace import Gram, Standard, matvec, normalise
from gemproj.backends import portable
from gemproj.backends.numba.addresses import address, locate, locate_output
from gemproj.backends.numba.lanes import HEIGHT, LANES, MULTIPLE
from gemproj.backends.numba.loops import (
    MOST_GROUPS,
    add_pieces,
    sum_products,
    sum_shared_products,
    write_combination,
)
from gemproj.backends.numba.search import solve_active_set
from gemproj.backends.numba.threads import cores, share
from gemproj.methods import Exact, Method, Outcome, Status
from gemproj.methods.exact import nearly_active, resolution

# Maximum and minimum number of columns of a piece, the unit of work of a thread. Between these limits a piece
# has a sixteenth of all columns, so the bits of sums do not depend on the number of threads.
_PIECE, _LEAST = 1 << 17, 1 << 13
# Maximum number of columns of a float64 chunk. Its products are summed before they are added to the total.
_WIDE_CHUNK = 1024
# Jobs per thread: handing over a job takes as long as reading 100 kB.
_JOBS = 4
# Elements of G and g below which a problem is one piece. Numbers to read below which waking threads takes
# longer.
_SMALL, _WORTH_THREADS = 1 << 17, 1 << 21
# Maximum number of entries of the Gram matrices of one piece for a shared G, one matrix per gradient.
_MOST_SHARED = 1 << 20
# Search time per entry of K, in units of the time to read a number.
_READS = 128
# Bytes of a tile, and minimum number of columns in a tile. A tile takes less than half of a first-level
# cache, because prefetched data also passes through this cache.
_TILE, _LEAST_TILE = 12 << 10, 256
# Columns of x that stage 3 computes at a time.
_PART = 1024
_LINE = 64  # bytes of a cache line
# Limits of the scratch arrays kept for the next call: bytes of one entry, and number of entries.
_KEPT, _KINDS = 1 << 16, 16
_FLOAT64 = np.dtype(np.float64)
_NONE = np.empty((0, 0))
_LIKE = {dtype: np.empty(0, dtype) for dtype in (np.uint16, np.float32, np.float64)}


def bind(problem: Problem) -> Numba | None:
    """Return the backend for a problem on the CPU; None if the loops cannot read its arrays."""
    if problem.batch and len(problem.rows) > 1:  # many gradients in blocks
        return None
    if problem.shared and not 0 < math.prod(problem.batch) * (problem.t + 1) ** 2 <= _MOST_SHARED:
        return None
    found = locate(problem)
    return None if found is None else Numba(problem, *found)


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
    in_question = _share(solve_active_set, count, count * _READS * t * t, arrays, (_search, t))
    lam, (pivots, status) = lam.reshape(b.shape), ended
    pivots = pivots.reshape(batch)
    if not any(in_question):
        return Outcome(lam, pivots, int(Status.OPTIMAL))
    if len(Ks) == 1 and count > 1:
        # By Cauchy's interlacing, no principal submatrix has a smaller eigenvalue than the whole matrix.
        whole = normalise(Ks[0], bs[0]).K
        resolved = np.maximum(resolved, np.linalg.eigvalsh(whole)[0])
    if len(close := np.flatnonzero(resolved < CLOSE)):
        low, found = None if lower is None else lowers[close], lam.reshape(-1, t)[close]
        one = normalise(Ks[close] if len(Ks) > 1 else Ks, bs[close], low, start=found)
        near = nearly_active(one.start, matvec(one.K, one.start) + one.b, low)
        resolved[close] = resolution(one.K, near)
        status[close] |= np.where(resolved[close] < RESOLVED, int(Status.UNRESOLVED), 0)
    return Outcome(lam, pivots, status.reshape(batch), resolved.reshape(batch))


def _float64(a: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return an array in a new shape, in the type that the loops are compiled for: C-contiguous float64."""
    if a.dtype is not _FLOAT64 or not a.flags.carray:  # `is not` is faster than `!=`
        a = np.array(a, np.float64, order="C")
    return a.reshape(shape)


class Numba:
    """Stages 1 and 3 in compiled loops that read arrays by address; see `Backend` and `locate`."""

    name = "numba"

    def __init__(self, problem: Problem, lines: np.ndarray, dtype: Any, by_rows: bool) -> None:
        self.lines, self.like, self.columns = lines, _LIKE[dtype], None if by_rows else True
        self.problems = len(lines) // len(problem.rows)
        piece = _PIECE
        if problem.columns * (problem.t + 1) >= _SMALL:
            piece = min(piece, max(_LEAST, -(-problem.columns // (16 * 1024)) * 1024))
        self.piece, self.pieces = piece, max(1, -(-problem.columns // piece))
        self.wide = dtype is np.float64 or problem.t <= FEW_ROWS or problem.columns < LARGE

    def gram(self, problem: Problem) -> tuple[Gram, float]:
        """Return K, b and |g|^2, and their rounding error, summed chunk by chunk in threads."""
        t, n, pieces = problem.t, problem.t + 1, self.pieces
        totals = np.empty((self.problems, pieces, t * t + n))
        # The work, in units of the time to read a number. Eight products take the same time. Each number is
        # read once and multiplied by n numbers. With a shared G, the work is about one unit per row, column
        # and group of gradients.
        if problem.shared:
            loop, count = sum_shared_products, -(-self.problems // HEIGHT)
            steps = t, self.piece
            numbers = count * problem.columns * n
        else:
            loop, count, steps = sum_products, self.problems, (pieces, self.piece)
            numbers = count * problem.columns * n * ((8 + n) // 8)
        arrays = (self.lines, len(problem.rows), *steps, self.like, self.columns, totals)
        _share(loop, count * pieces, numbers, arrays, (_tile_and_sums, t, problem.shared, self.wide), problem)
        if pieces > 1:
            add_pieces(totals)
        total = totals[:, 0].reshape((*problem.batch, t * t + n)) if problem.batch else totals[0, 0]
        K = totals[0, 0] if problem.shared else total  # with a shared G there is one K
        K = K[..., : t * t].reshape((*K.shape[:-1], t, t))
        gram = Gram(K, total[..., t * t : -1], total[..., -1])
        return (gram, WIDE_ROUNDING) if self.wide else _remake_out_of_range(gram, problem)

    def combine(self, problem: Problem, lam: Array, x: list[Array]) -> None:
        """Write ``g + G'lam`` to x, chunk by chunk in float64, rounded once."""
        if not locate_output(self.lines, problem.batch, x):
            portable.Portable().combine(problem, lam, x)
            return
        lam, steps = _float64(lam, (self.problems, problem.t)), (self.pieces, self.piece, problem.shared)
        arrays = (self.lines, len(problem.rows), *steps, self.like, self.columns, lam)
        numbers = self.problems * problem.columns * (problem.t + 2)
        _share(
            write_combination, self.problems * self.pieces, numbers, arrays, (_part, problem.t), problem, x
        )


def _remake_out_of_range(gram: Gram, problem: Problem) -> tuple[Gram, float]:
    """Return K, b and |g|^2, recomputed in `portable` for problems whose float32 sums left the range.

    The bits of all other problems do not change. With a shared G, all problems are recomputed.
    """
    fits = portable.fits_float32(gram)
    if problem.shared and not fits.all():
        return portable.Portable().gram(problem)
    for i in map(tuple, np.argwhere(~fits)):
        one = portable.Portable().gram(problem.at(i))[0]
        for to, value in zip(gram, one, strict=True):
            to[i] = value
    return gram, NARROW_ROUNDING


def _share(
    loop: Any, count: int, work: int, arrays: Any, scratch: Any, problem: Problem | None = None, x: Any = None
) -> list[Any]:
    """Return the results of ``loop(first, last, *arrays, *_scratch(*scratch))``, for parts of `count` pieces.

    If there is enough `work` (in numbers to read), several parts run in threads; otherwise there is one part.
    The threads hold references to the problem and x, because the loops have only addresses of the arrays.
    """
    if work < _WORTH_THREADS or count < 2:
        return [loop(0, count, *arrays, *_scratch(*scratch))]
    threads = int(problem.xp.get_num_threads()) if problem is not None and problem.is_torch else cores()
    step, found = count if threads == 1 else -(-count // (_JOBS * threads)), []

    def run(i: int) -> None:
        found.append(loop(i * step, min((i + 1) * step, count), *arrays, *_scratch(*scratch)))

    share(run, -(-count // step), threads, (problem, x))
    return found


def _tile_and_sums(t: int, shared: bool, wide: bool) -> list[np.ndarray]:
    """Return scratch arrays for a tile and for the sums of its products, see `loops`."""
    n, chunk, dtype = t + 1, _WIDE_CHUNK if wide else CHUNK, _FLOAT64 if wide else np.dtype(np.float32)
    groups = -(-(t if shared else n) // HEIGHT)
    sums = groups * (groups + 1) // 2  # blocks of the lower triangle
    if shared:
        tile = ((groups + 1) * HEIGHT, min(chunk, _LEAST_TILE))
        sums += MOST_GROUPS * (groups + 1)
    else:
        columns = _TILE // (n * dtype.itemsize) // MULTIPLE * MULTIPLE
        tile = (n, min(chunk, max(_LEAST_TILE, columns)))
    return [_aligned(tile, dtype), _aligned((sums, HEIGHT * HEIGHT * LANES), _FLOAT64)]


def _part(t: int) -> list[np.ndarray]:
    """Return scratch arrays for a part of x and for the indices of the rows added to it, see `loops`."""
    return [_aligned((1, _PART), _FLOAT64), np.empty(t, np.int64)]


def _search(t: int) -> list[np.ndarray]:
    """Return scratch arrays for a tableau, a matrix, vectors and flags, see `search`."""
    return [np.empty((t, t + 1)), np.empty((t, t)), np.empty((6, t)), np.empty((2, t), np.bool_)]


class _Kept(threading.local):
    """Scratch arrays of one thread; the key is the function that makes them, with its arguments."""

    def __init__(self) -> None:
        self.arrays: dict[Any, list[np.ndarray]] = {}


_kept = _Kept()


def _scratch(*wanted: Any) -> list[np.ndarray]:
    """Return uninitialised arrays of this thread; `wanted` is the function that makes them and its arguments.

    Small arrays are kept for the next call, because allocating them takes as long as a small projection.
    """
    found = _kept.arrays.get(wanted)
    if found is None:
        make, *sizes = wanted
        found = make(*sizes)
        if sum(a.nbytes for a in found) <= _KEPT:
            if len(_kept.arrays) >= _KINDS:
                _kept.arrays.clear()
            _kept.arrays[wanted] = found
    return found


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialised array that starts at a cache line, so that no vector crosses two lines."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _LINE, np.uint8)
    start = -address(memory) % _LINE
    return memory[start : start + size].view(dtype).reshape(shape)
