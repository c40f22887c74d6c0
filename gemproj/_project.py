"""Stage 3: the projected gradient; and the three stages in one call."""

from __future__ import annotations

import math
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
    is_recorded,
    note_written,
    read_out,
    read_problem,
    to_numpy,
)
from gemproj._derivative import record
from gemproj._dual import Options, read_options, read_start, solve_problem
from gemproj._gram import stacked_tiles
from gemproj._solution import DualSolution, from_units
from gemproj.compiled.addresses import table_of
from gemproj.kernels import stages_of
from gemproj.methods import AnyMethod
from gemproj.methods._method import clip


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
    (implicit differentiation on the active set; method "exact" only, and not twice). Under
    `torch.compile` it is one opaque operation, which does not break the graph.

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
    if is_recorded(g):
        from gemproj.torch.op import record_projection

        return record_projection(G, g, method, warm_start, margin, penalty, metric, out, check, refine)
    problem = read_problem(G, g, metric)
    options = read_options(method, margin, penalty, check, refine)
    # Checked before the work: an output that cannot be written is no result.
    target = None if out is None else read_out(out, problem)
    if problem.traced and out is not None:
        raise ValueError("out cannot be written while G, g or metric requires a gradient; detach them.")
    if problem.traced is None:
        if stages_of(problem) is not None and _launches(options, problem.t):
            return _project_on_device(problem, options, warm_start, out, target)
        if options.plain:
            x = _project_small(problem, warm_start, out, target)
            if x is not None:
                return x
    sol = solve_problem(problem, options, warm_start)
    x = project_problem(problem, sol, out, target)
    if problem.traced:
        return record(problem, sol.to(problem.xp, problem.device), x, options.method)
    return x


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
    lam = problem.take(lam)
    return combine_problem(problem, lam, out, target)


def _launches(options: Options, t: int) -> bool:
    """Tell whether each stage is one launch of a kernel, which leaves out rows that are not finite."""
    from gemproj.kernels.stages import solves

    plain = not (options.margin or options.refine or options.check)
    return plain and solves(options.method, t) and getattr(options.method, "normalize", True)


def _project_on_device(
    problem: Problem, options: Options, warm_start: Array | None, out: Any, target: list[Array] | None
) -> Any:
    """Three launches and nothing else: no certificate is made that nobody has asked for."""
    start = None if warm_start is None else clip(read_start(warm_start, problem), None)
    upper = None if options.penalty == math.inf else options.penalty
    kernels = stages_of(problem)
    K, b, _ = kernels.gram(problem)
    lam = kernels.solve(options.method, K, b, start, upper).multipliers
    return combine_problem(problem, lam, out, target)


def _project_small(problem: Problem, warm_start: Array | None, out: Any, target: list[Array] | None) -> Any:
    """Take the short way of `gemproj.compiled.express`; None where it ends."""
    table = table_of(problem)
    if table is None:
        return None
    from gemproj.compiled.express import applies, project_small

    if not applies(table):
        return None
    start = None if warm_start is None else read_start(warm_start, problem)
    x = [_empty(problem, v) for v in problem.vector] if target is None else target
    active = project_small(table, start, x)
    if active == 0:
        return _copy(problem, out, target)
    return None if active is None else _packed(problem, x, out)


def project_problem(problem: Problem, sol: DualSolution, out: Any, target: list[Array] | None) -> Any:
    """Stage 3 for a solution of this problem."""
    if sol.keep is not None:
        return _mix(problem, sol.keep, sol.multipliers, out, target)
    x = combine_problem(problem, sol.multipliers, out, target)
    if sol.factor is not None and all(v.dtype == problem.wide for v in problem.vector):
        _settle(problem, sol, problem.unpack(x))
    return x


def _mix(problem: Problem, keep: Array, lam: Array, out: Any, target: list[Array] | None) -> Any:
    """Return ``keep g + G'lam``."""
    x = [_empty(problem, v) for v in problem.vector] if target is None else target
    keep = problem.give(np.asarray(keep) if problem.host else keep)
    for a, v in zip(x, problem.vector, strict=True):
        a[...] = v
        a *= problem.xp.astype(keep[..., None] if problem.batch else keep, a.dtype)
    _add_rows(x, replace(problem, vector=x), lam)
    return _packed(problem, x, out)


def combine_problem(problem: Problem, lam: Array, out: Any, target: list[Array] | None) -> Any:
    """Stage 3 on checked arguments, one read of the active rows of G and of g."""
    if problem.host and not lam.any():
        return _copy(problem, out, target)
    x = [_empty(problem, v) for v in problem.vector] if target is None else target
    _add_rows(x, problem, lam)
    return _packed(problem, x, out)


def _packed(problem: Problem, x: list[Array], out: Any) -> Any:
    """Return x as the caller wants it."""
    if out is None:
        return problem.pack(x)
    for a in x:
        note_written(a)
    return out


def _empty(problem: Problem, vector: Array) -> Array:
    # A g that is repeated over a batch has strides that x should not have.
    if table_of(problem) is None:
        return problem.xp.empty_like(vector)
    return problem.xp.empty(tuple(vector.shape), dtype=vector.dtype, device=problem.device)


def _add_rows(x: list[Array], problem: Problem, lam: Array) -> None:
    """Write ``g + diag(1/w) G' lam`` into x."""
    kernels, table = stages_of(problem), table_of(problem)
    if kernels is not None and kernels.combine(problem, lam, x):
        return
    if table is not None and table.combine(lam, x):
        return
    if problem.large and problem.batch:
        for i in np.ndindex(problem.batch):
            _add_rows([a[(*i, ...)] for a in x], problem.at(i), lam[(*i, ...)])
        return
    with problem.in_full_precision():
        parts = _narrow_parts(problem, lam)
        if parts is None:
            _add_in_wide_tiles(x, problem, lam)
        else:
            _add_in_chunks(x, problem, parts)


def _add_in_wide_tiles(x: list[Array], problem: Problem, lam: Array) -> None:
    xp, lam = problem.xp, problem.give(lam)
    for k, lead, index, size in problem.tiles():
        tile, vector, piece = problem.rows[k][index], problem.vector[k][index], x[k][index]
        here = lam[(*lead, ...)]
        tile = xp.reshape(tile, (*here.shape, size))
        # Zero times what is not finite is not zero, and a row that was left out may hold that.
        tile = xp.where(here[..., None] != 0, xp.astype(tile, problem.wide), xp.zeros_like(here[..., None]))
        step = xp.reshape(_product(here[..., None, :], tile, problem), vector.shape)
        if problem.weight is not None:
            step = step / problem.weight[k][index]
        piece[...] = xp.astype(vector + step, piece.dtype)


def _add_in_chunks(x: list[Array], problem: Problem, parts: list[np.ndarray]) -> None:
    """Add rows in the dtype of x, part after part of lam; rows of multiplier zero are not read."""
    xp = problem.xp
    used, chosen = np.flatnonzero(parts[-1]), None
    if len(used) < problem.t:
        chosen = problem.give(used)
    given = [problem.give(part[used]) for part in parts]
    for k, _, index, size in problem.tiles(problem.tile):
        tile, piece = problem.rows[k][index], x[k][index]
        tile = tile if chosen is None else xp.take(tile, chosen, axis=0)
        tile = xp.reshape(tile, (tile.shape[0], size))
        piece[...] = problem.vector[k][index]
        for part in given:
            piece += xp.reshape(xp.matmul(part, tile), piece.shape)


def _product(left: Array, right: Array, problem: Problem) -> Array:
    """Multiply in float64; on the CPU by NumPy, which does it the same way whatever the size of the batch."""
    if not problem.host:
        return problem.xp.matmul(left, right)
    return from_numpy(np.matmul(to_numpy(left), to_numpy(right)), problem.xp, problem.device)


def _settle(problem: Problem, sol: DualSolution, x: list[Array]) -> None:
    """Take what rounding of large multipliers has left of ``G_P x`` out of x, for active rows P.

    Where rows nearly cancel, multipliers are large, and so is the rounding of ``g + G'lam``.
    """
    units = sol.units
    s = np.zeros(sol.multipliers.shape)
    for i in map(tuple, np.argwhere(sol.refined)):
        blocks = [a[(*i, ...)] for a in x]
        one = replace(problem.at(i), vector=blocks, weight=None)
        for _, tile in stacked_tiles(one, None if units is None else units[i]):
            s[i] += tile[:-1] @ tile[-1]
    # Rows that were left out hold what is not finite.
    s = np.where(np.isfinite(s), s, 0.0)
    step = from_units(-sol.solve_free(s), sol.units, check=False)
    _add_rows(x, replace(problem, vector=x), step)


def _narrow_parts(problem: Problem, lam: Array) -> list[np.ndarray] | None:
    """Split lam into summands of the dtype of G and g, smallest first, so that tiles need no conversion.

    In float32, lam = high + low to 48 bits: what remains is the rounding of the sum, not of lam.
    None where that does not work: other dtypes, a metric, or multipliers beyond the range.
    """
    if not problem.chunked or any(a.dtype != problem.narrow for a in [*problem.rows, *problem.vector]):
        return None
    if problem.narrow == problem.wide:
        return [lam]
    sizes = np.abs(lam)
    if not np.all((sizes == 0) | ((sizes > 1e-25) & (sizes < 1e30))):
        return None
    high = lam.astype(np.float32)
    return [(lam - high).astype(np.float32), high]


def _copy(problem: Problem, out: Any, target: list[Array] | None) -> Any:
    if target is None:
        return problem.pack(problem.vector)
    for to, v in zip(target, problem.vector, strict=True):
        if to is not v:
            to[...] = v
    return out
