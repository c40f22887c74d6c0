"""Rows that are copied, multiplied with each other, and added up."""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from gemproj.backends.numba.lanes import (
    BYTES,
    F64,
    HEIGHT,
    I64,
    LANES,
    along,
    bytes_of,
    converted,
    load,
    multiply_add,
    read,
    separated,
    shuffle,
    spread,
    store,
    stream,
    types_of,
)

# Independent additions in flight, which hide the latency of one.
_BUSY = 8


@intrinsic
def widen(typing_context, source, n, target, like, to):
    """Copy n entries of the dtype of `like` to an array of the dtype of `to`, float32 or float64."""

    def generate(context, builder, signature, args):
        source, n, target = args[:3]
        stored, real = types_of(context, signature.args[-2:])

        def copy(at, vector):
            value = stream(builder, source, at, stored, vector.count, real)
            store(builder, value, builder.add(target, builder.mul(at, I64(bytes_of(real)))))

        along(builder, n, ir.VectorType(real, BYTES // bytes_of(real)), 1, copy)
        return context.get_dummy_value()

    return types.none(*(types.int64,) * 3, like, to), generate


@intrinsic
def add_scaled(typing_context, source, step, chosen, scale, count, n, target, like):
    """Add the rows ``chosen[:count]``, n entries of the dtype of `like`, times `scale` to float64 numbers.

    Rows are `step` bytes apart; `chosen` and `scale` are addresses of int64 and float64 numbers.
    """

    def generate(context, builder, signature, args):
        source, step, chosen, scale, count, n, target, _ = args
        (stored,) = types_of(context, signature.args[-1:])
        unroll = 4

        def add(at, vector):
            totals, places = [], []
            for u in range(unroll if vector.count > 1 else 1):
                places.append(builder.add(at, I64(u * vector.count)))
                value = load(builder, builder.add(target, builder.mul(places[u], I64(8))), vector)
                totals.append(cgutils.alloca_once_value(builder, value))
            with cgutils.for_range(builder, count) as loop:
                offset = builder.mul(loop.index, I64(8))
                index = load(builder, builder.add(chosen, offset), I64)
                row = builder.add(source, builder.mul(index, step))
                factor = spread(builder, load(builder, builder.add(scale, offset), F64), vector)
                for place, total in zip(places, totals, strict=True):
                    value = stream(builder, row, place, stored, vector.count, F64)
                    multiply_add(builder, factor, value, total)
            for place, total in zip(places, totals, strict=True):
                store(builder, builder.load(total), builder.add(target, builder.mul(place, I64(8))))

        along(builder, n, ir.VectorType(F64, LANES), unroll, add)
        return context.get_dummy_value()

    return types.none(*(types.int64,) * 7, like), generate


@intrinsic
def add_block(typing_context, a, b, step, columns, height, sums, like):
    """Add products of `height` rows at address a with HEIGHT rows at address b to partial sums.

    Rows have the dtype of `like`, float32 or float64, are `step` bytes apart and have a multiple of MULTIPLE
    columns. `sums` is the address of (HEIGHT, HEIGHT, LANES) numbers in float64. Where a is b only the
    lower triangle is made.
    """

    def generate(context, builder, signature, args):
        a, b, step, columns, height, sums, _ = args
        (real,) = types_of(context, signature.args[-1:])
        same, count = builder.icmp_signed("==", a, b), BYTES // bytes_of(real)

        def rows_at(place, rows):
            places = [builder.add(place, builder.mul(step, I64(r))) for r in range(rows)]
            return lambda at: [read(builder, place, at, real, count, real) for place in places]

        for rows in range(1, HEIGHT + 1):
            here = builder.icmp_signed("==", height, I64(rows))
            with builder.if_then(builder.and_(here, same)):
                pairs = [(p, q) for p in range(rows) for q in range(p + 1)]
                _emit_block(builder, rows_at(a, rows), None, columns, sums, real, pairs)
            with builder.if_then(builder.and_(here, builder.not_(same))):
                pairs = [(p, q) for p in range(rows) for q in range(HEIGHT)]
                _emit_block(builder, rows_at(a, rows), rows_at(b, HEIGHT), columns, sums, real, pairs)
        return context.get_dummy_value()

    return types.none(*(types.int64,) * 6, like), generate


@intrinsic
def add_few(typing_context, source, row, column, vector, columns, t, sums, like, sum_like):
    """Do the same for a G of fewer than HEIGHT rows, and g, where they lie, of the dtype of `like`.

    The entries of each row are adjacent, or else those of all columns.
    """

    def generate(context, builder, signature, args):
        source, row, column, vector, columns, t, sums = args[:7]
        stored, real = types_of(context, signature.args[-2:])
        count = BYTES // bytes_of(real)
        by_rows = builder.icmp_signed("==", column, I64(bytes_of(stored)))

        def entries(rows, turned):
            places = [builder.add(source, builder.mul(row, I64(r))) for r in range(rows)]

            def read_all(at):
                if turned:
                    found = separated(builder, source, at, rows, stored, count, real)
                else:
                    found = [stream(builder, place, at, stored, count, real) for place in places]
                return [*found, stream(builder, vector, at, stored, count, real)]

            return read_all

        for rows in range(1, HEIGHT):
            pairs = [(p, q) for p in range(rows + 1) for q in range(p + 1)]
            here = builder.icmp_signed("==", t, I64(rows))
            with builder.if_then(builder.and_(here, by_rows)):
                _emit_block(builder, entries(rows, False), None, columns, sums, real, pairs)
            with builder.if_then(builder.and_(here, builder.not_(by_rows))):
                _emit_block(builder, entries(rows, True), None, columns, sums, real, pairs)
        return context.get_dummy_value()

    return types.none(*(types.int64,) * 7, like, sum_like), generate


def _emit_block(builder, left, right, columns, sums, real, pairs):
    """Emit sums of products of entries that `left` and `right`, or `left` alone, return from a column on."""
    vector, wide = ir.VectorType(real, BYTES // bytes_of(real)), ir.VectorType(F64, LANES)
    unroll = 1 if len(pairs) >= _BUSY else 2 if len(pairs) >= _BUSY // 2 else 4
    zero = ir.Constant(vector, [0.0] * vector.count)
    totals = {(*pair, u): cgutils.alloca_once_value(builder, zero) for pair in pairs for u in range(unroll)}
    with cgutils.for_range(builder, builder.sdiv(columns, I64(unroll * vector.count))) as loop:
        for u in range(unroll):
            at = builder.add(builder.mul(loop.index, I64(unroll * vector.count)), I64(u * vector.count))
            rows = left(at)
            others = rows if right is None else right(at)
            for p, q in pairs:
                multiply_add(builder, rows[p], others[q], totals[p, q, u])
    for p, q in pairs:
        place = builder.add(sums, I64((p * HEIGHT + q) * LANES * 8))
        total = load(builder, place, wide)
        for u in range(unroll):
            part = builder.load(totals[p, q, u])
            for k in range(0, vector.count, LANES):
                half = shuffle(builder, part, part, range(k, k + LANES))
                total = builder.fadd(total, converted(builder, half, F64))
        store(builder, total, place)
