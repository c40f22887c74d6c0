"""The numba backend: stages 1 and 3 in compiled loops, which read views of the arrays of a problem."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from gemproj._arrays import Array
from gemproj._problem import Problem
from gemproj._tspace import Gram
from gemproj.backends.numba.loops import sum_products, transpose, write_combinations
from gemproj.backends.numba.search import solve
from gemproj.backends.numba.threads import share_pieces

__all__ = ["Numba", "bind", "solve"]

# Maximum and minimum number of columns of a piece, the unit of work of a thread. Between these limits a piece
# has a sixteenth of all columns, so the bits of sums do not depend on the number of threads.
_PIECE, _LEAST = 1 << 17, 1 << 13
# Elements of G and g below which a problem is one piece.
_SMALL = 1 << 17
# Number of gradients on one G whose products are summed together, at least.
_TOGETHER = 12
# Elements of G and g that are copied at a time; a copy stays in a second-level cache. Blocks with fewer
# elements than _SMALL_BLOCK are copied, several of one shape at a time.
_COPY, _SMALL_BLOCK = 1 << 15, 1 << 13
# Maximum number of entries of the products of one piece for a shared G.
_MOST_SHARED = 1 << 20

Source = tuple[np.ndarray, np.ndarray]  # G (problems, t, n), or (1, t, n) for all, and g (problems, n)


def bind(problem: Problem) -> Numba | None:
    """Return the backend for a problem on the CPU; None if the loops cannot read its arrays.

    They read arrays of one dtype, float32, float64 or bfloat16, without a metric.
    """
    dtype = problem.vector[0].dtype
    if problem.weight is not None or _stored(dtype) is None:
        return None
    for a in (*problem.rows, *problem.vector):
        if (a.dtype is not dtype and a.dtype != dtype) or not _is_plain(type(a)):
            return None
    if problem.batch and len(problem.rows) > 1:  # many gradients in blocks
        return None
    if problem.shared and not 0 < math.prod(problem.batch) * (problem.t + 1) ** 2 <= _MOST_SHARED:
        return None
    try:
        return Numba(problem)
    except (RuntimeError, TypeError):  # tensors without memory of their own
        return None


class Numba:
    """Stages 1 and 3 in compiled loops; see `gemproj.backends.Backend`."""

    name = "numba"

    def __init__(self, problem: Problem) -> None:
        n, t = problem.columns, problem.t
        self.problems, self.piece = math.prod(problem.batch), _PIECE
        if n * (t + 1) >= _SMALL:
            self.piece = min(_PIECE, max(_LEAST, -(-n // (16 * 1024)) * 1024))
        self.threads = int(problem.xp.get_num_threads()) if problem.is_torch else None
        # Arguments of the loops for one block whose memory they can read as it is.
        self.direct = None
        if len(problem.rows) == 1 and n:
            self.direct = self._arguments(*self._source(problem, 0), 0, n)

    def gram(self, problem: Problem) -> Gram:
        """Return K, b and |g|^2, summed piece by piece in threads."""
        t, m, n, batch = problem.t, self.problems, problem.columns, problem.batch
        together = min(m, max(t, _TOGETHER)) if problem.shared else 1
        items, size = -(-m // together), t * t + together * (t + 1)

        def products(begin: int, end: int, args: Any, totals: np.ndarray) -> None:
            many = -(-args[5] // together)
            sum_products(begin, end or many, *args[:5], many, *args[6:], t, together, totals)

        if self.direct is not None:
            count = items * -(-n // self.piece)
            totals = np.zeros((count // items, items, size))

            def run(begin: int, end: int) -> None:
                products(begin, end, self.direct, totals)
        else:
            parts = self._parts(problem)
            count, totals = len(parts), np.zeros((len(parts), items, size))

            def run(begin: int, end: int) -> None:
                for i in range(begin, end):
                    for args, _, at, _ in self._tiles(problem, parts[i]):
                        products(0, 0, args, totals[i : i + 1, at if together == 1 else slice(None)])

        share_pieces(run, count, m * n * (t + 1) * ((9 + t) // 8), self.threads)  # 8 products cost one read
        left = len(totals)
        while left > 1:  # pairwise, to limit rounding
            half = left // 2
            totals[:half] += totals[left - half : left]
            left -= half
        K, products_of_g = totals[0, :, : t * t], totals[0, :, t * t :].reshape((-1, t + 1))[:m]
        K = K[0].reshape((t, t)) if problem.shared else K.reshape((*batch, t, t))
        return Gram(K, products_of_g[:, :t].reshape((*batch, t)), products_of_g[:, t].reshape(batch))

    def combine(self, problem: Problem, lam: Array, x: list[Array]) -> None:
        """Write ``g + G'lam`` to x, chunk by chunk in float64, rounded once."""
        t, m, n = problem.t, self.problems, problem.columns
        lams, views = np.array(lam, np.float64).reshape((m, t)), [_view(a) for a in x]
        flat = [v.reshape((m, size)) for v, size in zip(views, problem.sizes, strict=True)]
        if self.direct is not None and (place := _memory(flat[0], written=True)) is not None:
            count, args = m * -(-n // self.piece), (*self.direct, lams, place[0], place[1][0])

            def run(begin: int, end: int) -> None:
                write_combinations(begin, end, *args)
        else:
            parts = self._parts(problem)
            count = len(parts)

            def run(begin: int, end: int) -> None:
                for i in range(begin, end):
                    for args, blocks, at, columns in self._tiles(problem, parts[i]):
                        to = flat[blocks[0]][at, columns]
                        place = _memory(to, written=True) if len(blocks) == 1 else None
                        made = np.empty((args[5], args[6]), to.dtype) if place is None else to
                        out, step = (made.reshape(-1), args[6]) if place is None else (place[0], place[1][0])
                        write_combinations(0, args[5], *args, lams[at], out, step)
                        if len(blocks) > 1:
                            for k, row in zip(blocks, made, strict=True):
                                flat[k][0] = row
                        elif place is None:
                            to[...] = made

        share_pieces(run, count, m * n * (t + 2), self.threads)
        for v, f in zip(views, flat, strict=True):  # where no view of x has the shape (problems, n)
            if not (v.flags.c_contiguous or np.may_share_memory(v, f)):
                v[...] = f.reshape(v.shape)

    def _parts(self, problem: Problem) -> list[list[tuple[Any, ...]]]:
        """Return the parts of a problem, shared out among threads: lists of (source, blocks, start, stop).

        The source of several small blocks of one shape is None: they are copied when they are read.
        """
        t, small, sources = problem.t, {}, []
        for k, n in enumerate(problem.sizes):
            if 0 < n * (t + 1) < _SMALL_BLOCK and len(problem.sizes) > 1:
                small.setdefault(tuple(problem.vector[k].shape), []).append(k)
            elif n:
                sources.append((self._source(problem, k), [k], n))
        for shape, blocks in small.items():
            n = math.prod(shape)
            step = _COPY // (n * (t + 1))
            sources += [(None, blocks[i : i + step], n) for i in range(0, len(blocks), step)]
        parts, room = [], 0
        for source, blocks, n in sources:
            for start in range(0, n, self.piece):
                stop = min(start + self.piece, n)
                if room < (columns := (stop - start) * len(blocks)):
                    parts.append([])
                    room = max(self.piece, columns)
                room -= columns
                parts[-1].append((source, blocks, start, stop))
        return parts or [[]]

    def _source(self, problem: Problem, *blocks: int) -> Source:
        """Return a block as G (problems, t, n) and g (problems, n), or several blocks as several problems."""
        lead = 1 if problem.shared or not problem.batch else self.problems
        if len(blocks) == 1:
            rows, vectors = _view(problem.rows[blocks[0]]), _view(problem.vector[blocks[0]])
        else:
            join = problem.xp.concat if problem.vector[blocks[0]].ndim else problem.xp.stack
            rows = _view(problem.xp.concat([problem.rows[k] for k in blocks], axis=0))
            vectors = _view(join([problem.vector[k] for k in blocks], axis=0))
            lead = len(blocks)
        n = problem.sizes[blocks[0]]
        return rows.reshape((lead, problem.t, n)), vectors.reshape((-1, n))

    def _tiles(self, problem: Problem, part: list[tuple[Any, ...]]) -> Iterator[tuple[Any, ...]]:
        """Yield the arguments of the loops, the blocks, problems and columns, for tiles that cover a part."""
        for source, blocks, start, stop in part:
            rows, vectors = source or self._source(problem, *blocks)
            at = slice(None) if len(blocks) == 1 else slice(1)
            if (whole := self._arguments(rows, vectors, start, stop)) is not None:
                yield whole, blocks, at, slice(start, stop)
                continue
            t, m, shared = problem.t, len(vectors), len(rows) < len(vectors)
            width = min(stop - start, max(64, _COPY // (t + (m if shared else 1))))
            many = m if shared else max(1, _COPY // ((t + 1) * width))
            turned = _memory(rows[0].T) if len(rows) == 1 else None
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
                    yield self._arguments(tile, g, 0, g.shape[1]), blocks, at, columns

    def _arguments(self, rows: np.ndarray, vectors: np.ndarray, start: int, stop: int) -> Any:
        """Return the arguments of the loops for columns of a source; None if they cannot read its memory."""
        G, g = _memory(rows), _memory(vectors)
        if G is None or g is None:
            return None
        of_problem = G[1][0] if len(rows) > 1 else 0
        steps = G[1][1], of_problem, g[0][start:], g[1][0], len(vectors)
        return G[0][start:], *steps, stop - start, self.piece


@lru_cache(maxsize=16)
def _stored(dtype: Any) -> Any:
    """Return the NumPy dtype that the loops read: uint16 for the bits of bfloat16; None for other dtypes."""
    known = {"float32": np.float32, "float64": np.float64, "torch.float32": np.float32}
    known |= {"torch.float64": np.float64, "torch.bfloat16": np.uint16}
    return known.get(str(dtype))  # NumPy names dtypes in the other byte order differently


@lru_cache(maxsize=64)
def _is_plain(kind: type) -> bool:
    """Return whether arrays of a type store their values as NumPy or torch do; subclasses may not."""
    return kind is np.ndarray or (
        kind.__module__.startswith("torch") and kind.__name__ in ("Tensor", "Parameter")
    )


def _view(a: Array) -> np.ndarray:
    """Return a NumPy array that shares the memory of an array; bfloat16 as its bits."""
    if type(a) is np.ndarray:
        return a
    if a.dtype.itemsize == 2:
        return a.view(sys.modules["torch"].int16).numpy().view(np.uint16)
    return a.numpy()


def _memory(a: np.ndarray, written: bool = False) -> tuple[np.ndarray, list[int]] | None:
    """Return the memory of an array as an array of one dimension, and the steps of its axes in entries.

    Return None if entries of its last axis are not adjacent.
    """
    size = a.itemsize
    if a.flags.c_contiguous and a.flags.aligned:
        flat = a.reshape(-1)
        steps = [stride // size for stride in a.strides]
    else:
        steps = [stride // size if n > 1 else 0 for n, stride in zip(a.shape, a.strides, strict=True)]
        odd = any(stride % size for stride in a.strides) or not a.flags.aligned or min(steps) < 0
        if odd or (a.shape[-1] > 1 and steps[-1] != 1):
            return None
        flat = as_strided(
            a, (1 + sum((n - 1) * step for n, step in zip(a.shape, steps, strict=True)),), (size,)
        )
    if not written:  # numba compiles a loop again where it takes another array for one that may be written
        flat.flags.writeable = False
    return flat, steps
