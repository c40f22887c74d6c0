"""Stage 3: the projected gradient; and the three stages in one call."""

from __future__ import annotations

from typing import Any

import numpy as np

from gemproj._array import (
    Array,
    Blocks,
    Problem,
    detach,
    is_real_floating,
    read_out,
    read_problem,
    to_numpy,
)
from gemproj._dual import read_options, solve_gram
from gemproj._gram import problem_gram
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
    method, warm_start, margin, penalty, metric, check
        As in `solve_dual`.
    out : array or blocks, like `g`, optional
        Where to write x; ``out=g`` projects in place and allocates nothing of size d. Must not
        share memory with G, nor with g unless it is g.

    Returns
    -------
    array or blocks
        x, of the library, device, dtype and shape of `g`, in the container of `g`. Where all
        multipliers are zero that is `g` itself, not a copy (on the CPU). Gradients do not flow
        through it.

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
    options = read_options(method, margin, penalty, check)
    # Checked before the work: an output that cannot be written is no result.
    target = None if out is None else read_out(out, problem)
    gram, rounding = problem_gram(problem)
    sol = solve_gram(gram, rounding, *options, warm_start=warm_start)
    return combine_problem(problem, sol.multipliers, out, target)


def combine(
    G: Blocks, g: Blocks, multipliers: Array, *, metric: Blocks | None = None, out: Blocks | None = None
) -> Any:
    """Return ``x = g + G.T @ multipliers`` (``g + diag(1/w) @ G.T @ multipliers`` with a metric w).

    Multipliers count in float64 to the end, whatever the dtype of `g`. Rows with multiplier zero
    are not read on the CPU.

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


def combine_problem(problem: Problem, lam: Array, out: Any, target: list[Array] | None) -> Any:
    """Stage 3 on checked arguments, one read of the active rows of G and of g."""
    xp, t = problem.xp, problem.t
    rows: Any = None
    if problem.host:
        used = np.flatnonzero(np.any(to_numpy(lam) != 0, axis=tuple(range(lam.ndim - 1))))
        if len(used) == 0:
            return _copy(problem, out, target)
        if len(used) < t:
            rows = xp.asarray(used, device=problem.device)
            lam = xp.take(lam, rows, axis=-1)
    x = [xp.empty_like(v) for v in problem.vector] if target is None else target
    with problem.in_full_precision():
        _add_rows(x, problem, rows, lam)
    return problem.pack(x) if out is None else out


def _add_rows(x: list[Array], problem: Problem, rows: Array | None, lam: Array) -> None:
    """Write ``g + diag(1/w) G[rows]' lam`` into x, tile by tile."""
    xp = problem.xp
    parts = _native_parts(problem, lam)
    for k, index, size in problem.tiles(large=parts is not None):
        tile, vector, piece = problem.rows[k][index], problem.vector[k][index], x[k][index]
        if rows is not None:
            tile = xp.take(tile, rows, axis=len(problem.batch))
        tile = xp.reshape(tile, (*problem.batch, lam.shape[-1], size))
        if parts is not None:
            piece[...] = vector
            for part in parts:
                piece += xp.reshape(xp.matmul(part[..., None, :], tile), piece.shape)
            continue
        tile = xp.astype(tile, problem.wide)
        if not problem.host:
            # Zero times what is not finite is not zero, and a row that was left out may hold that.
            tile = xp.where(lam[..., None] != 0, tile, xp.zeros_like(tile))
        step = xp.reshape(xp.matmul(lam[..., None, :], tile), vector.shape)
        if problem.weight is not None:
            step = step / problem.weight[k][index]
        piece[...] = xp.astype(vector + step, piece.dtype)


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
