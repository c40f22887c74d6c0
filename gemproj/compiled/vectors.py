"""Two loops in vector instructions: products of blocks of rows, and the transposition of columns into rows.

They are written in LLVM's intermediate form: compilers do not keep 25 sums in registers, nor move lanes
about, where plain loops ask for it. LLVM lowers them for any processor.
"""

from __future__ import annotations

from typing import Any

from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_FEATURES = binding.get_host_cpu_features()
_BYTES = 64 if _FEATURES.get("avx512f") else 32 if _FEATURES.get("avx") else 16
# Rows of a block. Its sums, the rows on one side and one of the other side stay in registers: of those
# there are 32, or 16 on x86 before AVX-512.
HEIGHT = 3 if "sse2" in _FEATURES and _BYTES < 64 else 4
# Partial sums of one product, in float64; and what numbers of columns have to be a multiple of.
LANES, MULTIPLE = _BYTES // 8, _BYTES
# Columns that are transposed at a time.
TURNED = 16
# Additions under way at a time, which hide how long one takes.
_BUSY = 8
_I32, _I64, _F32, _F64 = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()


@intrinsic
def prefer_full_width(typing_context):
    """Let loops of the calling function use the widest registers; LLVM would take half of them."""

    def generate(context, builder, signature, args):
        set.add(builder.function.attributes, f'"prefer-vector-width"="{8 * _BYTES}"')
        return context.get_dummy_value()

    return types.none(), generate


@intrinsic
def add_block(typing_context, a, b, step, columns, height, sums, like):
    """Add products of `height` rows at address a with HEIGHT rows at address b to partial sums.

    Rows have the dtype of `like`, float32 or float64, are `step` bytes apart and have a multiple of MULTIPLE
    columns. `sums` is the address of (HEIGHT, HEIGHT, LANES) numbers in float64. Where a is b only the
    lower triangle is made.
    """

    def generate(context, builder, signature, args):
        a, b, step, columns, height, sums, _ = args
        real = context.get_data_type(signature.args[-1].dtype)
        same = builder.icmp_signed("==", a, b)
        for rows in range(1, HEIGHT + 1):
            with builder.if_then(builder.icmp_signed("==", height, _I64(rows))):
                with builder.if_else(same) as (triangle, rectangle):
                    with triangle:
                        pairs = [(p, q) for p in range(rows) for q in range(p + 1)]
                        _emit_block(builder, a, a, step, columns, sums, real, pairs)
                    with rectangle:
                        pairs = [(p, q) for p in range(rows) for q in range(HEIGHT)]
                        _emit_block(builder, a, b, step, columns, sums, real, pairs)
        return context.get_dummy_value()

    return types.none(*(types.int64,) * 6, like), generate


def _emit_block(builder, a, b, step, columns, sums, real, pairs) -> None:
    itemsize = 4 if real == _F32 else 8
    vector = ir.VectorType(real, _BYTES // itemsize)
    unroll = 1 if len(pairs) >= _BUSY else 2 if len(pairs) >= _BUSY // 2 else 4
    places = {
        (side, row): builder.add(base, builder.mul(step, _I64(row)))
        for side, base in ((0, a), (1, b))
        for row in sorted({pair[side] for pair in pairs})
    }
    zero = ir.Constant(vector, [0.0] * vector.count)
    totals = {(*pair, u): cgutils.alloca_once_value(builder, zero) for pair in pairs for u in range(unroll)}
    steps = builder.sdiv(columns, _I64(unroll * vector.count))
    with cgutils.for_range(builder, steps) as loop:
        for u in range(unroll):
            offset = builder.add(builder.mul(loop.index, _I64(unroll * _BYTES)), _I64(u * _BYTES))
            entries = {key: _load(builder, builder.add(place, offset), vector) for key, place in places.items()}
            for p, q in pairs:
                product = builder.fmul(entries[0, p], entries[1 if a is not b else 0, q], flags=("contract",))
                total = totals[p, q, u]
                builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
    for p, q in pairs:
        place = builder.add(sums, _I64((p * HEIGHT + q) * LANES * 8))
        wide = ir.VectorType(_F64, LANES)
        total = _load(builder, place, wide)
        for u in range(unroll):
            for part in _in_float64(builder, builder.load(totals[p, q, u])):
                total = builder.fadd(total, part)
        builder.store(total, builder.inttoptr(place, wide.as_pointer()), align=8)


def _in_float64(builder, value) -> list[Any]:
    """Return a vector of float64, or the halves of one of float32, widened."""
    if value.type.element == _F64:
        return [value]
    wide = ir.VectorType(_F64, LANES)
    halves = [_shuffle(builder, value, value, range(k, k + LANES)) for k in (0, LANES)]
    return [builder.fpext(half, wide) for half in halves]


@intrinsic
def transpose(typing_context, source, column, target, row, like):
    """Copy TURNED columns, `column` bytes apart, into rows, `row` bytes apart: 4 rows, in float64 two.

    The target has the dtype of `like`; bfloat16, which comes as uint16, is written in float32.
    """

    def generate(context, builder, signature, args):
        source, column, target, row, _ = args
        stored = context.get_data_type(signature.args[-1].dtype)
        real = _F64 if stored == _F64 else _F32
        lanes = 2 if real == _F64 else 4  # of 128 bits, within which it costs least to move entries
        for first in range(0, TURNED, 4 * lanes):

            def entries(c):
                place = builder.add(source, builder.mul(column, _I64(c)))
                part = _load(builder, place, ir.VectorType(stored, lanes))
                if stored != real:  # bfloat16 is the upper half of float32
                    bits = builder.zext(part, ir.VectorType(_I32, lanes))
                    bits = builder.shl(bits, ir.Constant(bits.type, [16] * lanes))
                    part = builder.bitcast(bits, ir.VectorType(real, lanes))
                return part

            # Vector j holds in its lane k all rows of column 4 k + j (2 k + j).
            vectors = []
            for j in range(lanes):
                parts = [entries(first + k * lanes + j) for k in range(4)]
                while len(parts) > 1:
                    parts = [
                        _shuffle(builder, x, y, range(2 * x.type.count))
                        for x, y in zip(parts[::2], parts[1::2], strict=True)
                    ]
                vectors += parts
            for r, value in enumerate(_turned(builder, vectors, lanes)):
                place = builder.add(target, builder.add(builder.mul(row, _I64(r)), _I64(first * (8 if lanes == 2 else 4))))
                builder.store(value, builder.inttoptr(place, value.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.none(*(types.int64,) * 4, like), generate


def _turned(builder, vectors, lanes) -> list[Any]:
    """Transpose the square of entries that the vectors have in each lane."""
    n = 4 * lanes

    def merged(x, y, size, half):
        """Take runs of `size` entries from x and y in turn, of one half of each lane."""
        mask = []
        for k in range(0, n, lanes):
            for start in range(k + half * lanes // 2, k + (half + 1) * lanes // 2, size):
                mask += [*range(start, start + size), *range(n + start, n + start + size)]
        return _shuffle(builder, x, y, mask)

    if lanes == 2:
        return [merged(*vectors, 1, half) for half in (0, 1)]
    v0, v1, v2, v3 = vectors
    return [merged(merged(v0, v1, 1, a), merged(v2, v3, 1, a), 2, b) for a in (0, 1) for b in (0, 1)]


def _load(builder, address, vector):
    return builder.load(builder.inttoptr(address, vector.as_pointer()), align=2 if vector.element == ir.IntType(16) else 4)


def _shuffle(builder, x, y, mask):
    indices = list(mask)
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(_I32, len(indices)), indices))
