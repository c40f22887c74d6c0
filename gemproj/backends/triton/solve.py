"""Stage 2 on a CUDA device: the multipliers of every problem of a batch in one launch.

The answers, statuses and counts stay on the device; nothing here waits for it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from gemproj._constants import MOST_ROWS, MOST_SETS
from gemproj.backends.triton._active_set import search_active_set
from gemproj.backends.triton._blocks import processors
from gemproj.backends.triton._enumeration import enumerate_sets
from gemproj.backends.triton._first_order import descend
from gemproj.methods import FISTA, PGD, Exact, Method
from gemproj.methods._method import Outcome, Status

# Products are rounded before they are added, as in NumPy: the same decisions, to the last bit where sums
# have the same order.
_AS_NUMPY = {"enable_fp_fusion": False}


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
) -> Outcome:
    """Solve ``min 1/2 lam' K lam + b' lam`` over ``lower <= lam <= upper``, as ``method.solve`` does.

    Parameters
    ----------
    K, b : tensors, shapes (..., t, t) and (..., t), float64
    method : Exact, PGD or FISTA
        With its options.
    lower : tensor, shape (..., t), optional
        0, or -inf for rows that hold with equality; 0 by default.
    upper : float or tensor, shape (..., t), optional
    start : tensor, shape (..., t), optional
        Multipliers to start from, within the bounds. A search of all active sets needs none.

    Returns
    -------
    Outcome
        As from ``method.solve``; where these are not the same for all problems, iterations, status
        and resolution are tensors of shape (...).
    """
    with torch.cuda.device_of(b):  # Triton launches on the current device
        return _solve(K, b, method, lower, upper, start)


def _solve(
    K: Tensor,
    b: Tensor,
    method: Method,
    lower: Tensor | None,
    upper: float | Tensor | None,
    start: Tensor | None,
) -> Outcome:
    t, batch = b.shape[-1], b.shape[:-1]
    # The batch as one dimension: views, unless it has gaps.
    K, b = K.reshape(-1, t, t), b.reshape(-1, t)
    K = K if K.stride(-1) == 1 else K.contiguous()
    given = {"SIGNED": lower is not None, "BOUNDED": upper is not None}

    def rows_of(a: float | Tensor | None) -> Tensor:
        if a is None:
            return b  # not read
        if not isinstance(a, Tensor):  # a copy from the host would wait
            return torch.full(b.shape, a, dtype=b.dtype, device=b.device)
        return a.expand(*batch, t).reshape(-1, t).contiguous()

    lam = torch.empty(b.shape, dtype=b.dtype, device=b.device)
    problem = (K, K.stride(0), K.stride(1), b, b.stride(0), b.stride(1), rows_of(lower), rows_of(upper))
    first, started = rows_of(start), {"STARTED": start is not None}
    count = len(b)
    if isinstance(method, (PGD, FISTA)):
        if count:
            _descend(method, problem, first, lam, given | started)
        return Outcome(lam.reshape(*batch, t), method.steps, int(Status.APPROXIMATE))
    status = torch.empty(count, dtype=torch.int64, device=b.device)
    resolution = torch.empty(count, dtype=b.dtype, device=b.device)
    iterations: Any = 0
    sets = (2 if upper is None else 3) ** t
    if sets <= MOST_SETS:
        if count:
            rows, lanes = triton.next_power_of_2(t), triton.next_power_of_2(sets)
            warps = max(1, lanes // 32)  # a thread for each lane
            enumerate_sets[(count,)](
                *problem, lam, status, resolution, t, T=rows, SETS=lanes, **given, num_warps=warps,
                **_AS_NUMPY,
            )  # fmt: skip
    else:
        pivots = torch.empty(count, dtype=torch.int64, device=b.device)
        if count:
            rows = triton.next_power_of_2(t)
            programs = min(count, 4 * processors(b.device))
            workspace = torch.empty(programs * 2 * t * t, dtype=b.dtype, device=b.device)
            search_active_set[(programs,)](
                *problem, first, lam, pivots, status, resolution, workspace, count, t,
                T=rows, CHUNK=_chunk(rows), **given, **started, num_warps=_warps(rows),
                **_AS_NUMPY,
            )  # fmt: skip
        iterations = pivots.reshape(batch)
    return Outcome(lam.reshape(*batch, t), iterations, status.reshape(batch), resolution.reshape(batch))


def _descend(method: PGD | FISTA, problem: Any, first: Tensor, lam: Tensor, options: dict[str, bool]) -> None:
    count, t = lam.shape
    rows = triton.next_power_of_2(t)
    chunk = rows if rows <= 64 else _chunk(rows)
    programs = count if chunk == rows else min(count, 4 * processors(lam.device))
    size = 0 if chunk == rows else programs * t * t
    workspace = torch.empty(size, dtype=lam.dtype, device=lam.device)
    power = isinstance(method, PGD) and method.step_size == "power"
    descend[(programs,)](
        *problem, first, lam, workspace, count, t, method.steps,
        T=rows, CHUNK=chunk, **options, NORMALIZE=method.normalize,
        ACCELERATED=isinstance(method, FISTA), RESTART=isinstance(method, FISTA) and method.restart,
        POWER=method.power_iterations if isinstance(method, PGD) and power else 0,
        SAFETY=method.c if isinstance(method, PGD) and power else 1.0,
        num_warps=min(16, max(1, rows // 8)), **_AS_NUMPY,
    )  # fmt: skip


def _warps(rows: int) -> int:
    """Return one warp per 16 rows: with `_chunk`, eight numbers per thread in a piece of the tableau."""
    return min(16, max(1, rows // 16))


def _chunk(rows: int) -> int:
    """Return how many rows or columns of the tableau a program holds at once: 16 where it has so many."""
    return min(16, rows)
