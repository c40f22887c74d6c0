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
    if problem.weight is not None or len(dtypes) > 1 or (problem.shared and 0 in problem.batch):
        return None
    likes = list(map(like_of, set(map(type, arrays)), repeat(dtypes.pop())))
    if not all(map(is_not, likes, repeat(None))):
        return None
    if problem.is_torch and any(map(problem.xp.Tensor.is_neg, arrays)):
        return None
    backend = Numba(problem, likes[0])
    return backend if backend.readable else None


class Numba:
    """Stages 1 and 3 in compiled loops; see `gemproj.backends.select`.

    Attributes
    ----------
    table : array, shape (7, blocks)
        The table of the loops.
    axes : dict
        For a block whose G is not in row-major order, by its number: the axes of g, and of x, in the order in
        which G has them in memory.
    vector : list
        The blocks of g with their axes in that order; copies where the entries are not adjacent then.
    readable : bool
        Whether the loops can read G where it is; it is never copied.
    count : int
        Number of pieces of all columns.
    """

    name = "numba"

    def __init__(self, problem: Problem, like: Any) -> None:
        t, n, rows, sizes = problem.t, problem.columns, problem.rows, problem.sizes
        self.like, self.problems, self.piece = like, math.prod(problem.batch), _PIECE
        if n * (t + 1) >= _SMALL:
            self.piece = min(_PIECE, max(_LEAST, -(-n // (16 * 1024)) * 1024))
        self.count = -(-n // self.piece)
        self.threads = problem.xp.get_num_threads if problem.is_torch else cores
        # With a shared G, whole groups of gradients are read together.
        self.together = -(-max(t, _TOGETHER) // HEIGHT) * HEIGHT if problem.shared else 1
        self.items = -(-self.problems // self.together)
        self.axes: dict[int, list[int]] = {}
        self.vector, self.readable = list(problem.vector), True
        places, steps = plain_addresses(rows + self.vector), {}
        if places is None:
            steps = {k: self._turn(problem, k) for k, G in enumerate(rows) if not is_row_major(G)}
            self.vector = [g if is_row_major(g) else copied(g) for g in self.vector]
            places = addresses(rows + self.vector)
        self.readable = self.readable and not lacks_memory(places, sizes * 2)
        k = len(rows)  # a batch of G has a single block
        self.table = np.array([places[:k], [t * n] * k, sizes, [1] * k, places[k:], [0] * k, sizes])
        for k, found in steps.items():
            self.table[1:4, k] = found
        if problem.shared:  # all gradients have the same rows
            self.table[1] = 0

    def _turn(self, problem: Problem, k: int) -> list[int]:
        """Take the axes of a block in the order in which G has them in memory; return the steps of G.

        Entries at odd addresses, columns in reverse and columns without one common step are not `readable`.
        """
        G, lead = problem.rows[k], len(problem.batch)
        first = 1 if problem.shared else lead + 1
        order = sorted(range(first, G.ndim), key=lambda i: -_steps(G)[i])
        turned = problem.xp.permute_dims(G, [*range(first), *order])
        self.axes[k] = [*range(lead), *(i - first + lead for i in order)]
        self.vector[k] = problem.xp.permute_dims(self.vector[k], self.axes[k])
        many = 1 if problem.shared else self.problems
        turned = turned.reshape((many, problem.t, problem.sizes[k]))  # a view if possible
        steps = _steps(turned)
        if problem.sizes[k] == 1:  # a step that is not taken
            steps[2] = 1
        views = addresses([turned]) == addresses([G])
        fits = views and steps[2] >= 0 and all(float(step).is_integer() for step in steps)
        self.readable = self.readable and fits
        return list(map(int, steps)) if fits else [0, 0, 1]

    def gram(self, problem: Problem) -> Gram:
        """Return K, b and |g|^2, summed piece by piece in threads."""
        t, m, n, batch = problem.t, self.problems, problem.columns, problem.batch
        size = t * t + self.together * (t + 1)
        totals = np.zeros((max(1, self.count), self.items, size))

        def run(begin: int, end: int) -> None:
            sum_products(begin, end, self.table, self.like, m, self.piece, t, self.together, totals)

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
        if problem.shared:
            K, rest = totals[0, 0, : t * t], totals[0, :, t * t :].reshape((-1, t + 1))[:m]
            return Gram(K.reshape((t, t)), rest[:, :t].reshape((*batch, t)), rest[:, t].reshape(batch))
        total = totals[0].reshape((*batch, size))
        return Gram(total[..., : t * t].reshape((*batch, t, t)), total[..., t * t : -1], total[..., -1])

    def combine(self, problem: Problem, lam: Array, x: list[Array]) -> None:
        """Write ``g + G'lam`` to x, chunk by chunk in float64, rounded once."""
        m, n, turn = self.problems, problem.columns, problem.xp.permute_dims
        lams = np.array(lam, np.float64).reshape((m, problem.t))
        turned = x
        if self.axes:
            turned = [turn(a, self.axes[k]) if k in self.axes else a for k, a in enumerate(x)]
        made, places = turned, plain_addresses(turned)
        if places is None:
            made = [a if is_row_major(a) else empty_as([a])[0] for a in turned]
            places = addresses(made)
        negated = problem.is_torch and any(map(problem.xp.Tensor.is_neg, x))
        if negated or lacks_memory(places, problem.sizes):
            portable.combine(problem, lam, x)
            return
        self.table[5] = places

        def run(begin: int, end: int) -> None:
            write_combinations(begin, end, self.table, self.like, m, self.piece, self.together, lams)

        share_pieces(run, self.count * self.items, m * n * (problem.t + 2), self.threads)
        for to, a in zip(turned, made, strict=True):
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
    (made,) = empty_as([a])
    made[...] = a
    return made


def addresses(arrays: list[Array]) -> list[int]:
    """Return the addresses of the first entries of arrays; 0 for a tensor without memory of its own."""
    if isinstance(arrays[0], np.ndarray):
        return [a.__array_interface__["data"][0] for a in arrays]
    return [a.data_ptr() for a in arrays]


def plain_addresses(arrays: list[Array]) -> list[int] | None:
    """Return what `addresses` does, in a fraction of the time, of arrays in row-major order; None if unknown.

    NumPy gives a buffer only of an array that is contiguous, not empty, and not read-only.
    """
    if not isinstance(first := arrays[0], np.ndarray):
        return addresses(arrays) if all(map(type(first).is_contiguous, arrays)) else None
    try:
        places = list(map(ctypes.addressof, map(_BYTE.from_buffer, arrays)))
    except (TypeError, ValueError):
        return None
    return places if not any(map(first.itemsize.__rmod__, places)) else None  # aligned


def lacks_memory(places: list[int], sizes: list[int]) -> bool:
    """Return whether there is an array with entries, but without memory of its own, by their addresses."""
    return 0 in places and any(n and not at for at, n in zip(places, sizes, strict=True))


def _steps(a: Array) -> list[Any]:
    """Return the steps of the axes of an array, in entries."""
    if isinstance(a, np.ndarray):
        size = a.itemsize if a.flags.aligned else math.nan
        return [step / size for step in a.strides]
    return list(a.stride())
