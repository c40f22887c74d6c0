"""The numba backend: stages 1 and 3 in compiled loops, which read views of the arrays of a problem."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gemproj._arrays import Array
from gemproj._problem import Problem
from gemproj._tspace import Gram
from gemproj.backends import portable
from gemproj.backends.numba.loops import sum_products, transpose, write_combinations
from gemproj.backends.numba.search import solve
from gemproj.backends.numba.threads import cores, share_pieces
from gemproj.backends.numba.views import flat, is_contiguous, is_plain, is_read, memory, view

__all__ = ["Numba", "bind", "solve"]

# Maximum and minimum number of columns of a piece, the unit of work of a thread. Between these limits a piece
# has a sixteenth of all columns, so the bits of sums do not depend on the number of threads.
_PIECE, _LEAST = 1 << 17, 1 << 13
# Elements of G and g below which a problem is one piece.
_SMALL = 1 << 17
# Numbers to read below which waking threads takes longer.
_WORTH_THREADS = 1 << 21
# Minimum number of gradients on one G whose products are summed together.
_TOGETHER = 12
# Elements of G and g that are copied at a time, to stay in a second-level cache. Blocks of fewer elements
# than _SMALL_BLOCK are copied, several of one shape at a time.
_COPY, _SMALL_BLOCK = 1 << 15, 1 << 14


def bind(problem: Problem) -> Numba | None:
    """Return the backend for a problem on the CPU; None if the loops cannot read its arrays.

    They read arrays of one dtype, float32, float64 or bfloat16, without a metric.
    """
    arrays = [*problem.rows, *problem.vector]
    if problem.weight is not None or (problem.shared and not math.prod(problem.batch)):
        return None
    if not all(is_plain(kind) for kind in {type(a) for a in arrays}):
        return None
    dtypes = {a.dtype for a in arrays}
    if len(dtypes) > 1 or not is_read(dtypes.pop()):
        return None
    if problem.batch and len(problem.rows) > 1:  # many gradients in blocks
        return None
    try:
        return Numba(problem)
    except (RuntimeError, TypeError):  # tensors without memory of their own
        return None


class Numba:
    """Stages 1 and 3 in compiled loops; see `gemproj.backends.Backend`.

    Attributes
    ----------
    direct : tuple or None
        Arguments of the loops for one block whose memory they can read as it is.
    parts : list
        The work that threads share otherwise: lists of (blocks, start, stop). Several blocks are small and of
        one shape, and are copied to be read.
    """

    name = "numba"

    def __init__(self, problem: Problem) -> None:
        n, t, batch = problem.columns, problem.t, problem.batch
        self.problems, self.piece, self.direct = math.prod(batch) if batch else 1, _PIECE, None
        if n * (t + 1) >= _SMALL:
            self.piece = min(_PIECE, max(_LEAST, -(-n // (16 * 1024)) * 1024))
        if len(problem.rows) == 1:
            G, g = view(problem.rows[0]), view(problem.vector[0])
            if is_contiguous(G) and is_contiguous(g):
                self.direct = flat(G), n, 0 if problem.shared else t * n, flat(g), n
            elif n:
                self.direct = _arguments(*self._source(problem, [0]), 0)
        self.parts = [] if self.direct else self._parts(problem)

    def gram(self, problem: Problem) -> Gram:
        """Return K, b and |g|^2, summed piece by piece in threads."""
        t, m, n, batch = problem.t, self.problems, problem.columns, problem.batch
        together = max(t, _TOGETHER) if problem.shared else 1
        items, size = -(-m // together), t * t + together * (t + 1)
        pieces = len(self.parts) if self.direct is None else -(-n // self.piece)
        totals = np.zeros((max(1, pieces), items, size))
        if self.direct is not None:
            count, whole = items * pieces, (*self.direct, items, n, self.piece, t, min(m, together), totals)

            def run(begin: int, end: int) -> None:
                sum_products(begin, end, *whole)
        else:
            count = pieces

            def run(begin: int, end: int) -> None:
                for i in range(begin, end):
                    for arrays, many, columns, _, at, _ in self._tiles(problem, self.parts[i]):
                        here, into = -(-many // together), totals[i : i + 1]
                        into = into if problem.shared else into[:, at]
                        sum_products(0, here, *arrays, here, columns, columns, t, min(m, together), into)

        _share(problem, run, count, m * n * (t + 1) * ((9 + t) // 8))  # 8 products take as long as a read
        left = len(totals)
        while left > 1:  # pairwise, to limit rounding
            half = left // 2
            totals[:half] += totals[left - half : left]
            left -= half
        if problem.shared:
            K, rest = totals[0, 0, : t * t], totals[0, :, t * t :].reshape((-1, t + 1))[:m]
            return Gram(K.reshape((t, t)), rest[:, :t].reshape((*batch, t)), rest[:, t].reshape(batch))
        total = totals[0].reshape((*batch, size)) if batch else totals[0, 0]
        return Gram(total[..., : t * t].reshape((*batch, t, t)), total[..., t * t : -1], total[..., -1])

    def combine(self, problem: Problem, lam: Array, x: list[Array]) -> None:
        """Write ``g + G'lam`` to x, chunk by chunk in float64, rounded once."""
        t, m, n = problem.t, self.problems, problem.columns
        lams = np.array(lam, np.float64).reshape((m, t))
        try:
            views = list(map(view, x))
        except (RuntimeError, TypeError):
            portable.Portable().combine(problem, lam, x)
            return
        if self.direct is not None and is_contiguous(views[0]):
            whole = *self.direct, m, n, self.piece, lams, views[0].reshape(-1), n

            def run(begin: int, end: int) -> None:
                write_combinations(begin, end, *whole)

            _share(problem, run, m * -(-n // self.piece), m * n * (t + 2))
            return
        flats = [v.reshape((m, size)) for v, size in zip(views, problem.sizes, strict=True)]
        parts = self.parts or self._parts(problem)

        def run_parts(begin: int, end: int) -> None:
            for part in parts[begin:end]:
                for arrays, many, size, blocks, at, columns in self._tiles(problem, part):
                    to = flats[blocks[0]][at, columns]
                    place = memory(to, written=True) if len(blocks) == 1 else None
                    out = np.empty((many, size), to.dtype) if place is None else to
                    flat_x, of_x = (out.reshape(-1), size) if place is None else (place[0], place[1][0])
                    write_combinations(0, many, *arrays, many, size, size, lams[at], flat_x, of_x)
                    if len(blocks) > 1:
                        for k, row in zip(blocks, out, strict=True):
                            flats[k][0] = row
                    elif place is None:
                        to[...] = out

        _share(problem, run_parts, len(parts), m * n * (t + 2))
        for v, f in zip(views, flats, strict=True):
            if not v.flags.c_contiguous and not np.may_share_memory(v, f):  # no view has the shape of f
                v[...] = f.reshape(v.shape)

    def _parts(self, problem: Problem) -> list[list[tuple[list[int], int, int]]]:
        """Return the parts of a problem; each has about the columns of a piece, or is one block."""
        small: dict[Any, list[int]] = {}
        found: list[tuple[list[int], int]] = []  # blocks, and columns that may be read at a time
        for k, (v, n) in enumerate(zip(problem.vector, problem.sizes, strict=True)):
            if 0 < n * (problem.t + 1) < _SMALL_BLOCK and len(problem.sizes) > 1:
                small.setdefault(v.shape, []).append(k)
            elif n:  # a block that has no view of two dimensions is copied whole, and only once
                one = v.ndim == 1 or (is_contiguous(view(problem.rows[k])) and is_contiguous(view(v)))
                found.append(([k], self.piece if one else n))
        for blocks in small.values():
            step = max(1, _COPY // (problem.sizes[blocks[0]] * (problem.t + 1)))
            found += [(blocks[i : i + step], self.piece) for i in range(0, len(blocks), step)]
        parts: list[list[tuple[list[int], int, int]]] = []
        room = 0
        for blocks, step in found:
            n = problem.sizes[blocks[0]]
            for start in range(0, n, step):
                stop = min(start + step, n)
                columns = (stop - start) * len(blocks)
                if room < columns:
                    parts.append([])
                    room = max(self.piece, columns)
                room -= columns
                parts[-1].append((blocks, start, stop))
        return parts

    def _source(self, problem: Problem, blocks: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return a block as G (problems, t, n), or (1, t, n) for all, and g (problems, n).

        Several blocks are copied, as problems of their own.
        """
        n, t = problem.sizes[blocks[0]], problem.t
        if len(blocks) == 1:
            G, g = view(problem.rows[blocks[0]]), view(problem.vector[blocks[0]])
            return G.reshape((1 if problem.shared else self.problems, t, n)), g.reshape((-1, n))
        rows, vectors = ([a[k] for k in blocks] for a in (problem.rows, problem.vector))
        join = problem.xp.concat if vectors[0].ndim else problem.xp.stack
        return view(problem.xp.concat(rows)).reshape((-1, t, n)), view(join(vectors)).reshape((-1, n))

    def _tiles(self, problem: Problem, part: list[tuple[list[int], int, int]]) -> Iterator[tuple[Any, ...]]:
        """Yield arguments of the loops, numbers of problems and columns, and where they are, for a part."""
        for blocks, start, stop in part:
            rows, vectors = self._source(problem, blocks)
            at = slice(None) if len(blocks) == 1 else slice(1)
            if (whole := _arguments(rows, vectors, start)) is not None:
                yield whole, len(vectors), stop - start, blocks, at, slice(start, stop)
                continue
            t, m, shared = problem.t, len(vectors), problem.shared
            width = min(stop - start, max(64, _COPY // (t + (_TOGETHER if shared else 1))))
            many = m if shared else max(1, _COPY // ((t + 1) * width))
            turned = memory(rows[0].T) if len(rows) == 1 else None
            for first in range(start, stop, width):
                columns = slice(first, min(first + width, stop))
                for p in range(0, m, many):
                    at = slice(p, min(p + many, m))
                    if turned is None:
                        tile = np.ascontiguousarray(rows[slice(None) if shared else at, :, columns])
                    else:
                        tile = np.empty((1, t, columns.stop - first), rows.dtype)
                        transpose(turned[0], turned[1][0], first, tile[0])
                    g = np.ascontiguousarray(vectors[at, columns])
                    yield _arguments(tile, g, 0), *g.shape, blocks, at, columns


def _arguments(rows: np.ndarray, vectors: np.ndarray, start: int) -> Any:
    """Return the arguments of the loops for columns of a source; None if they cannot read its memory."""
    G, g = memory(rows), memory(vectors)
    if G is None or g is None:
        return None
    (flat_G, (of_problem, of_row, _)), (flat_g, (of_vector, _)) = G, g
    return flat_G[start:], of_row, of_problem if len(rows) > 1 else 0, flat_g[start:], of_vector


def _share(problem: Problem, run: Callable[[int, int], None], count: int, work: int) -> None:
    """Call ``run(begin, end)`` for parts of `count` pieces; in threads, if there is enough `work`."""
    if work < _WORTH_THREADS or count < 2:
        run(0, count)
    else:
        share_pieces(run, count, int(problem.xp.get_num_threads()) if problem.is_torch else cores())
