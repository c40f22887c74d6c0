"""The inner loops in vector instructions: products and sums of rows, and columns turned into rows.

They are written in LLVM's intermediate form: compilers do not keep 25 sums in registers, nor move lanes
about, where plain loops ask for it. LLVM lowers them for any processor.
"""

from __future__ import annotations

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
# Independent additions in flight, which hide the latency of one.
_BUSY = 8
_I16, _I32, _I64, _F32, _F64 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()


@intrinsic
def widen(typing_context, source, n, target, like, to):
    """Copy n entries of the dtype of `like` to an array of the dtype of `to`, float32 or float64."""

    def generate(context, builder, signature, args):
        source, n, target = args[:3]
        stored, real = _types(context, signature.args[-2:])

        def copy(at, vector):
            value = _read(builder, source, at, stored, vector.count, real)
            _store(builder, value, builder.add(target, builder.mul(at, _size(real))))

        _along(builder, n, ir.VectorType(real, _BYTES // _bytes(real)), 1, copy)
        return context.get_dummy_value()

    return types.none(*(types.int64,) * 3, like, to), generate


@intrinsic
def add_scaled(typing_context, source, step, chosen, scale, count, n, target, like):
    """Add the rows ``chosen[:count]``, n entries of the dtype of `like`, times `scale` to float64 numbers.

    Rows are `step` bytes apart; `chosen` and `scale` are addresses of int64 and float64 numbers.
    """

    def generate(context, builder, signature, args):
        source, step, chosen, scale, count, n, target, _ = args
        (stored,) = _types(context, signature.args[-1:])

        def add(at, vector):
            unroll = 4 if vector.count > 1 else 1
            totals, places = [], []
            for u in range(unroll):
                places.append(builder.add(at, _I64(u * vector.count)))
                value = _load(builder, builder.add(target, builder.mul(places[u], _I64(8))), vector)
                totals.append(cgutils.alloca_once_value(builder, value))
            with cgutils.for_range(builder, count) as loop:
                offset = builder.mul(loop.index, _I64(8))
                index = _load(builder, builder.add(chosen, offset), _I64)
                row = builder.add(source, builder.mul(index, step))
                factor = _spread(builder, _load(builder, builder.add(scale, offset), _F64), vector)
                for place, total in zip(places, totals, strict=True):
                    value = _read(builder, row, place, stored, vector.count, _F64)
                    product = builder.fmul(factor, value, flags=("contract",))
                    builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
            for place, total in zip(places, totals, strict=True):
                _store(builder, builder.load(total), builder.add(target, builder.mul(place, _I64(8))))

        _along(builder, n, ir.VectorType(_F64, LANES), 4, add)
        return context.get_dummy_value()

    return types.none(*(types.int64,) * 7, like), generate


def _along(builder, n, vector, unroll, work) -> None:
    """Emit ``work(at, vector)`` for all of n entries, `unroll` vectors at a time and the rest one by one."""
    columns = _I64(vector.count * unroll)
    steps = builder.sdiv(n, columns)
    with cgutils.for_range(builder, steps) as loop:
        work(builder.mul(loop.index, columns), vector)
    done = builder.mul(steps, columns)
    with cgutils.for_range(builder, builder.sub(n, done)) as loop:
        work(builder.add(done, loop.index), ir.VectorType(vector.element, 1))


@intrinsic
def add_block(typing_context, a, b, step, columns, height, sums, like):
    """Add products of `height` rows at address a with HEIGHT rows at address b to partial sums.

    Rows have the dtype of `like`, float32 or float64, are `step` bytes apart and have a multiple of MULTIPLE
    columns. `sums` is the address of (HEIGHT, HEIGHT, LANES) numbers in float64. Where a is b only the
    lower triangle is made.
    """

    def generate(context, builder, signature, args):
        a, b, step, columns, height, sums, _ = args
        (real,) = _types(context, signature.args[-1:])
        same = builder.icmp_signed("==", a, b)
        apart = builder.not_(same)
        for rows in range(1, HEIGHT + 1):
            here = builder.icmp_signed("==", height, _I64(rows))
            left = [builder.add(a, builder.mul(step, _I64(p))) for p in range(rows)]
            right = [builder.add(b, builder.mul(step, _I64(q))) for q in range(HEIGHT)]
            with builder.if_then(builder.and_(here, same)):
                pairs = [(p, q) for p in range(rows) for q in range(p + 1)]
                _emit_block(builder, left, left, columns, sums, real, real, pairs)
            with builder.if_then(builder.and_(here, apart)):
                pairs = [(p, q) for p in range(rows) for q in range(HEIGHT)]
                _emit_block(builder, left, right, columns, sums, real, real, pairs)
        return context.get_dummy_value()

    return types.none(*(types.int64,) * 6, like), generate


@intrinsic
def add_few(typing_context, source, step, vector, columns, t, sums, like, sum_like):
    """Do the same for a G of fewer than HEIGHT rows, and g, where they lie, of the dtype of `like`."""

    def generate(context, builder, signature, args):
        source, step, vector, columns, t, sums = args[:6]
        stored, real = _types(context, signature.args[-2:])
        for rows in range(1, HEIGHT):
            with builder.if_then(builder.icmp_signed("==", t, _I64(rows))):
                places = [builder.add(source, builder.mul(step, _I64(p))) for p in range(rows)] + [vector]
                pairs = [(p, q) for p in range(rows + 1) for q in range(p + 1)]
                _emit_block(builder, places, places, columns, sums, stored, real, pairs)
        return context.get_dummy_value()

    return types.none(*(types.int64,) * 6, like, sum_like), generate


def _emit_block(builder, left, right, columns, sums, stored, real, pairs):
    vector, wide = ir.VectorType(real, _BYTES // _bytes(real)), ir.VectorType(_F64, LANES)
    unroll = 1 if len(pairs) >= _BUSY else 2 if len(pairs) >= _BUSY // 2 else 4
    places = {(side, pair[side]): (left, right)[side][pair[side]] for pair in pairs for side in (0, 1)}
    if left is right:
        places = {key: place for key, place in places.items() if key[0] == 0}
    zero = ir.Constant(vector, [0.0] * vector.count)
    totals = {(*pair, u): cgutils.alloca_once_value(builder, zero) for pair in pairs for u in range(unroll)}
    with cgutils.for_range(builder, builder.sdiv(columns, _I64(unroll * vector.count))) as loop:
        for u in range(unroll):
            at = builder.add(builder.mul(loop.index, _I64(unroll * vector.count)), _I64(u * vector.count))
            entries = {
                key: _read(builder, place, at, stored, vector.count, real) for key, place in places.items()
            }
            for p, q in pairs:
                product = builder.fmul(
                    entries[0, p], entries[0 if left is right else 1, q], flags=("contract",)
                )
                total = totals[p, q, u]
                builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)
    for p, q in pairs:
        place = builder.add(sums, _I64((p * HEIGHT + q) * LANES * 8))
        total = _load(builder, place, wide)
        for u in range(unroll):
            part = builder.load(totals[p, q, u])
            for k in range(0, vector.count, LANES):
                half = _shuffle(builder, part, part, range(k, k + LANES))
                total = builder.fadd(total, _converted(builder, half, _F64))
        _store(builder, total, place)


@intrinsic
def transpose(typing_context, source, column, target, row, like):
    """Copy TURNED columns, `column` bytes apart, of 8 rows, in float64 of 4, into rows `row` bytes apart.

    The target has the dtype of `like`; bfloat16, which comes as uint16, is written in float32.
    """

    def generate(context, builder, signature, args):
        source, column, target, row, _ = args
        (stored,) = _types(context, signature.args[-1:])
        real = _F64 if stored == _F64 else _F32
        n = 16 // _bytes(real)  # entries in a lane of 128 bits, within which it costs least to move them

        def columns(first):
            """Return vectors of column ``first + j`` in one half and ``first + n + j`` in the other."""
            vectors = []
            for j in range(first, first + n):
                places = (builder.add(source, builder.mul(column, _I64(c))) for c in (j, j + n))
                halves = [_read(builder, place, _I64(0), stored, 2 * n, real) for place in places]
                vectors.append(_shuffle(builder, halves[0], halves[1], range(4 * n)))
            return vectors

        for first in range(0, TURNED, 4 * n):
            left = _turned(builder, columns(first))
            right = _turned(builder, columns(first + 2 * n))
            for r in range(2 * n):
                # Lanes 0 and 2 hold the first n rows, lanes 1 and 3 the others.
                lanes = [range(k * n, (k + 1) * n) for k in range(r // n, 8, 2)]
                value = _shuffle(builder, left[r % n], right[r % n], [i for lane in lanes for i in lane])
                offset = builder.add(builder.mul(row, _I64(r)), _I64(first * _bytes(real)))
                _store(builder, value, builder.add(target, offset))
        return context.get_dummy_value()

    return types.none(*(types.int64,) * 4, like), generate


def _turned(builder, vectors):
    """Transpose the square of entries that the vectors have in each lane."""
    lanes, n = len(vectors), vectors[0].type.count

    def merged(x, y, size, half):
        """Take runs of `size` entries from x and y in turn, of one half of each lane."""
        mask = []
        for k in range(0, n, lanes):
            for start in range(k + half * lanes // 2, k + (half + 1) * lanes // 2, size):
                mask += [*range(start, start + size), *range(n + start, n + start + size)]
        return _shuffle(builder, x, y, mask)

    if lanes == 2:
        return [merged(vectors[0], vectors[1], 1, half) for half in (0, 1)]
    v0, v1, v2, v3 = vectors
    return [merged(merged(v0, v1, 1, a), merged(v2, v3, 1, a), 2, b) for a in (0, 1) for b in (0, 1)]


def _types(context, arrays):
    return [context.get_data_type(array.dtype) for array in arrays]


def _bytes(stored):
    return {_F64: 8, _F32: 4, _I16: 2}[stored]


def _size(stored):
    return _I64(_bytes(stored))


def _read(builder, address, at, stored, count, real):
    """Return entries from `at` on in a wider dtype; bfloat16, which comes as uint16, is half a float32."""
    place = builder.add(address, builder.mul(at, _size(stored)))
    value = _load(builder, place, ir.VectorType(stored, count), _bytes(stored))
    if stored == _I16:
        bits = builder.zext(value, ir.VectorType(_I32, count))
        bits = builder.shl(bits, ir.Constant(bits.type, [16] * count))
        value = builder.bitcast(bits, ir.VectorType(_F32, count))
    return _converted(builder, value, real)


def _converted(builder, value, real):
    wanted = ir.VectorType(real, value.type.count)
    if value.type.element == real:
        return value
    return builder.fpext(value, wanted) if real == _F64 else builder.fptrunc(value, wanted)


def _spread(builder, number, vector):
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), number, _I32(0))
    return _shuffle(builder, one, one, [0] * vector.count)


def _load(builder, address, kind, align=4):
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def _store(builder, value, address):
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def _shuffle(builder, x, y, mask):
    indices = list(mask)
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(_I32, len(indices)), indices))
