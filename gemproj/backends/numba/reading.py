"""Copies of array entries with any strides to tiles.

Arrays are passed as addresses, see `addresses`: views would be reference-counted, which costs more than the
work on a few hundred columns.
"""

from __future__ import annotations

import numba
import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic

from gemproj.backends.numba.addresses import COLUMN_STEP, ROW_STEP, ROWS, VECTOR, VECTOR_STEP
from gemproj.backends.numba.jit import fast
from gemproj.backends.numba.vectors import TURNED, transpose, widen

# Columns that are turned into rows at a time, and the least number of columns in a tile.
LEAST = 256


@intrinsic
def _pointer(typing_context, address):
    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@fast
def view(address, n, like):
    """Return n entries of the dtype of `like` as an array."""
    return numba.carray(_pointer(address), (n,), like.dtype)


@fast
def aligned(n, like):
    """Return an array of n entries that begins at a cache line."""
    spare = np.empty(n + 64 // like.itemsize, like.dtype)
    start = -spare.ctypes.data % 64 // like.itemsize
    return spare[start : start + n]


@fast
def _copy(address, step, n, like, target, to):
    """Copy n entries, `step` bytes apart, of the dtype of `like`, to an array of the dtype of `to`."""
    if step == like.itemsize:
        widen(address, n, target, like, to)
    else:
        for c in range(n):
            widen(address + c * step, 1, target + c * to.itemsize, like, to)


@fast
def read_vector(line, start, n, like, target, to):
    """Copy n entries of g."""
    _copy(line[VECTOR] + start * line[VECTOR_STEP], line[VECTOR_STEP], n, like, target, to)


@fast
def turn(line, start, n, t, like, rows, step, to):
    """Copy n columns of a G that is stored by columns, or in any other way, to rows, `step` bytes apart."""
    source, column, done, height = (
        line[ROWS] + start * line[COLUMN_STEP],
        line[COLUMN_STEP],
        0,
        32 // to.itemsize,
    )
    # Fewer rows are read with what follows them, which has to be columns of G.
    if line[ROW_STEP] == like.itemsize and (t >= height or column == t * like.itemsize):
        end = n if t >= height else n - height
        while done + TURNED <= end:
            for r in range(0, t, height):
                first = min(r, max(t - height, 0))
                target = rows + first * step + done * to.itemsize
                transpose(source + done * column + first * like.itemsize, column, target, step, like)
            done += TURNED
    for r in range(t):
        place, target = source + r * line[ROW_STEP] + done * column, rows + r * step + done * to.itemsize
        _copy(place, column, n - done, like, target, to)


@fast
def by_columns(lines, first, last, like):
    """Return whether the columns of any G are not adjacent in memory."""
    for k in range(first, last):  # noqa: SIM110
        if lines[k, COLUMN_STEP] != like.itemsize:
            return True
    return False


@fast
def read_rows(line, start, n, t, like, turned, turned_like, tile, step, sum_like):
    """Copy n columns of G to a tile, row by row."""
    if line[COLUMN_STEP] == like.itemsize:
        source = line[ROWS] + start * like.itemsize
        for r in range(t):
            widen(source + r * line[ROW_STEP], n, tile + r * step, like, sum_like)
        return
    row = LEAST * turned_like.itemsize
    turn(line, start, n, t, like, turned, row, turned_like)
    for r in range(t):
        widen(turned + r * row, n, tile + r * step, turned_like, sum_like)
