"""Reading of G and g in tiles of columns, small enough for a converted copy of a tile to stay in cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from typing import Any

from gemproj._arrays import Array, to_numpy
from gemproj._problem import Problem

# Number of elements of G and g in a tile. On the CPU, the float64 copy of a tile stays in cache. On a device,
# large tiles take few kernel launches.
_HOST_TILE, _DEVICE_TILE = 1 << 17, 1 << 24


def tiles(problem: Problem) -> Iterator[tuple[int, tuple[Any, ...], tuple[Any, ...], int]]:
    """Yield (block, lead, at, size) for tiles that cover all columns, in order.

    ``vector[block][at]`` has `size` columns; `lead` selects from the batch. The number of columns in a
    tile does not depend on the batch, so sums over tiles have the same bits for every batch. With a
    shared G, a tile holds these columns of all gradients.
    """
    elements = _HOST_TILE if problem.host else _DEVICE_TILE
    vectors = math.prod(problem.batch) if problem.shared else 1
    columns = max(64, elements // (problem.t + max(1, vectors)))
    lead_dims = len(problem.batch)
    for k, vector in enumerate(problem.vector):
        for index, size in _cover(tuple(vector.shape[lead_dims:]), columns):
            if not problem.batch or problem.shared:
                yield k, (), (..., *index), size
                continue
            # A large batch is split along its first axis, to bound memory.
            inner = math.prod(problem.batch[1:]) * (problem.t + 1) * max(1, size)
            step = max(1, 8 * elements // max(1, inner))
            for start in range(0, problem.batch[0], step):
                lead = slice(start, min(start + step, problem.batch[0]))
                yield k, (lead,), (lead, ..., *index), size


def stacked(problem: Problem, dtype: Any) -> Iterator[tuple[tuple[Any, ...], Array]]:
    """Yield (lead, tile): the rows [G; g], (..., t + m, n), of each tile in `dtype`.

    m is 1, or with a shared G the number of gradients. With a metric w, G is divided and g multiplied
    by sqrt(w). On the CPU tiles are NumPy arrays, because NumPy's products have the same bits for any batch
    size. Each tile overwrites the memory of the previous tile.
    """
    xp, t, buffer = problem.xp, problem.t, None
    m = math.prod(problem.batch) if problem.shared else 1
    for k, lead, at, size in tiles(problem):
        vector = problem.vector[k][at]
        batch = () if problem.shared else tuple(vector.shape[: len(problem.batch)])
        if buffer is None or size > buffer.shape[-1] or buffer.shape[:-2] != batch:
            buffer = xp.empty((*batch, t + m, size), dtype=dtype, device=problem.device)
        tile = buffer[..., :size]
        tile[..., :t, :] = xp.reshape(problem.rows[k][at], (*batch, t, size))
        tile[..., t:, :] = xp.reshape(vector, (*batch, m, size))
        if problem.weight is not None:
            weight = xp.reshape(problem.weight[k][at], (*batch, size))
            root = xp.sqrt(xp.astype(weight, dtype))[..., None, :]
            tile[..., :t, :] /= root
            tile[..., t:, :] *= root
        if problem.host:
            tile = to_numpy(tile)
        yield lead, tile


def _cover(shape: tuple[int, ...], columns: int) -> Iterator[tuple[tuple[Any, ...], int]]:
    """Yield (index, size) for parts of about `columns` elements that cover an array of `shape`."""
    if not shape:
        yield (), 1
        return
    axis, inner = len(shape) - 1, 1
    while axis > 0 and inner * shape[axis] <= columns:
        inner *= shape[axis]
        axis -= 1
    step = max(1, columns // max(1, inner))
    tail = (slice(None),) * (len(shape) - axis - 1)
    for lead in product(*(range(n) for n in shape[:axis])):
        for start in range(0, shape[axis], step):
            stop = min(start + step, shape[axis])
            yield (*lead, slice(start, stop), *tail), (stop - start) * inner
