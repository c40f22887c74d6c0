"""Loops that copy array entries with any strides to the rows of a tile.

The arrays are given by their addresses, because one call reads hundreds of them, see `addresses`. The problem
holds the arrays.
"""

from __future__ import annotations

from gemproj.backends.numba.addresses import COLUMN_STEP, ROW_STEP, ROWS, VECTOR, VECTOR_STEP
from gemproj.backends.numba.columns import TURNED, separate, transpose
from gemproj.backends.numba.jit import fast
from gemproj.backends.numba.vectors import widen


@fast
def _copy(address, step, n, like, tile, r, c):
    """Copy n entries, `step` bytes apart, of the dtype of `like`, to row r of a tile, from column c on."""
    if step == like.itemsize:
        widen(address, n, like, tile, r, c)
    else:
        for i in range(n):
            widen(address + i * step, 1, like, tile, r, c + i)


@fast
def read_vector(line, start, n, like, tile, r):
    """Copy n entries of g to row r of a tile."""
    _copy(line[VECTOR] + start * line[VECTOR_STEP], line[VECTOR_STEP], n, like, tile, r, 0)


@fast
def read_rows(line, start, n, t, like, columns, tile):
    """Copy n columns of G, from column `start` on, to the first t rows of a tile.

    `columns` is None if the entries of each row are adjacent; else G may have any strides.
    """
    row, column, done, turned = line[ROW_STEP], line[COLUMN_STEP], 0, 0
    source = line[ROWS] + start * column
    if columns is not None:
        done, turned = _read_columns(source, row, column, n, t, like, tile)
    for r in range(t):
        begin = done if r < turned else 0
        _copy(source + r * row + begin * column, column, n - begin, like, tile, r, begin)


@fast
def _read_columns(source, row, column, n, t, like, tile):
    """Copy columns with adjacent entries to rows of a tile; return the numbers of columns and rows copied."""
    done, height = n // TURNED * TURNED, 32 // max(4, like.itemsize)  # bfloat16 is read as float32
    if column == like.itemsize or row != like.itemsize:
        return 0, 0
    if t < 8 and column == t * row:
        separate(source, done, t, like, tile)
        return done, t
    if t < height:
        return 0, 0
    # Up to 3 remaining rows are copied entry by entry; more are transposed together with preceding rows.
    turned = t - t % height if t % height <= 3 else t
    for c in range(0, done, TURNED):
        for r in range(0, turned, height):
            first = min(r, t - height)
            transpose(source + c * column + first * row, column, like, tile, first, c)
    return done, turned
