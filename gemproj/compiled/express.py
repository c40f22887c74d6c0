"""All three stages in a row, for problems so small that what stands between the stages is what costs."""

from __future__ import annotations

import numpy as np

from gemproj._array import Array
from gemproj.compiled.addresses import PIECE, WIDE_CHUNK, WIDE_RANGE, AddressTable
from gemproj.compiled.loops import add_products, add_rows
from gemproj.compiled.search import search
from gemproj.methods.exact import CLOSE

_SUMS = np.empty(0)
_NONE = np.empty((0, 0))


def applies(table: AddressTable) -> bool:
    """Tell whether each problem is one piece, and all of them are little work."""
    return table.pieces == 1 and table.wide and table.small and table.t > 0


def project_small(table: AddressTable, start: np.ndarray | None, x: list[Array]) -> int | None:
    """Project exactly if everything is as usual: write x, and return the number of active constraints.

    None, and nothing written, where the stages have to look closer: rows of norm zero or near the ends
    of the range, not finite, or not far apart. If no constraint is active nothing is written either.
    """
    t = table.t
    count, lines, blocks, like = table.problems, table.lines, table.blocks, table.like
    sums = np.zeros((count, 1, t + 1, t + 1))
    add_products(lines, blocks, 0, count, 1, PIECE, WIDE_CHUNK, like, _SUMS, sums)
    starts = _NONE if start is None else np.ascontiguousarray(start, dtype=np.float64).reshape(-1, t)
    lam, pivots = np.empty((count, t)), np.empty(count, dtype=np.int64)
    status, apart = np.empty(count, dtype=np.int64), np.empty(count)
    totals = sums.reshape(count, t + 1, t + 1)
    if search(totals, starts, _NONE, _NONE, 0, count, *WIDE_RANGE, CLOSE, lam, pivots, status, apart):
        return None
    active = int(np.count_nonzero(lam))
    if active:
        if not table.write_to(x):
            return None
        add_rows(lines, blocks, 0, count, 1, PIECE, False, like, lam)
    return active
