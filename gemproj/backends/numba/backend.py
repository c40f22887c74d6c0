"""The numba backend: stages 1 and 3 in compiled loops, which read views of the arrays of a problem."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from gemproj._arrays import Array
from gemproj._problem import Problem
from gemproj._tspace import Gram
from gemproj.backends import portable
from gemproj.backends.numba.block import HEIGHT
from gemproj.backends.numba.loops import sum_products, transpose, write_combinations
from gemproj.backends.numba.search import solve
from gemproj.backends.numba.threads import cores, share_pieces
from gemproj.backends.numba.views import copied, flat, is_contiguous, is_plain, is_read, memory, view

__all__ = ["Numba", "bind", "solve"]

# Maximum and minimum number of columns of a piece, the unit of work of a thread. Between these limits a piece
# has a sixteenth of all columns, so the bits of sums do not depend on the number of threads.
_PIECE, _LEAST = 1 << 17, 1 << 13
# Elements of G and g below which a problem is one piece.
_SMALL = 1 << 17
# Minimum number of gradients on one G whose products are summed together.
_TOGETHER = 12
# Elements of G and g that are copied at a time, to stay in a second-level cache. Blocks of fewer elements
# than _SMALL_BLOCK are copied, several of one shape at a time.
_COPY, _SMALL_BLOCK = 1 << 17, 1 << 15

Part = list[tuple[list[int], int, int]]


def bind(problem: Problem) -> Numba | None:
    """Return the backend for a problem on the CPU; None if the loops cannot read its arrays.

    They read arrays of one dtype, float32, float64 or bfloat16, without a metric.
    """
    arrays = [*problem.rows, *problem.vector]
    kinds: set[Any] = {type(a) for a in arrays}
    if problem.weight is not None or not all(map(is_plain, kinds)):
        return None
    dtypes = {a.dtype for a in arrays}
    if len(dtypes) > 1 or not is_read(dtypes.pop()) or (problem.shared and not math.prod(problem.batch)):
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
        Arguments of the loops for a single block, if they can read its memory as it is.
    parts : list
        Otherwise the work that threads share: lists of (blocks, start, stop). Several blocks are small and of
        one shape; they are copied to be read.
    """

    name = "numba"

    def __init__(self, problem: Problem) -> None:
        n, t, batch = problem.columns, problem.t, problem.batch
        self.problems, self.piece = math.prod(batch) if batch else 1, _PIECE
        if n * (t + 1) >= _SMALL:
            self.piece = min(_PIECE, max(_LEAST, -(-n // (16 * 1024)) * 1024))
        self._known: dict[tuple[int, int], Any] = {}
        self.direct = self._in_place(problem, 0, 0) if len(problem.rows) == 1 else None
        self.parts = self._parts(problem) if self.direct is None else []

    def gram(self, problem: Problem) -> Gram:
        """Return K, b and |g|^2, summed piece by piece in threads."""
        t, m, n, batch, shared = problem.t, self.problems, problem.columns, problem.batch, problem.shared
        together = -(-max(t, _TOGETHER) // HEIGHT) * HEIGHT if shared else 1
        items, size = -(-m // together), t * t + together * (t + 1)
        count = len(self.parts) if self.direct is None else -(-n // self.piece)
        totals = np.zeros((max(1, count), items, size))
        if self.direct is not None:
            count, arguments = count * items, (*self.direct, m, n, self.piece, t, together, totals)

            def run(begin: int, end: int) -> None:
                sum_products(begin, end, *arguments)
        else:

            def run(begin: int, end: int) -> None:
                for i in range(begin, end):
                    for _, arrays, p, many, _, here in self._tiles(problem, self.parts[i]):
                        into = totals[i : i + 1, p : p + many]  # of one problem, for several blocks
                        count = items if shared else many
                        sum_products(0, count, *arrays, many, here, here, t, together, into)

        # Eight products take as long as reading a number.
        share_pieces(run, count, m * n * (t + 1) * ((9 + t) // 8), lambda: _threads(problem))
        if (left := len(totals)) > 1:
            with np.errstate(all="ignore"):  # stage 2 raises an error that names the row
                while left > 16:  # pairwise, to limit rounding
                    half = left // 2
                    totals[:half] += totals[left - half : left]
                    left -= half
                totals[0] = np.add.reduce(totals[:left])
        if shared:
            K, rest = totals[0, 0, : t * t], totals[0, :, t * t :].reshape((-1, t + 1))[:m]
            return Gram(K.reshape((t, t)), rest[:, :t].reshape((*batch, t)), rest[:, t].reshape(batch))
        total = totals[0].reshape((*batch, size)) if batch else totals[0, 0]
        return Gram(total[..., : t * t].reshape((*batch, t, t)), total[..., t * t : -1], total[..., -1])

    def combine(self, problem: Problem, lam: Array, x: list[Array]) -> None:
        """Write ``g + G'lam`` to x, chunk by chunk in float64, rounded once."""
        t, m, n = problem.t, self.problems, problem.columns
        lams = np.array(lam, np.float64).reshape((m, t))
        try:
            views = [view(a) for a in x]
        except (RuntimeError, TypeError):
            portable.Portable().combine(problem, lam, x)
            return
        written = [v if is_contiguous(v) else np.empty(v.shape, v.dtype) for v in views]
        if self.direct is not None:
            count, place = m * -(-n // self.piece), written[0].reshape(-1)
            arguments = *self.direct, m, n, self.piece, lams, place, n

            def run(begin: int, end: int) -> None:
                write_combinations(begin, end, *arguments)
        else:
            count, dtype = len(self.parts), written[0].dtype

            def run(begin: int, end: int) -> None:
                for part in self.parts[begin:end]:
                    for blocks, arrays, p, many, at, here in self._tiles(problem, part):
                        k, size = blocks[0], problem.sizes[blocks[0]]
                        to = written[k] if len(blocks) == 1 else np.empty((many, *written[k].shape), dtype)
                        place, own = to.reshape(-1)[p * size + at :], lams[p : p + many]
                        write_combinations(0, many, *arrays, many, here, here, own, place, size)
                        if len(blocks) > 1:
                            for k, block in zip(blocks, to, strict=True):
                                written[k][...] = block

        share_pieces(run, count, m * n * (t + 2), lambda: _threads(problem))
        for v, made in zip(views, written, strict=True):
            if made is not v:
                v[...] = made

    def _parts(self, problem: Problem) -> list[Part]:
        """Return the parts of a problem; each has about the columns of a piece, or is one block."""
        small: dict[Any, list[int]] = {}
        found: list[tuple[list[int], int]] = []  # blocks, and columns that may be read at a time
        for k, (v, n) in enumerate(zip(problem.vector, problem.sizes, strict=True)):
            if 0 < n * (problem.t + 1) < _SMALL_BLOCK and len(problem.sizes) > 1:
                small.setdefault(v.shape, []).append(k)
            elif n:  # a block without a view as a matrix is copied whole: it is one part, to be copied once
                plain = n <= self.piece or v.ndim == len(problem.batch) + 1
                plain = plain or (is_contiguous(view(problem.rows[k])) and is_contiguous(view(v)))
                found.append(([k], self.piece if plain else n))
        for blocks in small.values():
            step = _COPY // (problem.sizes[blocks[0]] * (problem.t + 1))
            found += [(blocks[i : i + step], self.piece) for i in range(0, len(blocks), step)]
        parts: list[Part] = []
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

    def _in_place(self, problem: Problem, k: int, start: int) -> Any:
        """Return the arguments of the loops for a block from a column on; None if it must be copied."""
        if (known := self._known.get((k, start))) is not None:
            return known
        G, g, n = view(problem.rows[k]), view(problem.vector[k]), problem.sizes[k]
        if not (is_contiguous(G) and is_contiguous(g)):
            return _arguments(*self._source(problem, [k]), start) if n else None
        found = flat(G, start), n, 0 if problem.shared else problem.t * n, flat(g, start), n
        self._known[k, start] = found
        return found

    def _source(self, problem: Problem, blocks: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return a block as G (problems, t, n), or (1, t, n) for all, and g (problems, n).

        Several blocks are copied, as problems of their own.
        """
        n, t, k = problem.sizes[blocks[0]], problem.t, blocks[0]
        if len(blocks) == 1:
            lead = 1 if problem.shared else self.problems
            return view(problem.rows[k]).reshape((lead, t, n)), view(problem.vector[k]).reshape(
                (self.problems, n)
            )
        join = problem.xp.concat if problem.vector[k].ndim else problem.xp.stack
        G, g = problem.xp.concat([problem.rows[k] for k in blocks]), join([problem.vector[k] for k in blocks])
        G, g = (copied(view(a)) for a in (G, g))  # libraries may keep the order of the blocks
        return G.reshape((len(blocks), t, n)), g.reshape((len(blocks), n))

    def _tiles(self, problem: Problem, part: Part) -> Iterator[tuple[Any, ...]]:
        """Yield blocks, arguments of the loops, problems and columns of tiles that cover a part.

        Problems and columns are given by the first and their number.
        """
        t, shared = problem.t, problem.shared
        for blocks, start, stop in part:
            if len(blocks) > 1:
                yield blocks, _arguments(*self._source(problem, blocks), 0), 0, len(blocks), 0, stop
                continue
            if (whole := self._in_place(problem, blocks[0], start)) is not None:
                yield blocks, whole, 0, self.problems, start, stop - start
                continue
            rows, vectors = self._source(problem, blocks)
            m = len(vectors)
            width = min(stop - start, max(64, _COPY // (t + (_TOGETHER if shared else 1))))
            many = m if shared else max(1, _COPY // ((t + 1) * width))
            columns = memory(rows[0].T) if len(rows) == 1 and t else None
            for at in range(start, stop, width):
                here = min(width, stop - at)
                for p in range(0, m, many):
                    if columns is None:
                        some = slice(None) if shared else slice(p, p + many)
                        tile = copied(rows[some, :, at : at + here])
                    else:
                        tile = np.empty((1, t, here), rows.dtype)
                        transpose(columns[0], columns[1][0], at, tile[0])
                    g = copied(vectors[p : p + many, at : at + here])
                    yield blocks, _arguments(tile, g, 0), p, len(g), at, here


def _arguments(rows: np.ndarray, vectors: np.ndarray, start: int) -> Any:
    """Return the arguments of the loops for columns of a source; None if they cannot read its memory."""
    if (G := memory(rows)) is None or (g := memory(vectors)) is None:
        return None
    (flat_G, (of_problem, of_row, _)), (flat_g, (of_vector, _)) = G, g
    return flat_G[start:], of_row, of_problem if len(rows) > 1 else 0, flat_g[start:], of_vector


def _threads(problem: Problem) -> int:
    return int(problem.xp.get_num_threads()) if problem.is_torch else cores()
