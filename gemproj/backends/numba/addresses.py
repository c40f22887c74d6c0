"""Table of the memory addresses of a problem, so that one compiled loop can read hundreds of parameters."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from gemproj._arrays import Array
from gemproj._problem import Problem
from gemproj.backends.numba.jit import entry as strict_entry

# Fields of the address table, which has a line per block and problem: address, row stride and column stride
# of G; address and stride of g; address and stride of x; first column and number of columns. Strides are in
# bytes.
FIELDS = 9
ROWS, ROW_STEP, COLUMN_STEP, VECTOR, VECTOR_STEP, OUT, OUT_STEP, FIRST_COLUMN, COLUMNS = range(FIELDS)
# NumPy dtype by item size, for real floating-point arrays; uint16 holds the bits of bfloat16.
_DTYPES = {2: np.uint16, 4: np.float32, 8: np.float64}


def locate(problem: Problem) -> tuple[np.ndarray, type, bool] | None:
    """Return the address table, the dtype of the arrays, and whether the entries of each row are adjacent.

    The dtype is uint16 for bfloat16. Returns None if the loops cannot read the arrays. The loops read arrays
    of NumPy or torch on the CPU, all of one dtype (bfloat16, float32 or float64), without a metric. The
    entries of each row must have a constant stride: G may be stored by rows or by columns, and rows may be
    padded, strided or repeated.
    """
    if problem.weight is not None:
        return None
    kind, lead, shared = problem.vector[0].dtype, len(problem.batch), problem.shared
    dtype = _DTYPES.get(getattr(kind, "itemsize", 0))
    if (
        dtype is None
        or (dtype is np.uint16 and str(kind) != "torch.bfloat16")
        or not getattr(kind, "isnative", True)
    ):
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
    """Write the addresses of x to the table; return False if the loops cannot write to a block of x."""
    for k, a in enumerate(x):
        place = _place(a, len(batch))
        # A stride of zero is refused: entries or problems of x would share memory.
        if place is None or not place[2] or (len(lines) > 1 and 0 in place[1]):
            return False
        if batch:
            lines[:, OUT], lines[:, OUT_STEP] = _addresses(batch, *place[:2]), place[2]
        else:
            lines[k, OUT], lines[k, OUT_STEP] = place[0], place[2]
    return True


def _addresses(batch: tuple[int, ...], address: int, strides: tuple[int, ...]) -> np.ndarray:
    """Return the addresses (problems,) of the arrays of a batch, from the first address and the strides."""
    found = np.full(batch, address, dtype=np.int64)
    for axis, (n, stride) in enumerate(zip(batch, strides, strict=True)):
        found += (stride * np.arange(n, dtype=np.int64)).reshape(-1, *(1,) * (len(batch) - axis - 1))
    return found.reshape(-1)


def _place(a: Array, lead: int) -> tuple[int, tuple[int, ...], int] | None:
    """Return the address of an array, the strides of its first `lead` axes, and the stride of all other axes.

    Strides are in bytes. Returns None if the other axes do not have one common stride.
    """
    kind: Any = type(a)
    if kind is np.ndarray:
        flags, size = a.flags, a.itemsize
        # `python -m gemproj --compile` compiles `address` for these types of arrays. Any other type would
        # cause a compilation during training.
        if flags.carray and a.ndim in (1, 2):
            return address(a), a.strides[:lead], size
        step = size if flags.c_contiguous else _step(a.shape[lead:], a.strides[lead:], size)
        if step is None or not flags.aligned:
            return None
        return a.__array_interface__["data"][0], a.strides[:lead], step
    if _is_plain_tensor(kind):
        # Lazily negated tensors do not store their values, and tensors without storage have none.
        if a.is_neg() or (not a.data_ptr() and a.numel()):
            return None
        size, strides = a.element_size(), a.stride()
        step = 1 if a.is_contiguous() else _step(tuple(a.shape[lead:]), strides[lead:], 1)
        before = tuple([size * stride for stride in strides[:lead]])
        return None if step is None else (a.data_ptr(), before, size * step)
    return None


@strict_entry
def address(a: np.ndarray) -> int:
    """Return the memory address of an array, five times as fast as ``a.ctypes.data`` in Python."""
    return a.ctypes.data


@lru_cache(maxsize=64)
def _is_plain_tensor(kind: type) -> bool:
    """Return whether a type is torch's Tensor or Parameter; subclasses may store their values elsewhere."""
    return kind.__module__.startswith("torch") and kind.__name__ in ("Tensor", "Parameter")


def _step(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> int | None:
    """Return the stride between consecutive entries of the axes, or None if this stride varies."""
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
