"""The compiled loops of stage 1 (products of rows) and stage 3 (linear combinations of rows).

G, g and x are read and written where they are, at addresses from a table with one column per block::

    address of G, of_problem, of_row, of_column, address of g, address of x, columns

Steps are in numbers: entry k of row r of problem p of G is ``p * of_problem + r * of_row + k * of_column``
numbers after the first one. The entries of g and of x are adjacent. The columns of all blocks, one block
after the other, are divided into pieces, numbered across problems: piece k of problem p is
``k * problems + p``. With one G for many g, `together` of them, a multiple of HEIGHT, count as one problem.

Loops run over slices, ``a = row[start : start + 1024]`` and ``range(a.size)``. An index that starts at a
variable may be negative for all that numba knows; it then wraps around, and LLVM reads one number at a time.
"""

from __future__ import annotations

import numpy as np
from numba import carray
from numba.core import types
from numba.extending import overload

from gemproj.backends.numba.block import HEIGHT, LANES, MULTIPLE, add_block, add_few, pointer, widen
from gemproj.backends.numba.jit import entry, fast

# Entries of an array at an address, as far as its slices know; more than there are.
_MANY = 1 << 48
# Columns whose products are summed before they are added to a total; columns of x computed at a time.
_CHUNK, _PART = 1024, 1024
# Bytes of a tile, and its minimum number of columns. It stays in a first-level cache, or, of columns of G for
# stage 3, in a second-level cache.
_TILE, _TURNED, _LEAST = 12 << 10, 96 << 10, 256


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
def _at(address, step, like):
    """Return the numbers from an address on, after a step, as an array with the dtype of `like`."""
    return carray(pointer(address + step * like.itemsize), (_MANY,), like.dtype)


@fast
def _room(rows, width):
    """Return an array (rows, width) that begins at a cache line, so that no vector lies on two."""
    room = np.empty(rows * width + 8)
    start = (-room.ctypes.data // 8) % 8
    return room[start : start + rows * width].reshape((rows, width))


@fast
def _widen(source, n, tile, row):
    """Copy n numbers to a row of a float64 tile."""
    done = n - n % LANES
    widen(source, done, tile, row)
    for i in range(done, n):
        tile[row, i] = number(source[i])


@fast
def _narrow(source, target):
    for i in range(source.size):
        target[i] = rounded(source[i], target[i])


@fast
def _two(columns, a, b):
    for i in range(a.size):
        a[i], b[i] = number(columns[2 * i]), number(columns[2 * i + 1])


@fast
def _three(columns, a, b, c):
    for i in range(a.size):
        a[i], b[i], c[i] = number(columns[3 * i]), number(columns[3 * i + 1]), number(columns[3 * i + 2])


@fast
def _four(columns, of_column, a, b, c, d):
    for i in range(a.size):
        four = columns[i * of_column : i * of_column + 4]
        a[i], b[i], c[i], d[i] = number(four[0]), number(four[1]), number(four[2]), number(four[3])


@fast
def _one(columns, of_column, a):
    for i in range(a.size):
        a[i] = number(columns[i * of_column])


@fast
def _turn(G, of_row, of_column, t, n, like, tile):
    """Copy n columns of G to the rows of a float64 tile, where the entries of a row are not adjacent in G."""
    done, source = 0, _at(G, 0, like)
    if of_row == 1 and of_column == t == 2:  # with a known step, LLVM reads and shuffles whole vectors
        _two(source[: 2 * n], tile[0, :n], tile[1, :n])
        done = 2
    elif of_row == 1 and of_column == t == 3:
        _three(source[: 3 * n], tile[0, :n], tile[1, :n], tile[2, :n])
        done = 3
    elif of_row == 1 and of_column == t == 4:
        _four(source[: 4 * n], 4, tile[0, :n], tile[1, :n], tile[2, :n], tile[3, :n])
        done = 4
    elif of_row == 1:
        done = t - t % 4
        for r in range(0, done, 4):
            _four(source[r:], of_column, tile[r, :n], tile[r + 1, :n], tile[r + 2, :n], tile[r + 3, :n])
    for r in range(done, t):
        _one(_at(G, r * of_row, like), of_column, tile[r, :n])


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
def sum_products(begin, end, table, like, problems, piece, t, together, totals):
    """Add the products of the rows [G; g] over the columns of pieces ``begin .. end - 1`` to `totals`.

    `totals` is (pieces, problems, size).
    """
    items, first, height = -(-problems // together), t, t + 1
    if together > 1:  # whole groups of rows, so that the bits of a g do not depend on the others
        first = -(-t // HEIGHT) * HEIGHT
        height = first + -(-min(together, problems) // HEIGHT) * HEIGHT
    width = min(_CHUNK, max(_LEAST, _TILE // (8 * (first + together)) // MULTIPLE * MULTIPLE))
    groups = -(-height // HEIGHT)
    tile, sums = _room(height, width), _room(groups * (groups + 1) // 2, HEIGHT * HEIGHT * LANES)
    if together > 1:
        tile[:] = 0.0
    for i in range(begin, end):
        k, p, at = i // items, i % items, 0
        sums[:] = 0.0
        for b in range(table.shape[1]):
            G, of_problem, of_row, of_column = table[0, b], table[1, b], table[2, b], table[3, b]
            g, n = table[4, b], table[6, b]
            few = together == 1 and 0 < t < HEIGHT and of_column == 1
            start, stop = max(k * piece - at, 0), min((k + 1) * piece - at, n)
            at += n
            while start < stop:
                here = min(width, stop - start)
                rows = G + (p * of_problem + start * of_column) * like.itemsize
                vectors = g + (p * together * n + start) * like.itemsize
                if few and here >= MULTIPLE:
                    here -= here % MULTIPLE  # few rows are multiplied in place
                    add_few(_at(rows, 0, like), of_row, t, _at(vectors, 0, like), here, sums)
                else:
                    if of_column == 1:
                        for r in range(t):
                            _widen(_at(rows, r * of_row, like), here, tile, r)
                    else:
                        _turn(rows, of_row, of_column, t, here, like, tile)
                    for r in range(min(together, problems - p * together)):
                        _widen(_at(vectors, r * n, like), here, tile, first + r)
                    _add_tile(tile, height, here, sums)
                start += here
        _collect(sums, height, t, first, totals[k, p])


@fast
def _add_three(p, a, q, b, r, c, out):
    for i in range(out.size):
        out[i] += p * number(a[i]) + q * number(b[i]) + r * number(c[i])


@fast
def _add_one(p, a, out):
    for i in range(out.size):
        out[i] += p * number(a[i])


@fast
def _add_rows(lam, chosen, rows, of_row, like, out):
    """Add the chosen rows times their multipliers."""
    n, count = out.size, chosen.size
    for c in range(0, count - 1, 3):
        a, b = chosen[c], chosen[c + 1]
        d = chosen[c + 2] if c + 2 < count else b
        _add_three(
            lam[a],
            _at(rows, a * of_row, like)[:n],
            lam[b],
            _at(rows, b * of_row, like)[:n],
            lam[d] if c + 2 < count else 0.0,
            _at(rows, d * of_row, like)[:n],
            out,
        )
    if count % 3 == 1:
        a = chosen[count - 1]
        _add_one(lam[a], _at(rows, a * of_row, like)[:n], out)


@entry
def write_combinations(begin, end, table, like, problems, piece, together, lams):
    """Write pieces ``begin .. end - 1`` of ``x = g + G'lam``; `lams` is (problems, t).

    Sums are in float64 and stay in cache. x is written after its sums are complete, because x may be g.
    """
    t, items = lams.shape[1], -(-problems // together)
    part, chosen, turned = np.empty((1, _PART)), np.empty(t, np.int64), np.empty((0, 0))
    for i in range(begin, end):
        k, first, at = i // items, i % items * together, 0
        for b in range(table.shape[1]):
            G, of_problem, of_row, of_column = table[0, b], table[1, b], table[2, b], table[3, b]
            g, to, n, width = table[4, b], table[5, b], table[6, b], _PART
            if of_column != 1:
                width = min(_PART, max(_LEAST, _TURNED // (8 * t)))
                turned = np.empty((t, width)) if turned.size == 0 else turned
            stop = min((k + 1) * piece - at, n)
            for start in range(max(k * piece - at, 0), stop, width):
                here = min(width, stop - start)
                rows = G + (first // together * of_problem + start * of_column) * like.itemsize
                if of_column != 1:
                    _turn(rows, of_row, of_column, t, here, like, turned)
                for p in range(first, min(first + together, problems)):
                    lam, count, out = lams[p], 0, part[0, :here]
                    for r in range(t):  # rows whose multiplier is zero need not be finite
                        if lam[r] != 0.0:
                            chosen[count] = r
                            count += 1
                    _widen(_at(g, p * n + start, like), here, part, 0)
                    if of_column == 1:
                        _add_rows(lam, chosen[:count], rows, of_row, like, out)
                    else:
                        _add_rows(lam, chosen[:count], turned.ctypes.data, width, turned, out)
                    _narrow(out, _at(to, p * n + start, like)[:here])
            at += n
