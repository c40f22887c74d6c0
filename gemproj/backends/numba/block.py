"""Products of a few rows with a few others, in LLVM's intermediate representation.

Compiled from a plain loop, sixteen sums do not stay in registers, which takes up to three times as long.
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
# Number of partial sums per product of two rows. Columns are padded to a multiple of MULTIPLE.
LANES = _BYTES // 8
MULTIPLE = 4 * LANES
# Number of independent additions needed to hide the latency of one addition.
_BUSY = 8
_I64, _VECTOR = ir.IntType(64), ir.VectorType(ir.DoubleType(), LANES)


@intrinsic
def add_block(typing_context, tile, a, b, height, columns, sums, k):
    """Add the products of the tile rows ``a : a + height`` with the rows ``b : b + HEIGHT`` to ``sums[k]``.

    The tile and the sums are C-contiguous and float64. The number of columns is a multiple of MULTIPLE, and
    `sums` has HEIGHT * HEIGHT * LANES numbers for each k. If a equals b, only the lower triangle is computed.
    """

    def generate(context, builder, signature, args):
        tile, a, b, height, columns, sums, k = args
        (data, width), (sums, size) = (
            _matrix(context, builder, kind, array)
            for kind, array in zip((signature.args[0], signature.args[5]), (tile, sums), strict=True)
        )
        place, same = builder.mul(k, size), builder.icmp_signed("==", a, b)

        def rows_at(first, count):
            starts = [builder.mul(builder.add(first, _I64(r)), width) for r in range(count)]
            return lambda at: [_load(builder, data, builder.add(start, at)) for start in starts]

        for rows in range(1, HEIGHT + 1):
            here = builder.icmp_signed("==", height, _I64(rows))
            with builder.if_then(builder.and_(here, same)):
                pairs = [(p, q) for p in range(rows) for q in range(p + 1)]
                _emit(builder, rows_at(a, rows), None, columns, sums, place, pairs)
            with builder.if_then(builder.and_(here, builder.not_(same))):
                pairs = [(p, q) for p in range(rows) for q in range(HEIGHT)]
                _emit(builder, rows_at(a, rows), rows_at(b, HEIGHT), columns, sums, place, pairs)
        return context.get_dummy_value()

    return types.none(tile, *(types.int64,) * 4, sums, types.int64), generate


def _emit(builder, left, right, columns, sums, place, pairs):
    """Emit the loop over columns that adds the products of pairs (p, q) of rows to ``sums[place:]``.

    ``left(at)[p]`` and ``right(at)[q]`` are vectors from column `at`; ``right=None`` stands for `left`.
    """
    unroll = 1 if len(pairs) >= _BUSY else 2 if len(pairs) >= _BUSY // 2 else 4
    zero = ir.Constant(_VECTOR, [0.0] * LANES)
    totals = {(*pair, u): cgutils.alloca_once_value(builder, zero) for pair in pairs for u in range(unroll)}
    with cgutils.for_range(builder, builder.sdiv(columns, _I64(unroll * LANES))) as loop:
        for u in range(unroll):
            at = builder.add(builder.mul(loop.index, _I64(unroll * LANES)), _I64(u * LANES))
            rows = left(at)
            others = rows if right is None else right(at)
            for p, q in pairs:
                product = builder.fmul(rows[p], others[q], flags=("contract",))
                total = builder.fadd(builder.load(totals[p, q, u]), product, flags=("contract",))
                builder.store(total, totals[p, q, u])
    for p, q in pairs:
        at = builder.add(place, _I64((p * HEIGHT + q) * LANES))
        total = _load(builder, sums, at)
        for u in range(unroll):
            total = builder.fadd(total, builder.load(totals[p, q, u]))
        builder.store(total, _place(builder, sums, at), align=8)


def _matrix(context, builder, kind, array):
    """Return the pointer to the data of a matrix, and the length of its rows."""
    made = context.make_array(kind)(context, builder, array)
    return made.data, cgutils.unpack_tuple(builder, made.shape)[1]


def _place(builder, data, at):
    return builder.bitcast(builder.gep(data, [at]), _VECTOR.as_pointer())


def _load(builder, data, at):
    return builder.load(_place(builder, data, at), align=8)
