"""Copies of array entries with any strides to tiles.

Arrays are passed as addresses, see `addresses`: views would be reference-counted, which costs more than the
work on a few hundred columns.
"""

from __future__ import annotations

import numba
from numba.core import cgutils, types
from numba.extending import intrinsic

from gemproj.backends.numba.addresses import COLUMN_STEP, ROW_STEP, ROWS, VECTOR, VECTOR_STEP
from gemproj.backends.numba.columns import TURNED, separate, transpose
from gemproj.backends.numba.jit import fast
from gemproj.backends.numba.vectors import widen


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
def adjacent(line, t, like):
    """Return whether there is nothing between the entries of a row, or between those of all columns."""
    row, column = line[ROW_STEP], line[COLUMN_STEP]
    return column == like.itemsize or (row == like.itemsize and column == t * row)


@fast
def read_rows(line, start, n, t, like, tile, step, to):
    """Copy n columns of G, which may be stored by rows, by columns or in any other way, to rows of a tile."""
    row, column, done, turned = line[ROW_STEP], line[COLUMN_STEP], 0, 0
    source, height = line[ROWS] + start * column, 32 // max(4, like.itemsize)  # bfloat16 is read as float32
    if column != like.itemsize and row == like.itemsize:
        done = n // TURNED * TURNED
        if t < 8 and adjacent(line, t, like):
            separate(source, done, t, tile, step, like, to)
            turned = t
        elif t >= height:
            # A few rows that are left are copied entry by entry, more with some of those before them.
            turned = t - t % height if t % height <= 3 else t
            for c in range(0, done, TURNED):
                for r in range(0, turned, height):
                    first = min(r, t - height)
                    place, target = source + c * column + first * row, tile + first * step + c * to.itemsize
                    transpose(place, column, target, step, like, to)
    for r in range(t):
        begin = done if r < turned else 0
        place, target = source + r * row + begin * column, tile + r * step + begin * to.itemsize
        _copy(place, column, n - begin, like, target, to)
