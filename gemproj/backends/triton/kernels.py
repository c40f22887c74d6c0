"""The kernels: products of rows, search over active sets of up to 8 rows, and combination of rows.

All sums are in float64. The number of rows T is a compile-time constant, so registers hold the entries of
small matrices: tuples of scalars, or of vectors with one lane for each active set.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gemproj._constants import DEPENDENT, EPS

_DEPENDENT: tl.constexpr = tl.constexpr(DEPENDENT * EPS)
_INF: tl.constexpr = tl.constexpr(float("inf"))
# By default Triton compiles a kernel again if a number is 1, or a number or address is a multiple of 16. Here
# this is switched off; ALIGNED says whether all strides and addresses are multiples of 16.
_NUMBERS = "columns share first parts rows stride of_G of_g of_w of_x row of_K of_b step"
_TENSORS = "G g w x partial K b margin lam"
kernel = triton.jit(do_not_specialize=_NUMBERS.split(), do_not_specialize_on_alignment=_TENSORS.split())


@triton.jit
def _aligned(number, ALIGNED: tl.constexpr):
    """Return a number; if ALIGNED, the compiler knows that it is a multiple of 16."""
    return number // 16 * 16 if ALIGNED else number


@triton.jit
def _at(pointer, offset, ALIGNED: tl.constexpr):
    """Return a moved pointer; if ALIGNED, the compiler knows that it is a multiple of 16 bytes."""
    if ALIGNED:
        return tl.multiple_of(pointer + offset // 16 * 16, 16)
    return pointer + offset


@triton.jit
def _inverse(a):
    """Return 1/a, and 0 where a is not positive."""
    return tl.where(a > 0, 1.0 / tl.where(a > 0, a, 1.0), 0.0)


@triton.jit
def _cosine(pointer, scale, other):
    """Return an entry of K times the scales of its rows; 0, and not NaN, if one of them is 0.

    Multiplied by one scale after the other, because the product of both may overflow.
    """
    return tl.where((scale > 0) & (other > 0), tl.load(pointer), 0.0) * scale * other


@kernel
def products(
    G, g, w, partial, columns: tl.int64, share: tl.int64, first: tl.int64, parts: tl.int64, stride: tl.int64,
    of_G: tl.int64, of_g: tl.int64, of_w: tl.int64,
    T: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Write the products of the rows [G; g] over a share of the columns of a problem, (T + 1) x (T + 1).

    With a metric w, rows of G are divided by sqrt(w), and g is multiplied by sqrt(w).
    """
    COLUMNS: tl.constexpr = THREADS * WIDTH
    problem, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    G = _at(G, problem * of_G, ALIGNED)
    g = _at(g, problem * of_g, ALIGNED)
    w = _at(w, problem * of_w, ALIGNED)
    begin = part * share // COLUMNS * COLUMNS
    end = _aligned(tl.minimum(begin + share, columns), ALIGNED)
    sums = ()
    for _ in tl.static_range((T + 1) * (T + 2) // 2):
        sums = sums + (tl.zeros((THREADS,), dtype=tl.float64),)
    for start in range(begin, end, COLUMNS):
        j = start + tl.arange(0, THREADS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        inside = j < end
        root = tl.full((THREADS, WIDTH), 1.0, dtype=tl.float64)
        if WEIGHTED:
            root = tl.sqrt(tl.load(w + j, mask=inside, other=1.0).to(tl.float64))
        x = ()
        for i in tl.static_range(T):
            row = tl.load(_at(G, i * stride, ALIGNED) + j, mask=inside, other=0.0).to(tl.float64)
            x = x + (row / root if WEIGHTED else row,)
        x = x + (tl.load(g + j, mask=inside, other=0.0).to(tl.float64) * root,)
        new = ()
        for i in tl.static_range(T + 1):
            for k in tl.static_range(i + 1):
                new = new + (sums[i * (i + 1) // 2 + k] + tl.sum(x[i] * x[k], axis=1),)
        sums = new
    n: tl.constexpr = T + 1
    partial += (problem * parts + first + part) * n * n
    for i in tl.static_range(T + 1):
        for k in tl.static_range(i + 1):
            total = tl.sum(sums[i * (i + 1) // 2 + k], axis=0)
            tl.store(partial + i * n + k, total)
            tl.store(partial + k * n + i, total)


@kernel
def search(
    K, b, margin, lam, of_K: tl.int64, row: tl.int64, of_b: tl.int64, step: tl.int64,
    T: tl.constexpr, SHIFTED: tl.constexpr,
):  # fmt: skip
    """Solve on all 2^T active sets by Cholesky, and write the solution with the smallest natural residual.

    This is `gemproj.backends.enumeration.solve_few` with one lane for each set; SHIFTED says whether there is
    a margin. Rows that are not finite get the scale zero, and so the multiplier zero.
    """
    problem, n = tl.program_id(0).to(tl.int64), tl.arange(0, 2**T)
    K += problem * of_K
    b += problem * of_b
    margin += problem * T
    scale, linear, free, kept = (), (), (), ()
    for i in tl.static_range(T):
        square, value = tl.load(K + i * (row + 1)), tl.load(b + i * step)
        good = tl.abs(square) + tl.abs(value) < _INF
        scale = scale + (tl.where(good, _inverse(tl.sqrt(square)), 0.0),)
        linear = linear + (tl.where(good, value, 0.0) * scale[i],)
        free, kept = free + (((n >> i) & 1).to(tl.float64),), kept + (good,)
    if SHIFTED:
        plain, linear = linear, ()
        for i in tl.static_range(T):
            value = plain[i]
            for k in tl.static_range(T):
                value += (
                    _cosine(K + i * row + k, scale[i], scale[k]) * _inverse(scale[k]) * tl.load(margin + k)
                )
            linear = linear + (value,)
    # Row i >= j of column j of the factor is at j * T - j * (j + 1) // 2 + i; the diagonal is inverted.
    factor, smallest = (), tl.full((2**T,), 1.0, dtype=tl.float64)
    for j in tl.static_range(T):
        for i in tl.static_range(j, T):
            entry = _cosine(K + i * row + j, scale[i], scale[j]) * (free[i] * free[j])
            if i == j:
                entry = tl.where(entry > 0, entry, 1.0)
            for k in tl.static_range(j):
                entry -= factor[k * T - k * (k + 1) // 2 + i] * factor[k * T - k * (k + 1) // 2 + j]
            if i == j:
                smallest = tl.minimum(smallest, entry)
                entry = 1.0 / tl.sqrt(tl.where(entry > _DEPENDENT, entry, 1.0))
            else:
                entry = entry * factor[j * T - j * (j + 1) // 2 + j]
            factor = factor + (entry,)
    half = ()
    for i in tl.static_range(T):
        value = free[i] * linear[i]
        for k in tl.static_range(i):
            value -= factor[k * T - k * (k + 1) // 2 + i] * half[k]
        half = half + (value * factor[i * T - i * (i + 1) // 2 + i],)
    x = ()  # from the last row to the first
    for i in tl.static_range(T - 1, -1, -1):
        value = -half[i]
        for k in tl.static_range(i + 1, T):
            value -= factor[i * T - i * (i + 1) // 2 + k] * x[T - 1 - k]
        x = x + (value * factor[i * T - i * (i + 1) // 2 + i],)
    miss = tl.zeros((2**T,), dtype=tl.float64)
    for i in tl.static_range(T):
        s = tl.zeros((2**T,), dtype=tl.float64) + linear[i]
        for k in tl.static_range(T):
            s += _cosine(K + i * row + k, scale[i], scale[k]) * x[T - 1 - k]
        residual = tl.abs(tl.minimum(x[T - 1 - i], s))  # zero for a row of scale zero
        miss = tl.maximum(miss, tl.where(residual < _INF, residual, _INF))  # also for NaN
    miss = tl.where(smallest > _DEPENDENT, miss, _INF)
    # Ties go to the first set: if no constraint is violated this is the empty set, and x is g.
    best = tl.min(tl.where(miss == tl.min(miss, axis=0), n, 2**T), axis=0)
    for i in tl.static_range(T):
        value = tl.sum(tl.where(n == best, x[T - 1 - i], 0.0), axis=0)
        value = tl.maximum(value, 0.0) * scale[i]
        if SHIFTED:
            value = tl.where(kept[i], value + tl.load(margin + i), 0.0)
        tl.store(lam + problem * T + i, value)


@kernel
def add_rows(
    G, g, w, lam, x, rows: tl.int64, columns: tl.int64, share: tl.int64, stride: tl.int64,
    of_G: tl.int64, of_g: tl.int64, of_w: tl.int64, of_x: tl.int64,
    COLUMNS: tl.constexpr, ALIGNED: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Write a share of the columns of x = g + G'lam / w, without reading rows whose multiplier is zero."""
    problem, part = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    G = _at(G, problem * of_G, ALIGNED)
    g = _at(g, problem * of_g, ALIGNED)
    w = _at(w, problem * of_w, ALIGNED)
    x = _at(x, problem * of_x, ALIGNED)
    begin = part * share // COLUMNS * COLUMNS
    end = _aligned(tl.minimum(begin + share, columns), ALIGNED)
    for start in range(begin, end, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        inside = j < end
        step = tl.zeros((COLUMNS,), dtype=tl.float64)
        for i in range(rows):
            weight = tl.load(lam + problem * rows + i)
            if weight != 0:  # zero times NaN would not be zero
                row = tl.load(_at(G, i * stride, ALIGNED) + j, mask=inside, other=0.0)
                step += weight * row.to(tl.float64)
        if WEIGHTED:
            step = step / tl.load(w + j, mask=inside, other=1.0).to(tl.float64)
        value = tl.load(g + j, mask=inside, other=0.0).to(tl.float64) + step
        if x.dtype.element_ty.primitive_bitwidth == 16:  # as the hardware does
            value = value.to(tl.float32)
        tl.store(x + j, value.to(x.dtype.element_ty), mask=inside)
