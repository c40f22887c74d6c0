"""Stage 3: the projected gradient from the multipliers, in one read of G and g."""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from typing import Any

import numpy as np

from gemproj._arrays import Array, Blocks, empty_as, namespace, note_written
from gemproj._checks import check_multipliers
from gemproj._constants import MISSED
from gemproj._problem import Problem, check_out, check_problem
from gemproj._solution import DualSolution
from gemproj._tiles import stacked
from gemproj._tspace import inverse, times_rows
from gemproj.backends import select
from gemproj.methods import Status

_UNSETTLED = int(Status.STALLED | Status.UNRESOLVED)


def combine(
    G: Blocks, g: Blocks, multipliers: Array, *, metric: Blocks | None = None, out: Blocks | None = None
) -> Any:
    """Return ``x = g + G.T @ multipliers`` (``g + diag(1/w) @ G.T @ multipliers`` with a metric w).

    The sum is computed in float64 for every dtype of `g`, and x is rounded once. Rows with a zero multiplier
    may contain NaN or infinity.

    Parameters
    ----------
    G, g, metric, out
        As in `project`.
    multipliers : array, shape (..., t)
        Finite numbers; checked on the CPU.

    Returns
    -------
    array or blocks
        x, structured like `g`: `out`, or new arrays.

    Examples
    --------
    >>> import numpy as np
    >>> from gemproj import combine
    >>> combine(np.array([[1.0, 2.0]]), np.array([-1.0, 0.0]), np.array([0.5]))
    array([-0.5,  1. ])
    """
    problem = check_problem(G, g, metric)
    lam = check_multipliers(multipliers, "multipliers", *problem.like)
    if problem.host and not np.isfinite(lam).all():
        raise ValueError(f"multipliers must be finite; found {lam}.")
    x = blocks_for_x(problem, out)
    write_x(problem, lam, x)
    return as_asked(problem, x, out)


def combine_into(problem: Problem, sol: DualSolution, x: list[Array]) -> None:
    """Write the projected gradient of a solution to x, which may be g itself.

    If rows nearly cancel, the multipliers and the rounding of ``g + G'lam`` are large. For float64 arrays,
    the correction of the solution removes this rounding from x, so that ``G_P x = h_P`` for the free rows P.
    """
    write_x(problem, sol.multipliers, x)
    if sol._correction is None or any(v.dtype != problem.wide for v in problem.vector):
        return
    # The slacks of x do not depend on the metric, but the correction step does.
    moved, step, h = replace(problem, vector=x), np.zeros(sol.multipliers.shape), sol.bounds.h
    for i in map(tuple, np.argwhere(sol._correction.any(axis=(-3, -2, -1)))):
        s = slack_of(replace(moved.at(i), weight=None), step[i], None if h is None else h[i])
        first, second = sol._correction[i][::-1]
        step[i] = -second @ (first @ np.where(np.isfinite(s), s, 0.0))
    select(moved).combine(moved, step, x)


def warn_if_missed(sol: DualSolution) -> None:
    """On the CPU, warn if x violates the optimality conditions, because `project` returns no status."""
    if isinstance(sol._status, int) or not (sol._exact and isinstance(sol.multipliers, np.ndarray)):
        return  # the exact method returns a single int only if all problems are optimal
    status = sol.status
    if not np.count_nonzero(status):
        return
    stalled = (status & int(Status.STALLED)) != 0
    unsettled = stalled if sol.bounds.h is None else (status & _UNSETTLED) != 0
    # The violation of x also counts: nearly dependent rows have large multipliers with large rounding.
    missed = np.maximum(np.where(stalled, sol.kkt_residual(), 0.0), _violation(sol))
    worst = float(np.max(missed, where=unsettled, initial=0.0))
    if worst <= MISSED:
        return
    cause = (
        "constraints nearly contradict each other, or are nearly dependent. Check `status` and "
        "`kkt_residual` of `solve_dual`, or set a penalty."
    )
    if sol.bounds.equality is not None and sol.bounds.upper is not None:
        cause = "x may have lost digits to the large penalty of an equality. Lower or omit the penalty."
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("gemproj.", "torch.")):
        frame, level = frame.f_back, level + 1
    warnings.warn(
        f"The projection violates its optimality conditions by {worst:.0e} of the problem's size: {cause}",
        RuntimeWarning,
        stacklevel=level,
    )


def _violation(sol: DualSolution) -> np.ndarray:
    """Return the largest violation of constraints without a penalty, (...), divided by row norm and size."""
    s = sol.slack()
    s = np.where(np.isinf(sol.lower), np.abs(s), -s) * inverse(np.sqrt(np.diagonal(sol.gram.K, 0, -2, -1)))
    worst = np.max(s, axis=-1, where=np.isinf(sol.upper), initial=0.0)
    return worst * inverse(np.asarray(sol._size()))


def slack_of(problem: Problem, lam: Array, h: Array | None) -> Array:
    """Return ``G x - h`` for ``x = g + G'lam``, from one read of G and g."""
    xp = namespace(lam)
    s = xp.zeros_like(lam) if h is None else -h
    flat = (-1, problem.t) if problem.shared else (*lam.shape[:-1], 1, problem.t)
    weights = xp.reshape(lam, flat)
    total = xp.zeros_like(weights)
    with problem.without_autocast():
        for lead, tile in stacked(problem, problem.wide):
            part, G, g = weights[(*lead, ...)], tile[..., : problem.t, :], tile[..., problem.t :, :]
            x = g + times_rows(part, G)
            total[(*lead, ...)] += xp.matmul(x, xp.matrix_transpose(G))
    return s + xp.reshape(total, lam.shape)


def blocks_for_x(problem: Problem, out: Blocks | None = None) -> list[Array]:
    """Return the blocks for x: the checked blocks of `out`, or new arrays."""
    if out is not None:
        return check_out(out, problem)
    return [empty_as(v) for v in problem.vector]


def as_asked(problem: Problem, x: list[Array], out: Any = None) -> Any:
    """Return `out` if it is given, else the blocks of x in the same kind of container as g."""
    if out is not None:
        note_written(x)
        return out
    if problem.keys is None:
        return x[0]
    return problem.keys(x) if problem.keys in (list, tuple) else dict(zip(problem.keys, x, strict=True))


def write_x(problem: Problem, lam: Array, x: list[Array]) -> None:
    """Write ``g + G'lam`` to x; the multipliers are an array of t-space."""
    if problem.host and not np.count_nonzero(lam):
        for to, v in zip(x, problem.vector, strict=True):
            if to is not v:
                to[...] = v
        return
    select(problem).combine(problem, lam, x)
