"""Compile all loops before they are needed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from gemproj.backends.numba.addresses import FIELDS, address
from gemproj.backends.numba.loops import add_pieces, sum_products, sum_shared_products, write_combination
from gemproj.backends.numba.search import search


def compile_all(dtypes: Sequence[Any] = (np.float32, np.float64, np.uint16)) -> float:
    """Compile the loops, or load them from disk; return the seconds it took.

    Parameters
    ----------
    dtypes : sequence of NumPy dtypes
        uint16 stands for bfloat16.
    """
    start = time.perf_counter()
    lines, totals = np.empty((0, FIELDS), dtype=np.int64), np.empty((1, 1, 2, 2))
    none, counts = np.empty((0, 0)), np.empty(0, dtype=np.int64)
    for dtype in dtypes:
        like = np.empty(0, dtype)
        if dtype is not np.uint16:
            address(like), address(like[:, None])
        for sums in (np.empty(0), np.empty(0, np.float32)):
            if dtype is not np.float64 or sums.dtype == np.float64:
                sum_products(lines, 1, 0, 0, 1, 1, 512, like, sums, totals)
                sum_shared_products(lines, 0, 0, 0, 1, 512, like, sums, totals)
        write_combination(lines, 1, 0, 0, 1, 1, False, like, none)
    add_pieces(totals)
    search(totals[0], none, none, none, none, 0, 0, none, counts, counts, np.empty(0))
    return time.perf_counter() - start
