"""The numba backend: stages 1 and 3 in compiled loops, which read views of the arrays of a problem."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from functools import lru_cache
from itertools import repeat
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from gemproj._arrays import Array
from gemproj._problem import Problem
from gemproj._tspace import Gram
from gemproj.backends import portable
from gemproj.backends.numba.block import HEIGHT
from gemproj.backends.numba.loops import sum_products, write_combinations
from gemproj.backends.numba.search import solve
from gemproj.backends.numba.threads import cores, share_pieces

__all__ = ["Numba", "bind", "solve"]

# Maximum and minimum number of columns of a piece, the unit of work of a thread. Between these limits a piece
# has a sixteenth of all columns, so the bits of sums do not depend on the number of threads.
_PIECE, _LEAST = 1 << 17, 1 << 13
# Elements of G and g below which a problem is one piece, and up to which copies of small blocks are kept from
# stage 1 to stage 3.
_SMALL, _KEPT = 1 << 17, 1 << 20
# Minimum number of gradients on one G whose products are summed together.
_TOGETHER = 12
# Elements of G and g that are copied at a time, to stay in a second-level cache. Blocks of fewer elements
# than _SMALL_BLOCK are copied, several of one shape at a time.
_COPY, _SMALL_BLOCK = 1 << 17, 1 << 15
_FLOATS = ["float32", "float64", "torch.float32", "torch.float64", "torch.bfloat16"]
_DTYPE = attrgetter("dtype")

Part = list[tuple[list[int], int, int]]


def bind(problem: Problem) -> Numba | None:
    """Return the backend for a problem on the CPU; None if the loops cannot read its arrays.

    They read arrays of one dtype, float32, float64 or bfloat16, without a metric.
    """
    arrays = problem.rows + problem.vector
    dtypes = set(map(_DTYPE, arrays))
    if problem.weight is not None or len(dtypes) > 1:
        return None
    if not all(map(is_read, set(map(type, arrays)), repeat(dtypes.pop()))):
        return None
    if problem.batch and (len(problem.rows) > 1 or (problem.shared and not math.prod(problem.batch))):
        return None  # many gradients in blocks, or none
    if problem.is_torch and any(a.is_neg() for a in arrays):
        return None
    try:
        return Numba(problem)
    except (RuntimeError, TypeError):  # tensors without memory of their own
        return None


class Numba:
    """Stages 1 and 3 in compiled loops; see `gemproj.backends.Backend`.

    Attributes
    ----------
    whole : tuple or None
        Arguments of the loops for a single block, if they can read its memory as it is.
    parts : list
        Otherwise the work that threads share: lists of (blocks, start, stop). Several blocks are small and of
        one shape; they are copied to be read.
    """

    name = "numba"

    def __init__(self, problem: Problem) -> None:
        n, elements = problem.columns, problem.columns * (problem.t + 1)
        self.problems, self.piece = math.prod(problem.batch), _PIECE
        if elements >= _SMALL:
            self.piece = min(_PIECE, max(_LEAST, -(-n // (16 * 1024)) * 1024))
        self._kept: dict[int, Any] | None = {} if elements <= _KEPT else None
        self.whole = _arguments(*self._block(problem, 0)) if len(problem.rows) == 1 else None
        self.parts = self._parts(problem) if self.whole is None else []

    def gram(self, problem: Problem) -> Gram:
        """Return K, b and |g|^2, summed piece by piece in threads."""
        t, m, n, batch, shared = problem.t, self.problems, problem.columns, problem.batch, problem.shared
        together = -(-max(t, _TOGETHER) // HEIGHT) * HEIGHT if shared else 1
        items, size = -(-m // together), t * t + together * (t + 1)
        count = len(self.parts) if self.whole is None else -(-n // self.piece)
        totals = np.zeros((max(1, count), items, size))

        def run(begin: int, end: int) -> None:
            if self.whole is not None:
                sum_products(begin, end, *self.whole, m, n, self.piece, t, together, totals)
                return
            for i in range(begin, end):
                for _, arrays, p, many, _, here in self._tiles(problem, self.parts[i]):
                    own, into = items if shared else many, totals[i : i + 1, p : p + many]
                    sum_products(0, own, *arrays, many, here, here, t, together, into)

        # Eight products take as long as reading a number.
        work = m * n * (t + 1) * ((9 + t) // 8)
        share_pieces(run, count if self.whole is None else count * items, work, lambda: _threads(problem))
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
        total = totals[0].reshape((*batch, size))
        return Gram(total[..., : t * t].reshape((*batch, t, t)), total[..., t * t : -1], total[..., -1])

    def combine(self, problem: Problem, lam: Array, x: list[Array]) -> None:
        """Write ``g + G'lam`` to x, chunk by chunk in float64, rounded once."""
        m, n = self.problems, problem.columns
        lams = np.array(lam, np.float64).reshape((m, problem.t))
        try:
            views = list(map(view, x))
        except (RuntimeError, TypeError):
            portable.Portable().combine(problem, lam, x)
            return
        written = [v if is_contiguous(v) else np.empty(v.shape, v.dtype) for v in views]

        def run(begin: int, end: int) -> None:
            if self.whole is not None:
                to = written[0].reshape(-1)
                write_combinations(begin, end, *self.whole, m, n, self.piece, lams, to, n)
                return
            for part in self.parts[begin:end]:
                for blocks, arrays, p, many, at, here in self._tiles(problem, part):
                    first, size = written[blocks[0]], problem.sizes[blocks[0]]
                    to = first if len(blocks) == 1 else np.empty((many, *first.shape), first.dtype)
                    place, own = to.reshape(-1)[p * size + at :], lams[p : p + many]
                    write_combinations(0, many, *arrays, many, here, here, own, place, size)
                    for k, block in zip(blocks, to, strict=True) if len(blocks) > 1 else ():
                        written[k][...] = block

        count = len(self.parts) if self.whole is None else m * -(-n // self.piece)
        share_pieces(run, count, m * n * (problem.t + 2), lambda: _threads(problem))
        for v, made in zip(views, written, strict=True):
            if made is not v:
                v[...] = made

    def _parts(self, problem: Problem) -> list[Part]:
        """Return the parts of a problem; each has about the columns of a piece, or is one block."""
        sizes, height, small = problem.sizes, problem.t + 1, dict[Any, list[int]]()
        found: list[tuple[list[int], int]] = []  # blocks, and columns that may be read at a time
        for k, (v, n) in enumerate(zip(problem.vector, sizes, strict=True)):
            if 0 < n * height < _SMALL_BLOCK and len(sizes) > 1:
                small.setdefault(v.shape, []).append(k)
            elif n:  # a block without a view as a matrix is copied whole: it is one part, to be copied once
                plain = n <= self.piece or v.ndim == len(problem.batch) + 1
                plain = plain or (is_contiguous(view(problem.rows[k])) and is_contiguous(view(v)))
                found.append(([k], self.piece if plain else n))
        for blocks in small.values():
            step = _COPY // (sizes[blocks[0]] * height)
            found += [(blocks[i : i + step], self.piece) for i in range(0, len(blocks), step)]
        parts: list[Part] = []
        room = 0
        for blocks, step in found:
            n = sizes[blocks[0]]
            for start in range(0, n, step):
                stop = min(start + step, n)
                columns = (stop - start) * len(blocks)
                if room < columns:
                    parts.append([])
                    room = max(self.piece, columns)
                room -= columns
                parts[-1].append((blocks, start, stop))
        return parts

    def _block(self, problem: Problem, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a block as G (problems, t, n), or (1, t, n) for all problems, and g (problems, n)."""
        n, m = problem.sizes[k], self.problems
        G = view(problem.rows[k]).reshape((1 if problem.shared else m, problem.t, n))
        return G, view(problem.vector[k]).reshape((m, n))

    def _joined(self, problem: Problem, blocks: list[int]) -> Any:
        """Return the arguments of the loops for copies of small blocks, as problems of their own."""
        if self._kept and (known := self._kept.get(blocks[0])):
            return known
        n, t, count, xp = problem.sizes[blocks[0]], problem.t, len(blocks), problem.xp
        join = xp.concat if problem.vector[blocks[0]].ndim else xp.stack
        G, g = xp.concat([problem.rows[k] for k in blocks]), join([problem.vector[k] for k in blocks])
        G, g = (copied(view(a)) for a in (G, g))  # libraries may keep the order of the blocks
        found = _arguments(G.reshape((count, t, n)), g.reshape((count, n)))
        if self._kept is not None:
            self._kept[blocks[0]] = found
        return found

    def _tiles(self, problem: Problem, part: Part) -> Iterator[tuple[Any, ...]]:
        """Yield blocks, arguments of the loops, problems and columns of tiles that cover a part.

        Problems and columns are given by the first and their number.
        """
        t, shared = problem.t, problem.shared
        for blocks, start, stop in part:
            if len(blocks) > 1:
                yield blocks, self._joined(problem, blocks), 0, len(blocks), 0, stop
                continue
            rows, vectors = self._block(problem, blocks[0])
            if (found := _arguments(rows, vectors, start)) is not None:
                yield blocks, found, 0, self.problems, start, stop - start
                continue
            width = min(stop - start, max(64, _COPY // (t + (_TOGETHER if shared else 1))))
            many = len(vectors) if shared else max(1, _COPY // ((t + 1) * width))
            for at in range(start, stop, width):
                here = min(width, stop - at)
                for p in range(0, len(vectors), many):
                    tile = (rows if shared else rows[p : p + many])[:, :, at : at + here]
                    g = vectors[p : p + many, at : at + here]
                    yield blocks, _arguments(copied(tile), copied(g)), p, len(g), at, here


@lru_cache(maxsize=64)
def is_read(kind: Any, dtype: Any) -> bool:
    """Return whether loops read arrays of a type and dtype.

    Subclasses of arrays may store their values in another way, and NumPy names dtypes of the other byte order
    differently.
    """
    of_torch = kind.__module__.startswith("torch") and kind.__name__ in ("Tensor", "Parameter")
    return (kind is np.ndarray or of_torch) and str(dtype) in _FLOATS


def view(a: Array) -> np.ndarray:
    """Return an array or tensor as a NumPy array that shares its memory; bfloat16 as its bits, uint16.

    Raise a RuntimeError for a tensor that has no memory of its own, or is negated by a flag.
    """
    if isinstance(a, np.ndarray):
        return np.asarray(a)  # for example of a file in memory
    if a.dtype.itemsize == 2:
        bits: np.ndarray = a.view(sys.modules["torch"].int16).numpy()
        return bits.view(np.uint16)
    seen: np.ndarray = a.numpy()
    return seen


def is_contiguous(a: np.ndarray) -> bool:
    """Return whether all entries of an array are adjacent, in row-major order, at aligned addresses."""
    flags = a.flags
    return flags.c_contiguous and flags.aligned


def copied(a: np.ndarray) -> np.ndarray:
    """Return an array that `is_contiguous`: the given one, or a copy."""
    return a if is_contiguous(a) else a.copy("C")


def memory(a: np.ndarray) -> tuple[np.ndarray, list[int]] | None:
    """Return the memory of an array, and the steps of its axes in entries.

    The memory has one dimension and is not to be written: numba would compile a loop once for arrays that may
    be written and once for others. Return None for entries in reverse, or at odd addresses.
    """
    size, steps, one = a.itemsize, [stride // a.itemsize for stride in a.strides], a.shape[-1] == 1
    if not is_contiguous(a):
        steps = [step if n > 1 else 0 for n, step in zip(a.shape, steps, strict=True)]
        if not a.flags.aligned or min(steps) < 0 or any(step % size for step in a.strides):
            return None
        a = as_strided(a, (1 + sum((n - 1) * step for n, step in zip(a.shape, steps, strict=True)),), (size,))
    steps[-1] = 1 if one else steps[-1]
    flat = a.reshape(-1)
    flat.setflags(write=False)
    return flat, steps


def _arguments(rows: np.ndarray, vectors: np.ndarray, start: int = 0) -> Any:
    """Return the arguments of the loops for G (problems, t, n) and g (problems, n) from a column on.

    Return None if the loops cannot read their memory.
    """
    if (G := memory(rows)) is None or (g := memory(vectors)) is None or g[1][1] != 1:
        return None
    (flat_G, (of_problem, of_row, of_column)), (flat_g, (of_vector, _)) = G, g
    if of_column != 1 and len(rows) < len(vectors):
        return None  # columns of one G would be turned once for each gradient
    steps = of_row, of_column, of_problem if len(rows) > 1 else 0
    if start:
        flat_G, flat_g = flat_G[start * of_column :], flat_g[start:]
    return flat_G, *steps, flat_g, of_vector


def _threads(problem: Problem) -> int:
    return int(problem.xp.get_num_threads()) if problem.is_torch else cores()
