"""Layout of the parameters: blocks, cut into equal shares of columns for the programs of a kernel.

Nothing is concatenated. Several blocks travel as a table of addresses, one line per segment: a run of
columns of one block that belongs to one program. One array needs no table.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

# The code of a dtype in the table; a set of dtypes is a sum of their bits 1 << code.
CODES = {torch.float32: 0, torch.float64: 1, torch.float16: 2, torch.bfloat16: 3}
# Numbers in a line of the table: addresses of rows, g and x, row stride, columns, codes of the three dtypes.
LINE: tl.constexpr = tl.constexpr(6)
# Tables of this many parameter lists are kept: a training loop has one or two.
_MOST_TABLES = 16
# Arguments that may begin anywhere: views, and arrays of t-space that others have made.
_SMALL = ("K", "b", "lower", "upper", "start", "lam")


@dataclass(frozen=True)
class Layout:
    """What a kernel needs to find its columns."""

    table: Tensor | None
    rows: int  # addresses, for one array
    vector: int
    out: int  # with a table, what its addresses of out count from
    strides: tuple[int, int, int, int]  # between rows; between problems of rows, vector and out
    columns: int
    share: int  # columns of one program
    parts: int  # programs of one problem
    dtypes: tuple[int, int, int]  # sets of those of rows, vector and out
    align: int  # elements: a power of two that divides all that offsets are made of


def supports(rows: Sequence[Tensor], vector: Sequence[Tensor], out: Sequence[Tensor] | None = None) -> bool:
    """Return whether the kernels can read these blocks (and write `out`) where they are.

    Blocks have shapes (t, *shape_k) and (*shape_k), at least one each, of float16, bfloat16, float32
    or float64. Rows may lie anywhere, but what is in a row must be contiguous.
    """
    return (
        all(a.dtype in CODES for a in (*rows, *vector, *(out or ())))
        and all(a.is_contiguous() or (len(a) > 0 and a[0].is_contiguous()) for a in rows)
        and all(a.is_contiguous() for a in (*vector, *(out or ())))
    )


def supports_batch(G: Tensor, g: Tensor, out: Tensor | None = None) -> bool:
    """Return the same for arrays of shape (B, t, d) and (B, d): columns must be contiguous."""
    arrays = [a for a in (G, g, out) if a is not None]
    return all(a.dtype in CODES and (a.stride(-1) == 1 or a.shape[-1] <= 1) for a in arrays)


def lay_out(
    rows: Sequence[Tensor], vector: Sequence[Tensor], out: Sequence[Tensor] | None, unit: int, most: int
) -> Layout:
    """Cut the columns of one problem into at most `most` shares, multiples of `unit` columns."""
    if len(rows) == 1:
        x = None if out is None else out[0].reshape(1, -1)
        # The length is spelled out: there may be no columns.
        G = rows[0].flatten(1) if rows[0].ndim > 1 else rows[0][:, None]
        return lay_out_batch(G[None], vector[0].reshape(1, -1), x, unit, most)
    sizes = np.array([a.numel() for a in vector], dtype=np.int64)
    columns = int(sizes.sum())
    share, parts = _share(columns, unit, most)
    addresses = [
        [a.data_ptr() for a in blocks] if blocks is not None else [0] * len(rows)
        for blocks in (rows, vector, out)
    ]
    strides = [a.stride(0) for a in rows]
    # x may be new at every call: its blocks are views of one array, and only that one's address changes.
    base = min(addresses[2])
    aligned = not any(p % 16 for where in addresses for p in where) and not any(
        s * a.element_size() % 16 for s, a in zip(strides, rows, strict=True)
    )
    addresses[2] = [p - base for p in addresses[2]]
    codes = [
        [CODES[a.dtype] for a in blocks] if blocks is not None else [0] * len(rows)
        for blocks in (rows, vector, out)
    ]
    key = (parts, str(vector[0].device), *map(tuple, (*addresses, strides, sizes.tolist(), *codes)))
    table = _kept(key, vector[0].device, lambda: _lines(share, parts, sizes, addresses, strides, codes))
    widest = max(a.element_size() for a in (*rows, *vector, *(out or ())))
    # Shares begin at multiples of `unit` of all columns, blocks anywhere: only in blocks whose sizes are
    # multiples of 16 elements do segments begin at aligned addresses.
    aligned = aligned and not (sizes % 16).any()
    dtypes = [sum(1 << c for c in set(code)) for code in codes]
    return Layout(
        table,
        0,
        0,
        base,
        (0, 0, 0, 0),
        columns,
        share,
        parts,
        (dtypes[0], dtypes[1], dtypes[2]),
        16 // widest if aligned else 1,
    )


def lay_out_batch(G: Tensor, g: Tensor, out: Tensor | None, unit: int, most: int) -> Layout:
    """Cut the columns of every problem of a batch (B, t, d), (B, d) likewise."""
    share, parts = _share(g.shape[-1], unit, most)
    arrays = [a for a in (G, g, out) if a is not None]
    strides = (G.stride(1), G.stride(0), g.stride(0), 0 if out is None else out.stride(0))
    widest = max(a.element_size() for a in arrays)
    aligned = not any(a.data_ptr() % 16 or a.stride(0) * a.element_size() % 16 for a in arrays)
    aligned = aligned and strides[0] * G.element_size() % 16 == 0
    return Layout(
        None,
        G.data_ptr(),
        g.data_ptr(),
        0 if out is None else out.data_ptr(),
        strides,
        g.shape[-1],
        share,
        parts,
        (1 << CODES[G.dtype], 1 << CODES[g.dtype], 1 << CODES[g.dtype if out is None else out.dtype]),
        16 // widest if aligned else 1,
    )


def _share(columns: int, unit: int, most: int) -> tuple[int, int]:
    share = max(1, triton.cdiv(columns, unit * most)) * unit
    return share, max(1, triton.cdiv(columns, share))


def _lines(share: int, parts: int, sizes: np.ndarray, addresses: Any, strides: Any, codes: Any) -> np.ndarray:
    """Return where the lines of each program begin, and the lines."""
    ends = np.cumsum(sizes)
    starts = np.unique(np.concatenate([ends - sizes, np.arange(parts, dtype=np.int64) * share]))
    starts = starts[starts < ends[-1]]
    k = np.searchsorted(ends, starts, side="right")  # passes over empty blocks
    offset = starts - (ends - sizes)[k]
    itemsize = np.array([4, 8, 2, 2])
    rows, vector, out = (
        np.array(a, dtype=np.int64)[k] + offset * itemsize[np.array(c)[k]]
        for a, c in zip(addresses, codes, strict=True)
    )
    code = np.array(codes[0])[k] + 4 * np.array(codes[1])[k] + 16 * np.array(codes[2])[k]
    count = np.diff(starts, append=ends[-1])
    lines = np.stack([rows, vector, out, np.array(strides, dtype=np.int64)[k], count, code], axis=1)
    first = np.searchsorted(starts, np.arange(parts + 1, dtype=np.int64) * share)
    return np.concatenate([first, lines.ravel()]).astype(np.int64)


@dataclass
class _Table:
    """A table on its device, and the pinned memory it was or will be copied from."""

    here: Tensor
    there: Tensor
    stream: Any = None
    copied: Any = None


_tables: OrderedDict[Any, _Table] = OrderedDict()
# A captured CUDA graph reads its tables, or the pinned memory they come from, at every replay.
_captured: list[_Table] = []


def _kept(key: Any, device: torch.device, lines: Any) -> Tensor:
    """Return the table on the device; tables of the last few lists of blocks are kept."""
    if device.type != "cuda":
        return torch.from_numpy(lines())
    capturing, stream = torch.cuda.is_current_stream_capturing(), torch.cuda.current_stream(device)
    table = _tables.get(key)
    if table is None:
        here = torch.from_numpy(lines()).pin_memory()
        table = _Table(here, here.to(device, non_blocking=True), stream)
        if not capturing:  # else the copy runs at replay, and until then the table holds nothing
            table.copied = stream.record_event()
            _tables[key] = table
            if len(_tables) > _MOST_TABLES:
                _tables.popitem(last=False)
    elif capturing:
        _captured.append(table)  # was copied before: captures begin after all work of the device
    else:
        _tables.move_to_end(key)
        if table.stream != stream:
            stream.wait_event(table.copied)
            table.there.record_stream(stream)
    if capturing and table.copied is None:
        _captured.append(table)
    return table.there


@lru_cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors; on the CPU, where programs run in turn, a few."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


_zeros: dict[Any, Tensor] = {}
_spare: dict[torch.device, tuple[Tensor, int]] = {}
_POOL = 1 << 16
_CACHE_LINE = 32  # counters of 128 bytes


def counters(device: torch.device, count: int) -> Tensor:
    """Return int32 counters at zero that no other launch in flight uses; the kernel must reset them.

    Launches in one stream follow each other and share theirs. A captured graph may be replayed in
    any stream, so each captured launch has its own for ever, out of a pool made before.
    """
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32)
    capturing, stream = torch.cuda.is_current_stream_capturing(), torch.cuda.current_stream(device)
    if not capturing:
        key = (device, stream.cuda_stream)
        if device not in _spare:
            _spare[device] = torch.zeros(_POOL, dtype=torch.int32, device=device), 0
        if key not in _zeros or len(_zeros[key]) < count:
            _zeros[key] = torch.zeros(max(count, 1024), dtype=torch.int32, device=device)
        return _zeros[key]
    pool, used = _spare.get(device, (None, _POOL))
    # A cache line each: launches do not share one, and all addresses are as aligned as those of eager calls.
    taken = -(-count // _CACHE_LINE) * _CACHE_LINE
    if pool is None or used + taken > _POOL:
        return torch.zeros(count, dtype=torch.int32, device=device)  # cleared by every replay
    _spare[device] = pool, used + taken
    return pool[used : used + count]


def kernel(*changing: str) -> Callable[[Any], Any]:
    """Compile a kernel once for all values of the numbers `changing`, and for all addresses of small arrays.

    Triton would compile again for numbers that are 1 or multiples of 16, as t and strides are by turns.
    What wide loads need to know is in the constant ALIGN.
    """
    return triton.jit(do_not_specialize=changing, do_not_specialize_on_alignment=_SMALL)


@triton.jit
def segment(
    table,
    s,
    part,
    parts,
    problem,
    rows,
    vector,
    out,
    row_stride,
    rows_batch,
    vector_batch,
    out_batch,
    columns,
    share,
    TABLE: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Return addresses, row stride, offsets from the addresses, number of columns and codes of segment s."""
    if TABLE:
        line = table + parts + 1 + s * LINE
        rows, vector, out = tl.load(line), tl.load(line + 1), out + tl.load(line + 2)
        row_stride, count, code = tl.load(line + 3), tl.load(line + 4), tl.load(line + 5)
        row_offset = problem * 0
        vector_offset = problem * 0
        out_offset = problem * 0
    else:
        rows, vector, out = rows.to(tl.int64), vector.to(tl.int64), out.to(tl.int64)
        row_stride = row_stride.to(tl.int64)
        start = part * share.to(tl.int64)
        count = tl.minimum(share, columns - start)
        code = problem * 0
        row_offset = problem * rows_batch + start
        vector_offset = problem * vector_batch + start
        out_offset = problem * out_batch + start
    if ALIGN > 1:
        # Divisibility hints, for loads of 16 bytes; `load` gives those of the addresses.
        row_stride = row_stride // ALIGN * ALIGN  # a hint would be lost: it cannot be put on an argument
        row_offset = tl.multiple_of(row_offset, ALIGN)
        vector_offset = tl.multiple_of(vector_offset, ALIGN)
        out_offset = tl.multiple_of(out_offset, ALIGN)
    return rows, vector, out, row_stride, row_offset, vector_offset, out_offset, count, code


@triton.jit
def _among(mask, code, CODE: tl.constexpr, DTYPES: tl.constexpr):
    """Narrow the mask down to where `code` is CODE, which is everywhere if there is no other."""
    if DTYPES != 1 << CODE:
        # Broadcast before the comparison: the interpreter broadcasts booleans as integers.
        mask = mask & (code + tl.zeros(mask.shape, dtype=tl.int64) == CODE)
    return mask


@triton.jit
def _pointer(address, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    pointer = address.to(tl.pointer_type(DTYPE))
    if ALIGN > 1:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _load_as(address, offsets, mask, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    return tl.load(_pointer(address, DTYPE, ALIGN) + offsets, mask=mask, other=0.0).to(tl.float64)


@triton.jit
def load(address, offsets, mask, code, DTYPES: tl.constexpr, ALIGN: tl.constexpr):
    """Load numbers of any dtype of the set DTYPES in float64; `code` says which, unless there is but one."""
    # One dtype as it comes: the compiler may not drop the addition of a zero, which changes -0.
    if DTYPES == 1:
        value = _load_as(address, offsets, mask, tl.float32, ALIGN)
    elif DTYPES == 2:
        value = _load_as(address, offsets, mask, tl.float64, ALIGN)
    elif DTYPES == 4:
        value = _load_as(address, offsets, mask, tl.float16, ALIGN)
    elif DTYPES == 8:
        value = _load_as(address, offsets, mask, tl.bfloat16, ALIGN)
    else:
        # Not a branch: loads that are masked off cost an instruction, and few problems mix dtypes.
        value = tl.zeros(offsets.shape, dtype=tl.float64)
        if DTYPES & 1:
            value += _load_as(address, offsets, _among(mask, code, 0, DTYPES), tl.float32, ALIGN)
        if DTYPES & 2:
            value += _load_as(address, offsets, _among(mask, code, 1, DTYPES), tl.float64, ALIGN)
        if DTYPES & 4:
            value += _load_as(address, offsets, _among(mask, code, 2, DTYPES), tl.float16, ALIGN)
        if DTYPES & 8:
            value += _load_as(address, offsets, _among(mask, code, 3, DTYPES), tl.bfloat16, ALIGN)
    return value


@triton.jit
def _to_odd(value):
    """Round float64 to float32 towards odd: a further rounding to 16 bits is then as if it were the first."""
    near = value.to(tl.float32)
    back = near.to(tl.float64)
    bits = near.to(tl.int32, bitcast=True)
    bits = tl.where(tl.abs(back) > tl.abs(value), bits - 1, bits)  # towards zero
    return tl.where(back != value, bits | 1, bits).to(tl.float32, bitcast=True)


@triton.jit
def _store_as(address, offsets, value, mask, DTYPE: tl.constexpr, ALIGN: tl.constexpr):
    tl.store(_pointer(address, DTYPE, ALIGN) + offsets, value.to(DTYPE), mask=mask)


@triton.jit
def store(address, offsets, value, mask, code, DTYPES: tl.constexpr, ALIGN: tl.constexpr):
    """Store float64 numbers in the dtype that `code` says, rounded once."""
    if DTYPES & 1:
        _store_as(address, offsets, value, _among(mask, code, 0, DTYPES), tl.float32, ALIGN)
    if DTYPES & 2:
        _store_as(address, offsets, value, _among(mask, code, 1, DTYPES), tl.float64, ALIGN)
    if DTYPES & 4:
        _store_as(address, offsets, _to_odd(value), _among(mask, code, 2, DTYPES), tl.float16, ALIGN)
    if DTYPES & 8:
        _store_as(address, offsets, _to_odd(value), _among(mask, code, 3, DTYPES), tl.bfloat16, ALIGN)
