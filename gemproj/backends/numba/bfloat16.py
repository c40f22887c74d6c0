"""How numbers are read and rounded: float32 and float64 as they are, bfloat16 by the bits of a uint16."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic, overload


@intrinsic
def _bits_of(typing_context, number):
    def generate(context, builder, signature, args):
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


def entry(value: Any, like: Any) -> Any:
    """Return a float64 as an array like `like` stores it, rounded once to the nearest, ties to even."""
    raise NotImplementedError("for compiled code only")


@overload(entry)
def _entry(value, like):
    if like.dtype != types.uint16:
        return lambda value, like: value

    def round_to_bfloat16(value, like):
        near = np.float32(value)
        bits = _bits_of(near)
        if near != near:
            return np.uint16((bits >> np.uint32(16)) | np.uint32(0x40))
        if np.float64(near) != value:
            # Rounding to odd first makes the second rounding correct.
            if abs(np.float64(near)) > abs(value):
                bits -= np.uint32(1)
            bits |= np.uint32(1)
        even = (bits >> np.uint32(16)) & np.uint32(1)
        return np.uint16((bits + np.uint32(0x7FFF) + even) >> np.uint32(16))

    return round_to_bfloat16
