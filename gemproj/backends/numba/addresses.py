"""Where the arrays of a problem are: what lets one call of a compiled loop read hundreds of parameters."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from gemproj._arrays import Array
from gemproj._problem import Problem
from gemproj.backends.numba.jit import strict_entry

# Columns of the address table, which has a line per block and problem; strides in bytes. Address of the first
# row, strides of rows and columns; addresses of g and x, each with its stride; first column, their number.
FIELDS = 9
ROWS, ROW_STEP, COLUMN_STEP, VECTOR, VECTOR_STEP, OUT, OUT_STEP, FIRST_COLUMN, COLUMNS = range(FIELDS)
# By bytes, of what is known to be real floating point. NumPy has no bfloat16, only its bits.
_DTYPES = {2: np.uint16, 4: np.float32, 8: np.float64}


def locate(problem: Problem) -> tuple[np.ndarray, type, bool] | None:
    """Return one line of addresses per problem and block, the dtype, and whether G is stored by rows.

    The dtype is uint16 for the bits of bfloat16. By rows, the entries of each row are adjacent.

    None where the loops cannot read the arrays. They can where all are of NumPy or torch, on the CPU, of one
    dtype, bfloat16, float32 or float64, and where the columns of a row are equally far apart in memory. So G
    may be stored by rows or by columns, and rows may be padded, strided or repeated.
    """
    if problem.weight is not None:
        return None
    kind, lead, shared = problem.vector[0].dtype, len(problem.batch), problem.shared
    dtype = _DTYPES.get(getattr(kind, "itemsize", 0))
    if dtype is None or (dtype is np.uint16 and str(kind) != "torch.bfloat16"):
        return None
    lines, first, by_rows = [], 0, True
    for rows, vector, size in zip(problem.rows, problem.vector, problem.sizes, strict=True):
        if rows.dtype != kind or vector.dtype != kind:
            return None
        at_rows, at_vector = _place(rows, 1 if shared else lead + 1), _place(vector, lead)
        if at_rows is None or at_vector is None:
            return None
        by_rows = by_rows and at_rows[2] == kind.itemsize
        lines.append((at_rows[0], at_rows[1][-1], at_rows[2], at_vector[0], at_vector[2], 0, 0, first, size))
        first += size
    table = np.array(lines, dtype=np.int64)
    if lead and at_rows and at_vector:
        table = np.repeat(table, math.prod(problem.batch), axis=0)
        if not shared:
            table[:, ROWS] = _addresses(problem.batch, at_rows[0], at_rows[1][:-1])
        table[:, VECTOR] = _addresses(problem.batch, *at_vector[:2])
    return table, dtype, by_rows


def locate_output(lines: np.ndarray, batch: tuple[int, ...], x: list[Array]) -> bool:
    """Write the addresses of x to the table; False if its entries are not equally far apart in memory."""
    places = [place for a in x if (place := _place(a, len(batch)))]
    # Nor where several entries, or all problems, would be written to one place.
    if len(places) < len(x) or not all(place[2] for place in places):
        return False
    if len(lines) > len(x) and 0 in places[0][1]:
        return False
    if batch:
        lines[:, OUT_STEP] = places[0][2]
        lines[:, OUT] = _addresses(batch, *places[0][:2])
    else:
        for k, (address, _, step) in enumerate(places):
            lines[k, OUT], lines[k, OUT_STEP] = address, step
    return True


def _addresses(batch: tuple[int, ...], address: int, strides: tuple[int, ...]) -> np.ndarray:
    """Return the addresses of the problems of a batch."""
    found = np.full(batch, address, dtype=np.int64)
    for axis, (n, stride) in enumerate(zip(batch, strides, strict=True)):
        found += (stride * np.arange(n, dtype=np.int64)).reshape(-1, *(1,) * (len(batch) - axis - 1))
    return found.reshape(-1)


def _place(a: Array, lead: int) -> tuple[int, tuple[int, ...], int] | None:
    """Return the address, the steps of `lead` axes in bytes, and that of all others; None without one."""
    kind: Any = type(a)
    if kind is np.ndarray:
        flags, size = a.flags, a.itemsize
        if not (flags.aligned and a.dtype.isnative):
            return None
        step = size if flags.c_contiguous else _step(a.shape[lead:], a.strides[lead:], size)
        if step is None:
            return None
        # Kinds of arrays that `python -m gemproj --compile` knows; others would be compiled when they come.
        compiled = flags.carray and a.ndim in (1, 2)
        place = address(a) if compiled else a.__array_interface__["data"][0]
        return place, a.strides[:lead], step
    if _is_plain_tensor(kind):
        # Lazily negated tensors, and tensors without storage, have no memory to read.
        if a.is_neg() or (not a.data_ptr() and a.numel()):
            return None
        size, strides = a.element_size(), a.stride()
        step = 1 if a.is_contiguous() else _step(tuple(a.shape[lead:]), strides[lead:], 1)
        before = tuple([size * stride for stride in strides[:lead]])
        return None if step is None else (a.data_ptr(), before, size * step)
    return None


@strict_entry
def address(a):
    """Return what ``a.ctypes.data`` is, five times as fast."""
    return a.ctypes.data


@lru_cache(maxsize=64)
def _is_plain_tensor(kind: type) -> bool:
    """Return whether a type is that of tensors or parameters; the memory of others may be anywhere."""
    return kind.__module__.startswith("torch") and kind.__name__ in ("Tensor", "Parameter")


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
