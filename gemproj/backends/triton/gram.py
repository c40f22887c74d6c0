"""Stage 1 on a CUDA device: the Gram matrix of the stacked rows [G; g], in float64.

The columns are shared out between programs. Each leaves the products of its share in a workspace, and a
second launch adds these up, always in the order of the columns: the sums are equal to the last bit from run
to run on the same device.

Which form of the product:

- Up to t = 8, four columns per thread at a time, and one sum for each pair of rows: no thread needs what
  another one has until the end. It is bound by memory: 45 products per column at t = 8 are 6 us of float64
  arithmetic where their bytes take 23 us (an H100: 34 TFLOP/s, 3.35 TB/s, d = 2e6, float32).
- Above, `tl.dot` in float64 between blocks of 16 rows, on and below the diagonal, which Triton turns into
  tensor core instructions from sm_80 on. The products with g are summed apart from it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemproj.backends.triton._access import aligned, kernel, lines, load, segment, wide_columns
from gemproj.backends.triton._launch import launch
from gemproj.backends.triton._layout import UNIT, Layout, power, processors

__all__ = ["gram", "supports"]

# Rows up to which products are elementwise.
_FEW = 8
# The fewest columns of a program: below, starting it costs more than its work.
_LEAST = 1024
# Rows of a block, and blocks that a program of `_many_rows` holds.
_BLOCK: tl.constexpr = tl.constexpr(16)
_MOST_BLOCKS = 2
# Partial sums, and entries of them, that a program adds up at a time.
_SUMS: tl.constexpr = tl.constexpr(256)
_ENTRIES: tl.constexpr = tl.constexpr(16)
# Triton 3.6 does not compile tl.dot in float64 of numbers of 16 bits; 3.9 does.
_DOTS_HALVES = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 9)


def supports(at: Layout) -> bool:
    """Return whether the kernels compile for this layout."""
    return at.t <= _FEW or _DOTS_HALVES or not at.holds(torch.float16, torch.bfloat16)


def gram(at: Layout) -> Tensor:
    """Return the Gram matrix of the stacked rows [G; g] of every problem, (problems, t + 1, t + 1)."""
    n, few = at.t + 1, at.t <= _FEW
    total = torch.empty((at.problems, n, n), dtype=torch.float64, device=at.device)
    if not at.problems:
        return total
    blocks = min(_MOST_BLOCKS, -(-at.t // _BLOCK.value))
    squares = -(-at.t // (blocks * _BLOCK.value))
    pairs = 1 if few else squares * (squares + 1) // 2
    # Programs that are in flight together, by the registers they take; of small problems fewer.
    together = (2 if few and at.t > 4 else 4) * processors(at.device)
    cut = at.cut(UNIT, max(1, min(together // (pairs * at.problems), at.columns // _LEAST)))
    partial = total
    if cut.parts > 1:
        partial = torch.empty((at.problems, cut.parts, n, n), dtype=torch.float64, device=at.device)
    table = None if cut.table is None else cut.table.get()
    where = (at.t, at.rows, at.vector, *at.strides, at.columns, cut.share, cut.parts)
    reading = (table is not None, *at.dtypes, at.align)
    if few:
        # One warp for each of a batch of small problems; and fewer columns where they take more registers.
        warps = 1 if at.columns <= 256 else 4
        width = 2 if at.columns <= 64 or at.holds(torch.float64) else 4
        form, arguments = _few_rows, (table, partial, *where)
        constants = (power(at.t), 32 * warps, width)
    else:
        warps = min(2, blocks)
        form, arguments = _many_rows, (table, partial, *where, pairs)
        constants = (blocks, 16 if at.holds(torch.float64) else 32, pairs == 1)
    launch(
        form,
        at.problems * cut.parts * pairs,
        arguments,
        (*constants, *reading),
        device=at.device,
        num_warps=warps,
        enable_fp_fusion=True,
    )
    if cut.parts > 1:
        launch(
            _add_up,
            at.problems * -(-n * n // _ENTRIES.value),
            (partial, total, n * n, cut.parts),
            (),
            device=at.device,
            num_warps=8,
            enable_fp_fusion=True,
        )
    return total


@triton.jit
def _add_few(
    sums, G, g, stride, at_G, at_g, j, inside, t, code,
    ROWS: tl.constexpr, ROW_TYPES: tl.constexpr, VECTOR_TYPES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Add the products of all pairs of rows of [G; g] in columns j; the last dimension lies in one thread."""
    stride, at_G, at_g = aligned(stride, ALIGN), aligned(at_G, ALIGN), aligned(at_g, ALIGN)
    x = ()
    for i in tl.static_range(ROWS):
        # The interpreter broadcasts booleans as integers: hence j * 0.
        x = x + (load(G, at_G + i * stride + j, inside & (j * 0 + i < t), code & 3, ROW_TYPES, ALIGN),)
    x = x + (load(g, at_g + j, inside, code // 4, VECTOR_TYPES, ALIGN),)
    new = ()
    for i in tl.static_range(ROWS + 1):
        for k in tl.static_range(i + 1):
            new = new + (sums[i * (i + 1) // 2 + k] + tl.sum(x[i] * x[k], axis=1),)
    return new


@kernel
def _few_rows(
    table, partial, t, rows: tl.int64, vector: tl.int64, row_stride: tl.int64, rows_batch: tl.int64,
    vector_batch: tl.int64, columns: tl.int64, share, parts,
    ROWS: tl.constexpr, THREADS: tl.constexpr, WIDTH: tl.constexpr,
    TABLE: tl.constexpr, ROW_TYPES: tl.constexpr, VECTOR_TYPES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Multiply up to 8 rows elementwise, WIDTH columns per thread at a time."""
    COLUMNS: tl.constexpr = THREADS * WIDTH
    part = tl.program_id(0) % parts
    problem = (tl.program_id(0) // parts).to(tl.int64)
    sums = ()
    for _ in tl.static_range((ROWS + 1) * (ROWS + 2) // 2):
        sums = sums + (tl.zeros((THREADS,), dtype=tl.float64),)
    first, last = lines(table, part, TABLE)
    for s in range(first, last):
        G, g, stride, at_G, at_g, size, code = segment(
            table, s, part, parts, problem, rows, vector, row_stride, rows_batch, vector_batch, columns,
            share, TABLE,
        )  # fmt: skip
        j = tl.arange(0, THREADS)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
        wide = wide_columns(G | g, stride | at_G | at_g, size, COLUMNS, ALIGN)
        for start in range(0, wide, COLUMNS):
            sums = _add_few(
                sums, G, g, stride, at_G + start, at_g + start, j, j >= 0, t, code,
                ROWS, ROW_TYPES, VECTOR_TYPES, ALIGN,
            )  # fmt: skip
        for start in range(wide, size, COLUMNS):
            sums = _add_few(
                sums, G, g, stride, at_G + start, at_g + start, j, j + start < size, t, code,
                ROWS, ROW_TYPES, VECTOR_TYPES, 1,
            )  # fmt: skip
    n = t + 1
    partial += (problem * parts + part) * n * n
    for i in tl.static_range(ROWS + 1):
        for k in tl.static_range(i + 1):
            total = tl.sum(sums[i * (i + 1) // 2 + k], axis=0)
            # Of the padded rows none is stored; g comes after the last row.
            used = ((i == ROWS) | (i < t)) & ((k == ROWS) | (k < t))
            r, c = tl.minimum(i, t), tl.minimum(k, t)
            tl.store(partial + r * n + c, total, mask=used)
            tl.store(partial + c * n + r, total, mask=used)


@triton.jit
def _add_many(
    products, with_g, gg, G, g, stride, at_G, at_g, left, right, j, inside, t, code, BLOCKS: tl.constexpr,
    ONE: tl.constexpr, ROW_TYPES: tl.constexpr, VECTOR_TYPES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Add the products of two squares of blocks of rows in columns j; with ONE they are the same."""
    stride, at_G, at_g = aligned(stride, ALIGN), aligned(at_G, ALIGN), aligned(at_g, ALIGN)
    i = tl.arange(0, _BLOCK)
    v = load(g, at_g + j, inside, code // 4, VECTOR_TYPES, ALIGN)
    x = ()
    for p in tl.static_range(BLOCKS):
        r = left + p * _BLOCK + i
        mask = (r < t)[:, None] & inside[None, :]
        x = x + (load(G, at_G + r[:, None] * stride + j[None, :], mask, code & 3, ROW_TYPES, ALIGN),)
    y = x
    if not ONE:
        y = ()
        for q in tl.static_range(BLOCKS):
            r = right + q * _BLOCK + i
            mask = (r < t)[:, None] & inside[None, :]
            y = y + (load(G, at_G + r[:, None] * stride + j[None, :], mask, code & 3, ROW_TYPES, ALIGN),)
    new = ()
    new_with_g = ()
    for p in tl.static_range(BLOCKS):
        new_with_g = new_with_g + (with_g[p] + x[p] * v[None, :],)
        for q in tl.static_range(p + 1 if ONE else BLOCKS):
            new = new + (
                tl.dot(
                    x[p],
                    tl.trans(y[q]),
                    products[p * (p + 1) // 2 + q if ONE else p * BLOCKS + q],
                    out_dtype=tl.float64,
                ),
            )
    return new, new_with_g, gg + v * v


@kernel
def _many_rows(
    table, partial, t, rows: tl.int64, vector: tl.int64, row_stride: tl.int64, rows_batch: tl.int64,
    vector_batch: tl.int64, columns: tl.int64, share, parts, pairs,
    BLOCKS: tl.constexpr, COLUMNS: tl.constexpr, ONE: tl.constexpr,
    TABLE: tl.constexpr, ROW_TYPES: tl.constexpr, VECTOR_TYPES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Multiply blocks of 16 rows by tl.dot: one pair of squares of BLOCKS x BLOCKS blocks per program."""
    # Pairs of the same columns are neighbours: the later ones find the rows in the L2 cache.
    pair = tl.program_id(0) % pairs
    part = tl.program_id(0) // pairs % parts
    problem = (tl.program_id(0) // pairs // parts).to(tl.int64)
    down, right = 0, pair
    while right > down:  # pair counts along the rows of the lower triangle
        down += 1
        right -= down
    left, right = down * BLOCKS * _BLOCK, right * BLOCKS * _BLOCK
    products = ()
    for _ in tl.static_range(BLOCKS * (BLOCKS + 1) // 2 if ONE else BLOCKS * BLOCKS):
        products = products + (tl.zeros((_BLOCK, _BLOCK), dtype=tl.float64),)
    with_g = ()
    for _ in tl.static_range(BLOCKS):
        with_g = with_g + (tl.zeros((_BLOCK, COLUMNS), dtype=tl.float64),)
    gg = tl.zeros((COLUMNS,), dtype=tl.float64)
    first, last = lines(table, part, TABLE)
    for s in range(first, last):
        G, g, stride, at_G, at_g, size, code = segment(
            table, s, part, parts, problem, rows, vector, row_stride, rows_batch, vector_batch, columns,
            share, TABLE,
        )  # fmt: skip
        j = tl.arange(0, COLUMNS)
        wide = wide_columns(G | g, stride | at_G | at_g, size, COLUMNS, ALIGN)
        for start in range(0, wide, COLUMNS):
            products, with_g, gg = _add_many(
                products, with_g, gg, G, g, stride, at_G + start, at_g + start, left, right, j, j >= 0, t,
                code, BLOCKS, ONE, ROW_TYPES, VECTOR_TYPES, ALIGN,
            )  # fmt: skip
        for start in range(wide, size, COLUMNS):
            products, with_g, gg = _add_many(
                products, with_g, gg, G, g, stride, at_G + start, at_g + start, left, right, j,
                j + start < size, t, code, BLOCKS, ONE, ROW_TYPES, VECTOR_TYPES, 1,
            )  # fmt: skip
    n = t + 1
    partial += (problem * parts + part) * n * n
    i = tl.arange(0, _BLOCK)
    for p in tl.static_range(BLOCKS):
        r = left + p * _BLOCK + i
        b = tl.sum(with_g[p], axis=1)
        if left == right:
            tl.store(partial + r * n + t, b, mask=r < t)
            tl.store(partial + t * n + r, b, mask=r < t)
        for q in tl.static_range(p + 1 if ONE else BLOCKS):
            c = right + q * _BLOCK + i
            # The lower triangle goes to both, so that the result is symmetric to the last bit.
            lower = (r < t)[:, None] & (c[None, :] <= r[:, None])
            product = products[p * (p + 1) // 2 + q if ONE else p * BLOCKS + q]
            tl.store(partial + r[:, None] * n + c[None, :], product, mask=lower)
            tl.store(partial + c[None, :] * n + r[:, None], product, mask=lower)
    tl.store(partial + n * n - 1, tl.sum(gg, axis=0))  # the same in all pairs


@kernel
def _add_up(partial, total, entries, parts):
    """Add the partial sums of each problem in their order, 16 entries of the matrix per program."""
    chunks = tl.cdiv(entries, _ENTRIES)
    problem = (tl.program_id(0) // chunks).to(tl.int64)
    e = tl.program_id(0) % chunks * _ENTRIES + tl.arange(0, _ENTRIES)
    partial += problem * parts * entries
    sums = tl.zeros((_SUMS, _ENTRIES), dtype=tl.float64)
    for start in range(0, parts, _SUMS):
        p = start + tl.arange(0, _SUMS)
        mask = (p < parts)[:, None] & (e < entries)[None, :]
        sums += tl.load(partial + p.to(tl.int64)[:, None] * entries + e[None, :], mask=mask, other=0.0)
    tl.store(total + problem * entries + e, tl.sum(sums, axis=0), mask=e < entries)
