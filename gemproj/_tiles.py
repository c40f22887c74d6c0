"""Reading of G and g in tiles of columns, small enough for a converted copy of a tile to stay in cache."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from gemproj._arrays import Array
from gemproj._problem import Problem

# Number of elements of G and g in a tile. On the CPU, the float64 copy of a tile stays in cache. On a device,
# large tiles take few kernel launches.
_HOST_TILE, _DEVICE_TILE = 1 << 17, 1 << 24


def tiles(problem: Problem) -> Iterator[tuple[int, tuple[Any, ...], tuple[Any, ...], list[Array]]]:
    """Yield (block, lead, at, [G, g, metric]) for tiles that cover all columns, in order.

    A tile is part `at` of the block with one axis of columns: a view, or a copy if its entries are not in
    row-major order. `lead` selects from the batch, and there is a metric only if the problem has one. The
    number of columns in a tile does not depend on the batch, so sums over tiles have the same bits for every
    batch. With a shared G, a tile holds these columns of all gradients.
    """
    xp, t, batch, shared = problem.xp, problem.t, problem.batch, problem.shared
    elements, outer = _HOST_TILE if problem.host else _DEVICE_TILE, () if shared else batch
    columns = max(64, elements // (t + max(1, math.prod(batch) if shared else 1)))
    arrays = zip(
        problem.rows, problem.vector, *([] if problem.weight is None else [problem.weight]), strict=True
    )
    for k, (size, block) in enumerate(zip(problem.sizes, arrays, strict=True)):
        shapes = (*outer, t, size), (*batch, size), (*outer, size)
        whole = [xp.reshape(a, shape) for a, shape in zip(block, shapes, strict=False)]
        for start in range(0, size, columns):
            at = slice(start, min(start + columns, size))
            # A large batch is split along its first axis, to bound memory: alike for all tiles.
            step = max(1, 8 * elements // max(1, math.prod(outer[1:]) * (t + 1) * min(columns, size)))
            leads = (
                [(slice(i, min(i + step, outer[0])),) for i in range(0, outer[0], step)] if outer else [()]
            )
            for lead in leads:
                yield k, lead, (*lead, ..., at), [a[(*lead, ..., at)] for a in whole]


def stacked(problem: Problem) -> Iterator[tuple[tuple[Any, ...], Array]]:
    """Yield (lead, tile): the rows [G; g], (..., t + m, n), of each tile in float64.

    m is 1, or with a shared G the number of gradients. With a metric w, G is divided and g multiplied
    by sqrt(w). On the CPU tiles are NumPy arrays, because NumPy's products have the same bits for any batch
    size. Each tile overwrites the memory of the previous tile.
    """
    xp, dtype, t, buffer = problem.xp, problem.wide, problem.t, None
    m = math.prod(problem.batch) if problem.shared else 1
    for _, lead, _, (rows, vector, *weight) in tiles(problem):
        batch, size = tuple(rows.shape[:-2]), rows.shape[-1]
        if buffer is None or size > buffer.shape[-1] or buffer.shape[:-2] != batch:
            buffer = xp.empty((*batch, t + m, size), dtype=dtype, device=problem.device)
        tile = buffer[..., :size]
        tile[..., :t, :] = rows
        tile[..., t:, :] = xp.reshape(vector, (*batch, m, size))
        if weight:
            root = xp.sqrt(xp.astype(weight[0], dtype))[..., None, :]
            tile[..., :t, :] /= root
            tile[..., t:, :] *= root
        yield lead, problem.to_host(tile)
