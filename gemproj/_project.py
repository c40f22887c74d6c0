"""Stage 3: the projected gradient; and the three stages in one call."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from gemproj._array import (
    Array,
    Blocks,
    Problem,
    detach,
    from_numpy,
    is_real_floating,
    read_out,
    read_problem,
    to_numpy,
)
from gemproj._derivative import record
from gemproj._dual import read_options, solve_problem
from gemproj._gram import stacked_tiles
from gemproj._solution import DualSolution, from_units
from gemproj.methods import AnyMethod


def project(
    G: Blocks,
    g: Blocks,
    *,
    method: AnyMethod = "exact",
    warm_start: Array | None = None,
    margin: float = 0.0,
    penalty: float | None = None,
    metric: Blocks | None = None,
    out: Blocks | None = None,
    check: bool | None = None,
    refine: int | None = None,
) -> Any:
    """Project g onto the cone ``{x : G @ x >= 0}``: Gradient Episodic Memory's projection.

    ``argmin_x 1/2 |x - g|^2 subject to G @ x >= 0``, where row i of G is the gradient of the loss
    of an earlier task: to first order, a step along -x raises none of these losses.

    Parameters
    ----------
    G : array, shape (..., t, d), or blocks
        Constraint gradients as rows; leading dimensions are independent problems. Or a sequence or
        mapping of arrays ``G[k]`` of shape ``(t, *shape_k)``, with `g` alike: one problem.
    g : array, shape (..., d), or blocks
        The proposed gradient.
    method, warm_start, margin, penalty, metric, check, refine
        As in `solve_dual`.
    out : array or blocks, like `g`, optional
        Where to write x; ``out=g`` projects in place and allocates nothing of size d. Must not
        share memory with G, nor with g unless it is g.

    Returns
    -------
    array or blocks
        x, of the library, device, dtype and shape of `g`, in the container of `g`. Where all
        multipliers are zero that is `g` itself, not a copy (on the CPU).

    Notes
    -----
    Under torch's autograd, x has the derivative of the projection with respect to G, g and metric
    (implicit differentiation on the active set; method "exact" only, and not twice).

    Examples
    --------
    The gradient points against an earlier task in its first entry; the projection takes that away:

    >>> import numpy as np
    >>> from gemproj import project
    >>> project(np.array([[1.0, 0.0]]), np.array([-3.0, 1.0]))
    array([0., 1.])

    Blocks, as parameters come out of a model:

    >>> x = project([np.ones((1, 2, 2)), np.ones((1, 3))], [np.zeros((2, 2)), np.array([-7.0, 0.0, 0.0])])
    >>> x[0].tolist(), x[1].tolist()
    ([[1.0, 1.0], [1.0, 1.0]], [-6.0, 1.0, 1.0])
    """
    problem = read_problem(G, g, metric)
    options = read_options(method, margin, penalty, check, refine)
    # Checked before the work: an output that cannot be written is no result.
    target = None if out is None else read_out(out, problem)
    if problem.traced and out is not None:
        raise ValueError("out cannot be written while G, g or metric requires a gradient; detach them.")
    sol = solve_problem(problem, options, warm_start)
    x = project_problem(problem, sol, out, target)
    return record(problem, sol, x, options.method) if problem.traced else x


def combine(
    G: Blocks, g: Blocks, multipliers: Array, *, metric: Blocks | None = None, out: Blocks | None = None
) -> Any:
    """Return ``x = g + G.T @ multipliers`` (``g + diag(1/w) @ G.T @ multipliers`` with a metric w).

    Multipliers count in float64 to the end, whatever the dtype of `g`. Rows of large
    problems whose multiplier is zero are not read on the CPU.

    Parameters
    ----------
    G, g, metric, out
        As in `project`.
    multipliers : array, shape (..., t)

    Examples
    --------
    >>> import numpy as np
    >>> from gemproj import combine
    >>> combine(np.array([[1.0, 2.0]]), np.array([-1.0, 0.0]), np.array([0.5]))
    array([-0.5,  1. ])
    """
    problem = read_problem(G, g, metric)
    expected = (*problem.batch, problem.t)
    if tuple(getattr(multipliers, "shape", ())) != expected:
        raise ValueError(
            f"multipliers must be an array of shape {expected}, one per constraint; "
            f"found {tuple(getattr(multipliers, 'shape', ())) or type(multipliers).__name__}."
        )
    if not is_real_floating(multipliers):
        raise TypeError(f"multipliers must have a real floating-point dtype; found {multipliers.dtype}.")
    target = None if out is None else read_out(out, problem)
    lam = problem.xp.asarray(detach(multipliers), dtype=problem.wide, device=problem.device)
    return combine_problem(problem, lam, out, target)


def project_problem(problem: Problem, sol: DualSolution, out: Any, target: list[Array] | None) -> Any:
    """Stage 3 for a solution of this problem."""
    x = combine_problem(problem, sol.multipliers, out, target)
    if sol.factor is not None and all(v.dtype == problem.wide for v in problem.vector):
        _settle(problem, sol, problem.unpack(x))
    return x


def combine_problem(problem: Problem, lam: Array, out: Any, target: list[Array] | None) -> Any:
    """Stage 3 on checked arguments, one read of the active rows of G and of g."""
    if problem.host and not bool(problem.xp.any(lam != 0)):
        return _copy(problem, out, target)
    x = [problem.xp.empty_like(v) for v in problem.vector] if target is None else target
    with problem.in_full_precision():
        _add_rows(x, problem, lam)
    return problem.pack(x) if out is None else out


def _add_rows(x: list[Array], problem: Problem, lam: Array) -> None:
    """Write ``g + diag(1/w) G' lam`` into x, tile by tile."""
    if problem.large and problem.batch:
        for i in np.ndindex(problem.batch):
            _add_rows([a[(*i, ...)] for a in x], problem.at(i), lam[(*i, ...)])
        return
    xp, rows = problem.xp, None
    if problem.large:
        # Rows of multiplier zero need not be read.
        used = np.flatnonzero(to_numpy(lam))
        if len(used) < problem.t:
            rows = xp.asarray(used, device=problem.device)
            lam = xp.take(lam, rows, axis=-1)
    parts = _native_parts(problem, lam)
    for k, lead, index, size in problem.tiles(large=parts is not None):
        tile, vector, piece = problem.rows[k][index], problem.vector[k][index], x[k][index]
        if rows is not None:
            tile = xp.take(tile, rows, axis=len(problem.batch))
        here = lam[(*lead, ...)]
        tile = xp.reshape(tile, (*here.shape, size))
        if parts is not None:
            piece[...] = vector
            for part in parts:
                piece += xp.reshape(xp.matmul(part[..., None, :], tile), piece.shape)
            continue
        # Zero times what is not finite is not zero, and a row that was left out may hold that.
        tile = xp.where(here[..., None] != 0, xp.astype(tile, problem.wide), xp.zeros_like(here[..., None]))
        step = xp.reshape(_product(here[..., None, :], tile, problem), vector.shape)
        if problem.weight is not None:
            step = step / problem.weight[k][index]
        piece[...] = xp.astype(vector + step, piece.dtype)


def _product(left: Array, right: Array, problem: Problem) -> Array:
    """Multiply in float64; on the CPU by NumPy, which does it the same way whatever the size of the batch."""
    if not problem.host:
        return problem.xp.matmul(left, right)
    return from_numpy(np.matmul(to_numpy(left), to_numpy(right)), problem.xp, problem.device)


def _settle(problem: Problem, sol: DualSolution, x: list[Array]) -> None:
    """Take what rounding of large multipliers has left of ``G_P x`` out of x, for active rows P.

    Where rows nearly cancel, multipliers are large, and so is the rounding of ``g + G'lam``.
    """
    units = None if sol.units is None else to_numpy(sol.units)
    s = np.zeros(sol.multipliers.shape)
    for i in map(tuple, np.argwhere(to_numpy(sol.refined))):
        blocks = [a[(*i, ...)] for a in x]
        one = replace(problem.at(i), vector=blocks, weight=None)
        for _, tile in stacked_tiles(one, None if units is None else units[i]):
            s[i] += tile[:-1] @ tile[-1]
    # Rows that were left out hold what is not finite.
    s = from_numpy(np.where(np.isfinite(s), s, 0.0), problem.xp, problem.device)
    step = from_units(-sol.solve_free(s), sol.units, check=False)
    _add_rows(x, replace(problem, vector=x), step)


def _native_parts(problem: Problem, lam: Array) -> list[Array] | None:
    """Split lam into summands of the dtype of g, smallest first, so that tiles need no conversion.

    In float32, lam = high + low to 48 bits: what remains is the rounding of the sum, not of lam.
    None where that does not work: other dtypes, a metric, or multipliers beyond the range.
    """
    xp, dtype = problem.xp, problem.vector[0].dtype
    if not problem.native:
        return None
    if dtype == problem.wide:
        return [lam]
    sizes = np.abs(to_numpy(lam))
    if not np.all((sizes == 0) | ((sizes > 1e-25) & (sizes < 1e30))):
        return None
    high = xp.astype(lam, dtype)
    return [xp.astype(lam - xp.astype(high, problem.wide), dtype), high]


def _copy(problem: Problem, out: Any, target: list[Array] | None) -> Any:
    if target is None:
        return problem.pack(problem.vector)
    for to, v in zip(target, problem.vector, strict=True):
        if to is not v:
            to[...] = v
    return out
