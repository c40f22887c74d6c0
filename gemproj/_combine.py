"""Stage 3: the projected gradient from the multipliers, in one read of G; in three if rows nearly cancel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from gemproj._arrays import Array, Blocks, empty_as, note_written, to_numpy
from gemproj._checks import check_multipliers
from gemproj._problem import Problem, check_out, check_problem
from gemproj._solution import DualSolution
from gemproj._tiles import stacked
from gemproj._tspace import inverse
from gemproj._warn import warn
from gemproj.backends import select
from gemproj.methods import Status

# Violation of the optimality conditions above which `project` warns that its result is not optimal.
MISSED = 1e-5


def combine(
    G: Blocks,
    g: Blocks,
    multipliers: Array | DualSolution,
    *,
    metric: Blocks | None = None,
    out: Blocks | None = None,
) -> Any:
    """Return ``x = g + G.T @ multipliers`` (``g + diag(1/w) @ G.T @ multipliers`` with a metric w).

    The sum is computed in float64 for every dtype of `g`, and x is rounded once. Rows with a zero multiplier
    may contain NaN or infinity.

    Parameters
    ----------
    G, g, metric, out
        As in `project`.
    multipliers : array, shape (..., t), or DualSolution
        Finite numbers; checked on the CPU. With the solution of `solve_dual`, x is that of `project`, bit for
        bit: if rows nearly cancel, the solution also holds what is taken out of x beyond ``G.T @
        multipliers``.

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
    sol = multipliers if isinstance(multipliers, DualSolution) else None
    lam = check_multipliers(multipliers if sol is None else sol.multipliers, "multipliers", *problem.like)
    if problem.host and not np.isfinite(lam).all():
        raise ValueError(f"multipliers must be finite; found {lam}.")
    return combined(problem, lam if sol is None else sol.on_host(), out, G)


def combined(problem: Problem, sol: DualSolution | Array, out: Blocks | None = None, G: Blocks = ()) -> Any:
    """Return `out` if it is given, else the blocks of x in the same kind of container as g."""
    x = empty_as(problem.vector) if out is None else check_out(out, G, problem)
    combine_into(problem, sol, x)
    if out is not None:
        note_written(x)
        return out
    if problem.keys is None:
        return x[0]
    return problem.keys(x) if problem.keys in (list, tuple) else dict(zip(problem.keys, x, strict=True))


def combine_into(problem: Problem, sol: DualSolution | Array, x: list[Array]) -> None:
    """Write the x of a solution, or of multipliers in t-space, to x, which may be g itself.

    If rows nearly cancel, the multipliers and the rounding of ``g + G'lam`` are large. For float64 arrays,
    the dual basis in the solution takes this rounding out of x, so that ``G_P x = h_P`` for the free rows P.
    """
    write_x(problem, sol.multipliers if isinstance(sol, DualSolution) else sol, x)
    if not isinstance(sol, DualSolution):
        return
    rows = sol._rows
    if rows is None or rows.loses is None or any(v.dtype != problem.wide for v in problem.vector):
        return
    # The slacks of x do not depend on the metric, but the step does.
    moved, s, h = replace(problem, vector=x), np.zeros(sol.multipliers.shape), sol.bounds.h
    for i in map(tuple, np.argwhere(rows.loses)):
        s[i] = 0.0 if h is None else -h[i]
        with problem.without_autocast():
            for _, tile in stacked(replace(moved.at(i), weight=None)):
                s[i] += to_numpy(tile[: problem.t, :] @ tile[problem.t, :])
    step = np.zeros(s.shape)
    step[rows.where] = rows.step(np.where(sol.free & np.isfinite(s), s, 0.0)[rows.where])
    write_x(moved, step, x)


def warn_if_missed(sol: DualSolution) -> None:
    """Warn if x violates the optimality conditions, because `project` returns no status."""
    if not (sol._exact and np.count_nonzero(sol.status)):
        return
    stalled = (sol.status & int(Status.STALLED)) != 0
    unsettled = stalled if sol.bounds.h is None else sol.status != 0
    # The violation of rows without a penalty, over their norm and the size. Multipliers of nearly dependent
    # rows have large rounding, which x need not have.
    s = np.where(np.isinf(sol.lower), np.abs(sol.slack()), -sol.slack())
    s = s * inverse(sol._norms()) * inverse(sol.size())[..., None]
    violation = np.max(s, axis=-1, where=np.isinf(sol.upper), initial=0.0)
    missed = np.maximum(np.where(stalled, sol.kkt_residual(), 0.0), violation)
    worst = float(np.max(missed, where=unsettled, initial=0.0))
    if worst <= MISSED:
        return
    cause = (
        "constraints nearly contradict each other, or are nearly dependent. Check `status` and "
        "`kkt_residual` of `solve_dual`, or set a penalty."
    )
    warn(
        f"The projection violates its optimality conditions by {worst:.0e} of the problem's size: {cause}",
        RuntimeWarning,
    )


def write_x(problem: Problem, lam: Array, x: list[Array]) -> None:
    """Write ``g + G'lam`` to x; the multipliers are an array of t-space."""
    if not problem.host:
        lam = problem.to_caller(lam)
    elif not np.count_nonzero(lam):
        for to, v in zip(x, problem.vector, strict=True):
            if to is not v:
                to[...] = v
        return
    select(problem).combine(problem, lam, x)
