"""Emitted loops for a G stored by columns: copy columns to the rows of a tile, or multiply them in place."""

from __future__ import annotations

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from gemproj.backends.numba.lanes import (
    BYTES,
    F32,
    F64,
    I64,
    bytes_of,
    converted,
    load,
    multiply_add,
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

# Number of columns that are transposed at a time.
TRANSPOSED = 16
# Number of columns, and of entries in each column, whose products are summed in parallel.
QUAD = 4


@intrinsic
def separate(typing_context, source, n, t, like, tile):
    """Copy n adjacent columns of fewer than 8 rows to the rows of a tile; n is a multiple of TRANSPOSED."""

    def generate(context, builder, signature, args):
        source, n, t, _, tile = args
        stored, wanted = types_of(context, signature.args[-2:])
        target = place_in(context, builder, signature.args[-1], tile)
        row = row_step(context, builder, signature.args[-1], tile)
        real = F64 if stored == F64 else F32
        count = BYTES // bytes_of(real)
        for rows in range(2, 8):
            with (
                builder.if_then(builder.icmp_signed("==", t, I64(rows))),
                cgutils.for_range(builder, builder.sdiv(n, I64(count))) as loop,
            ):
                at = builder.mul(loop.index, I64(count))
                place = builder.add(target, builder.mul(at, I64(bytes_of(wanted))))
                for value in separated(builder, source, at, rows, stored, count, real):
                    store(builder, converted(builder, value, wanted), place)
                    place = builder.add(place, row)
        return context.get_dummy_value()

    return types.none(*(types.int64,) * 3, like, tile), generate


@intrinsic
def add_separated(typing_context, source, n, t, like, scale, target):
    """Add the dot products of n columns, as in `separate`, with `scale` (t,) to float64 ``target[0, :n]``.

    Entries that are multiplied by zero may be NaN or infinite.
    """

    def generate(context, builder, signature, args):
        source, n, t, _, scale, target = args
        (stored,) = types_of(context, signature.args[3:4])
        scale = place_in(context, builder, signature.args[4], scale)
        target = place_in(context, builder, signature.args[5], target)
        real = F64 if stored == F64 else F32
        count = BYTES // bytes_of(real)
        vector = ir.VectorType(F64, count)
        zeros = ir.Constant(vector, [0.0] * count)
        for rows in range(2, 8):
            with builder.if_then(builder.icmp_signed("==", t, I64(rows))):
                scales = [load(builder, builder.add(scale, I64(8 * r)), F64) for r in range(rows)]
                factors = [spread(builder, factor, vector) for factor in scales]
                used = [builder.fcmp_unordered("!=", factor, zeros) for factor in factors]
                with cgutils.for_range(builder, builder.sdiv(n, I64(count))) as loop:
                    at = builder.mul(loop.index, I64(count))
                    address = builder.add(target, builder.mul(at, I64(8)))
                    total = load(builder, address, vector)
                    values = separated(builder, source, at, rows, stored, count, real)
                    for value, factor, where in zip(values, factors, used, strict=True):
                        value = builder.select(where, converted(builder, value, F64), zeros)
                        product = builder.fmul(factor, value, flags=("contract",))
                        total = builder.fadd(total, product, flags=("contract",))
                    store(builder, total, address)
        return context.get_dummy_value()

    return types.none(*(types.int64,) * 3, like, scale, target), generate


@intrinsic
def add_dots(typing_context, source, column, n, t, like, scale, target):
    """Add the dot products of n columns with `scale` (t,) to float64 ``target[0, :n]``, for t >= QUAD.

    The columns are `column` bytes apart, and n is a multiple of QUAD. Each column has QUAD partial sums,
    which are added for QUAD columns at a time. The last t % QUAD rows are loaded together with preceding
    rows, whose factors are set to zero.
    """

    def generate(context, builder, signature, args):
        source, column, n, t, _, scale, target = args
        (stored,) = types_of(context, signature.args[4:5])
        scale = place_in(context, builder, signature.args[5], scale)
        target = place_in(context, builder, signature.args[6], target)
        vector = ir.VectorType(F64, QUAD)
        zeros = ir.Constant(vector, [0.0] * QUAD)
        lanes = ir.Constant(ir.VectorType(I64, QUAD), list(range(QUAD)))

        def add(entry, places, totals, read_some, since=None):
            factor = load(builder, builder.add(scale, builder.mul(entry, I64(8))), vector)
            if since is not None:
                new = builder.icmp_signed(">=", lanes, spread(builder, since, lanes.type))
                factor = builder.select(new, factor, zeros)
            used = builder.fcmp_unordered("!=", factor, zeros)
            for place, total in zip(places, totals, strict=True):
                value = read_some(builder, place, entry, stored, QUAD, F64)
                multiply_add(builder, factor, builder.select(used, value, zeros), total)

        with cgutils.for_range(builder, builder.sdiv(n, I64(QUAD))) as group:
            at = builder.mul(group.index, I64(QUAD))
            places = [builder.add(source, builder.mul(column, builder.add(at, I64(c)))) for c in range(QUAD)]
            totals = [cgutils.alloca_once_value(builder, zeros) for _ in places]
            with cgutils.for_range(builder, builder.sdiv(t, I64(2 * QUAD))) as loop:
                entry = builder.mul(loop.index, I64(2 * QUAD))
                # One prefetch, by `stream`, serves both reads.
                add(entry, places, totals, stream)
                add(builder.add(entry, I64(QUAD)), places, totals, read)
            done = builder.mul(builder.sdiv(t, I64(2 * QUAD)), I64(2 * QUAD))
            whole = builder.mul(builder.sdiv(t, I64(QUAD)), I64(QUAD))
            with builder.if_then(builder.icmp_signed("<", done, whole)):
                add(done, places, totals, read)
            with builder.if_then(builder.icmp_signed("<", whole, t)):
                last = builder.sub(t, I64(QUAD))
                add(last, places, totals, read, since=builder.sub(whole, last))
            address = builder.add(target, builder.mul(at, I64(8)))
            sums = _sums(builder, [builder.load(total) for total in totals])
            store(builder, builder.fadd(load(builder, address, vector), sums), address)
        return context.get_dummy_value()

    return types.none(*(types.int64,) * 4, like, scale, target), generate


def _sums(builder, vectors):
    """Return the sums of n vectors with n entries each, as one vector."""
    while len(vectors) > 1:
        run, half = len(vectors), len(vectors) // 2  # adjacent entries that belong to one sum
        starts = range(0, vectors[0].type.count, run)
        mask = [i for k in starts for j in (k, k + vectors[0].type.count) for i in range(j, j + half)]
        vectors = [
            builder.fadd(shuffle(builder, x, y, mask), shuffle(builder, x, y, [i + half for i in mask]))
            for x, y in zip(vectors[:half], vectors[half:], strict=True)
        ]
    return vectors[0]


@intrinsic
def transpose(typing_context, source, column, like, tile, first_row, first_column):
    """Copy TRANSPOSED columns of 8 rows (4 in float64) to ``tile[first_row:, first_column:]``.

    The columns are `column` bytes apart.
    """

    def generate(context, builder, signature, args):
        source, column = args[:2]
        stored, wanted = types_of(context, signature.args[2:4])
        target = place_in(context, builder, signature.args[3], *args[3:])
        row = row_step(context, builder, signature.args[3], args[3])
        real = F64 if stored == F64 else F32
        n = 16 // bytes_of(real)  # entries in a lane of 128 bits: shuffles within lanes are the fastest

        def columns(first):
            """Return vectors with column ``first + j`` in the first half, ``first + n + j`` in the second."""
            vectors = []
            for j in range(first, first + n):
                places = [builder.add(source, builder.mul(column, I64(c))) for c in (j, j + n)]
                halves = [stream(builder, place, I64(0), stored, 2 * n, real) for place in places]
                vectors.append(shuffle(builder, halves[0], halves[1], range(4 * n)))
            return vectors

        for first in range(0, TRANSPOSED, 4 * n):
            left = _transposed(builder, columns(first))
            right = _transposed(builder, columns(first + 2 * n))
            for r in range(2 * n):
                # Lanes 0 and 2 hold the first n rows, lanes 1 and 3 the last n rows.
                lanes = [range(k * n, (k + 1) * n) for k in range(r // n, 8, 2)]
                value = shuffle(builder, left[r % n], right[r % n], [i for lane in lanes for i in lane])
                offset = builder.add(builder.mul(row, I64(r)), I64(first * bytes_of(wanted)))
                store(builder, converted(builder, value, wanted), builder.add(target, offset))
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, like, tile, types.int64, types.int64), generate


def _transposed(builder, vectors):
    """Return the vectors with the square matrix in each lane transposed."""
    lanes, n = len(vectors), vectors[0].type.count

    def merged(x, y, size, half):
        """Return runs of `size` entries, alternately from x and y, of one half of each lane."""
        mask = []
        for k in range(0, n, lanes):
            for start in range(k + half * lanes // 2, k + (half + 1) * lanes // 2, size):
                mask += [*range(start, start + size), *range(n + start, n + start + size)]
        return shuffle(builder, x, y, mask)

    if lanes == 2:
        return [merged(vectors[0], vectors[1], 1, half) for half in (0, 1)]
    v0, v1, v2, v3 = vectors
    return [merged(merged(v0, v1, 1, a), merged(v2, v3, 1, a), 2, b) for a in (0, 1) for b in (0, 1)]
