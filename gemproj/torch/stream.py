"""Tile-by-tile reading of rows whose dtype differs from the dtype of the gradient.

As with shards, the Gram matrix of each tile is computed separately, and the Gram matrices are summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import reduce

import torch
from torch import Tensor

from gemproj._gram import measure
from gemproj._problem import Problem, check_problem
from gemproj._tspace import Gram, Measured

# Entries of a tile. Smaller tiles would stay in a CPU's cache, but the additional calls would cost more time.
_HOST_TILE, _DEVICE_TILE = 1 << 22, 1 << 26


class Stream:
    """The problems of projecting v in some columns, one per tile; every iteration reads the rows again."""

    def __init__(self, rows: Tensor, v: Tensor, weight: Tensor | None, columns: Sequence[slice]) -> None:
        self._rows, self._v, self._weight, self._columns = rows, v, weight, columns

    def __iter__(self) -> Iterator[Problem]:
        for at, tile in tiles(self._rows, self._v, self._columns):
            yield check_problem(tile, self._v[at], None if self._weight is None else self._weight[at])


def tiles(rows: Tensor, like: Tensor, columns: Iterable[slice]) -> Iterator[tuple[slice, Tensor]]:
    """Yield, for each tile of the columns, its slice and its rows, converted to the dtype of `like`.

    Each tile overwrites the previous tile. Without columns, there is one empty tile.
    """
    t = len(rows)
    size = (_HOST_TILE if like.device.type == "cpu" else _DEVICE_TILE) // max(t, 1)
    pieces = [
        slice(start, min(start + size, at.stop)) for at in columns for start in range(at.start, at.stop, size)
    ]
    pieces = pieces or [slice(0, 0)]
    buffer = torch.empty((t, max(at.stop - at.start for at in pieces)), dtype=like.dtype, device=like.device)
    for at in pieces:
        tile = buffer[:, : at.stop - at.start]
        yield at, tile.copy_(rows[:, at])


def measure_sum(problems: Iterable[Problem]) -> Measured:
    """Return the sum of the Gram matrices of problems on different columns of the same rows."""
    return reduce(_add, (measure(problem)._replace(rows=None) for problem in problems))


def _add(a: Measured, b: Measured) -> Measured:
    gram = Gram(*(one + other for one, other in zip(a.gram, b.gram, strict=True)))
    return a._replace(gram=gram, rounding=max(a.rounding, b.rounding))
