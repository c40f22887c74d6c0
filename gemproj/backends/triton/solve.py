"""Stage 2 on a CUDA device: the multipliers of every problem of a batch in one launch.

The answers, statuses and counts stay on the device; nothing here waits for it. Products are rounded before
they are added (`enable_fp_fusion`), as in NumPy: the same decisions, to the last bit where sums have the same
order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gemproj._constants import MOST_ROWS, MOST_SETS
from gemproj.backends.triton._active_set import search_active_set
from gemproj.backends.triton._enumeration import enumerate_sets
from gemproj.backends.triton._first_order import descend
from gemproj.backends.triton._launch import launch
from gemproj.backends.triton._layout import power, processors
from gemproj.methods import FISTA, PGD, Exact, Method
from gemproj.methods._method import Outcome, Status

# Sets that one warp enumerates. More take all registers of a processor, so that many problems are searched
# instead, each by one warp.
_LANES = 32
# Warps of a processor that search at once: so many have enough registers up to 8 rows, 12 above.
_IN_FLIGHT = 16


def supports(method: Any, t: int) -> bool:
    """Return whether `solve` supports this method, for t rows."""
    return type(method) in (Exact, PGD, FISTA) and 1 <= t <= MOST_ROWS


def solve(
    K: Tensor,
    b: Tensor,
    *,
    method: Method,
    lower: Tensor | None = None,
    upper: float | Tensor | None = None,
    start: Tensor | None = None,
    only_multipliers: bool = False,
) -> Outcome:
    """Solve ``min 1/2 lam' K lam + b' lam`` over ``lower <= lam <= upper``, as ``method.solve`` does.

    Parameters
    ----------
    K, b : tensors, shapes (..., t, t) and (..., t), float64
        K may have fewer leading dimensions. A row that is not finite gets the multiplier zero.
    method : Exact, PGD or FISTA
        With its options.
    lower : tensor, shape (..., t), optional
        0, or -inf for rows that hold with equality; 0 by default.
    upper : float or tensor, shape (..., t), optional
    start : tensor, shape (..., t), optional
        Multipliers to start from, within the bounds. A search of all active sets needs none.
    only_multipliers : bool
        Whether the status may be missing, which takes a third of the time.

    Returns
    -------
    Outcome
        As from ``method.solve``, without resolution; where these are not the same for all problems,
        iterations and status are tensors of shape (...).
    """
    t, batch, device = b.shape[-1], b.shape[:-1], b.device
    if len(batch) > 1 or (batch and K.ndim == 2):  # the batch as one dimension: views, unless it has gaps
        K, b = K.expand(*batch, t, t).reshape(-1, t, t), b.reshape(-1, t)
    K = K if K.stride(-1) == 1 else K.contiguous()
    count = len(b) if batch else 1

    def rows_of(a: float | Tensor | None) -> Tensor:
        if a is None:
            return b  # not read
        if not isinstance(a, Tensor):  # a copy from the host would wait
            return torch.full((count, t), a, dtype=b.dtype, device=device)
        return a.expand(*batch, t).reshape(-1, t).contiguous()

    apart = (K.stride(0), b.stride(0)) if batch else (0, 0)
    problem = (K, apart[0], K.stride(-2), b, apart[1], b.stride(-1), rows_of(lower), rows_of(upper))
    lam = torch.empty((*batch, t), dtype=b.dtype, device=device)
    first, started = rows_of(start), start is not None
    given = lower is not None, upper is not None
    if isinstance(method, (PGD, FISTA)):
        if count:
            _descend(method, problem, first, lam, count, (*given, started))
        return Outcome(lam, method.steps, int(Status.APPROXIMATE))
    iterations: Any = 0
    status: Any = 0 if only_multipliers else torch.empty(batch, dtype=torch.int64, device=device)
    to = lam if only_multipliers else status  # not written
    sets = (2 if upper is None else 3) ** t
    if sets <= (MOST_SETS if count <= processors(device) else _LANES):
        if count:
            lanes = power(sets)
            constants = (power(t), lanes, *given, not only_multipliers)
            launch(enumerate_sets, count, (*problem, lam, to, t), constants,
                   device=device, num_warps=max(1, lanes // 32), enable_fp_fusion=False)  # fmt: skip
    else:
        iterations = torch.empty(batch, dtype=torch.int64, device=device)
        if count:
            rows = power(t)
            programs = min(count, _IN_FLIGHT // _warps(rows) * processors(device))
            workspace = torch.empty(programs * 2 * t * t, dtype=b.dtype, device=device)
            launch(search_active_set, programs, (*problem, first, lam, iterations, to, workspace, count, t),
                   (rows, _chunk(rows), *given, started, not only_multipliers),
                   device=device, num_warps=_warps(rows), enable_fp_fusion=False)  # fmt: skip
    return Outcome(lam, iterations, status)


def _descend(
    method: PGD | FISTA, problem: Any, first: Tensor, lam: Tensor, count: int, given: tuple[bool, ...]
) -> None:
    t = lam.shape[-1]
    rows = power(t)
    chunk = rows if rows <= 64 else _chunk(rows)
    programs = count if chunk == rows else min(count, 4 * processors(lam.device))
    size = 0 if chunk == rows else programs * t * t
    workspace = torch.empty(size, dtype=lam.dtype, device=lam.device)
    by_power = isinstance(method, PGD) and method.step_size == "power"
    constants = (
        rows, chunk, *given, method.normalize,
        isinstance(method, FISTA), isinstance(method, FISTA) and method.restart,
        method.power_iterations if isinstance(method, PGD) and by_power else 0,
        method.c if isinstance(method, PGD) and by_power else 1.0,
    )  # fmt: skip
    launch(descend, programs, (*problem, first, lam, workspace, count, t, method.steps), constants,
           device=lam.device, num_warps=min(16, max(1, rows // 8)), enable_fp_fusion=False)  # fmt: skip


def _warps(rows: int) -> int:
    """Return one warp per 16 rows: with `_chunk`, eight numbers per thread in a piece of the tableau."""
    return min(16, max(1, rows // 16))


def _chunk(rows: int) -> int:
    """Return how many rows or columns of the tableau a program holds at once: 16 where it has so many."""
    return min(16, rows)
