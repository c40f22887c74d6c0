"""Vectors of entries in LLVM's intermediate form: how they are read, moved about, summed and written.

Compilers do not keep 25 sums in registers, nor move lanes about, where plain loops ask for it. LLVM lowers
this for any processor.
"""

from __future__ import annotations

from llvmlite import binding, ir
from numba.core import cgutils

_FEATURES = binding.get_host_cpu_features()
BYTES = 64 if _FEATURES.get("avx512f") else 32 if _FEATURES.get("avx") else 16
# Rows of a block. Its sums, the rows on one side and one of the other side stay in registers: of those
# there are 32, or 16 on x86 before AVX-512.
HEIGHT = 3 if "sse2" in _FEATURES and BYTES < 64 else 4
# Partial sums of one product, in float64; and what numbers of columns have to be a multiple of.
LANES, MULTIPLE = BYTES // 8, BYTES
# Bytes between what is read from memory and what is asked for.
_AHEAD = 4096
I16, I32, I64, F32, F64 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.DoubleType()


def along(builder, n, vector, unroll, work) -> None:
    """Emit ``work(at, vector)`` for all of n entries, `unroll` vectors at a time and the rest one by one."""
    columns = I64(vector.count * unroll)
    steps = builder.sdiv(n, columns)
    with cgutils.for_range(builder, steps) as loop:
        work(builder.mul(loop.index, columns), vector)
    done = builder.mul(steps, columns)
    with cgutils.for_range(builder, builder.sub(n, done)) as loop:
        work(builder.add(done, loop.index), ir.VectorType(vector.element, 1))


def types_of(context, arrays):
    """Return the types of the entries of arrays; that of bfloat16 is an integer of 16 bits."""
    return [context.get_data_type(array.dtype) for array in arrays]


def place_in(context, builder, kind, array, *indices):
    """Return the address of an entry of an array without gaps, which is an argument of the loop.

    The array belongs to the caller, so its memory outlives the loop.
    """
    made = context.make_array(kind)(context, builder, array)
    address = builder.ptrtoint(made.data, I64)
    for index, step in zip(indices, cgutils.unpack_tuple(builder, made.strides), strict=False):
        address = builder.add(address, builder.mul(index, step))
    return address


def row_step(context, builder, kind, array):
    """Return the bytes from row to row of an array."""
    return cgutils.unpack_tuple(builder, context.make_array(kind)(context, builder, array).strides)[0]


def bytes_of(stored):
    """Return the bytes of an entry."""
    return {F64: 8, F32: 4, I16: 2}[stored]


def read(builder, address, at, stored, count, real):
    """Return entries from `at` on in a wider dtype."""
    place = builder.add(address, builder.mul(at, I64(bytes_of(stored))))
    return widened(builder, load(builder, place, ir.VectorType(stored, count), bytes_of(stored)), real)


def stream(builder, address, at, stored, count, real):
    """Do the same in a pass through memory, asking for what lies ahead: processors fetch too little of it."""
    place = builder.add(address, builder.mul(at, I64(bytes_of(stored))))
    if count > 1:
        ahead = builder.inttoptr(builder.add(place, I64(_AHEAD)), cgutils.voidptr_t)
        kind = ir.FunctionType(ir.VoidType(), [ahead.type, I32, I32, I32])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # Data, to be read, into the second-level cache.
        builder.call(prefetch, [ahead, I32(0), I32(2), I32(1)])
    return read(builder, place, I64(0), stored, count, real)


def widened(builder, value, real):
    """Return entries in a wider dtype; bfloat16, which comes as uint16, is half a float32."""
    if value.type.element == I16:
        count = value.type.count
        bits = builder.zext(value, ir.VectorType(I32, count))
        bits = builder.shl(bits, ir.Constant(bits.type, [16] * count))
        value = builder.bitcast(bits, ir.VectorType(F32, count))
    return converted(builder, value, real)


def converted(builder, value, real):
    """Return a vector of float32 or float64 in one of these."""
    wanted = ir.VectorType(real, value.type.count)
    if value.type.element == real:
        return value
    return builder.fpext(value, wanted) if real == F64 else builder.fptrunc(value, wanted)


def narrowed(builder, value, stored):
    """Return a vector of float64 as it is stored, rounded once to the nearest, ties to even."""
    if stored != I16:
        return converted(builder, value, stored)
    near = converted(builder, value, F32)
    bits = builder.bitcast(near, ir.VectorType(I32, value.type.count))

    def same(number):
        return ir.Constant(bits.type, [number] * value.type.count)

    # Rounding to odd first makes the second rounding correct: of what is not exact in float32, the number
    # towards zero, with its last bit set.
    exact = converted(builder, near, F64)
    off = builder.fcmp_ordered("!=", exact, value)
    size = [builder.call(_absolute(builder, v.type), [v]) for v in (exact, value)]
    beyond = builder.and_(off, builder.fcmp_ordered(">", *size))
    odd = builder.or_(builder.sub(bits, builder.zext(beyond, bits.type)), builder.zext(off, bits.type))
    high = builder.lshr(odd, same(16))
    even = builder.and_(high, same(1))
    rounded = builder.lshr(builder.add(odd, builder.add(same(0x7FFF), even)), same(16))
    # NaN stays NaN, also where the bits that make it one are cut off.
    no_number = builder.fcmp_unordered("uno", near, near)
    chosen = builder.select(no_number, builder.or_(high, same(0x40)), rounded)
    return builder.trunc(chosen, ir.VectorType(I16, value.type.count))


def _absolute(builder, kind):
    function = ir.FunctionType(kind, [kind])
    return cgutils.get_or_insert_function(builder.module, function, f"llvm.fabs.v{kind.count}f64")


def spread(builder, number, vector):
    """Return a vector that has a number in all lanes."""
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), number, I32(0))
    return shuffle(builder, one, one, [0] * vector.count)


def load(builder, address, kind, align=4):
    """Read a number or vector."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def store(builder, value, address):
    """Write a number or vector."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=4)


def shuffle(builder, x, y, mask):
    """Return the lanes of x and y that the mask counts."""
    indices = list(mask)
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(indices)), indices))


def multiply_add(builder, x, y, total):
    """Add a product to what a variable holds, rounding once where the processor can."""
    product = builder.fmul(x, y, flags=("contract",))
    builder.store(builder.fadd(builder.load(total), product, flags=("contract",)), total)


def separated(builder, source, at, rows, stored, count, real):
    """Return `count` entries of each row from column `at` on, where a column has no entries but these."""
    first = builder.mul(at, I64(rows))
    places = [builder.add(first, I64(k * count)) for k in range(rows)]
    vectors = [stream(builder, source, place, stored, count, real) for place in places]
    separated = []
    for r in range(rows):
        places = [divmod(c * rows + r, count) for c in range(count)]
        value = vectors[0]
        for k in range(1, rows):  # entries of vector k join those that have their places already
            mask = [count + i if v == k else i if k == 1 else c for c, (v, i) in enumerate(places)]
            value = shuffle(builder, value, vectors[k], mask)
        separated.append(value)
    return separated
