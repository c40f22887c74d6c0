"""Addresses and strides of the arrays of a problem: one compiled call reads hundreds of parameters."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gemproj._arrays import Array
from gemproj._constants import CHUNK, FEW_ROWS, LARGE
from gemproj._problem import Problem
from gemproj.backends.numba.threads import cores, share

# Columns of the address table, which has a line per block and problem; strides in bytes. Address of the first
# row, strides of rows and columns; addresses of g and x, each with its stride; first column, their number.
ADDRESSES = 9
ROWS, ROW_STEP, COLUMN_STEP, VECTOR, VECTOR_STEP, OUT, OUT_STEP, FIRST_COLUMN, COLUMNS = range(ADDRESSES)
# Most and fewest columns of a piece, the unit of work of a thread: a sixteenth of all columns in between.
# Sums depend on this, but not on the number of threads.
PIECE, _LEAST = 1 << 17, 1 << 13
# Most columns of a chunk, whose products are summed before they are added up, in float64.
WIDE_CHUNK = 1024
_JOBS = 4
# Numbers below which a problem is one piece, and below which waking threads takes longer than the work.
_SMALL, _WORTH_THREADS = 1 << 17, 1 << 21
# Entries of the Gram matrices of one piece for a shared G, which take memory for each gradient.
_MOST_SHARED = 1 << 20
# By bytes, of what is known to be real floating point. NumPy has no bfloat16, only its bits.
_DTYPES = {2: np.uint16, 4: np.float32, 8: np.float64}


class AddressTable:
    """The addresses of G, g and x, of one problem or a batch, and the compiled stages 1 and 3 on them.

    Parameters
    ----------
    problem : Problem
    lines : ndarray, shape (problems * blocks, ADDRESSES)
        One line per problem and block, see `ROWS` and what follows.
    dtype : type
        Of all arrays: float32, float64, or uint16 for the bits of bfloat16.
    """

    def __init__(self, problem: Problem, lines: np.ndarray, dtype: Any) -> None:
        # Not the problem itself, which keeps this table: a cycle would keep G in memory for a while.
        self.t, self.batch, self.columns = problem.t, problem.batch, problem.columns
        self.lines, self.like, self.blocks = lines, np.empty(0, dtype), len(problem.rows)
        self.problems, self.shared = len(lines) // self.blocks, problem.shared
        alone = self.columns * (self.t + 1) < _SMALL
        self.piece = PIECE if alone else min(PIECE, max(_LEAST, -(-self.columns // (16 * 1024)) * 1024))
        self.pieces = max(1, -(-self.columns // self.piece))
        self.threads = int(problem.xp.get_num_threads()) if problem.is_torch else None
        self.wide = dtype is np.float64 or self.t <= FEW_ROWS or self.columns < LARGE
        """Whether all sums run in float64."""

    def gram(self) -> np.ndarray:
        """Return the Gram matrices of the stacked rows [G; g], (*batch, t + 1, t + 1), in float64.

        With a shared G only the first one is whole; of the others, the last row is.
        """
        from gemproj.backends.numba.loops import add_pieces, add_products, add_shared_products
        from gemproj.backends.numba.vectors import HEIGHT

        n, chunk = self.t + 1, WIDE_CHUNK if self.wide else CHUNK
        sums = np.empty(0, np.float64 if self.wide else np.float32)
        totals = np.empty((self.problems, self.pieces, n, n))

        def work(first: int, last: int) -> None:
            add_products(
                self.lines, self.blocks, first, last, self.pieces, self.piece, chunk, self.like, sums, totals
            )

        def shared_work(first: int, last: int) -> None:
            add_shared_products(
                self.lines, self.blocks, first, last, self.piece, chunk, self.like, sums, totals
            )

        # One unit is a number read; eight products take as long.
        if self.shared:
            groups = -(-self.problems // HEIGHT)
            self._share(shared_work, groups * self.pieces, groups * self.columns * n)
        else:
            numbers = self.problems * self.columns * n * (8 + n) // 8
            self._share(work, self.problems * self.pieces, numbers)
        if self.pieces > 1:
            add_pieces(totals)
        return totals[:, 0].reshape((*self.batch, n, n))

    def combine(self, lam: np.ndarray, x: list[Array]) -> bool:
        """Write ``g + G'lam`` to x, rounded once, without reading rows whose multiplier is 0.

        False, and nothing written, if loops cannot write x where it is.
        """
        from gemproj.backends.numba.loops import add_rows

        if not self.write_to(x):
            return False
        lam = np.array(lam, dtype=np.float64).reshape(self.problems, self.t)

        def work(first: int, last: int) -> None:
            add_rows(
                self.lines, self.blocks, first, last, self.pieces, self.piece, self.shared, self.like, lam
            )

        self._share(work, self.problems * self.pieces, self.problems * self.columns * (self.t + 2))
        return True

    def write_to(self, x: list[Array]) -> bool:
        """Enter the addresses of x; False if its entries are not equally far apart in memory."""
        places = [place for a in x if (place := _place(a, len(self.batch)))]
        # Nor where all problems would be written to one place.
        if len(places) < len(x) or (self.problems > 1 and 0 in places[0][1]):
            return False
        self.lines[:, OUT_STEP] = [place[2] for place in places] * self.problems
        first = [place[0] for place in places]
        self.lines[:, OUT] = _addresses(self.batch, *places[0][:2]) if self.batch else first
        return True

    def _share(self, work: Any, count: int, numbers: int) -> None:
        """Call ``work(first, last)`` for `count` pieces, in parallel if enough `numbers` are read."""
        threads = 1
        if numbers >= _WORTH_THREADS:
            threads = cores() if self.threads is None else self.threads
        if threads == 1:
            work(0, count)
            return
        # A few jobs per thread: handing one over takes as long as reading 100 kB.
        step = -(-count // (_JOBS * threads))
        share(lambda i: work(i * step, min((i + 1) * step, count)), -(-count // step), threads)


def locate(problem: Problem) -> AddressTable | None:
    """Return the address table of a problem; None where the loops cannot read its arrays.

    They can where all arrays are of NumPy or torch, on the CPU, of one dtype, bfloat16, float32 or float64,
    and where the columns of a row are equally far apart in memory. So G may be stored by rows or by columns,
    and rows may be padded, strided or repeated.
    """
    if problem.weight is not None:
        return None
    kind, lead, shared = problem.vector[0].dtype, len(problem.batch), problem.shared
    if shared and not 0 < math.prod(problem.batch) * (problem.t + 1) ** 2 <= _MOST_SHARED:
        return None
    lines, first = [], 0
    for rows, vector in zip(problem.rows, problem.vector, strict=True):
        at_rows, at_vector = _place(rows, 1 if shared else lead + 1), _place(vector, lead)
        if at_rows is None or at_vector is None or rows.dtype != kind or vector.dtype != kind:
            return None
        size = math.prod(vector.shape[lead:])
        lines.append((at_rows[0], at_rows[1][-1], at_rows[2], at_vector[0], at_vector[2], 0, 0, first, size))
        first += size
    dtype = _DTYPES.get(kind.itemsize)
    if dtype is None or (dtype is np.uint16 and str(kind) != "torch.bfloat16"):
        return None
    table = np.array(lines, dtype=np.int64)
    if lead and at_rows and at_vector:
        table = np.repeat(table, math.prod(problem.batch), axis=0)
        if not shared:
            table[:, ROWS] = _addresses(problem.batch, at_rows[0], at_rows[1][:-1])
        table[:, VECTOR] = _addresses(problem.batch, *at_vector[:2])
    return AddressTable(problem, table, dtype)


def _addresses(batch: tuple[int, ...], address: int, strides: tuple[int, ...]) -> np.ndarray:
    """Return the addresses of the problems of a batch."""
    found = np.full(batch, address, dtype=np.int64)
    for axis, (n, stride) in enumerate(zip(batch, strides, strict=True)):
        found += (stride * np.arange(n, dtype=np.int64)).reshape(-1, *(1,) * (len(batch) - axis - 1))
    return found.reshape(-1)


def _place(a: Array, lead: int) -> tuple[int, tuple[int, ...], int] | None:
    """Return the address, the steps of `lead` axes in bytes, and that of all others; None without one."""
    kind = type(a)
    if kind is np.ndarray:
        if not (a.flags.aligned and a.dtype.isnative):
            return None
        step = a.itemsize if a.flags.c_contiguous else _step(a.shape[lead:], a.strides[lead:], a.itemsize)
        return None if step is None else (a.__array_interface__["data"][0], a.strides[:lead], step)
    # No subclasses but parameters: their memory may be elsewhere, or nowhere.
    if kind.__module__.startswith("torch") and kind.__name__ in ("Tensor", "Parameter"):
        # Lazily negated tensors, and tensors without storage, have no memory to read.
        if a.is_neg() or (not a.data_ptr() and a.numel()):
            return None
        size = a.element_size()
        strides = tuple([step * size for step in a.stride()])
        step = size if a.is_contiguous() else _step(tuple(a.shape[lead:]), strides[lead:], size)
        return None if step is None else (a.data_ptr(), strides[:lead], step)
    return None


def _step(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int | None:
    """Return the bytes from entry to entry, where they are the same all along the axes."""
    step, after = None, None
    for n, stride in zip(reversed(shape), reversed(strides), strict=True):
        if n == 1:
            continue
        if step is None:
            step = stride
        elif stride != after:
            return None
        after = stride * n
    return itemsize if step is None or 0 in shape else step
