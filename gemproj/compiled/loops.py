"""Stages 1 and 3 as loops: products of rows, and sums of rows. Arrays come as addresses, see `addresses`."""

from __future__ import annotations

import numba
import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic

from gemproj.compiled.addresses import (
    COLUMN_STEP,
    COLUMNS,
    FIRST_COLUMN,
    OUT,
    OUT_STEP,
    ROW_STEP,
    ROWS,
    VECTOR,
    VECTOR_STEP,
)
from gemproj.compiled.bfloat16 import entry, number, readable
from gemproj.compiled.jit import fast
from gemproj.compiled.vectors import HEIGHT, LANES, MULTIPLE, TURNED, add_block, prefer_full_width, transpose

# Bytes of a tile that stay in the first-level cache, and the least number of its columns.
_TILE, _LEAST = 24 << 10, 256
_BLOCK = HEIGHT * HEIGHT * LANES


@intrinsic
def _pointer(typing_context, address):
    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@fast
def _view(address, n, like):
    return numba.carray(_pointer(address), (n,), like.dtype)


@fast
def _aligned(rows, columns, like):
    """Return an array (rows, columns) that begins at a cache line."""
    spare = np.empty(rows * columns + 64 // like.itemsize, like.dtype)
    start = -spare.ctypes.data % 64 // like.itemsize
    return spare[start : start + rows * columns].reshape(rows, columns)


@fast
def _tile_columns(rows, most, like):
    """Return how many columns of so many rows are worked on at a time."""
    fitting = _TILE // (rows * like.itemsize) // MULTIPLE * MULTIPLE
    return min(most, max(_LEAST, fitting))


@fast
def _read(address, step, n, like, to):
    """Copy n entries, `step` bytes apart, to an array of float32 or float64."""
    wide = to.dtype.type
    if step == like.itemsize:
        a = _view(address, n, like)
        for c in range(n):
            to[c] = wide(number(a[c]))
    else:
        for c in range(n):
            to[c] = wide(number(_view(address + c * step, 1, like)[0]))


@fast
def _turn(line, start, n, t, like, turned):
    """Copy n columns of a G that is stored by columns, or in any other way, into rows."""
    source, step, done = line[ROWS] + start * line[COLUMN_STEP], line[COLUMN_STEP], 0
    height = 16 // turned.itemsize
    # Fewer rows are read with what follows them, which has to be columns of G.
    if line[ROW_STEP] == like.itemsize and (t >= height or step == t * like.itemsize):
        end = n if t >= height else n - height
        while done + TURNED <= end:
            for r in range(0, t, height):
                first = min(r, max(t - height, 0))
                target = turned.ctypes.data + first * turned.strides[0] + done * turned.itemsize
                transpose(source + first * like.itemsize, step, target, turned.strides[0], like)
            source += TURNED * step
            done += TURNED
    for r in range(t):
        _read(source + r * line[ROW_STEP], step, n - done, like, turned[r, done:])


@fast
def _scratch(lines, first, last, t, columns, like):
    """Return room for columns that are turned into rows, if there are any."""
    for k in range(first, last):
        if lines[k, COLUMN_STEP] != like.itemsize:
            return _aligned(max(t, 4), columns, readable(like))
    return _aligned(0, 0, readable(like))


@fast
def _read_rows(line, start, n, t, like, turned, tile):
    """Copy n columns of G to a tile, row by row."""
    if line[COLUMN_STEP] == like.itemsize:
        for r in range(t):
            _read(line[ROWS] + r * line[ROW_STEP] + start * like.itemsize, like.itemsize, n, like, tile[r])
        return
    _turn(line, start, n, t, like, turned)
    for r in range(t):
        for c in range(n):
            tile[r, c] = turned[r, c]


@fast
def _fill_up(tile, n):
    """Fill rows with zeros up to a multiple of what is worked on at once; return that number of columns."""
    end = -(-n // MULTIPLE) * MULTIPLE
    for r in range(tile.shape[0]):
        for c in range(n, end):
            tile[r, c] = 0
    return end


@fast
def _add_tile(tile, n, sums):
    """Add the products of all rows of a tile to partial sums, block by block of the lower triangle."""
    rows, step, k = tile.shape[0], tile.strides[0], 0
    for i in range(0, rows, HEIGHT):
        for j in range(0, i + 1, HEIGHT):
            a, b = tile.ctypes.data + i * step, tile.ctypes.data + j * step
            add_block(a, b, step, n, min(HEIGHT, rows - i), sums.ctypes.data + k * _BLOCK * 8, tile)
            k += 1


@fast
def _total(sums, k, p, q):
    start, total = k * _BLOCK + (p * HEIGHT + q) * LANES, 0.0
    for lane in range(LANES):
        total += sums[start + lane]
    return total


@fast
def _collect(sums, total):
    """Write partial sums to a symmetric matrix."""
    rows, k = total.shape[0], 0
    for i in range(0, rows, HEIGHT):
        for j in range(0, i + 1, HEIGHT):
            for p in range(min(HEIGHT, rows - i)):
                for q in range(min(HEIGHT, i + p - j + 1)):
                    total[i + p, j + q] = total[j + q, i + p] = _total(sums, k, p, q)
            k += 1


@fast
def add_products(lines, blocks, first, last, pieces, columns, chunk, like, sum_like, totals):
    """Write the products of the rows [G; g] over pieces ``first .. last - 1`` of the problems to totals.

    Each piece has a matrix (t + 1, t + 1) of its own in totals (problems, pieces, ...). Products of at
    most `chunk` columns are summed in the dtype of `sum_like`, the rest in float64.
    """
    prefer_full_width()
    t = totals.shape[2] - 1
    groups = (t + HEIGHT) // HEIGHT
    n = _tile_columns(t + 1, chunk, sum_like)
    tile = _aligned(t + 1, n, sum_like)
    turned = _scratch(lines, first // pieces * blocks, -(-last // pieces) * blocks, t, n, like)
    sums = _aligned(groups * (groups + 1) // 2, _BLOCK, totals).reshape(-1)
    for p in range(first, last):
        problem, piece = p // pieces, p % pieces
        sums[:] = 0.0
        for k in range(problem * blocks, (problem + 1) * blocks):
            line = lines[k]
            start = max(piece * columns - line[FIRST_COLUMN], 0)
            stop = min((piece + 1) * columns - line[FIRST_COLUMN], line[COLUMNS])
            while start < stop:
                here = min(n, stop - start)
                _read_rows(line, start, here, t, like, turned, tile)
                _read(line[VECTOR] + start * line[VECTOR_STEP], line[VECTOR_STEP], here, like, tile[t])
                _add_tile(tile, _fill_up(tile, here), sums)
                start += here
        _collect(sums, totals[problem, piece])


@fast
def _add_scaled(address, step, n, like, lam, active, x):
    """Add the active rows times lam to x, four at a time: a quarter as often through x."""
    k, count = 0, active.size
    while k + 4 <= count:
        a, b = _view(address + active[k] * step, n, like), _view(address + active[k + 1] * step, n, like)
        c, d = _view(address + active[k + 2] * step, n, like), _view(address + active[k + 3] * step, n, like)
        p, q, r, s = lam[active[k]], lam[active[k + 1]], lam[active[k + 2]], lam[active[k + 3]]
        for i in range(n):
            left = p * np.float64(number(a[i])) + q * np.float64(number(b[i]))
            x[i] += left + (r * np.float64(number(c[i])) + s * np.float64(number(d[i])))
        k += 4
    if k + 2 <= count:
        a, b = _view(address + active[k] * step, n, like), _view(address + active[k + 1] * step, n, like)
        p, q = lam[active[k]], lam[active[k + 1]]
        for i in range(n):
            x[i] += p * np.float64(number(a[i])) + q * np.float64(number(b[i]))
        k += 2
    if k < count:
        a, p = _view(address + active[k] * step, n, like), lam[active[k]]
        for i in range(n):
            x[i] += p * np.float64(number(a[i]))


@fast
def _combine_chunk(line, start, n, t, like, lam, active, turned, x):
    """Write n columns of ``g + G'lam`` to the output, by way of sums in float64 that stay in cache."""
    _read(line[VECTOR] + start * line[VECTOR_STEP], line[VECTOR_STEP], n, like, x)
    if line[COLUMN_STEP] == like.itemsize:
        _add_scaled(line[ROWS] + start * like.itemsize, line[ROW_STEP], n, like, lam, active, x)
    elif active.size:
        _turn(line, start, n, t, like, turned)
        _add_scaled(turned.ctypes.data, turned.strides[0], n, turned, lam, active, x)
    # Only now, because the output may be g.
    address, step = line[OUT] + start * line[OUT_STEP], line[OUT_STEP]
    if step == like.itemsize:
        out = _view(address, n, like)
        for c in range(n):
            out[c] = entry(x[c], like)
    else:
        for c in range(n):
            _view(address + c * step, 1, like)[0] = entry(x[c], like)


@fast
def add_rows(lines, blocks, first, last, pieces, columns, like, lam):
    """Write pieces ``first .. last - 1`` of ``x = g + G'lam`` for lam (problems, t); x may be g itself."""
    prefer_full_width()
    t, x = lam.shape[1], np.empty(1024)
    turned = _scratch(lines, first // pieces * blocks, -(-last // pieces) * blocks, t, _LEAST, like)
    n = _LEAST if turned.size else x.size
    for p in range(first, last):
        problem, piece = p // pieces, p % pieces
        active = np.flatnonzero(lam[problem])
        for k in range(problem * blocks, (problem + 1) * blocks):
            line = lines[k]
            start = max(piece * columns - line[FIRST_COLUMN], 0)
            stop = min((piece + 1) * columns - line[FIRST_COLUMN], line[COLUMNS])
            while start < stop:
                here = min(n, stop - start)
                _combine_chunk(line, start, here, t, like, lam[problem], active, turned, x)
                start += here
