"""The compiled loops of stage 1 (products of rows) and stage 3 (linear combinations of rows).

Loops run over slices, ``a = G[start : start + 1024]`` and ``range(a.size)``. An index that starts at a
variable may be negative for all that numba knows; it then wraps around, and LLVM reads one number at a time.
Arrays have one dimension, because only the entries of such an array are known to be adjacent: row r of
problem p of G begins at ``p * of_problem + r * of_row``.
"""

from __future__ import annotations

import numpy as np
from numba.core import types
from numba.extending import overload

from gemproj.backends.numba.block import HEIGHT, LANES, MULTIPLE, add_block, add_few, widen
from gemproj.backends.numba.jit import entry, fast

# Columns whose products are summed before they are added to a total; columns of x computed at a time.
_CHUNK, _PART = 1024, 1024
# Bytes of a tile, and its minimum number of columns. It stays in a first-level cache.
_TILE, _LEAST = 12 << 10, 256


def number(entry):
    """Return an entry as a number; uint16 holds the bits of bfloat16, the upper half of float32."""


@overload(number)
def _number(entry):
    if isinstance(entry, types.Integer):
        return lambda entry: np.uint32(np.uint32(entry) << np.uint32(16)).view(np.float32)
    return lambda entry: entry


def rounded(value, like):
    """Return a float64 number in the form of an entry of x: bfloat16 is rounded to float32 first."""


@overload(rounded)
def _rounded(value, like):
    if not isinstance(like, types.Integer):
        return lambda value, like: value

    def bits_of(value, like):
        bits = np.float32(value).view(np.uint32)
        even = (bits >> np.uint32(16)) & np.uint32(1)
        up = np.uint32(bits + np.uint32(0x7FFF) + even)
        return np.uint16((up if value == value else bits | np.uint32(0x400000)) >> np.uint32(16))

    return bits_of


@fast
def _widen(source, start, n, tile, row):
    """Copy n numbers from ``source[start:]`` to a row of a float64 tile."""
    done = n - n % LANES
    widen(source, start, done, tile, row)
    for i in range(done, n):
        tile[row, i] = number(source[start + i])


@fast
def _narrow(source, target):
    for i in range(source.size):
        target[i] = rounded(source[i], target[i])


@fast
def _add_tile(tile, rows, n, sums):
    """Add the products of all pairs of rows of a tile to partial sums, in blocks of the lower triangle."""
    k, end = 0, -(-n // MULTIPLE) * MULTIPLE
    for r in range(rows):
        tile[r, n:end] = 0.0
    for i in range(0, rows, HEIGHT):
        for j in range(0, i + 1, HEIGHT):
            add_block(tile, i, j, min(HEIGHT, rows - i), end, sums, k)
            k += 1


@fast
def _collect(sums, rows, t, first, total):
    """Add products to a total: K, then b and |g|^2 for each g, which are the rows from `first` on."""
    k = 0
    for i in range(0, rows, HEIGHT):
        for j in range(0, i + 1, HEIGHT):
            for r in range(i, min(i + HEIGHT, rows)):
                for c in range(j, min(j + HEIGHT, r + 1)):
                    at, product = ((r - i) * HEIGHT + c - j) * LANES, 0.0
                    for lane in sums[k, at : at + LANES]:
                        product += lane
                    if r < t:
                        total[r * t + c] += product
                        if c < r:
                            total[c * t + r] += product
                    elif r >= first and c < t:
                        total[t * t + (r - first) * (t + 1) + c] += product
                    elif r >= first and c == r:
                        total[t * t + (r - first) * (t + 1) + t] += product
            k += 1


@entry
def sum_products(
    begin, end, rows, of_row, of_problem, vectors, of_vector, problems, n, piece, t, together, totals
):
    """Add the products of the rows [G; g] over the columns of pieces ``begin .. end - 1`` to `totals`.

    Pieces of n columns are numbered across problems: piece k of problem p is ``k * problems + p``. With one G
    for many g, `together` of them, a multiple of HEIGHT, count as one problem. `totals` is (pieces, problems,
    size), or (pieces, 1, size) for the sums over all problems.
    """
    items, first, height = -(-problems // together), t, t + 1
    if together > 1:  # whole groups of rows, so that the bits of a g do not depend on the others
        first = -(-t // HEIGHT) * HEIGHT
        height = first + -(-min(together, problems) // HEIGHT) * HEIGHT
    width = min(_CHUNK, max(_LEAST, _TILE // (8 * (first + together)) // MULTIPLE * MULTIPLE))
    groups = -(-height // HEIGHT)
    tile, sums = np.empty((height, width)), np.empty((groups * (groups + 1) // 2, HEIGHT * HEIGHT * LANES))
    if together > 1:
        tile[:] = 0.0
    few = together == 1 and 0 < t < HEIGHT
    for i in range(begin, end):
        k, p = i // items, i % items
        sums[:] = 0.0
        start, stop = k * piece, min((k + 1) * piece, n)
        while start < stop:
            here = min(width, stop - start)
            at, v = p * of_problem + start, p * together * of_vector + start
            if few and here >= MULTIPLE:
                here -= here % MULTIPLE  # few rows are multiplied in place
                add_few(rows, at, of_row, t, vectors, v, here, sums)
            else:
                for r in range(t):
                    _widen(rows, at + r * of_row, here, tile, r)
                for r in range(min(together, problems - p * together)):
                    _widen(vectors, v + r * of_vector, here, tile, first + r)
                _add_tile(tile, height, here, sums)
            start += here
        _collect(sums, height, t, first, totals[k, min(p, totals.shape[1] - 1)])


@fast
def _add_three(p, a, q, b, r, c, out):
    for i in range(out.size):
        out[i] += p * number(a[i]) + q * number(b[i]) + r * number(c[i])


@fast
def _add_one(p, a, out):
    for i in range(out.size):
        out[i] += p * number(a[i])


@entry
def write_combinations(
    begin, end, rows, of_row, of_problem, vectors, of_vector, problems, n, piece, lams, x, of_x
):
    """Write pieces ``begin .. end - 1`` of ``x = g + G'lam``, numbered as in `sum_products`.

    `lams` is (problems, t), or (1, t) for all problems.

    Sums are in float64 and stay in cache. x is written after its sums are complete, because x may be g.
    """
    part, chosen = np.empty((1, _PART)), np.empty(lams.shape[1], np.int64)
    for i in range(begin, end):
        k, p = i // problems, i % problems
        lam, count = lams[min(p, len(lams) - 1)], 0
        for r in range(lam.size):  # rows whose multiplier is zero need not be finite
            if lam[r] != 0.0:
                chosen[count] = r
                count += 1
        stop = min((k + 1) * piece, n)
        for start in range(k * piece, stop, _PART):
            here = min(_PART, stop - start)
            out, at, v, to = part[0, :here], p * of_problem + start, p * of_vector + start, p * of_x + start
            _widen(vectors, v, here, part, 0)
            for c in range(0, count - 1, 3):
                a, b = chosen[c], chosen[c + 1]
                d = chosen[c + 2] if c + 2 < count else b
                _add_three(
                    lam[a],
                    rows[at + a * of_row : at + a * of_row + here],
                    lam[b],
                    rows[at + b * of_row : at + b * of_row + here],
                    lam[d] if c + 2 < count else 0.0,
                    rows[at + d * of_row : at + d * of_row + here],
                    out,
                )
            if count % 3 == 1:
                a = chosen[count - 1]
                _add_one(lam[a], rows[at + a * of_row : at + a * of_row + here], out)
            _narrow(out, x[to : to + here])


@fast
def _turn(columns, of_column, start, tile, c):
    """Copy eight columns to a tile; LLVM stores eight numbers at a time."""
    t = tile.shape[0]
    at = start + c
    s0 = columns[at * of_column : at * of_column + t]
    s1 = columns[(at + 1) * of_column : (at + 1) * of_column + t]
    s2 = columns[(at + 2) * of_column : (at + 2) * of_column + t]
    s3 = columns[(at + 3) * of_column : (at + 3) * of_column + t]
    s4 = columns[(at + 4) * of_column : (at + 4) * of_column + t]
    s5 = columns[(at + 5) * of_column : (at + 5) * of_column + t]
    s6 = columns[(at + 6) * of_column : (at + 6) * of_column + t]
    s7 = columns[(at + 7) * of_column : (at + 7) * of_column + t]
    to = tile[:, c : c + 8]
    for r in range(s0.size):
        to[r, 0], to[r, 1], to[r, 2], to[r, 3] = s0[r], s1[r], s2[r], s3[r]
        to[r, 4], to[r, 5], to[r, 6], to[r, 7] = s4[r], s5[r], s6[r], s7[r]


@entry
def transpose(columns, of_column, start, tile):
    """Copy columns, from column `start` on, to the rows of a tile (t, n)."""
    t, n = tile.shape
    if t == 2 and of_column == 2:
        pairs, a, b = columns[2 * start : 2 * (start + n)], tile[0], tile[1]
        for i in range(a.size):
            a[i], b[i] = pairs[2 * i], pairs[2 * i + 1]
        return
    done = n - n % 8
    for c in range(0, done, 8):
        _turn(columns, of_column, start, tile, c)
    for c in range(done, n):
        for r in range(t):
            tile[r, c] = columns[(start + c) * of_column + r]
