"""Functions that emit LLVM IR for vectors: load, convert, shuffle, multiply-add and store.

IR is emitted, because code compiled from plain loops neither keeps 16 sums in registers nor shuffles lanes.
LLVM lowers the IR for any processor.
"""

from __future__ import annotations

from llvmlite import binding, ir
from numba.core import cgutils
from numba.core.registry import cpu_target

# Features of numba's target processor, which NUMBA_CPU_NAME can set. Machines that share a cache must agree
# on the layout of scratch arrays.
_FEATURES = cpu_target.target_context.codegen().magic_tuple()[2].split(",")
BYTES = 64 if "+avx512f" in _FEATURES else 32 if "+avx" in _FEATURES else 16
# Rows of a block of products. HEIGHT^2 sums, HEIGHT rows and one more row stay in registers. There are 32
# registers, or 16 on x86 before AVX-512.
HEIGHT = 3 if "sse2" in binding.get_host_cpu_features() and BYTES < 64 else 4
# Number of float64 partial sums per product of two rows. Columns are padded to a multiple of MULTIPLE.
LANES, MULTIPLE = BYTES // 8, BYTES
# Bytes by which a prefetch is ahead of the read.
_AHEAD = 4096
I16, I32, I64, F32, F64 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()


def along(builder, n, vector, unroll, work) -> None:
    """Emit loops of ``work(at, vector)`` over n entries: `unroll` vectors at a time, then single entries."""
    columns = I64(vector.count * unroll)
    steps = builder.sdiv(n, columns)
    with cgutils.for_range(builder, steps) as loop:
        work(builder.mul(loop.index, columns), vector)
    done = builder.mul(steps, columns)
    with cgutils.for_range(builder, builder.sub(n, done)) as loop:
        work(builder.add(done, loop.index), ir.VectorType(vector.element, 1))


def types_of(context, arrays):
    """Return the LLVM types of the entries of arrays; for bfloat16 an integer of 16 bits."""
    return [context.get_data_type(array.dtype) for array in arrays]


def place_in(context, builder, kind, array, *indices):
    """Return the address of an entry of a C-contiguous array, which is an argument of the loop.

    The caller holds the array, so its memory outlives the loop.
    """
    made = context.make_array(kind)(context, builder, array)
    address = builder.ptrtoint(made.data, I64)
    for index, step in zip(indices, cgutils.unpack_tuple(builder, made.strides), strict=False):
        address = builder.add(address, builder.mul(index, step))
    return address


def row_step(context, builder, kind, array):
    """Return the row stride of an array, in bytes."""
    return cgutils.unpack_tuple(builder, context.make_array(kind)(context, builder, array).strides)[0]


def bytes_of(stored):
    """Return the size of an LLVM type, in bytes."""
    return {F64: 8, F32: 4, I16: 2}[stored]


def read(builder, address, at, stored, count, real):
    """Return the vector of the `count` entries that start at index `at`, converted to the type `real`."""
    place = builder.add(address, builder.mul(at, I64(bytes_of(stored))))
    return widened(builder, load(builder, place, ir.VectorType(stored, count), bytes_of(stored)), real)


def stream(builder, address, at, stored, count, real):
    """Return the same vector as `read`, with a prefetch: the hardware alone prefetches too few entries."""
    place = builder.add(address, builder.mul(at, I64(bytes_of(stored))))
    if count > 1:
        ahead = builder.inttoptr(builder.add(place, I64(_AHEAD)), cgutils.voidptr_t)
        kind = ir.FunctionType(ir.VoidType(), [ahead.type, I32, I32, I32])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # The arguments of llvm.prefetch: 0 for a read, 2 for the second-level cache, 1 for data.
        builder.call(prefetch, [ahead, I32(0), I32(2), I32(1)])
    return read(builder, place, I64(0), stored, count, real)


def widened(builder, value, real):
    """Return a vector converted to the type `real`; bfloat16 is the upper half of the bits of a float32."""
    if value.type.element == I16:
        count = value.type.count
        bits = builder.zext(value, ir.VectorType(I32, count))
        bits = builder.shl(bits, ir.Constant(bits.type, [16] * count))
        value = builder.bitcast(bits, ir.VectorType(F32, count))
    return converted(builder, value, real)


def converted(builder, value, real):
    """Return a vector of float32 or float64, converted to the type `real`: float32 or float64."""
    wanted = ir.VectorType(real, value.type.count)
    if value.type.element == real:
        return value
    return builder.fpext(value, wanted) if real == F64 else builder.fptrunc(value, wanted)


def narrowed(builder, value, stored):
    """Return a vector of float64, rounded once to the type `stored`: to nearest, ties to even."""
    if stored != I16:
        return converted(builder, value, stored)
    near = converted(builder, value, F32)
    bits = builder.bitcast(near, ir.VectorType(I32, value.type.count))

    def splat(number):
        return ir.Constant(bits.type, [number] * value.type.count)

    # The first rounding, to float32, is to odd, which makes the second rounding correct: numbers that float32
    # cannot represent are rounded towards zero, and their last bit is set.
    exact = converted(builder, near, F64)
    off = builder.fcmp_ordered("!=", exact, value)
    size = [builder.call(_absolute(builder, v.type), [v]) for v in (exact, value)]
    beyond = builder.and_(off, builder.fcmp_ordered(">", *size))
    odd = builder.or_(builder.sub(bits, builder.zext(beyond, bits.type)), builder.zext(off, bits.type))
    high = builder.lshr(odd, splat(16))
    even = builder.and_(high, splat(1))
    rounded = builder.lshr(builder.add(odd, builder.add(splat(0x7FFF), even)), splat(16))
    # A bit of NaN is set, because a NaN could become infinity without its lower bits.
    is_nan = builder.fcmp_unordered("uno", near, near)
    chosen = builder.select(is_nan, builder.or_(high, splat(0x40)), rounded)
    return builder.trunc(chosen, ir.VectorType(I16, value.type.count))


def _absolute(builder, kind):
    function = ir.FunctionType(kind, [kind])
    return cgutils.get_or_insert_function(builder.module, function, f"llvm.fabs.v{kind.count}f64")


def spread(builder, number, vector):
    """Return a vector with the same number in all lanes."""
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), number, I32(0))
    return shuffle(builder, one, one, [0] * vector.count)


def load(builder, address, kind, align=4):
    """Return the number or vector of type `kind` at an address."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def store(builder, value, address):
    """Write a number or vector to an address."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def shuffle(builder, x, y, mask):
    """Return the lanes of the concatenation [x, y] with the indices `mask` (LLVM's shufflevector)."""
    indices = list(mask)
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(indices)), indices))


def multiply_add(builder, x, y, total):
    """Add ``x * y`` to the variable `total`, as a fused multiply-add if the processor has one."""
    product = builder.fmul(x, y, flags=("contract",))
    builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)


def separated(builder, source, at, rows, stored, count, real):
    """Return, for each of `rows` rows, a vector of the `count` entries that start at column `at`.

    Columns have `rows` entries and follow each other in memory without gaps.
    """
    first = builder.mul(at, I64(rows))
    places = [builder.add(first, I64(k * count)) for k in range(rows)]
    vectors = [stream(builder, source, place, stored, count, real) for place in places]
    separated = []
    for r in range(rows):
        places = [divmod(c * rows + r, count) for c in range(count)]
        value = vectors[0]
        for k in range(1, rows):  # insert the entries of vector k
            mask = [count + i if v == k else i if k == 1 else c for c, (v, i) in enumerate(places)]
            value = shuffle(builder, value, vectors[k], mask)
        separated.append(value)
    return separated
