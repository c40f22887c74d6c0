"""Stage 2: the multipliers of the constraints, from K, b and |g|^2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from gemproj._arrays import Array, Blocks, device_of, from_numpy, namespace
from gemproj._bounds import PLAIN, Bounds, Options, check_options, make_bounds, overstepped, standard_form
from gemproj._checks import check_multipliers
from gemproj._constants import EPS, LOOSE, OPTIMAL_WITHIN, REACH, WIDE_ROUNDING, WIDER
from gemproj._feasibility import cancelled_by_penalty, infeasible, refuse_infeasible
from gemproj._gram import check_gram, check_range, measure
from gemproj._problem import check_problem
from gemproj._refine import ill_conditioned, refine_directly, return_to_rows, uncertified
from gemproj._solution import DualSolution
from gemproj._tspace import Gram, Measured, Standard, clip, matvec, normalise, snap
from gemproj.backends import stage_two
from gemproj.methods import AnyMethod, Exact, Method, Outcome, Status
from gemproj.methods._method import call, exact_status
from gemproj.methods.exact import enumerable


def solve_dual(
    G: Blocks,
    g: Blocks,
    *,
    method: AnyMethod = "exact",
    h: Array | None = None,
    margin: float | Array = 0.0,
    penalty: float | Array | None = None,
    equality: bool | Array = False,
    metric: Blocks | None = None,
    warm_start: Array | None = None,
) -> DualSolution:
    """Return the multipliers of the projection of g onto ``{x : G @ x >= h}``, with their certificates.

    The multipliers solve the dual problem, ``min 1/2 lam'K lam + (b - h)'lam, lower <= lam <= upper``, with
    ``K = G G'`` and ``b = G g``. This function takes G and g; `solve_gram` takes K and b.

    Parameters
    ----------
    G : array, shape (..., t, d), or blocks
        Constraint gradients as rows; leading dimensions are independent problems. Or one problem in
        blocks: a sequence or mapping of arrays ``G[k]`` of shape ``(t, *shape_k)``, and `g` likewise.
    g : array, shape (..., d), or blocks
        The proposed gradient. Leading dimensions of G and g are broadcast; for many gradients (m, d) and
        one G (t, d), K is computed once.
    method : str, Method or callable, default "exact"
        "exact", "pgd", "fista", "agem", "quadprog", "osqp" or "gem2017"; an object such as
        ``PGD(steps=5)``; or any callable ``(K, b, warm_start) -> multipliers``.
    h : array, shape (..., t), optional
        Right-hand side. To first order, a negative entry allows the loss of its row to rise, and a positive
        entry requires the loss to fall. A positive h can be infeasible.
    margin : float or array, shape (..., t), default 0
        GEM's memory strength: a lower bound on the multipliers. The result is the projection of
        ``g + G.T @ margin``. Equality constraints ignore it.
    penalty : float or array, shape (..., t), optional
        Hinge penalties ``penalty * max(0, h - G @ x)`` instead of hard constraints. The penalty is an upper
        bound on the multipliers. Equality constraints get ``penalty * |G @ x - h|``.
    equality : bool or array of bool, shape (..., t), default False
        True for rows with the constraint ``G @ x = h``. Their multipliers may have any sign.
    metric : array or blocks, shaped like `g`, optional
        Positive weights w of the distance ``sum(w * (x - g)**2)``.
    warm_start : array, shape (..., t), optional
        Multipliers of an earlier, similar problem, clipped to the bounds.

    Returns
    -------
    DualSolution

    Raises
    ------
    TypeError, ValueError
        If arguments do not fit together; the message names the argument and what was found. On the CPU, also
        if rows are not finite or, with method "exact", h is infeasible; the message names the rows. On a
        device the status has a flag for each of these cases. Other methods do not test h; if h is
        infeasible, their status is ``STALLED`` or ``APPROXIMATE``, or ``OPTIMAL`` for zero rows.

    Examples
    --------
    >>> import numpy as np
    >>> from gemproj import solve_dual
    >>> sol = solve_dual(np.array([[1.0, 0.0], [0.0, 1.0]]), np.array([-3.0, 1.0]))
    >>> sol.multipliers, sol.active
    (array([3., 0.]), array([ True, False]))
    >>> float(sol.kkt_residual()), float(sol.duality_gap())
    (0.0, 0.0)

    An equality, and a constraint with a positive right-hand side:

    >>> G, g = np.eye(2), np.array([2.0, 0.5])
    >>> equality, h = np.array([True, False]), np.array([0.0, 1.0])
    >>> solve_dual(G, g, equality=equality, h=h).multipliers
    array([-2. ,  0.5])
    """
    problem = check_problem(G, g, metric)
    options = check_options(method, h=h, margin=margin, penalty=penalty, equality=equality)
    start = None if warm_start is None else check_multipliers(warm_start, "warm_start", *problem.like)
    sol = solve(measure(problem), options, start)
    # Certificates need a more accurate K than multipliers do.
    chosen = uncertified(sol) if problem.host and problem.t else None
    if chosen is not None and np.count_nonzero(chosen):
        sol = return_to_rows(problem, sol, chosen)
    return sol.to(problem.to_caller)


def solve_gram(
    K: Array,
    b: Array,
    gg: Array | None = None,
    *,
    method: AnyMethod = "exact",
    h: Array | None = None,
    margin: float | Array = 0.0,
    penalty: float | Array | None = None,
    equality: bool | Array = False,
    warm_start: Array | None = None,
) -> DualSolution:
    """Return the multipliers of a problem given by ``K = G G'`` and ``b = G g``, as `solve_dual` does.

    Parameters
    ----------
    K : array, shape (..., t, t)
        Gram matrix, symmetric positive semidefinite. (For a constraint matrix use `solve_dual`.)
    b : array, shape (..., t)
        Linear term; leading dimensions of K and b are broadcast. For many linear terms (m, t) and one K
        (t, t), K is stored once.
    gg : array, shape (...), optional
        Squared norm of g, to which certificates are relative. The default is its lower bound
        ``max(b_i^2 / K_ii)``. Without a margin, certificates are then never smaller than for the
        true norm.
    method, h, margin, penalty, equality, warm_start
        As in `solve_dual`.

    Returns
    -------
    DualSolution
        Certificates include the rounding of the narrower dtype of K and b. They do not include larger errors
        from computing K and b, such as those of float32 sums; the certificates of `solve_dual` do.

    Examples
    --------
    >>> import numpy as np
    >>> from gemproj import solve_gram
    >>> K, b = np.array([[2.0, 1.0], [1.0, 2.0]]), np.array([[-1.0, 1.0], [1.0, -1.0]])
    >>> solve_gram(K, b).multipliers
    array([[0.5, 0. ],
           [0. , 0.5]])
    """
    options = check_options(method, h=h, margin=margin, penalty=penalty, equality=equality)
    gram, xp, device = check_gram(K, b, gg), namespace(b), device_of(b)
    like = tuple(gram.b.shape), xp, device
    start = None if warm_start is None else check_multipliers(warm_start, "warm_start", *like)
    rounding = WIDE_ROUNDING / EPS * max(float(xp.finfo(dtype).eps) for dtype in {K.dtype, b.dtype})
    measured = Measured(gram, rounding, partial(from_numpy, xp=xp, device=device))
    return solve(measured, options, start).to(measured.to_caller)


def solve(measured: Measured, options: Options, start: Array | None = None) -> DualSolution:
    """Return the dual solution of a measured problem; on the CPU, read G again if K is ill-conditioned.

    On the CPU all arrays of the result are NumPy arrays. Rows that are not finite, or whose squares overflow,
    raise on the CPU and are left out on a device.
    """
    gram, rows, exact, kept = measured.gram, measured.rows, isinstance(options.method, Exact), None
    host = isinstance(gram.b, np.ndarray)
    if host:
        gram = check_range(gram, rows)
    else:
        K, b, kept = stage_two(gram.b).drop_not_finite(gram.K, gram.b)
        gram = gram._replace(K=K, b=b)
    bounds = make_bounds(options, gram.b)
    if kept is not None and bounds.h is not None:
        bounds = bounds._replace(h=namespace(kept).where(kept, bounds.h, 0.0))
    found = _run(gram, bounds, options.method, start, measured.to_caller)
    lam, status = found.multipliers, found.status
    # Rows that were left out have norm zero, and the exact method gives them the multiplier zero.
    if (kept is not None and not exact) or bounds is not PLAIN or lam.dtype is not gram.b.dtype:
        lam = _multipliers(gram, bounds, lam, kept)
    if not host:
        status = partial(_status_on_device, status, kept)
    sol = DualSolution(lam, gram, bounds, found.iterations, status, measured.rounding, exact)
    if rows is not None and exact and options.method.refine:
        sol = refine_directly(rows, sol, options.method.refine)
    if not (exact and host):
        return sol
    if rows is not None and rows.t:
        chosen = ill_conditioned(rows, sol, found.resolution)
        if chosen is not None and np.count_nonzero(chosen):
            sol = return_to_rows(rows, sol, chosen)
    if bounds.equality is not None and bounds.upper is not None:
        sol = replace(sol, _status=sol.status | cancelled_by_penalty(sol) * int(Status.STALLED))
    if bounds.h is not None:
        refuse_infeasible(sol, bounds.h)
    return sol


def _run(
    gram: Gram, bounds: Bounds, method: Any, start: Array | None, to_caller: Callable[[Array], Array]
) -> Outcome:
    """Return the outcome of a method on the standard form, with multipliers relative to the lower bounds."""
    exact = isinstance(method, Exact)
    reach = REACH if exact and isinstance(gram.b, np.ndarray) else LOOSE
    dual, cut = standard_form(gram.K, gram.b, bounds, reach)
    if start is not None:
        xp = namespace(start)
        start = xp.where(xp.isfinite(start), start, xp.zeros_like(start))
        start = clip(start if bounds.base is None else start - bounds.base, dual.lower, dual.upper)
    if exact and cut is not None:
        return _solve_cut(gram, bounds, method, dual, cut, start)
    if isinstance(method, Method):
        return stage_two(dual.b).solve(method, dual, start)
    return call(method, dual.K, dual.b, start, to_caller)


def _multipliers(gram: Gram, bounds: Bounds, lam: Array, kept: Array | None) -> Array:
    """Return the multipliers of the given problem, from the multipliers `lam` of its standard form."""
    xp = namespace(gram.b)
    lam = xp.astype(lam, gram.b.dtype, copy=False)  # a user's method may return another dtype
    if bounds.base is not None:
        lam = lam + bounds.base
    if bounds.upper is not None:  # scaling has rounded multipliers at their upper bound
        lam = snap(lam, bounds.upper)
        if bounds.h is not None:  # a zero row with a penalty and h > 0 stays violated
            void = (xp.linalg.diagonal(gram.K) == 0) & (bounds.h > 0) & xp.isfinite(bounds.upper)
            lam = xp.where(void, bounds.upper, lam)
    return lam if kept is None else xp.where(kept, lam, xp.zeros_like(lam))


def _status_on_device(found: Any, kept: Array, sol: DualSolution) -> Array:
    """Return the method's status of each problem, with flags for dropped rows and an infeasible h."""
    xp, bounds = namespace(kept), sol.bounds
    status = _now(found)
    flags = {Status.ROW_DROPPED: ~xp.all(kept, axis=-1)}
    if sol._exact and (bounds.h is not None or (bounds.equality is not None and bounds.upper is not None)):
        # The residual is that of the given problem. The method has solved a problem with cut rows and shifted
        # lower bounds, and this shift loses digits if an equality has a large penalty.
        flags[Status.STALLED] = sol.kkt_residual() > OPTIMAL_WITHIN * xp.finfo(sol.multipliers.dtype).eps
    if sol._exact and bounds.h is not None:
        flags[Status.INFEASIBLE] = infeasible(sol, bounds.h, (status & int(Status.STALLED)) > 0)
    for flag, where in flags.items():
        status = status | xp.astype(where, xp.int64) * int(flag)
    return status


def _now(status: Any) -> Any:
    """Return the status of an `Outcome`, which may be a function that returns it."""
    return status() if callable(status) else status


def _status_of_cut(found: Any, dual: Standard, cut: Array, lam: Array) -> Array:
    """Return the status of each problem, with STALLED if the solution depends on the cut of its rows."""
    xp = namespace(lam)
    return _now(found) | xp.astype(overstepped(dual, cut, lam), xp.int64) * int(Status.STALLED)


def _solve_cut(
    gram: Gram, bounds: Bounds, method: Exact, dual: Standard, cut: Array, start: Array | None
) -> Outcome:
    """Return the outcome of the exact method for a problem with cut rows, see `standard_form`.

    If the solution depends on the cut, the status is STALLED. On the CPU the problem is first solved again
    with a higher limit.
    """
    if not isinstance(cut, np.ndarray):
        found = _solve_on_device(gram, bounds, method, dual, start)
        return found._replace(status=partial(_status_of_cut, found.status, dual, cut, found.multipliers))
    reach = np.asarray(REACH)
    while True:
        found = stage_two(dual.b).solve(method, dual, start)
        status = _status_of_cut(found.status, dual, cut, found.multipliers)
        found = found._replace(status=status)
        if np.max(reach) >= LOOSE / WIDER:
            return found
        again = (found.status & int(Status.STALLED) > 0) & cut.any(axis=-1)
        if not again.any():
            return found
        # Only these problems get a higher limit, so other results keep their bits.
        reach = np.where(again[..., None], reach * WIDER, reach)
        dual, cut = standard_form(gram.K, gram.b, bounds, reach)


def _solve_on_device(
    gram: Gram, bounds: Bounds, method: Exact, dual: Standard, start: Array | None
) -> Outcome:
    """Return the outcome on a device; no value is read to decide on a second solve.

    Few rows are solved by enumeration, with the limit LOOSE of `standard_form`. More rows are solved on the
    CPU with both limits, LOOSE and REACH, in one copy. The solution for REACH is more accurate, and is used
    if it is optimal and does not depend on the cut.
    """
    solve, xp = stage_two(dual.b).solve, namespace(dual.b)
    if enumerable(dual.b.shape[-1], dual.upper):
        return solve(method, dual, start)
    near, cut = standard_form(gram.K, gram.b, bounds, REACH)
    both = solve(method, near._replace(b=xp.stack([near.b, dual.b])), start)
    unit = normalise(*near, both.multipliers[0, ...])
    missed = exact_status(unit.start, matvec(unit.K, unit.start) + unit.b, unit.lower, unit.upper) > 0
    again = missed | overstepped(near, cut, both.multipliers[0, ...])

    def chosen(a: Array, where: Array = again) -> Array:
        return xp.where(where, a[1, ...], a[0, ...])

    lam = chosen(both.multipliers, again[..., None])
    return Outcome(lam, chosen(both.iterations), lambda: chosen(_now(both.status)))
