"""Stages 1 and 3 as loops: products of rows, and sums of rows. Arrays come as addresses, see `Table`."""

from __future__ import annotations

import numba
import numpy as np
from numba.core import cgutils, types
from numba.extending import intrinsic

from gemproj.compiled.jit import fast
from gemproj.compiled.numbers import entry, number


@intrinsic
def _pointer(typing_context, address):
    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@fast
def _view(address, start, n, like):
    return numba.carray(_pointer(address + start * like.itemsize), (n,), like.dtype)


@fast
def _dot(a, b, sums):
    wide = sums.dtype.type
    s = wide(0)
    for i in range(a.size):
        s += wide(number(a[i])) * wide(number(b[i]))
    return s


@fast
def _dots_2(a0, a1, b0, b1, sums):
    wide = sums.dtype.type
    s00, s01, s10, s11 = wide(0), wide(0), wide(0), wide(0)
    for i in range(a0.size):
        p0, p1, q0, q1 = wide(number(a0[i])), wide(number(a1[i])), wide(number(b0[i])), wide(number(b1[i]))
        s00 += p0 * q0
        s01 += p0 * q1
        s10 += p1 * q0
        s11 += p1 * q1
    return s00, s01, s10, s11


@fast
def _square_3(a0, a1, a2, sums):
    """Return the products of three rows among themselves: all that two constraints need."""
    wide = sums.dtype.type
    s00, s10, s11, s20, s21, s22 = wide(0), wide(0), wide(0), wide(0), wide(0), wide(0)
    for i in range(a0.size):
        p0, p1, p2 = wide(number(a0[i])), wide(number(a1[i])), wide(number(a2[i]))
        s00 += p0 * p0
        s10 += p1 * p0
        s11 += p1 * p1
        s20 += p2 * p0
        s21 += p2 * p1
        s22 += p2 * p2
    return s00, s10, s11, s20, s21, s22


@fast
def _dots_4(a0, a1, a2, a3, b0, b1, b2, b3, sums):
    # Sixteen sums from eight loads: what keeps arithmetic, not loading, the limit. Arrays of sums would
    # not stay in registers.
    wide = sums.dtype.type
    s00, s01, s02, s03 = wide(0), wide(0), wide(0), wide(0)
    s10, s11, s12, s13 = wide(0), wide(0), wide(0), wide(0)
    s20, s21, s22, s23 = wide(0), wide(0), wide(0), wide(0)
    s30, s31, s32, s33 = wide(0), wide(0), wide(0), wide(0)
    for i in range(a0.size):
        p0, p1, p2, p3 = wide(number(a0[i])), wide(number(a1[i])), wide(number(a2[i])), wide(number(a3[i]))
        q0, q1, q2, q3 = wide(number(b0[i])), wide(number(b1[i])), wide(number(b2[i])), wide(number(b3[i]))
        s00 += p0 * q0
        s01 += p0 * q1
        s02 += p0 * q2
        s03 += p0 * q3
        s10 += p1 * q0
        s11 += p1 * q1
        s12 += p1 * q2
        s13 += p1 * q3
        s20 += p2 * q0
        s21 += p2 * q1
        s22 += p2 * q2
        s23 += p2 * q3
        s30 += p3 * q0
        s31 += p3 * q1
        s32 += p3 * q2
        s33 += p3 * q3
    return (s00, s01, s02, s03), (s10, s11, s12, s13), (s20, s21, s22, s23), (s30, s31, s32, s33)


@fast
def _row(line, i, t, start, n, like):
    """Return n columns of row i of [G; g]; past its end, g once more."""
    return _view(line[0] + i * line[1] if i < t else line[2], start, n, like)


@fast
def _add_chunk(line, start, n, t, like, sums, total):
    """Add the products of n columns to the lower triangle of total, four by four rows, or what is left."""
    i = 0
    while i <= t:
        left = t + 1 - i
        a0 = _row(line, i, t, start, n, like)
        if left == 1:
            for j in range(0, i, 2):
                b0, b1 = _row(line, j, t, start, n, like), _row(line, j + 1, t, start, n, like)
                s = _dots_2(a0, a0, b0, b1, sums)
                total[i, j] += s[0]
                total[i, j + 1] += s[1]
            total[i, i] += _dot(a0, a0, sums)
            return
        a1 = _row(line, i + 1, t, start, n, like)
        if left == 2:
            for j in range(0, i + 1, 2):
                b0, b1 = _row(line, j, t, start, n, like), _row(line, j + 1, t, start, n, like)
                s = _dots_2(a0, a1, b0, b1, sums)
                total[i, j] += s[0]
                total[i, j + 1] += s[1]
                total[i + 1, j] += s[2]
                total[i + 1, j + 1] += s[3]
            return
        a2 = _row(line, i + 2, t, start, n, like)
        if t == 2:
            s = _square_3(a0, a1, a2, sums)
            total[0, 0] += s[0]
            total[1, 0] += s[1]
            total[1, 1] += s[2]
            total[2, 0] += s[3]
            total[2, 1] += s[4]
            total[2, 2] += s[5]
            return
        a3 = _row(line, i + 3, t, start, n, like)
        for j in range(0, i + 1, 4):
            b0, b1 = _row(line, j, t, start, n, like), _row(line, j + 1, t, start, n, like)
            b2, b3 = _row(line, j + 2, t, start, n, like), _row(line, j + 3, t, start, n, like)
            block = _dots_4(a0, a1, a2, a3, b0, b1, b2, b3, sums)
            for p in range(min(4, left)):
                for q in range(min(4, t + 1 - j)):
                    total[i + p, j + q] += block[p][q]
        i += 4


@fast
def add_products(lines, blocks, first, last, pieces, columns, chunk, like, sums, totals):
    """Write the products of the rows [G; g] over pieces ``first .. last - 1`` of the problems to totals.

    Each piece has a matrix (t + 1, t + 1) of its own in totals (problems, pieces, ...). Products of
    `chunk` columns are summed in the dtype of `sums`, the rest in float64.
    """
    t = totals.shape[2] - 1
    for p in range(first, last):
        problem, piece = p // pieces, p % pieces
        total = totals[problem, piece]
        for k in range(problem * blocks, (problem + 1) * blocks):
            line = lines[k]
            start = max(piece * columns - line[4], 0)
            stop = min((piece + 1) * columns - line[4], line[5])
            while start < stop:
                n = min(chunk, stop - start)
                _add_chunk(line, start, n, t, like, sums, total)
                start += n
        for i in range(t + 1):
            for j in range(i):
                total[j, i] = total[i, j]


@fast
def _combine_chunk(line, start, n, like, lam, x):
    """Write n columns of ``g + G'lam`` to x, by way of sums in float64 that stay in cache."""
    g, out = _view(line[2], start, n, like), _view(line[3], start, n, like)
    waiting, begun = -1, False  # rows go in pairs: half as often through x
    for i in range(lam.size):
        if lam[i] == 0.0:
            continue
        if waiting < 0:
            waiting = i
            continue
        u, a = lam[waiting], _view(line[0] + waiting * line[1], start, n, like)
        v, b = lam[i], _view(line[0] + i * line[1], start, n, like)
        if begun:
            for c in range(n):
                x[c] += u * np.float64(number(a[c])) + v * np.float64(number(b[c]))
        else:
            for c in range(n):
                step = u * np.float64(number(a[c])) + v * np.float64(number(b[c]))
                x[c] = np.float64(number(g[c])) + step
        waiting, begun = -1, True
    if not begun:
        for c in range(n):
            x[c] = np.float64(number(g[c]))
    if waiting >= 0:
        u, a = lam[waiting], _view(line[0] + waiting * line[1], start, n, like)
        for c in range(n):
            x[c] += u * np.float64(number(a[c]))
    # Only now, because `out` may be g, and what may overlap is not vectorised.
    for c in range(n):
        out[c] = entry(x[c], like)


@fast
def add_rows(lines, blocks, first, last, pieces, columns, like, lam):
    """Write pieces ``first .. last - 1`` of ``x = g + G'lam`` for lam (problems, t); x may be g itself."""
    x = np.empty(1024)
    for p in range(first, last):
        problem, piece = p // pieces, p % pieces
        for k in range(problem * blocks, (problem + 1) * blocks):
            line = lines[k]
            start = max(piece * columns - line[4], 0)
            stop = min((piece + 1) * columns - line[4], line[5])
            while start < stop:
                n = min(x.size, stop - start)
                _combine_chunk(line, start, n, like, lam[problem], x)
                start += n
