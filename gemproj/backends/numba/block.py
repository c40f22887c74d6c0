"""Products of a few rows with a few others, in LLVM's intermediate representation.

Compiled from a plain loop, sixteen sums do not stay in registers, and nothing is prefetched: the hardware
alone prefetches too few numbers of a few streams of memory.
"""

from __future__ import annotations

from llvmlite import binding, ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

# Features of numba's target processor, which NUMBA_CPU_NAME can set.
_FEATURES = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
_BYTES = 64 if "+avx512f" in _FEATURES else 32 if "+avx" in _FEATURES else 16
# Rows of a block. HEIGHT^2 sums, HEIGHT rows and one more row stay in registers: there are 32, or 16 on x86
# before AVX-512.
HEIGHT = 3 if "sse2" in binding.get_host_cpu_features() and _BYTES < 64 else 4
# Numbers in a vector: partial sums per product of two rows. Columns of a tile are a multiple of MULTIPLE.
LANES = _BYTES // 8
MULTIPLE = 4 * LANES
# Number of independent additions needed to hide the latency of one addition.
_BUSY = 8
# Bytes by which a prefetch is ahead of the read.
AHEAD = 4096
_I16, _I32, _I64, _F32, _F64 = *map(ir.IntType, (16, 32, 64)), ir.FloatType(), ir.DoubleType()
_VECTOR = ir.VectorType(_F64, LANES)


@intrinsic
def pointer(typing_context, address):
    """Return an address as a pointer, for `numba.carray`."""

    def generate(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


@intrinsic
def widen(typing_context, source, n, tile, row):
    """Copy n numbers, a multiple of LANES, to a row of a float64 tile."""

    def generate(context, builder, signature, args):
        data, tile = (_data(context, builder, signature.args[k], args[k]) for k in (0, 2))
        target = builder.mul(args[3], _width(context, builder, signature.args[2], args[2]))
        with cgutils.for_range(builder, builder.sdiv(args[1], _I64(LANES))) as loop:
            at = builder.mul(loop.index, _I64(LANES))
            value = _read(builder, data, at, ahead=True)
            builder.store(value, _place(builder, tile, builder.add(target, at)), align=8)
        return context.get_dummy_value()

    return types.none(source, types.int64, tile, types.int64), generate


@intrinsic
def add_few(typing_context, rows, of_row, t, vector, columns, sums):
    """Add the products of the rows [G; g], which are read in place, to ``sums[0]``, for t < HEIGHT.

    Row r of G begins at ``rows[r * of_row]``. See `add_block`.
    """

    def generate(context, builder, signature, args):
        of_row, t, _, columns, _ = args[1:]
        G, g, sums = (_data(context, builder, signature.args[k], args[k]) for k in (0, 3, 5))
        for count in range(1, HEIGHT):
            places = [*((G, builder.mul(of_row, _I64(r))) for r in range(count)), (g, _I64(0))]
            pairs = [(p, q) for p in range(count + 1) for q in range(p + 1)]
            with builder.if_then(builder.icmp_signed("==", t, _I64(count))):
                _add_products(builder, places, places, columns, sums, _I64(0), pairs, ahead=True)
        return context.get_dummy_value()

    integer = types.int64
    return types.none(rows, integer, integer, vector, integer, sums), generate


@intrinsic
def add_block(typing_context, tile, a, b, height, columns, sums, k):
    """Add the products of the tile rows ``a : a + height`` with the rows ``b : b + HEIGHT`` to ``sums[k]``.

    The tile and the sums are C-contiguous and float64. The number of columns is a multiple of MULTIPLE, and
    `sums` has HEIGHT * HEIGHT * LANES numbers for each k. If a equals b, only the lower triangle is computed.
    """

    def generate(context, builder, signature, args):
        tile, a, b, height, columns, sums, k = args
        width, size = (_width(context, builder, signature.args[i], args[i]) for i in (0, 5))
        tile, sums = (_data(context, builder, signature.args[i], args[i]) for i in (0, 5))
        place, same = builder.mul(k, size), builder.icmp_signed("==", a, b)

        def rows_at(first, count):
            return [(tile, builder.mul(builder.add(first, _I64(r)), width)) for r in range(count)]

        for rows in range(1, HEIGHT + 1):
            here = builder.icmp_signed("==", height, _I64(rows))
            with builder.if_then(builder.and_(here, same)):
                pairs = [(p, q) for p in range(rows) for q in range(p + 1)]
                left = rows_at(a, rows)
                _add_products(builder, left, left, columns, sums, place, pairs)
            with builder.if_then(builder.and_(here, builder.not_(same))):
                pairs = [(p, q) for p in range(rows) for q in range(HEIGHT)]
                _add_products(builder, rows_at(a, rows), rows_at(b, HEIGHT), columns, sums, place, pairs)
        return context.get_dummy_value()

    return types.none(tile, *(types.int64,) * 4, sums, types.int64), generate


def _add_products(builder, left, right, columns, sums, place, pairs, ahead=False):
    """Emit the loop over columns that adds the products of pairs (p, q) of rows to ``sums[place:]``.

    Rows are pairs of a pointer and an index; with `ahead`, they are prefetched.
    """
    unroll = 1 if len(pairs) >= _BUSY else 2 if len(pairs) >= _BUSY // 2 else 4
    zero = ir.Constant(_VECTOR, [0.0] * LANES)
    totals = {(*pair, u): cgutils.alloca_once_value(builder, zero) for pair in pairs for u in range(unroll)}
    with cgutils.for_range(builder, builder.sdiv(columns, _I64(unroll * LANES))) as loop:
        for u in range(unroll):
            at = builder.add(builder.mul(loop.index, _I64(unroll * LANES)), _I64(u * LANES))
            rows = [_read(builder, data, builder.add(first, at), ahead) for data, first in left]
            others = rows
            if right is not left:
                others = [_read(builder, data, builder.add(first, at)) for data, first in right]
            for p, q in pairs:
                product = builder.fmul(rows[p], others[q], flags=("contract",))
                total = builder.fadd(builder.load(totals[p, q, u]), product, flags=("contract",))
                builder.store(total, totals[p, q, u])
    for p, q in pairs:
        to = _place(builder, sums, builder.add(place, _I64((p * HEIGHT + q) * LANES)))
        total = builder.load(to, align=8)
        for u in range(unroll):
            total = builder.fadd(total, builder.load(totals[p, q, u]))
        builder.store(total, to, align=8)


def _read(builder, data, at, ahead=False):
    """Return a vector of float64 numbers from index `at` on; integers of 16 bits are those of bfloat16."""
    place = builder.gep(data, [at])
    if ahead:
        _prefetch(builder, place)
    stored = data.type.pointee
    wide = ir.VectorType(stored, LANES)
    value = builder.load(builder.bitcast(place, wide.as_pointer()), align={_I16: 2, _F32: 4, _F64: 8}[stored])
    if stored == _I16:  # the upper half of the bits of float32
        bits = builder.zext(value, ir.VectorType(_I32, LANES))
        bits = builder.shl(bits, ir.Constant(bits.type, [16] * LANES))
        value = builder.bitcast(bits, ir.VectorType(_F32, LANES))
    return value if stored == _F64 else builder.fpext(value, _VECTOR)


def _prefetch(builder, place):
    ahead = builder.inttoptr(builder.add(builder.ptrtoint(place, _I64), _I64(AHEAD)), cgutils.voidptr_t)
    kind = ir.FunctionType(ir.VoidType(), [ahead.type, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    # The arguments of llvm.prefetch: 0 for a read, 2 for the second-level cache, 1 for data.
    builder.call(function, [ahead, _I32(0), _I32(2), _I32(1)])


def _place(builder, data, at):
    return builder.bitcast(builder.gep(data, [at]), _VECTOR.as_pointer())


def _data(context, builder, kind, array):
    return context.make_array(kind)(context, builder, array).data


def _width(context, builder, kind, array):
    """Return the number of columns of a matrix."""
    return cgutils.unpack_tuple(builder, context.make_array(kind)(context, builder, array).shape)[1]
