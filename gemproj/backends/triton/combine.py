"""Stage 3 on a CUDA device: x = g + G' lam in one launch, reading only rows with a multiplier."""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from gemproj.backends.triton._access import aligned, kernel, lines, load, segment, store, wide_columns
from gemproj.backends.triton._launch import launch
from gemproj.backends.triton._layout import Layout, processors

__all__ = ["combine", "supports"]

# Columns of a tile, four per thread: one load of 16 bytes in float32. The rows of a tile are read one
# after the other, so only many programs at once, 16 per processor, keep the memory busy.
_COLUMNS, _PROGRAMS = 512, 16


def supports(at: Layout, out: Sequence[Tensor]) -> bool:
    """Return whether the kernel can write these blocks, or this array (problems, d), where they are."""
    return all(map(Tensor.is_contiguous, out)) or (at.problems > 1 and out[0].stride(-1) == 1)


def combine(at: Layout, lam: Tensor, out: Sequence[Tensor]) -> None:
    """Write ``g + G' lam`` to `out`, which may be g itself; sums in float64, rounded once.

    Parameters
    ----------
    at : Layout
        Of G and g.
    lam : tensor, shape (problems, t), or (t,) of one problem, float64
        Where a multiplier is zero, its row is not read and may hold anything.
    out : sequence of tensors
        Blocks of the shapes and dtypes of g that `supports` accepts; of a batch, one array.
    """
    if not at.problems or not at.columns:
        return
    most = max(1, _PROGRAMS * processors(at.device) // at.problems)
    cut = at.cut(_COLUMNS, most)
    table, where, x = None, None, out[0].data_ptr()
    if cut.table is not None:
        # x may be new at every call, its blocks are views of one array: only that one's address changes.
        distances = tuple([a.data_ptr() - x for a in out])
        table, where = cut.table.get(), cut.output(distances, at.device).get()
    small = at.columns <= 128  # a batch of small problems: one warp each
    apart = (lam.stride(0), out[0].stride(0)) if at.problems > 1 else (0, 0)
    launch(
        _combine,
        at.problems * cut.parts,
        (table, where, lam, apart[0], lam.stride(-1), at.t, at.rows, at.vector, x, *at.strides, apart[1],
         at.columns, cut.share, cut.parts),
        (128 if small else _COLUMNS, table is not None, *at.dtypes, at.align),
        device=at.device,
        num_warps=1 if small else 4,
        enable_fp_fusion=True,
    )  # fmt: skip


@kernel
def _combine(
    table, where, lam, lam_batch, lam_step, t, rows: tl.int64, vector: tl.int64, out: tl.int64,
    row_stride: tl.int64, rows_batch: tl.int64, vector_batch: tl.int64, out_batch: tl.int64,
    columns: tl.int64, share, parts,
    COLUMNS: tl.constexpr, TABLE: tl.constexpr, ROW_TYPES: tl.constexpr, VECTOR_TYPES: tl.constexpr,
    ALIGN: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0) % parts
    problem = (tl.program_id(0) // parts).to(tl.int64)
    lam += problem * lam_batch
    first, last = lines(table, part, TABLE)
    for s in range(first, last):
        G, g, stride, at_G, at_g, size, code = segment(
            table, s, part, parts, problem, rows, vector, row_stride, rows_batch, vector_batch, columns,
            share, TABLE,
        )  # fmt: skip
        if TABLE:
            x = out + tl.load(where + s)
            at_x = at_g
        else:
            x = out.to(tl.int64)
            at_x = at_g + problem * (out_batch - vector_batch)
        wide = wide_columns(G | g | x, stride | at_G | at_g | at_x, size, COLUMNS, ALIGN)
        for start in range(0, wide, COLUMNS):
            j = start + tl.arange(0, COLUMNS)
            value = _sum(
                G, g, lam, lam_step, stride, at_G, at_g, j, j >= 0, t, code, ROW_TYPES, VECTOR_TYPES, ALIGN
            )
            store(x, aligned(at_x, ALIGN) + j, value, j >= 0, code // 4, VECTOR_TYPES, ALIGN)
        for start in range(wide, size, COLUMNS):
            j = start + tl.arange(0, COLUMNS)
            inside = j < size
            value = _sum(
                G, g, lam, lam_step, stride, at_G, at_g, j, inside, t, code, ROW_TYPES, VECTOR_TYPES, 1
            )
            store(x, at_x + j, value, inside, code // 4, VECTOR_TYPES, 1)


@triton.jit
def _sum(
    G, g, lam, lam_step, stride, at_G, at_g, j, inside, t, code,
    ROW_TYPES: tl.constexpr, VECTOR_TYPES: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Return columns j of g + G' lam in float64."""
    stride, at_G, at_g = aligned(stride, ALIGN), aligned(at_G, ALIGN), aligned(at_g, ALIGN)
    step = tl.zeros(j.shape, dtype=tl.float64)
    for i in range(t):
        weight = tl.load(lam + i * lam_step)
        if weight != 0:  # the same for the whole program; zero times NaN would not be zero
            step += weight * load(G, at_G + i * stride + j, inside, code & 3, ROW_TYPES, ALIGN)
    return load(g, at_g + j, inside, code // 4, VECTOR_TYPES, ALIGN) + step
