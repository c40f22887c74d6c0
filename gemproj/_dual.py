"""Stage 2: multipliers of the constraints, from t-space numbers alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import array_api_compat
import numpy as np

from gemproj import _certificate
from gemproj._array import (
    Array,
    Blocks,
    detach,
    from_numpy,
    is_real_floating,
    on_host,
    read_problem,
    to_numpy,
)
from gemproj._gram import Gram, problem_gram
from gemproj.methods import AnyMethod, Method, Status, find
from gemproj.methods._method import check_number, clip


@dataclass(frozen=True, eq=False)
class DualSolution:
    """Multipliers with all that is needed to judge them; no certificate costs anything until asked for.

    Attributes
    ----------
    multipliers : array, shape (..., t)
        lam >= 0 in float64 (float32 on devices without it); ``x = g + G.T @ lam``.
    gram, linear, squared_norm : array, shapes (..., t, t), (..., t), (...)
        ``K = G G'``, ``b = G g`` and ``gg = |g|^2``, see `gemproj.gram`.
    margin, penalty : float
        Bounds of every multiplier, 0 and infinity for the plain projection.
    iterations : int or array, shape (...)
        Steps or pivots that the method took; 0 where it takes none.
    status : array of int, shape (...)
        A `gemproj.Status` per problem.
    rounding : float
        Relative rounding of the entries of `gram` and `linear`, which certificates cannot see beyond:
        about 1e-15, or 2e-6 at worst where a large float32 problem was summed in float32.

    Notes
    -----
    Certificates are relative to the norm of the gradient that is projected: g, or with a margin
    ``g + margin * G.sum(0)``.
    """

    multipliers: Array
    gram: Array
    linear: Array
    squared_norm: Array
    margin: float
    penalty: float
    iterations: Any
    status: Array
    rounding: float = 1e-15

    @property
    def active(self) -> Array:
        """Boolean (..., t): the constraints whose multiplier is above its lower bound, the margin."""
        return self.multipliers > self.margin

    @property
    def violated(self) -> Array:
        """Boolean (..., t): the constraints that g itself violates."""
        return self.linear < 0

    def kkt_residual(self) -> Array:
        """Largest violation of the optimality conditions, shape (...), scale-free; 0 at the solution."""
        return _certificate.kkt_residual(*self._shifted())

    def duality_gap(self) -> Array:
        """Primal minus dual objective over ``|g|^2``, shape (...); may be negative where x is infeasible."""
        return _certificate.duality_gap(*self._shifted())

    def error_bound(self) -> Array:
        """Upper bound of ``|x - x*| / |g|``, shape (...), without x*. Waits for a device.

        For x as `combine` makes it in float64; rounding it to the dtype of g comes on top.
        """
        K, b, gg, lam, upper = self._shifted()
        bound = _certificate.error_bound(
            to_numpy(K), to_numpy(b), to_numpy(gg), to_numpy(lam), upper, self.rounding
        )
        return from_numpy(bound, array_api_compat.array_namespace(gg), array_api_compat.device(gg))

    def cosine(self) -> Array:
        """Cosine between g and x, shape (...)."""
        return _certificate.cosine(self.gram, self.linear, self.squared_norm, self.multipliers)

    def _shifted(self) -> tuple[Array, Array, Array, Array, float]:
        """Return the problem with lower bound zero that a margin stands for, and its multipliers."""
        K, b, gg = shift(Gram(self.gram, self.linear, self.squared_norm), self.margin)
        return K, b, gg, self.multipliers - self.margin, self.penalty - self.margin


def shift(gram: Gram, margin: float) -> Gram:
    """Return the t-space problem of g + margin * (sum of rows), to which a lower bound is equivalent."""
    if margin == 0.0:
        return gram
    K, b, gg = gram
    xp = array_api_compat.array_namespace(K)
    pull = xp.sum(K, axis=-1)
    return Gram(K, b + margin * pull, gg + margin * xp.sum(2.0 * b + margin * pull, axis=-1))


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
        "exact", "pgd", "fista", "agem", "quadprog", "osqp" or "gem2017"; an object such as
        ``PGD(steps=5)``; or any callable ``(K, b, warm_start) -> multipliers``.
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
    options = read_options(method, margin, penalty, check)
    gram, rounding = problem_gram(problem)
    return solve_gram(gram, rounding, *options, warm_start=warm_start)


def read_options(
    method: AnyMethod, margin: float, penalty: float | None, check: bool | None
) -> tuple[Any, float, float, bool | None]:
    """Check the options that do not depend on the data."""
    found = find(method)
    check_number(margin, "margin", 0.0)
    if penalty is not None and penalty != math.inf:
        check_number(penalty, "penalty", 0.0)
        if penalty < margin:
            raise ValueError(f"penalty must be at least margin, {margin}; found {penalty}.")
    upper = math.inf if penalty is None else float(penalty)
    accepts = found.accepts if isinstance(found, Method) else {"margin"}
    for name, given in (("margin", margin > 0), ("penalty", upper < math.inf)):
        if given and name not in accepts:
            raise ValueError(f"{name} cannot be combined with method {found!r}, which does not take it.")
    return found, float(margin), upper, check


def solve_gram(
    gram: Gram,
    rounding: float,
    method: Any,
    margin: float = 0.0,
    penalty: float = math.inf,
    check: bool | None = None,
    *,
    warm_start: Array | None = None,
) -> DualSolution:
    """Stage 2 on its own: solve for a Gram matrix that was computed, or summed over ranks, before."""
    xp, device = array_api_compat.array_namespace(gram.K), array_api_compat.device(gram.K)
    host, dropped = on_host(device), None
    if check or (check is None and host):
        _raise_if_not_finite(gram)
    else:
        gram, dropped = _drop_not_finite(gram)
    K, b, _ = shift(gram, margin)
    upper = None if math.isinf(penalty) else xp.full_like(b, penalty - margin)
    start = None if warm_start is None else clip(_read_start(warm_start, b) - margin, upper)
    iterations: Any
    status: Any
    if not isinstance(method, Method):
        # Copies, because a function may work in place, and the solution keeps K and b.
        lam = _read_multipliers(method(K + 0.0, b + 0.0, start), b, method)
        iterations, status = 0, int(Status.APPROXIMATE)
    elif host:
        # The package's methods run on NumPy where that is free: a call costs a fifth of torch's.
        outcome = method.solve(*(a if a is None else to_numpy(a) for a in (K, b, start, upper)))
        lam, iterations, status = (a if isinstance(a, int) else from_numpy(a, xp, device) for a in outcome)
    else:
        lam, iterations, status = method.solve(K, b, start, upper)
    if isinstance(status, int):
        status = xp.full(gram.gg.shape, status, dtype=xp.int64, device=device)
    lam = lam + margin if margin else lam
    if upper is not None:  # the bounds hold to the last bit, not to rounding
        lam = clip(lam, xp.full_like(lam, penalty))
    if dropped is not None:
        lam = xp.where(dropped, xp.zeros_like(lam), lam)
        status = status + xp.astype(xp.any(dropped, axis=-1), status.dtype) * int(Status.ROW_DROPPED)
    return DualSolution(lam, *gram, margin, penalty, iterations, status, rounding)


def _read_start(warm_start: Array, b: Array) -> Array:
    if not array_api_compat.is_array_api_obj(warm_start):
        raise TypeError(f"warm_start must be an array of multipliers; found {type(warm_start).__name__}.")
    if tuple(warm_start.shape) != tuple(b.shape):
        raise ValueError(
            f"warm_start must have shape {tuple(b.shape)}, one multiplier per constraint; "
            f"found {tuple(warm_start.shape)}. Start afresh when the constraints change in number."
        )
    if not isinstance(warm_start, type(b)):
        raise TypeError(
            f"warm_start must be of the library of G, {type(b).__name__}; found {type(warm_start).__name__}."
        )
    if not is_real_floating(warm_start):
        raise TypeError(f"warm_start must have a real floating-point dtype; found {warm_start.dtype}.")
    xp = array_api_compat.array_namespace(b)
    start = xp.astype(detach(warm_start), b.dtype, copy=False)
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
    xp = array_api_compat.array_namespace(K)
    # If g is not finite no row can be judged: all are left out and x is g.
    bad = ~xp.isfinite(xp.linalg.diagonal(K)) | ~xp.isfinite(gg)[..., None] | ~xp.isfinite(b)
    K = xp.where(bad[..., :, None] | bad[..., None, :], xp.zeros_like(K), K)
    return Gram(K, xp.where(bad, xp.zeros_like(b), b), gg), bad


def _read_multipliers(lam: Any, b: Array, method: Any) -> Array:
    xp = array_api_compat.array_namespace(b)
    if not isinstance(lam, type(b)) or tuple(lam.shape) != tuple(b.shape):
        found = f"{type(lam).__name__} of shape {tuple(lam.shape)}" if hasattr(lam, "shape") else repr(lam)
        raise ValueError(
            f"method {method!r} must return multipliers of the type and shape of b, "
            f"{type(b).__name__} {tuple(b.shape)}; found {found}."
        )
    lam = xp.astype(detach(lam), b.dtype, copy=False)
    if on_host(array_api_compat.device(b)) and not bool(xp.all(xp.isfinite(lam))):
        raise ValueError(f"method {method!r} returned multipliers that are not finite: {lam}.")
    return lam
