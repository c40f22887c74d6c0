"""How kernels find, read and write the columns of a layout, whatever their dtypes."""

from __future__ import annotations

import triton
import triton.language as tl

from gemproj.backends.triton._layout import LINE

# Numbers that change from call to call: Triton would compile again where one is 1 or a multiple of 16, as t
# and strides are by turns. Kernels find out by themselves where loads can be wide.
_NUMBERS = (
    *("t", "count", "steps", "pairs", "entries", "parts", "share", "columns"),
    *("rows", "vector", "out", "row_stride", "rows_batch", "vector_batch", "out_batch"),
    *("lam_batch", "lam_step", "K_batch", "K_row", "b_batch", "b_step"),
)
# Arguments that may begin anywhere: views, and arrays of t-space that others have made.
_SMALL = ("K", "b", "lower", "upper", "start", "lam")
kernel = triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_SMALL)


@triton.jit
def lines(table, part, TABLE: tl.constexpr):
    """Return the first line of a program, and the first of the next: one segment without a table."""
    first, last = 0, 1
    if TABLE:
        first, last = tl.load(table + part).to(tl.int32), tl.load(table + part + 1).to(tl.int32)
    return first, last


@triton.jit
def segment(
    table, s, part, parts, problem, rows, vector, row_stride, rows_batch, vector_batch, columns, share,
    TABLE: tl.constexpr,
):  # fmt: skip
    """Return addresses of rows and vector, row stride, offsets from the addresses, columns and codes."""
    if TABLE:
        line = table + parts + 1 + s * LINE
        rows, vector = tl.load(line), tl.load(line + 1)
        row_stride, count, code = tl.load(line + 2), tl.load(line + 3), tl.load(line + 4)
        row_offset = problem * 0
        vector_offset = problem * 0
    else:
        rows, vector = rows.to(tl.int64), vector.to(tl.int64)
        row_stride = row_stride.to(tl.int64)
        start = part * share.to(tl.int64)
        count = tl.minimum(share, columns - start)
        code = problem * 0
        row_offset = problem * rows_batch + start
        vector_offset = problem * vector_batch + start
    return rows, vector, row_stride, row_offset, vector_offset, count, code


@triton.jit
def wide_columns(address, offset, size, COLUMNS: tl.constexpr, ALIGN: tl.constexpr):
    """Return how many columns, whole tiles, are read 16 bytes at a time, without a mask: all, or none.

    `address` has the bits of all addresses, and `offset` those of the strides of and the offsets from them.
    """
    return tl.where((address % 16 == 0) & (offset % ALIGN == 0), size // COLUMNS * COLUMNS, 0)


@triton.jit
def aligned(offset, ALIGN: tl.constexpr):
    """Return an offset that is a multiple of ALIGN in a form that shows this to the compiler.

    A hint would not do: it cannot be put on an argument, and would hold where the offset is none as well.
    """
    return offset // ALIGN * ALIGN


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
