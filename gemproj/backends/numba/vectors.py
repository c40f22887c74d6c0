"""Emitted loops over rows: copy and convert, products of rows, and linear combinations of rows."""

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
    narrowed,
    place_in,
    read,
    row_step,
    separated,
    shuffle,
    spread,
    store,
    stream,
    types_of,
)

# Number of independent additions needed to hide the latency of one addition.
_BUSY = 8


@intrinsic
def widen(typing_context, source, n, like, target, row, column):
    """Copy n entries of the dtype of `like` to ``target[row, column:]``, in float32 or float64."""

    def generate(context, builder, signature, args):
        source, n = args[:2]
        stored, real = types_of(context, signature.args[2:4])
        target = place_in(context, builder, signature.args[3], *args[3:])

        def copy(at, vector):
            value = stream(builder, source, at, stored, vector.count, real)
            store(builder, value, builder.add(target, builder.mul(at, I64(bytes_of(real)))))

        along(builder, n, ir.VectorType(real, BYTES // bytes_of(real)), 1, copy)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, like, target, types.int64, types.int64), generate


@intrinsic
def narrow(typing_context, sums, column, n, target, like):
    """Write n float64 numbers ``sums[0, column:]`` to the address `target`, in the dtype of `like`."""

    def generate(context, builder, signature, args):
        sums, column, n, target, _ = args
        (stored,) = types_of(context, signature.args[4:])
        source = place_in(context, builder, signature.args[0], sums, I64(0), column)

        def copy(at, vector):
            value = narrowed(builder, read(builder, source, at, F64, vector.count, F64), stored)
            store(builder, value, builder.add(target, builder.mul(at, I64(bytes_of(stored)))))

        along(builder, n, ir.VectorType(F64, LANES), 1, copy)
        return context.get_dummy_value()

    return types.none(sums, *(types.int64,) * 3, like), generate


@intrinsic
def add_scaled(typing_context, source, step, n, like, scale, chosen, first, count, target, at):
    """Add the rows ``chosen[first : first + count]``, scaled by `scale`, to ``target[0, at:]``.

    Rows have n entries of the dtype of `like`, and are `step` bytes apart.
    """

    def generate(context, builder, signature, args):
        source, step, n, _, scale, chosen, first, count, target, at = args
        (stored,) = types_of(context, signature.args[3:4])
        scale = place_in(context, builder, signature.args[4], scale)
        chosen = place_in(context, builder, signature.args[5], chosen, first)
        target = place_in(context, builder, signature.args[8], target, I64(0), at)
        unroll = 4

        def add(at, vector):
            totals, places = [], []
            for u in range(unroll if vector.count > 1 else 1):
                places.append(builder.add(at, I64(u * vector.count)))
                value = load(builder, builder.add(target, builder.mul(places[u], I64(8))), vector)
                totals.append(cgutils.alloca_once_value(builder, value))
            with cgutils.for_range(builder, count) as loop:
                index = load(builder, builder.add(chosen, builder.mul(loop.index, I64(8))), I64)
                row = builder.add(source, builder.mul(index, step))
                number = load(builder, builder.add(scale, builder.mul(index, I64(8))), F64)
                factor = spread(builder, number, vector)
                for place, total in zip(places, totals, strict=True):
                    value = stream(builder, row, place, stored, vector.count, F64)
                    multiply_add(builder, factor, value, total)
            for place, total in zip(places, totals, strict=True):
                store(builder, builder.load(total), builder.add(target, builder.mul(place, I64(8))))

        along(builder, n, ir.VectorType(F64, LANES), unroll, add)
        return context.get_dummy_value()

    integer = types.int64
    kinds = (integer, integer, integer, like, scale, chosen, integer, integer, target, integer)
    return types.none(*kinds), generate


@intrinsic
def add_block(typing_context, tile, a, b, height, columns, sums, k):
    """Add the products of the tile rows ``a : a + height`` with the rows ``b : b + HEIGHT`` to ``sums[k]``.

    The tile is float32 or float64, and the number of columns is a multiple of MULTIPLE. `sums` has
    HEIGHT * HEIGHT * LANES float64 numbers for each k. If a equals b, only the lower triangle is computed.
    """

    def generate(context, builder, signature, args):
        tile, a, b, height, columns, sums, k = args
        (real,) = types_of(context, signature.args[:1])
        same, count = builder.icmp_signed("==", a, b), BYTES // bytes_of(real)
        step = row_step(context, builder, signature.args[0], tile)
        a, b = (place_in(context, builder, signature.args[0], tile, row) for row in (a, b))
        sums = place_in(context, builder, signature.args[5], sums, k)

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

    return types.none(tile, *(types.int64,) * 4, sums, types.int64), generate


@intrinsic
def add_few(typing_context, source, row, column, vector, n, t, like, columns, tile, sums):
    """Add the products of the rows [G; g], read in place, to ``sums[0]``; G has fewer than HEIGHT rows.

    Entries have the dtype of `like`, and are multiplied in the dtype of `tile`. The entries of each row are
    adjacent. Unless `columns` is None, G may also be stored by columns without gaps.
    """

    def generate(context, builder, signature, args):
        source, row, column, vector, n, t, _, _, _, sums = args
        stored, real = types_of(context, [signature.args[k] for k in (6, 8)])
        sums = place_in(context, builder, signature.args[9], sums)
        count = BYTES // bytes_of(real)
        by_rows = builder.icmp_signed("==", column, I64(bytes_of(stored)))

        def entries(rows, by_columns):
            places = [builder.add(source, builder.mul(row, I64(r))) for r in range(rows)]

            def read_all(at):
                if by_columns:
                    found = separated(builder, source, at, rows, stored, count, real)
                else:
                    found = [stream(builder, place, at, stored, count, real) for place in places]
                return [*found, stream(builder, vector, at, stored, count, real)]

            return read_all

        for rows in range(1, HEIGHT):
            pairs = [(p, q) for p in range(rows + 1) for q in range(p + 1)]
            here = builder.icmp_signed("==", t, I64(rows))
            with builder.if_then(builder.and_(here, by_rows)):
                _emit_block(builder, entries(rows, False), None, n, sums, real, pairs)
            if columns is not types.none:
                with builder.if_then(builder.and_(here, builder.not_(by_rows))):
                    _emit_block(builder, entries(rows, True), None, n, sums, real, pairs)
        return context.get_dummy_value()

    return types.none(*(types.int64,) * 6, like, columns, tile, sums), generate


def _emit_block(builder, left, right, columns, sums, real, pairs):
    """Emit the loop over columns that adds the products of pairs (p, q) of rows to `sums`.

    ``left(at)[p]`` and ``right(at)[q]`` are vectors from column `at`; ``right=None`` stands for `left`.
    """
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
