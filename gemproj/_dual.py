"""Stage 2: multipliers of the constraints, from t-space numbers alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import array_api_compat
import numpy as np

from gemproj._array import (
    Array,
    Blocks,
    Problem,
    detach,
    device_of,
    is_real_floating,
    namespace,
    on_host,
    read_problem,
    to_numpy,
)
from gemproj._gram import Gram, Measured, measure
from gemproj._refine import refine_directly, return_to_rows
from gemproj._solution import DualSolution, from_units, in_units, shift
from gemproj.kernels import available
from gemproj.methods import AnyMethod, Equality, Exact, Method, Status, find
from gemproj.methods._method import check_count, check_number, clip, snap


class Options(NamedTuple):
    """The checked options of a projection, none of which depends on its data."""

    method: Any
    margin: float = 0.0
    penalty: float = math.inf
    check: bool | None = None
    refine: int | None = None

    @property
    def plain(self) -> bool:
        """Whether this is the exact projection onto the cone, without anything else."""
        return type(self.method) is Exact and not (
            self.margin or self.penalty < math.inf or self.refine is not None
        )


def solve_dual(
    G: Blocks,
    g: Blocks,
    *,
    method: AnyMethod = "exact",
    warm_start: Array | None = None,
    margin: float = 0.0,
    penalty: float | None = None,
    metric: Blocks | None = None,
    check: bool | None = None,
    refine: int | None = None,
) -> DualSolution:
    """Solve the dual of the projection: ``min 1/2 lam'K lam + b'lam`` over ``margin <= lam <= penalty``.

    Parameters
    ----------
    G : array, shape (..., t, d), or blocks
        Constraint gradients as rows; leading dimensions are independent problems. Or a sequence or
        mapping of arrays ``G[k]`` of shape ``(t, *shape_k)``, with `g` alike: one problem.
    g : array, shape (..., d), or blocks
        The proposed gradient.
    method : str, Method or callable, default "exact"
        "exact", "pgd", "fista", "agem", "sgem", "quadprog", "osqp", "gem2017" or "equality"; an object
        such as ``PGD(steps=5)`` or ``MEGA1(loss=0.3, reference_loss=1.2)``; or any callable
        ``(K, b, warm_start) -> multipliers``.
    warm_start : array, shape (..., t), optional
        Multipliers of an earlier, similar problem. Values outside the bounds are moved into them.
    margin : float, default 0
        GEM's memory strength: a lower bound of every multiplier, which is the projection of
        ``g + margin * G.sum(0)``. (Not a slack on ``G @ x``.)
    penalty : float, optional
        Hinge penalties ``penalty * sum(max(0, -G @ x))`` instead of hard constraints, as in
        SOFT-GEM: an upper bound of every multiplier.
    metric : array or blocks, shaped like `g`, optional
        Positive weights w of the distance ``sum(w * (x - g)**2)``.
    check : bool, optional
        Whether to look for rows that are not finite and raise. By default that is done on the CPU
        only, since looking stops a device. Otherwise such a row is left out and `status` says so.
    refine : int, optional
        How often to recompute ``s = G x`` from G and correct the multipliers by it, for rows so
        nearly dependent that K has lost digits; one more read of G each. By default none, except
        that on the CPU method "exact" goes back to a factorisation of G where, and only where, it
        finds that digits were lost. 0 forbids that.

    Returns
    -------
    DualSolution

    Raises
    ------
    TypeError, ValueError
        For arguments that do not fit together, naming the argument and what was found, and for
        rows that are not finite, naming the row.

    Examples
    --------
    >>> import numpy as np
    >>> from gemproj import solve_dual
    >>> sol = solve_dual(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([-3.0, 1.0]))
    >>> sol.multipliers, sol.active
    (array([3., 0.]), array([ True, False]))
    >>> float(sol.kkt_residual()), float(sol.duality_gap())
    (0.0, 0.0)
    """
    problem = read_problem(G, g, metric)
    options = read_options(method, margin, penalty, check, refine)
    return solve_problem(problem, options, warm_start, certify=True).to(problem.xp, problem.device)


# The options of `project(G, g)` and of the other names.
_named: dict[str, Options] = {}


def read_options(
    method: AnyMethod,
    margin: float = 0.0,
    penalty: float | None = None,
    check: bool | None = None,
    refine: int | None = None,
) -> Options:
    """Check the options that do not depend on the data."""
    usual = type(margin) is float and margin == 0.0 and penalty is None and check is None and refine is None
    if usual and type(method) is str and method in _named:
        return _named[method]
    found = find(method)
    check_number(margin, "margin", 0.0)
    if penalty is not None and penalty != math.inf:
        check_number(penalty, "penalty", 0.0)
        if penalty < margin:
            raise ValueError(f"penalty must be at least margin, {margin}; found {penalty}.")
    upper = math.inf if penalty is None else float(penalty)
    accepts = found.accepts if isinstance(found, Method) else {"margin"}
    for name, given in (("margin", margin > 0), ("penalty", upper < math.inf), ("refine", bool(refine))):
        if given and name not in accepts:
            raise ValueError(f"{name} cannot be combined with method {found!r}, which does not take it.")
    if refine is not None:
        check_count(refine, "refine", 0)
    options = Options(found, float(margin), upper, check, refine)
    if usual and type(method) is str:
        _named[method] = options
    return options


def solve_problem(
    problem: Problem,
    options: Options,
    warm_start: Array | None = None,
    *,
    certify: bool = False,
    total: Callable[[Measured], Measured] | None = None,
) -> DualSolution:
    """Stages 1 and 2, and the way back to G where its Gram matrix does not suffice.

    On the CPU all t-space arrays are NumPy's until `Problem.give` hands them out: a call costs a fifth
    of torch's. With `certify`, methods that are approximate by design also keep a factorisation of G
    where their certificates would need it. `total` adds what other processes have measured, whose
    columns of G cannot be returned to.
    """
    start = None if warm_start is None else read_start(warm_start, problem)
    measured = measure(problem) if total is None else total(measure(problem))
    sol = solve_gram(measured, _for_library(options, problem), start)
    if total is not None:
        return sol
    if options.refine:
        return refine_directly(problem, sol, options.refine)
    solved = sol.equality or isinstance(options.method, Exact)
    wanted = options.refine is None and sol.keep is None and (certify or solved)
    return return_to_rows(problem, sol, options) if wanted and problem.host and problem.t else sol


def solve_gram(measured: Measured, options: Options, warm_start: Array | None = None) -> DualSolution:
    """Stage 2 on its own: solve for a Gram matrix that was computed, or summed over ranks, before."""
    gram, units = measured.gram, measured.units
    method, margin, penalty, check, _ = options
    xp, device = namespace(gram.K), device_of(gram.K)
    host, dropped = on_host(device), None
    if measured.finite:
        pass
    elif check or (check is None and host):
        _raise_if_not_finite(gram)
    else:
        gram, dropped = _drop_not_finite(gram)
    K, b, gg, upper = shift(gram, margin, penalty, units)
    if margin and host and check is not False and not bool(xp.all(xp.isfinite(gg))):
        raise ValueError(f"margin, {margin}, times the rows of G is too large beside g: scale G and g alike.")
    start = None if warm_start is None else clip(in_units(warm_start - margin, units), upper)
    resolution: Array | None = None
    keep: Array | None = None
    if isinstance(method, Method):
        solve: Any = method.solve
        if "gg" in method.accepts:
            solve = partial(solve, gg=gg)
        if not host and available(device):
            from gemproj.kernels import stages

            if stages.solves(method, b.shape[-1]):
                solve = partial(stages.solve, method)
        lam, iterations, status, resolution, keep = solve(K, b, start, upper)
    else:
        lam, iterations, status = method(K, b, start), 0, int(Status.APPROXIMATE)
    if isinstance(status, int):
        status = xp.full(gram.gg.shape, status, dtype=xp.int64, device=device)
    if keep is not None and units is not None:
        raise ValueError(f"Norms of G or g are beyond the range of method {method!r}: scale G and g alike.")
    lam = from_units(lam, units, check=host and check is not False)
    lam = lam + margin if margin else lam
    if upper is not None:  # the bound holds to the last bit, not to the rounding of its scale
        lam = snap(lam, xp.full_like(lam, penalty))
    if dropped is not None:
        lam = xp.where(dropped, xp.zeros_like(lam), lam)
        status = status + xp.astype(xp.any(dropped, axis=-1), status.dtype) * int(Status.ROW_DROPPED)
    return DualSolution(
        lam,
        *gram,
        margin,
        penalty,
        iterations,
        status,
        measured.rounding,
        units,
        resolution,
        keep=keep,
        equality=isinstance(method, Equality),
    )


def _for_library(options: Options, problem: Problem) -> Options:
    """Let a function of the user see arrays of the library it was called with."""
    if isinstance(options.method, Method):
        return options

    def method(K: Array, b: Array, start: Array | None) -> Array:
        # Copies, because a function may work in place, and the solution keeps K and b.
        K, b, start = problem.give(K + 0.0), problem.give(b + 0.0), problem.give(start)
        return problem.take(_read_multipliers(options.method(K, b, start), b, options.method))

    return options._replace(method=method)


def read_start(warm_start: Array, problem: Problem) -> Array:
    if not array_api_compat.is_array_api_obj(warm_start):
        raise TypeError(f"warm_start must be an array of multipliers; found {type(warm_start).__name__}.")
    expected = (*problem.batch, problem.t)
    if tuple(warm_start.shape) != expected:
        raise ValueError(
            f"warm_start must have shape {expected}, one multiplier per constraint; "
            f"found {tuple(warm_start.shape)}. Start afresh when the constraints change in number."
        )
    if namespace(warm_start) is not problem.xp:
        raise TypeError(
            f"warm_start must be of the library of G, {type(problem.vector[0]).__name__}; "
            f"found {type(warm_start).__name__}."
        )
    if not is_real_floating(warm_start):
        raise TypeError(f"warm_start must have a real floating-point dtype; found {warm_start.dtype}.")
    start = problem.take(problem.xp.astype(detach(warm_start), problem.wide, copy=False))
    xp = namespace(start)
    return xp.where(xp.isfinite(start), start, xp.zeros_like(start))


def _raise_if_not_finite(gram: Gram) -> None:
    K, b, gg = (to_numpy(a) for a in gram)
    if np.isfinite(K).all() and np.isfinite(b).all() and np.isfinite(gg).all():
        return
    cause = "which holds NaN or infinity, or numbers whose squares overflow"
    for i in np.ndindex(gg.shape):
        where = f" of problem {i if len(i) > 1 else i[0]}" if i else ""
        rows = np.flatnonzero(~np.isfinite(np.diagonal(K[i])))
        if len(rows):
            raise ValueError(f"G is not finite: row {', '.join(map(str, rows))}{where}, {cause}.")
        if not np.isfinite(gg[i]):
            raise ValueError(f"g is not finite{': problem' + where[11:] if where else ''}, {cause}.")
        if not (np.isfinite(K[i]).all() and np.isfinite(b[i]).all()):
            raise ValueError(
                f"G and g are too large{where}: products of their entries overflow. Scale them down."
            )


def _drop_not_finite(gram: Gram) -> tuple[Gram, Array]:
    """Take rows that are not finite out of the problem without looking at them."""
    K, b, gg = gram
    xp = namespace(K)
    # If g is not finite no row can be judged: all are left out and x is g.
    bad = ~xp.isfinite(xp.linalg.diagonal(K)) | ~xp.isfinite(gg)[..., None] | ~xp.isfinite(b)
    K = xp.where(bad[..., :, None] | bad[..., None, :], xp.zeros_like(K), K)
    return Gram(K, xp.where(bad, xp.zeros_like(b), b), gg), bad


def _read_multipliers(lam: Any, b: Array, method: Any) -> Array:
    xp = namespace(b)
    if not isinstance(lam, type(b)) or tuple(lam.shape) != tuple(b.shape):
        found = f"{type(lam).__name__} of shape {tuple(lam.shape)}" if hasattr(lam, "shape") else repr(lam)
        raise ValueError(
            f"method {method!r} must return multipliers of the type and shape of b, "
            f"{type(b).__name__} {tuple(b.shape)}; found {found}."
        )
    lam = xp.astype(detach(lam), b.dtype, copy=False)
    if on_host(device_of(b)) and not bool(xp.all(xp.isfinite(lam))):
        raise ValueError(f"method {method!r} returned multipliers that are not finite: {lam}.")
    return lam
