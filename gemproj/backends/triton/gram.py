"""Stage 1 on a CUDA device: the Gram matrix of the stacked rows [G; g], in float64, in one launch.

The columns are shared out between programs. Each leaves the products of its share in a workspace, the
last program of a group of sixteen adds those of its group, and the last group adds the groups: always in
the order of the columns, whatever the order in which programs end, so the sums are equal to the last bit
from run to run on the same device. Two levels, because one program that alone adds the products of
hundreds, 81 kB each at t = 100, would take longer than all of them took to make them.

Which form of the product:

- Up to t = 8, elementwise: one accumulator per pair of rows and column of a tile. It is bound by memory:
  73 products per column at t = 8 are 9 us of float64 arithmetic where their bytes take 23 us (an H100:
  34 TFLOP/s, 3.35 TB/s, d = 2e6, float32). `tl.dot` would pad t + 1 = 3 to 16 for 28 times the products.
- Above, `tl.dot` in float64, which Triton turns into tensor core instructions from sm_80 on, where float64
  runs at twice the elementwise rate on data-centre cards. Rows come in blocks of 16, 32 or 64; only pairs
  of blocks below the diagonal are multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemproj.backends.triton import _blocks
from gemproj.backends.triton._blocks import (
    Layout,
    counters,
    kernel,
    lay_out,
    lay_out_batch,
    load,
    processors,
    segment,
)

__all__ = ["gram", "gram_batch", "supports", "supports_batch"]

# Rows up to which products are elementwise.
_FEW = 8
# Columns in multiples of which shares are made: nearly equal ones, at aligned addresses. And the fewest of a
# program: below, starting it costs more than its work.
_UNIT, _LEAST = 64, 1024
# Partial sums added by one program: sixteen groups of sixteen are 256, about two per processor.
_GROUP = 16


# Triton 3.6 does not compile tl.dot in float64 of numbers of 16 bits; 3.9 does.
_DOTS_HALVES = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 9)


def supports(rows: Sequence[Tensor], vector: Sequence[Tensor]) -> bool:
    """Return whether the kernels can read these blocks where they are."""
    return _blocks.supports(rows, vector) and _compiles(len(rows[0]), [*rows, *vector])


def supports_batch(G: Tensor, g: Tensor) -> bool:
    """Return the same for arrays of shape (B, t, d) and (B, d)."""
    return _blocks.supports_batch(G, g) and _compiles(G.shape[-2], [G, g])


def _compiles(t: int, arrays: Sequence[Tensor]) -> bool:
    return t <= _FEW or _DOTS_HALVES or all(a.element_size() > 2 for a in arrays)


def gram(rows: Sequence[Tensor], vector: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return K = G G', b = G g and |g|^2 of one problem in blocks, in float64.

    Parameters
    ----------
    rows, vector : sequences of tensors, shapes (t, *shape_k) and (*shape_k)
        Blocks that `supports` accepts.
    """
    t = len(rows[0])
    unit, most = _shares(t, vector[0].device, sum(v.numel() for v in vector))
    with torch.cuda.device_of(vector[0]):  # Triton launches on the current device
        total = _total(lay_out(rows, vector, None, unit, most), t, 1, vector[0].device)[0]
    return total[:t, :t], total[:t, t], total[t, t]


def gram_batch(G: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same for every problem of a batch, arrays (B, t, d) and (B, d)."""
    t = G.shape[-2]
    unit, most = _shares(t, g.device, g.shape[-1])
    most = max(1, most // max(1, len(g)))  # problems share the processors too
    with torch.cuda.device_of(g):
        total = _total(lay_out_batch(G, g, None, unit, most), t, len(g), g.device)
    return total[:, :t, :t], total[:, :t, t], total[:, t, t]


def _shares(t: int, device: torch.device, columns: int) -> tuple[int, int]:
    """Return the unit in which columns are shared out, and between how many programs at most."""
    # Programs that are in flight together, by the registers they take; of small problems fewer.
    most = 4 * processors(device) if t <= _FEW else 2 * processors(device) // _pairs(t)
    return _UNIT, max(1, min(most, columns // _LEAST))


def _pairs(t: int) -> int:
    blocks = triton.cdiv(t + 1, _row_block(t))
    return blocks * (blocks + 1) // 2


def _row_block(t: int) -> int:
    return min(64, max(16, triton.next_power_of_2(t + 1)))


def _total(at: Layout, t: int, problems: int, device: torch.device) -> Tensor:
    """Return the Gram matrices of the stacked rows, (problems, t + 1, t + 1)."""
    entries = (t + 1) ** 2
    total = torch.empty((problems, t + 1, t + 1), dtype=torch.float64, device=device)
    if not problems:
        return total
    split = at.parts > 1
    groups = triton.cdiv(at.parts, _GROUP)
    # Without a second part the sums go straight to `total`, so no counter is needed.
    partial = total
    count = at.table
    if split:
        partial = torch.empty(problems * (at.parts + groups) * entries, dtype=torch.float64, device=device)
        count = counters(device, problems * (groups + 1))
    sizes = (t, at.rows, at.vector, *at.strides[:3], at.columns, at.share, at.parts)
    options = {
        "TABLE": at.table is not None,
        "SPLIT": split,
        "ROW_TYPES": at.dtypes[0],
        "VECTOR_TYPES": at.dtypes[1],
        "ALIGN": at.align,
        "GROUP": _GROUP,
        "enable_fp_fusion": True,  # explicit, because Triton warns of a change of its default
        # 64 numbers per thread, or fewer, while a group is added.
        "CHUNK": min(512, triton.next_power_of_2(entries)),
    }
    # Accumulators take 64 of the registers of a thread in both forms, which lets four (two, with the
    # operands of tl.dot) programs of four warps work on a processor.
    if t <= _FEW:
        rows = triton.next_power_of_2(t)
        columns, warps = min(512, 4096 // rows**2), 4
        if at.columns <= 256:  # a batch of small problems: one warp each
            columns, warps = min(64, 1024 // rows**2), 1
        _few_rows[(problems * at.parts,)](
            at.table, total, partial, count, *sizes, ROWS=rows, COLUMNS=columns, **options, num_warps=warps
        )
        return total
    block, pairs = _row_block(t), _pairs(t)
    _many_rows[(problems * at.parts * pairs,)](
        at.table,
        total,
        partial,
        count,
        *sizes,
        pairs,
        ROWS=block,
        COLUMNS=2048 // block,
        ONE=pairs == 1,
        **options,
        num_warps=8 if block == 64 else 4,
    )
    return total


@triton.jit
def _add_few(
    KK, bb, gg, G, g, stride, at_G, at_g, i, j, inside, t, code,
    ROW_TYPES: tl.constexpr, VECTOR_TYPES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Add the products of rows i and of g in columns j, elementwise."""
    where = at_G + i[:, None] * stride + j[None, :]
    tile = load(G, where, (i < t)[:, None] & inside[None, :], code & 3, ROW_TYPES, ALIGN)
    v = load(g, at_g + j, inside, code // 4 & 3, VECTOR_TYPES, ALIGN)
    return KK + tile[:, None, :] * tile[None, :, :], bb + tile * v[None, :], gg + v * v


@kernel("t", "rows", "vector", "row_stride", "rows_batch", "vector_batch", "columns", "share", "parts")
def _few_rows(
    table,
    total,
    partial,
    count,
    t,
    rows: tl.int64,
    vector: tl.int64,
    row_stride: tl.int64,
    rows_batch: tl.int64,
    vector_batch: tl.int64,
    columns: tl.int64,
    share,
    parts,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TABLE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROW_TYPES: tl.constexpr,
    VECTOR_TYPES: tl.constexpr,
    ALIGN: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Multiply up to 8 rows elementwise."""
    part = tl.program_id(0) % parts
    problem = (tl.program_id(0) // parts).to(tl.int64)
    i = tl.arange(0, ROWS)
    KK = tl.zeros((ROWS, ROWS, COLUMNS), dtype=tl.float64)
    bb = tl.zeros((ROWS, COLUMNS), dtype=tl.float64)
    gg = tl.zeros((COLUMNS,), dtype=tl.float64)
    first, last = 0, 1
    if TABLE:
        first, last = tl.load(table + part).to(tl.int32), tl.load(table + part + 1).to(tl.int32)
    for s in range(first, last):
        G, g, _, stride, at_G, at_g, _, size, code = segment(
            table, s, part, parts, problem, rows, vector, vector, row_stride, rows_batch, vector_batch,
            vector_batch, columns, share, TABLE, ALIGN,
        )  # fmt: skip
        # Whole tiles need no mask for the columns, which would stand in the way of wide loads.
        whole = size // COLUMNS * COLUMNS
        for start in range(0, whole, COLUMNS):
            j = start + tl.arange(0, COLUMNS)
            KK, bb, gg = _add_few(
                KK, bb, gg, G, g, stride, at_G, at_g, i, j, j >= 0, t, code, ROW_TYPES, VECTOR_TYPES, ALIGN
            )  # fmt: skip
        if whole < size:
            j = whole + tl.arange(0, COLUMNS)
            KK, bb, gg = _add_few(
                KK, bb, gg, G, g, stride, at_G, at_g, i, j, j < size, t, code, ROW_TYPES, VECTOR_TYPES, ALIGN
            )  # fmt: skip
    n = t + 1
    here = partial + (problem * parts + part) * n * n
    tl.store(here + i[:, None] * n + i[None, :], tl.sum(KK, axis=2), mask=(i < t)[:, None] & (i < t)[None, :])
    b = tl.sum(bb, axis=1)
    tl.store(here + i * n + t, b, mask=i < t)
    tl.store(here + t * n + i, b, mask=i < t)
    tl.store(here + t * n + t, tl.sum(gg, axis=0))
    if SPLIT:
        _add_up(total, partial, count, problem, part, parts, 1, n * n, GROUP, CHUNK)


@triton.jit
def _tile(
    G,
    g,
    stride,
    at_G,
    at_g,
    i,
    j,
    inside,
    t,
    code,
    ROW_TYPES: tl.constexpr,
    VECTOR_TYPES: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Load rows i of [G; g], in columns j."""
    is_row = (i < t)[:, None] & inside[None, :]
    tile = load(G, at_G + i[:, None] * stride + j[None, :], is_row, code & 3, ROW_TYPES, ALIGN)
    # Masked loads are zero, so the sum selects the valid one.
    is_vector = (i == t)[:, None] & inside[None, :]
    return tile + load(g, at_g + i[:, None] * 0 + j[None, :], is_vector, code // 4 & 3, VECTOR_TYPES, ALIGN)


@triton.jit
def _add_many(
    products, G, g, stride, at_G, at_g, i, k, j, inside, t, code,
    ONE: tl.constexpr, ROW_TYPES: tl.constexpr, VECTOR_TYPES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Add the products of rows i with rows k of [G; g] in columns j; with ONE, i and k are the same."""
    x = _tile(G, g, stride, at_G, at_g, i, j, inside, t, code, ROW_TYPES, VECTOR_TYPES, ALIGN)
    y = x
    if not ONE:
        y = _tile(G, g, stride, at_G, at_g, k, j, inside, t, code, ROW_TYPES, VECTOR_TYPES, ALIGN)
    return tl.dot(x, tl.trans(y), products, out_dtype=tl.float64)


@kernel(
    "t", "rows", "vector", "row_stride", "rows_batch", "vector_batch", "columns", "share", "parts", "pairs"
)
def _many_rows(
    table,
    total,
    partial,
    count,
    t,
    rows: tl.int64,
    vector: tl.int64,
    row_stride: tl.int64,
    rows_batch: tl.int64,
    vector_batch: tl.int64,
    columns: tl.int64,
    share,
    parts,
    pairs,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ONE: tl.constexpr,
    TABLE: tl.constexpr,
    SPLIT: tl.constexpr,
    ROW_TYPES: tl.constexpr,
    VECTOR_TYPES: tl.constexpr,
    ALIGN: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Multiply pairs of blocks of rows by tl.dot."""
    # Pairs of the same columns are neighbours: the later ones find the rows in the L2 cache.
    pair = tl.program_id(0) % pairs
    part = tl.program_id(0) // pairs % parts
    problem = (tl.program_id(0) // pairs // parts).to(tl.int64)
    left, right = 0, pair
    while right > left:  # pair counts along the rows of the lower triangle
        left += 1
        right -= left
    i = left * ROWS + tl.arange(0, ROWS)
    k = right * ROWS + tl.arange(0, ROWS)
    products = tl.zeros((ROWS, ROWS), dtype=tl.float64)
    first, last = 0, 1
    if TABLE:
        first, last = tl.load(table + part).to(tl.int32), tl.load(table + part + 1).to(tl.int32)
    for s in range(first, last):
        G, g, _, stride, at_G, at_g, _, size, code = segment(
            table, s, part, parts, problem, rows, vector, vector, row_stride, rows_batch, vector_batch,
            vector_batch, columns, share, TABLE, ALIGN,
        )  # fmt: skip
        whole = size // COLUMNS * COLUMNS
        for start in range(0, whole, COLUMNS):
            j = start + tl.arange(0, COLUMNS)
            products = _add_many(
                products, G, g, stride, at_G, at_g, i, k, j, j >= 0, t, code,
                ONE, ROW_TYPES, VECTOR_TYPES, ALIGN,
            )  # fmt: skip
        if whole < size:
            j = whole + tl.arange(0, COLUMNS)
            products = _add_many(
                products, G, g, stride, at_G, at_g, i, k, j, j < size, t, code,
                ONE, ROW_TYPES, VECTOR_TYPES, ALIGN,
            )  # fmt: skip
    n = t + 1
    here = partial + (problem * parts + part) * n * n
    # The lower triangle goes to both, so that the result is symmetric to the last bit.
    lower = (i <= t)[:, None] & (k[None, :] <= i[:, None])
    tl.store(here + i[:, None] * n + k[None, :], products, mask=lower)
    tl.store(here + k[None, :] * n + i[:, None], products, mask=lower)
    if SPLIT:
        _add_up(total, partial, count, problem, part, parts, pairs, n * n, GROUP, CHUNK)


@triton.jit
def _add_up(
    total, partial, count, problem, part, parts, pairs, entries, GROUP: tl.constexpr, CHUNK: tl.constexpr
):
    """Let the last program of each group add its partial sums, and the last group the groups."""
    problems = tl.num_programs(0) // (parts * pairs)
    groups = tl.cdiv(parts, GROUP)
    group = part // GROUP
    members = tl.minimum(GROUP, parts - group * GROUP)
    own = partial + problem * parts * entries
    sums = partial + (problems * parts.to(tl.int64) + problem * groups) * entries
    counter = count + problem * (groups + 1)
    # The barrier puts the stores of all threads before the atomic, which releases them to the device;
    # its other half acquires those of the programs that were here before.
    tl.debug_barrier()
    if tl.atomic_add(counter + 1 + group, 1, sem="acq_rel") == members * pairs - 1:
        # Zero again for the next launch, or the next replay of a CUDA graph.
        tl.store(counter + 1 + group, 0)
        _add(own + group * GROUP * entries, members, sums + group * entries, entries, GROUP, CHUNK)
        tl.debug_barrier()
        if tl.atomic_add(counter, 1, sem="acq_rel") == groups - 1:
            tl.store(counter, 0)
            _add(sums, groups, total + problem * entries, entries, GROUP, CHUNK)


@triton.jit
def _add(source, number, target, entries, GROUP: tl.constexpr, CHUNK: tl.constexpr):
    """Add `number` arrays of `entries` numbers that lie one after the other."""
    k = tl.arange(0, GROUP)
    for start in range(0, entries, CHUNK):
        j = start + tl.arange(0, CHUNK)
        total = tl.zeros((CHUNK,), dtype=tl.float64)
        for first in range(0, number, GROUP):
            inside = (first + k < number)[:, None] & (j < entries)[None, :]
            where = source + (first + k)[:, None] * entries + j[None, :]
            # From L2: what other processors wrote is not in this one's L1, or is stale there.
            total += tl.sum(tl.load(where, mask=inside, other=0.0, cache_modifier=".cg"), axis=0)
        tl.store(target + j, total, mask=j < entries)
