"""The numba backend: stages 1 and 3 in compiled loops, which read the arrays of a problem where they are."""

from __future__ import annotations

import ctypes
import math
from functools import lru_cache
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any

import numpy as np

from gemproj._arrays import Array, empty_as, is_row_major
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
# Elements of G and g below which a problem is one piece.
_SMALL = 1 << 17
# Minimum number of gradients on one G that are read together.
_TOGETHER = 12
# In place of the step between columns: the block has to be copied.
_COPIED = -1
# Empty arrays by the name of a dtype; uint16 holds the bits of bfloat16.
_LIKE = {name: np.empty(0, name) for name in ("float32", "float64")}
_LIKE |= {f"torch.{name}": like for name, like in _LIKE.items()} | {"torch.bfloat16": np.empty(0, np.uint16)}
_DTYPE, _BYTE = attrgetter("dtype"), ctypes.c_char


def bind(problem: Problem) -> Numba | None:
    """Return the backend for a problem on the CPU; None if the loops cannot read its arrays.

    They read arrays of one dtype, float32, float64 or bfloat16, without a metric.
    """
    arrays = problem.rows + problem.vector
    dtypes = set(map(_DTYPE, arrays))
    if problem.weight is not None or len(dtypes) > 1:
        return None
    likes = list(map(like_of, set(map(type, arrays)), repeat(dtypes.pop())))
    if not all(map(is_not, likes, repeat(None))):
        return None
    if problem.batch and (len(problem.rows) > 1 or (problem.shared and not math.prod(problem.batch))):
        return None  # many gradients in blocks, or none
    if problem.is_torch and any(map(problem.xp.Tensor.is_neg, arrays)):
        return None
    backend = Numba(problem, likes[0])
    return backend if len(backend.table) else None


class Numba:
    """Stages 1 and 3 in compiled loops; see `gemproj.backends.Backend`.

    Attributes
    ----------
    table : array, shape (lines, 9)
        The table of the loops: a line for a single block, else a line for each piece of a block. Empty if
        they cannot read a single block.
    parts : list
        The work that threads share for several blocks: the first lines of the parts, and the end of the last.
    count : int
        Number of these parts, or of pieces of a single block.
    """

    name = "numba"

    def __init__(self, problem: Problem, like: Any) -> None:
        t, n = problem.t, problem.columns
        self.like, self.problems, self.piece = like, math.prod(problem.batch), _PIECE
        if n * (t + 1) >= _SMALL:
            self.piece = min(_PIECE, max(_LEAST, -(-n // (16 * 1024)) * 1024))
        self.count = -(-n // self.piece)
        self.threads = problem.xp.get_num_threads if problem.is_torch else cores
        # With a shared G, whole groups of gradients are read together.
        self.together = -(-max(t, _TOGETHER) // HEIGHT) * HEIGHT if problem.shared else 1
        self.items = -(-self.problems // self.together)
        self.table, self.parts = np.empty((0, 9), np.int64), list[int]()
        if len(problem.rows) > 1:
            self._divide(problem)
            return
        of_rows = (1 if problem.shared else self.problems, t, n)
        if found := readable(problem.rows[0], problem.vector[0], of_rows, (self.problems, n)):
            self._held, G, g, of_problem, *steps, of_vector = found
            of_problem = 0 if problem.shared else of_problem
            self.table = np.array([[G, of_problem, *steps, g, of_vector, 0, n, n]])

    def _divide(self, problem: Problem) -> None:
        """Make the table of several blocks, and divide it into parts of about the columns of a piece."""
        t, piece, size = problem.t, self.piece, self.like.itemsize
        rows, vector, columns = problem.rows, problem.vector, np.array(problem.sizes)
        adjacent = problem.xp.Tensor.is_contiguous if problem.is_torch else is_row_major
        plain: Any = np.all([list(map(adjacent, a)) for a in (rows, vector)], axis=0)
        places = np.array([addresses(rows), addresses(vector)])
        if not (places.all(axis=0) | (columns == 0)).all():
            return  # tensors without memory of their own
        steps = np.stack([columns, np.ones_like(columns)])  # of_row, of_column
        for k in np.flatnonzero(~plain):
            n = problem.sizes[k]
            found = readable(rows[k], vector[k], (1, t, n), (1, n))
            plain[k] = found is not None and (*places[:, k],) == found[1:3]  # views, no copies
            steps[:, k] = found[4:6] if found is not None and plain[k] else _COPIED
        # A block that has to be copied is one line, to be copied once.
        counts = np.where(plain, -(-columns // piece), columns > 0)
        block = np.repeat(np.arange(len(columns)), counts)
        start = (np.arange(len(block)) - np.repeat(np.cumsum(counts) - counts, counts)) * piece
        here = np.where(plain[block], np.minimum(columns[block] - start, piece), columns[block])
        self.table = np.zeros((len(block), 9), np.int64)
        self.table[:, 2:4], self.table[:, 8] = steps[:, block].T, here
        self.table[:, 0] = places[0, block] + start * steps[1, block] * size
        self.table[:, 4] = places[1, block] + start * size
        self._blocks, self._starts = block, start * size
        part = (np.cumsum(here) - 1) // piece
        self.parts = [*np.flatnonzero(np.diff(part, prepend=-1)).tolist(), len(block)]
        self.count = len(self.parts) - 1

    def _lines(self, problem: Problem, i: int) -> tuple[np.ndarray, Any]:
        """Return the table of a part, and copies of the blocks that cannot be read where they are."""
        first, last = self.parts[i : i + 2]
        table, held = self.table[first:last].copy(), []
        for j in np.flatnonzero(table[:, 3] == _COPIED):
            k = self._blocks[first + j]
            held += [copied(problem.rows[k]), copied(problem.vector[k])]
            (table[j, 0], table[j, 4]), table[j, 2:4] = addresses(held[-2:]), (table[j, 8], 1)
        return table, held

    def gram(self, problem: Problem) -> Gram:
        """Return K, b and |g|^2, summed piece by piece in threads."""
        t, m, n, batch, shared = problem.t, self.problems, problem.columns, problem.batch, problem.shared
        size = t * t + self.together * (t + 1)
        totals = np.zeros((max(1, self.count), self.items, size))

        def run(begin: int, end: int) -> None:
            if not self.parts:
                given = self.table, self.like, m, self.piece, t, self.together
                sum_products(begin, end, *given, totals)
            for i in range(begin, end) if self.parts else ():
                table, _ = self._lines(problem, i)
                sum_products(0, len(table), table, self.like, 1, n, t, 1, totals[i : i + 1])

        # Eight products take as long as reading a number.
        work = m * n * (t + 1) * ((9 + t) // 8)
        share_pieces(run, self.count * self.items, work, self.threads)
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
        made = [a if is_row_major(a) else empty_as(a) for a in x]
        places = addresses(made)
        if problem.is_torch and (
            any(map(problem.xp.Tensor.is_neg, x))
            or any(n and not at for n, at in zip(problem.sizes, places, strict=True))
        ):
            portable.combine(problem, lam, x)
            return
        if self.parts:
            self.table[:, 6] = np.array(places)[self._blocks] + self._starts
        else:
            self.table[0, 6] = places[0]

        def run(begin: int, end: int) -> None:
            if not self.parts:
                given = self.table, self.like, m, self.piece, self.together
                write_combinations(begin, end, *given, lams)
            for i in range(begin, end) if self.parts else ():
                table, _ = self._lines(problem, i)
                write_combinations(0, len(table), table, self.like, 1, n, 1, lams)

        share_pieces(run, self.count * self.items, m * n * (problem.t + 2), self.threads)
        for to, a in zip(x, made, strict=True):
            if a is not to:
                to[...] = a


@lru_cache(maxsize=64)
def like_of(kind: Any, dtype: Any) -> Any:
    """Return an empty array from which loops know a dtype; None if they do not read arrays of this type.

    Subclasses of arrays may store their values in another way, and NumPy names dtypes of the other byte order
    differently.
    """
    of_torch = kind.__module__.startswith("torch") and kind.__name__ in ("Tensor", "Parameter")
    return _LIKE.get(str(dtype)) if kind is np.ndarray or of_torch else None


def copied(a: Array) -> Array:
    """Return a copy that `is_row_major`."""
    made = empty_as(a)
    made[...] = a
    return made


def addresses(arrays: list[Array]) -> list[int]:
    """Return the addresses of the first entries of arrays; 0 for a tensor without memory of its own."""
    if not isinstance(arrays[0], np.ndarray):
        return [a.data_ptr() for a in arrays]
    try:  # a quarter of the time of what follows
        return list(map(ctypes.addressof, map(_BYTE.from_buffer, arrays)))
    except (TypeError, ValueError):  # one is read-only, empty, or not contiguous
        return [a.__array_interface__["data"][0] for a in arrays]


def readable(
    G: Array, g: Array, of_rows: tuple[int, int, int], of_vector: tuple[int, int]
) -> tuple[Any, ...] | None:
    """Return what the loops read of a block of such shapes: arrays with its memory, addresses and steps.

    The steps are of_problem, of_row, of_column and of_vector. Return None for columns in reverse, entries at
    odd addresses, entries of g that are not adjacent, or tensors without memory of their own.
    """
    n = of_vector[-1]
    steps: list[Any] = [of_rows[1] * n, n, 1, n]
    if not (is_row_major(G) and is_row_major(g)):
        G, g = G.reshape(of_rows), g.reshape(of_vector)  # views if possible
        *steps, of_entry = *_steps(G), *_steps(g)
        if n == 1:  # a step that is not taken
            steps[2] = of_entry = 1
        if steps[2] < 0 or of_entry != 1 or not all(float(step).is_integer() for step in steps):
            return None
    of_G, of_g = addresses([G, g])
    return ((G, g), of_G, of_g, *map(int, steps)) if of_G and of_g else None


def _steps(a: Array) -> list[Any]:
    """Return the steps of the axes of an array, in entries."""
    if isinstance(a, np.ndarray):
        size = a.itemsize if a.flags.aligned else math.nan
        return [step / size for step in a.strides]
    return list(a.stride())
