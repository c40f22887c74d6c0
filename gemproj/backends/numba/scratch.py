"""Memory that the loops work in: how much they need, and what they find in it.

The caller makes it and holds it during the call. numba frees an array that a compiled function made after the
last use of its name, whoever still has its address; so none takes the address of anything but its arguments.
"""

from __future__ import annotations

from functools import lru_cache

from gemproj.backends.numba.jit import fast
from gemproj.backends.numba.lanes import HEIGHT, LANES, MULTIPLE

# Bytes of a tile: less than half of a first-level cache, through which what is asked for passes, too.
_TILE = 12 << 10
# The least number of columns in a tile.
_LEAST = 256
# Groups of gradients that pass while a tile of G stays in cache.
CROWDS = 16
# Partial sums of the products of two groups of rows.
BLOCK = HEIGHT * HEIGHT * LANES
# Columns that are combined at a time.
PART = 1024


@fast
def align(address):
    """Return the beginning of the next cache line."""
    return address + -address % 64


@fast
def count_sums(rows):
    """Return the number of partial sums of all products of rows with each other."""
    groups = (rows + HEIGHT - 1) // HEIGHT
    return groups * (groups + 1) // 2 * BLOCK


@fast
def count_shared_sums(t):
    """Return that of t rows, and of CROWDS groups of gradients with these rows and among themselves."""
    groups = (t + HEIGHT - 1) // HEIGHT
    return groups * (groups + 1) // 2 * BLOCK + CROWDS * (groups + 1) * BLOCK


@lru_cache(maxsize=256)
def for_products(rows: int, chunk: int, itemsize: int) -> tuple[int, int]:
    """Return the columns of a tile, and the size of the array that `sum_products` works in."""
    columns = min(chunk, max(_LEAST, _TILE // (rows * itemsize) // MULTIPLE * MULTIPLE))
    return columns, _size(count_sums.py_func(rows), rows * columns, itemsize)


@lru_cache(maxsize=256)
def for_shared_products(t: int, chunk: int, itemsize: int) -> tuple[int, int]:
    """Do the same for `sum_shared_products`."""
    columns, rows = min(chunk, _LEAST), (-(-t // HEIGHT) + 1) * HEIGHT
    return columns, _size(count_shared_sums.py_func(t), rows * columns, itemsize)


def for_combination(t: int) -> int:
    """Return the size of the array of float64 that `write_combination` works in."""
    return _size(PART, 2 * t, 8)


def _size(sums: int, entries: int, itemsize: int) -> int:
    """Return how many entries have room for sums in float64 and for entries, both at cache lines."""
    return (8 * sums + 128) // itemsize + entries
