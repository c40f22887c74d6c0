"""Scratch arrays of the compiled loops, which the caller allocates and holds.

Compiled loops allocate no arrays (`jit` forbids it), so every address in a loop is that of an argument.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from gemproj.backends.numba.addresses import address
from gemproj.backends.numba.lanes import HEIGHT, LANES, MULTIPLE

# Bytes of a tile: less than half of a first-level cache, because prefetched data passes through it, too.
_TILE = 12 << 10
# The least number of columns in a tile.
_LEAST = 256
# Most groups of HEIGHT gradients that are multiplied while a tile of G stays in cache.
CROWDS = 16
# Columns of x that stage 3 computes at a time.
PART = 1024
_LINE = 64  # bytes of a cache line


@lru_cache(maxsize=256)
def for_products(rows: int, chunk: int, itemsize: int) -> tuple[tuple[int, int], int]:
    """Return the shape of the tile of `sum_products`, and the number of blocks of partial sums."""
    columns = min(chunk, max(_LEAST, _TILE // (rows * itemsize) // MULTIPLE * MULTIPLE))
    groups = -(-rows // HEIGHT)
    return (rows, columns), groups * (groups + 1) // 2


def for_shared_products(t: int, chunk: int) -> tuple[tuple[int, int], int]:
    """Return the shape of the tile of `sum_shared_products`, and the number of blocks of partial sums."""
    groups = -(-t // HEIGHT)
    return ((groups + 1) * HEIGHT, min(chunk, _LEAST)), groups * (groups + 1) // 2 + CROWDS * (groups + 1)


def make(tile: tuple[int, int], blocks: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return an uninitialised tile, and uninitialised partial sums in float64 for `blocks` blocks."""
    return _aligned(tile, dtype), _aligned((blocks, HEIGHT * HEIGHT * LANES), np.float64)


def for_combination(t: int) -> tuple[np.ndarray, ...]:
    """Return scratch arrays for `write_combination`: sums, and indices and multipliers of active rows."""
    return _aligned((1, PART), np.float64), np.empty(t, np.int64), np.empty(t)


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an uninitialised array that starts at a cache line, so that no vector crosses two lines."""
    size = np.dtype(dtype).itemsize
    for n in shape:
        size *= n
    memory = np.empty(size + _LINE, np.uint8)
    start = -address(memory) % _LINE
    return memory[start : start + size].view(dtype).reshape(shape)
