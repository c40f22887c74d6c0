"""Stage 3 on a CUDA device: x = g + G' lam in one launch, reading only rows with a multiplier."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from gemproj.backends.triton._blocks import (
    Layout,
    kernel,
    lay_out,
    lay_out_batch,
    load,
    processors,
    segment,
    store,
    supports,
    supports_batch,
)

__all__ = ["combine", "combine_batch", "supports", "supports_batch"]

# Columns of a tile, four per thread: one load of 16 bytes in float32. The rows of a tile are read one
# after the other, so only many programs at once, 16 per processor, keep the memory busy.
_COLUMNS, _PROGRAMS = 512, 16


def combine(rows: Sequence[Tensor], vector: Sequence[Tensor], lam: Tensor, out: Sequence[Tensor]) -> None:
    """Write ``g + G' lam`` to `out`, which may be `vector` itself; sums in float64, rounded once.

    Parameters
    ----------
    rows, vector, out : sequences of tensors, shapes (t, *shape_k), (*shape_k) and (*shape_k)
        Blocks that `supports` accepts.
    lam : tensor, shape (t,), float64
        Where a multiplier is zero, its row is not read and may hold anything.
    """
    most = _PROGRAMS * processors(lam.device)
    with torch.cuda.device_of(lam):  # Triton launches on the current device
        _launch(lay_out(rows, vector, out, _COLUMNS, most), lam[None], lam.shape[0])


def combine_batch(G: Tensor, g: Tensor, lam: Tensor, out: Tensor) -> None:
    """Write the same for every problem of a batch, (B, t, d), (B, d), (B, t) and (B, d)."""
    most = max(1, _PROGRAMS * processors(lam.device) // max(1, len(g)))
    with torch.cuda.device_of(lam):
        _launch(lay_out_batch(G, g, out, _COLUMNS, most), lam, G.shape[-2])


def _launch(at: Layout, lam: Tensor, t: int) -> None:
    if not len(lam) or not at.columns:
        return
    small = at.columns <= 128  # a batch of small problems: one warp each
    _combine[(len(lam) * at.parts,)](
        at.table,
        lam,
        lam.stride(0),
        lam.stride(1),
        t,
        at.rows,
        at.vector,
        at.out,
        *at.strides,
        at.columns,
        at.share,
        at.parts,
        COLUMNS=128 if small else _COLUMNS,
        TABLE=at.table is not None,
        ROW_TYPES=at.dtypes[0],
        VECTOR_TYPES=at.dtypes[1],
        OUT_TYPES=at.dtypes[2],
        ALIGN=at.align,
        num_warps=1 if small else 4,
        enable_fp_fusion=True,
    )


@kernel(
    "lam_batch",
    "lam_step",
    "t",
    "rows",
    "vector",
    "out",
    "row_stride",
    "rows_batch",
    "vector_batch",
    "out_batch",
    "columns",
    "share",
    "parts",
)
def _combine(
    table,
    lam,
    lam_batch,
    lam_step,
    t,
    rows: tl.int64,
    vector: tl.int64,
    out: tl.int64,
    row_stride: tl.int64,
    rows_batch: tl.int64,
    vector_batch: tl.int64,
    out_batch: tl.int64,
    columns: tl.int64,
    share,
    parts,
    COLUMNS: tl.constexpr,
    TABLE: tl.constexpr,
    ROW_TYPES: tl.constexpr,
    VECTOR_TYPES: tl.constexpr,
    OUT_TYPES: tl.constexpr,
    ALIGN: tl.constexpr,
):
    part = tl.program_id(0) % parts
    problem = (tl.program_id(0) // parts).to(tl.int64)
    lam += problem * lam_batch
    first, last = 0, 1
    if TABLE:
        first, last = tl.load(table + part).to(tl.int32), tl.load(table + part + 1).to(tl.int32)
    for s in range(first, last):
        G, g, x, stride, at_G, at_g, at_x, size, code = segment(
            table, s, part, parts, problem, rows, vector, out, row_stride, rows_batch, vector_batch,
            out_batch, columns, share, TABLE, ALIGN,
        )  # fmt: skip
        whole = size // COLUMNS * COLUMNS
        for start in range(0, whole, COLUMNS):
            j = start + tl.arange(0, COLUMNS)
            value = _sum(
                G, g, lam, lam_step, stride, at_G, at_g, j, j >= 0, t, code, ROW_TYPES, VECTOR_TYPES, ALIGN
            )
            store(x, at_x + j, value, j >= 0, code // 16 & 3, OUT_TYPES, ALIGN)
        if whole < size:
            j = whole + tl.arange(0, COLUMNS)
            inside = j < size
            value = _sum(
                G, g, lam, lam_step, stride, at_G, at_g, j, inside, t, code, ROW_TYPES, VECTOR_TYPES, ALIGN
            )
            store(x, at_x + j, value, inside, code // 16 & 3, OUT_TYPES, ALIGN)


@triton.jit
def _sum(
    G, g, lam, lam_step, stride, at_G, at_g, j, inside, t, code,
    ROW_TYPES: tl.constexpr, VECTOR_TYPES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Return columns j of g + G' lam in float64."""
    step = tl.zeros(j.shape, dtype=tl.float64)
    for i in range(t):
        weight = tl.load(lam + i * lam_step)
        if weight != 0:  # the same for the whole program; zero times NaN would not be zero
            step += weight * load(G, at_G + i * stride + j, inside, code & 3, ROW_TYPES, ALIGN)
    return load(g, at_g + j, inside, code // 4 & 3, VECTOR_TYPES, ALIGN) + step
