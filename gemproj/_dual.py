"""Stage 2: the multipliers of the constraints, from K, b and |g|^2."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from gemproj._arrays import Array, Blocks, device_of, from_numpy, namespace, to_numpy
from gemproj._bounds import Bounds, Options, is_like, make_bounds, standard_form
from gemproj._checks import check_multipliers
from gemproj._constants import EPS, RESOLVED, SMALL, TRUST_SMALL
from gemproj._coordinates import from_rows, unit_diagonal
from gemproj._gram import check_gram, check_range, measure
from gemproj._problem import Problem, check_problem
from gemproj._search import GRAM_RESOLVES, INFEASIBLE, NEAR_ZERO, OPTIMAL
from gemproj._solution import DualSolution
from gemproj._tspace import Dual, Gram, Measured, clip, drop_rows, fetch
from gemproj.backends import search, solve_few
from gemproj.methods import AGEM, FISTA, PGD, AnyMethod, Exact, Method, Outcome, Quadprog
from gemproj.methods._method import call
from gemproj.methods.exact import without_rays

# The relative rounding of dtypes of 16 bits is above this.
HALF = 1e-4
# Number of rows up to which a device solves on all active sets at once.
FEW = 8
# Rounding of g + G'lam, relative to the size of the problem, above which x is corrected.
LOST = 1e-14
# Norm and right-hand side, relative to the largest norm and to the largest h or G g, below which a row cannot
# contradict others.
SLIGHT = 1e-15
# A margin up to this times a row, of norm below 1e140, has a square.
SAFE_MARGIN = 1e10
# Maximum number of rows that an error names.
NAMED = 12


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
    """Return the multipliers of the projection of g onto ``{x : G @ x >= h}``, and their error.

    The multipliers solve the dual problem, ``min 1/2 lam'K lam + (b - h)'lam, lower <= lam <= upper``, with
    ``K = G G'`` and ``b = G g``. This function takes G and g; `solve_gram` takes K and b.

    Parameters
    ----------
    G, g
        As in `project`.
    method : str, Method or callable, default "exact"
        "exact", "pgd", "fista", "agem", "quadprog", "osqp" or "gem2017"; an object such as
        ``PGD(steps=5)``; or any callable ``(K, b, warm_start) -> multipliers``.
    h : array, shape (..., t), optional
        Right-hand side. To first order, a negative entry allows the loss of its row to rise, and a positive
        entry requires the loss to fall. A positive h can be infeasible. ``-inf`` switches a row off.
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
        If arguments do not fit together; the message names the argument and what was found. Also if rows are
        not finite or, with method "exact", h is infeasible; the message names the rows. Other methods do not
        test h; if h is infeasible, their status is ``STALLED`` or ``APPROXIMATE``, or ``OPTIMAL`` for zero
        rows.

    Notes
    -----
    A device is read in one copy of t*t numbers, which synchronises.

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
    problem, asked = measured_for(method, (G, g, metric, h, margin, penalty, equality, warm_start))
    return _with_rows(problem, solve(*asked)).to(problem.to_caller)


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
        Squared norm of g, to which measures of error are relative. The default is its lower bound
        ``max(b_i^2 / K_ii)``, which also replaces a smaller value. Without a margin, the measures are then
        never smaller than for the true norm, but for `error_bound` of nearly dependent rows.
    method, h, margin, penalty, equality, warm_start
        As in `solve_dual`.

    Returns
    -------
    DualSolution
        Its measures of error include the rounding of the narrower dtype of K and b. They do not include
        larger errors from computing K and b, such as those of float32 sums.

    Examples
    --------
    >>> import numpy as np
    >>> from gemproj import solve_gram
    >>> K, b = np.array([[2.0, 1.0], [1.0, 2.0]]), np.array([[-1.0, 1.0], [1.0, -1.0]])
    >>> solve_gram(K, b).multipliers
    array([[0.5, 0. ],
           [0. , 0.5]])
    """
    options = Options(method, h, margin, penalty, equality)
    gram, xp, device = check_gram(K, b, gg), namespace(b), device_of(b)
    like = tuple(gram.b.shape), xp, device
    start = None if warm_start is None else to_numpy(check_multipliers(warm_start, "warm_start", *like))
    eps = max(EPS, *(float(xp.finfo(dtype).eps) for dtype in {K.dtype, b.dtype}))
    measured = Measured(gram, eps, partial(from_numpy, xp=xp, device=device))
    return solve(measured, options, start).to(measured.to_caller)


def measured_for(
    method: AnyMethod, arrays: tuple[Any, ...]
) -> tuple[Problem, tuple[Measured, Options, Array | None]]:
    """Return the problem of the arguments of `project`, and the arguments of `solve`."""
    G, g, metric, h, margin, penalty, equality, warm_start = arrays
    options = Options(method, h, margin, penalty, equality)
    problem = check_problem(G, g, metric)
    start = None if warm_start is None else check_multipliers(warm_start, "warm_start", *problem.like)
    return problem, (measure(problem), options, start)


def _with_rows(problem: Problem, sol: DualSolution) -> DualSolution:
    """Return a solution with coordinates from G for errors that K does not resolve.

    Without them, the error bound of dependent rows would only be ``|x|``. The exact method has tested its
    free rows; rows that are nearly active are tested with them. Another method may have missed any row.
    """
    if (read := sol.refined).all():
        return sol
    norms, cosines = unit_diagonal(sol.gram.K)
    rows = np.broadcast_to(norms > 0, sol.multipliers.shape)
    if sol._exact:
        near = sol.slack() <= NEAR_ZERO * norms * np.asarray(sol.size())[..., None]
        rows = rows & near & np.any(near & rows & ~sol.free, axis=-1, keepdims=True)
    # The smallest eigenvalue is at most the smallest squared distance of a row from the span of the others.
    unit = np.where(rows[..., :, None] & rows[..., None, :], cosines, np.eye(rows.shape[-1]))
    where = read | (np.min(np.linalg.eigvalsh(unit), axis=-1, initial=1.0) < RESOLVED**2)
    if np.count_nonzero(where) == np.count_nonzero(read):
        return sol
    found = from_rows(problem, where).without_zeros(sol.gram)
    if sol._rows is not None and sol._rows.loses is not None:
        found = found.corrected(sol.free, sol._rows.loses)
    return replace(sol, _rows=found)


def solve(measured: Measured, options: Options, start: Array | None = None) -> DualSolution:
    """Return the dual solution of a measured problem; a device is read, in one copy.

    Raise if rows or g are not finite, or their squares overflow.
    """
    gram, method = measured.gram, options.method
    if not isinstance(gram.b, np.ndarray):
        given = {name: a for name, a in vars(options).items() if is_like(a, gram.b)}
        K, b, gg, start, *values = fetch([*gram, start, *given.values()])
        gram, options = Gram(K, b, gg), replace(options, **dict(zip(given, values, strict=True)))
    if (checked := check_range(gram, measured.problem)) is not measured.gram:
        measured = measured._replace(gram=checked)
    bounds = make_bounds(options, measured.gram.b)
    if type(method) is Exact:  # a class derived from it need not be exact
        sol = _search(measured, bounds, start)
    else:
        lam, *numbers = _run(measured, bounds, method, start)
        shape = measured.gram.gg.shape  # ints stand for all problems
        steps, status = (np.full(shape, n, dtype=np.int64) if isinstance(n, int) else n for n in numbers)
        sol = DualSolution(lam, measured.gram, bounds, steps, status, measured.eps)
        # A class derived from Exact need not return what it has solved, and quadprog adds a ridge.
        sol = sol._judged() if isinstance(method, Exact | Quadprog) else sol
    if bounds.lower is not None and np.max(bounds.lower, initial=0.0) > SAFE_MARGIN:
        with np.errstate(over="ignore", invalid="ignore"):
            if not np.isfinite(sol.size()).all():
                raise ValueError("margin is too large: the square of margin * |row| overflows. Lower it.")
    return sol


def solve_unread(measured: Measured, options: Options, start: Array | None = None) -> DualSolution:
    """Return the solution; a device is not read for it, and it has no status, if a projection needs none.

    That is for the exact method with few rows and no penalty or equality, and for PGD, FISTA and AGEM. Rows
    that are not finite, or whose squares overflow, are left out then.
    """
    (K, b, _), method = measured.gram, options.method
    few = b.shape[-1] <= FEW and options.penalty is None and options.equality is False
    if isinstance(b, np.ndarray) or type(method) not in (PGD, FISTA, AGEM, *([Exact] * few)):
        return solve(measured, options, start)
    bounds = make_bounds(options, b)
    if type(method) is not Exact:
        lam = _run(measured, bounds, method, start).multipliers
    else:
        if bounds.h is not None:  # b is infinite for rows that are switched off, and they are left out
            K, b = namespace(b).broadcast_to(K, (*b.shape, b.shape[-1])), b - bounds.h
        lam = solve_few(K, b, bounds.lower)
    return DualSolution(lam, measured.gram, bounds, _eps=measured.eps)


def _search(measured: Measured, bounds: Bounds, start: Array | None) -> DualSolution:
    """Return the exact solution on the CPU, from K, or from G where K does not resolve the rows.

    A problem with no more columns than rows is solved in its own coordinates at once.
    """
    (K, b, _), problem, rows, (lower, upper, h) = measured.gram, measured.problem, measured.own, bounds
    if rows is not None:
        rows.without_zeros(measured.gram)
        dual = Dual(0.0, 0.0, rows.V, rows.a.reshape((*b.shape[:-1], -1)), h, lower, upper, start)
        lam, status, pivots, total = search(dual)
    else:
        small = problem is not None and problem.columns * (b.shape[-1] + 1) <= SMALL
        trust = TRUST_SMALL if small else RESOLVED
        eps, resolves = measured.eps, GRAM_RESOLVES
        # In half precision entries are rounded once, as products are summed in float32. Sums in float32 have
        # more roundings.
        if eps > EPS:
            resolves = float(((1.0 if eps > HALF else 16.0) * eps * b.shape[-1] ** 0.5) ** 0.5)
        lam, status, pivots, total = search(Dual(resolves, trust, K, b, h, lower, upper, start))
        if problem is not None and np.count_nonzero(status):
            again = status != OPTIMAL
            rows = from_rows(problem, again).without_zeros(measured.gram)
            given = h, lower, upper, np.where(status[..., None] < INFEASIBLE, lam, 0.0)
            some = (None if a is None else a[again] for a in given)
            found = search(Dual(0.0, 0.0, rows.V, rows.a, *some))
            lam[again], status[again], pivots[again], total[again] = found
    if h is not None and (np.count_nonzero(rays := status >= INFEASIBLE) or not K.diagonal(0, -2, -1).all()):
        slight = _refuse_infeasible(bounds, measured.gram, lam, rays)
        if np.count_nonzero(slight):
            return _search(measured, bounds.without(slight), start)
    if np.count_nonzero(status):  # without h, K and b contradict each other: there is no g with G g = b
        without_rays(lam, status)
    sol = DualSolution(lam, measured.gram, bounds, pivots, status, measured.eps, True, rows)
    if rows is not None and np.count_nonzero(loses := total > LOST / EPS):
        sol = replace(sol, _rows=rows.corrected(sol.free, loses))
    return sol


def _refuse_infeasible(bounds: Bounds, gram: Gram, lam: np.ndarray, rays: np.ndarray) -> np.ndarray:
    """Raise for an infeasible h, and name the contradicting rows: those of a ray, or rows of norm zero.

    `rays` is the mask (...) of problems whose `lam` is a ray. Rows at the level of rounding do not count: in
    norm that of all other rows, in h that of any h and of G g. Return the mask (..., t) of those in a ray.
    """
    lower, upper, h = bounds.lower, bounds.upper, np.asarray(bounds.h)
    norms, without = np.sqrt(gram.K.diagonal(0, -2, -1)), np.zeros(h.shape, dtype=bool)
    void = (norms == 0) & ((h > 0) if lower is None else (h > 0) | (np.isinf(lower) & (h < 0)))
    void &= True if upper is None else np.isinf(upper)
    if not (np.count_nonzero(void) or np.count_nonzero(rays)):
        return without
    size = np.where(bounds.off, 0.0, np.abs(h))
    longest = np.max(np.where(bounds.off, 0.0, norms), axis=-1, keepdims=True)
    largest = np.maximum(np.max(size, axis=-1, keepdims=True), longest * np.sqrt(gram.gg)[..., None])
    slight = (norms <= SLIGHT * longest) & (size <= SLIGHT * largest)
    void &= ~slight
    for i in map(tuple, np.argwhere(rays | void.any(axis=-1)).tolist()):
        rows = np.flatnonzero(void[i])
        if not len(rows):
            rows = np.flatnonzero(np.abs(lam[i]) > 1e-10 * np.abs(lam[i]).max())
            if slight[i][rows].any():
                without[i][rows] = slight[i][rows]
                continue
        where = f" of problem {i if len(i) > 1 else i[0]}" if i else ""
        more = f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
        named = f"{', '.join(map(str, rows[:NAMED]))}{more}{where}"
        raise ValueError(
            f"h is infeasible: no x satisfies G @ x >= h in "
            f"{f'row {named}' if len(rows) == 1 else f'rows {named} at once'}. "
            "Lower h there, or set a penalty to allow violations."
        )
    return without


def _run(measured: Measured, bounds: Bounds, method: Any, start: Array | None) -> Outcome:
    """Return the outcome of a method that takes the standard form; nothing is read from a device.

    Rows that are not finite or switched off are left out: they get norm zero and the multiplier zero.
    """
    (K, b, _), off, kept, xp = measured.gram, bounds.off, None, namespace(measured.gram.b)
    if not isinstance(b, np.ndarray) or (off is not None and off.any()):
        K, b, kept = drop_rows(K, b, off)
    b, lower, upper, shift = standard_form(K, b, bounds)
    if kept is not None and bounds.h is not None:
        b = xp.where(kept, b, xp.zeros_like(b))
    if start is not None:
        start = xp.where(xp.isfinite(start), start, xp.zeros_like(start))
        start = clip(start if shift is None else start - shift, lower, upper)
    if isinstance(method, Method):
        lam, iterations, status = method.solve(K, b, lower, upper, start)
    else:
        lam, iterations, status = call(method, K, b, start, measured.to_caller)
    lam = xp.astype(lam, b.dtype, copy=False)  # a user's method may return another dtype
    if shift is not None:
        lam = lam + shift
    if bounds.upper is not None:  # the shift has rounded multipliers at their upper bound
        lam = xp.where(lam >= bounds.upper * (1.0 - 1e-15), bounds.upper, lam)
    if kept is not None:
        lam = xp.where(kept, lam, xp.zeros_like(lam))
    return Outcome(lam, iterations, status)
