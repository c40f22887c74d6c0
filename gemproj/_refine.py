"""Beyond the Gram matrix: what K = G G' has lost by squaring, G itself still knows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from gemproj._arrays import Array, device_of, from_numpy, namespace, to_numpy
from gemproj._bounds import standard_form
from gemproj._constants import EPS, OPTIMAL_WITHIN, RESOLVED, ROUNDING, SLAB
from gemproj._coordinates import SMALL, from_rows, settle, solve_on_rows
from gemproj._problem import Problem
from gemproj._solution import DualSolution
from gemproj._tiles import stacked
from gemproj._tspace import Gram, clip, inverse, matvec, normalise, snap, solve_on, times_rows
from gemproj.backends import select
from gemproj.methods._active_set import solve_active_set
from gemproj.methods._faces import Factorisation
from gemproj.methods._method import Status
from gemproj.methods.exact import Exact, resolution

# The resolution below which K is not trusted: small problems lose no time by reading G again, and where
# float32 products were summed K is good to 1e-8.
_TRUST_SMALL, _TRUST_NARROW = 1e-2, 1e-3
_STALLED = int(Status.STALLED)
_UNSETTLED = int(Status.STALLED | Status.UNRESOLVED)
_HOPELESS = 1e-7  # error of x over |g| that even coordinates cannot avoid


def return_to_rows(
    problem: Problem, sol: DualSolution, method: object, resolved: np.ndarray | None, certify: bool = False
) -> DualSolution:
    """Solve anew, in coordinates of the rows, the problems whose K has lost the digits they need.

    One more read of G and g. What coordinates confirm stays, as where rows are repeated; so do multipliers
    of methods that are approximate by design. With `certify` the coordinates serve their certificates.
    """
    lost = _lost(problem, sol, resolved, certify)
    if not np.count_nonzero(lost):
        return sol
    K = np.broadcast_to(sol.gram.K, (*problem.batch, problem.t, problem.t))
    factor = _coordinates(problem, sol, K, lost)
    if not isinstance(method, Exact):
        return replace(sol, _factor=factor)
    lam, status = np.array(sol.multipliers), np.array(sol.status)
    iterations = np.broadcast_to(np.asarray(sol.iterations), status.shape).copy()
    lower, upper, confirmed = sol.lower, sol.upper, np.zeros_like(lost)
    at, step = np.argwhere(lost), max(1, SLAB // problem.t**2)
    for k in range(0, len(at), step):
        part = np.zeros_like(lost)
        part[tuple(at[k : k + step].T)] = True
        confirmed[part] = _confirmed(sol, K, factor, part)
    status[confirmed] &= ~_UNSETTLED
    for i in map(tuple, np.argwhere(lost & ~confirmed)):
        h = None if sol.bounds.h is None else sol.bounds.h[i]
        found, pivots, ended = solve_in_coordinates(factor[i], h, lower[i], upper[i], lam[i])
        # Rows of norm zero, or left out, keep their multipliers.
        lam[i] = np.where(factor[i][:, :-1].any(axis=0), found, lam[i])
        status[i] = status[i] & ~_UNSETTLED | ended
        iterations[i] += pivots
    if not certify:  # nor is there anything to polish
        factor[confirmed] = 0.0
    return replace(sol, multipliers=lam, status=status, iterations=iterations, _factor=factor)


def _lost(problem: Problem, sol: DualSolution, resolved: np.ndarray | None, certify: bool) -> np.ndarray:
    wide = sol._rounding < 1e-12
    if resolved is not None and wide:
        trusted = _TRUST_SMALL if problem.columns * (problem.t + 1) <= SMALL else RESOLVED
        if not resolved.ndim and not certify:  # plain numbers are the fastest to look at
            return np.array(resolved.item() < trusted or sol.status.item() & _STALLED > 0)
        lost = (resolved < trusted) | (sol.status & _STALLED > 0)
        if not (certify and np.count_nonzero(still := _demands_little(sol))):
            return lost
        return lost | (still & (_resolution(sol) < RESOLVED))
    # Where the method does not say which rows are active, or K is too coarse to tell, any row may be.
    return _resolution(sol) < (RESOLVED if wide else _TRUST_NARROW)


def _demands_little(sol: DualSolution) -> np.ndarray:
    """Tell where ``b - h`` is so small next to g that the method takes nearly active rows for far ones."""
    (K, b, gg), h = sol.gram, sol.bounds.h
    apart = b if h is None else b - h
    norms = np.sqrt(np.diagonal(K, axis1=-2, axis2=-1))
    return np.all(np.abs(apart) <= 1e-2 * norms * np.sqrt(gg)[..., None], axis=-1)


def _resolution(sol: DualSolution) -> np.ndarray:
    unit = normalise(sol.gram.K, sol.gram.b)
    return resolution(unit.K, np.ones(unit.b.shape, dtype=bool))


def _coordinates(problem: Problem, sol: DualSolution, K: np.ndarray, lost: np.ndarray) -> np.ndarray:
    """Return coordinates of the rows of the chosen problems, (*batch, t + 1, t + 1), zero for the others."""
    t = problem.t
    factor = np.zeros((*problem.batch, t + 1, t + 1))
    if not problem.batch or problem.shared or problem.columns * (t + 1) > SMALL:
        for i in map(tuple, np.argwhere(lost)):
            factor[i] = from_rows(problem.at(i), Gram(K[i], sol.gram.b[i], sol.gram.gg[i]), sol._rounding)
        return factor
    with problem.without_autocast():
        for lead, tile in stacked(problem, problem.wide):  # one holds all columns of its problems
            here = lost[lead]
            rows = tile[here]
            rows[:, :t][np.diagonal(K[lead][here], axis1=-2, axis2=-1) == 0] = 0.0
            R: Any = np.linalg.qr(np.swapaxes(rows, -1, -2), mode="r")
            factor[lead][here, : R.shape[-2]] = R
    return factor


def _confirmed(sol: DualSolution, K: np.ndarray, factor: np.ndarray, lost: np.ndarray) -> np.ndarray:
    """Tell of the lost problems which meet the optimality conditions in coordinates to rounding.

    With free rows that K resolves; then it does not matter what the others depend on.
    """
    F, lam, free = factor[lost], sol.multipliers[lost], sol.free[lost]
    A, g = F[..., :-1], F[..., -1]
    x = g + matvec(A, lam)
    s = np.sum(A * x[..., :, None], axis=-2)
    if sol.bounds.h is not None:
        s = s - sol.bounds.h[lost]
    n = np.sqrt(np.sum(A * A, axis=-2))
    size = np.sqrt(np.sum(g * g, axis=-1)) + np.sum(np.abs(lam) * n, axis=-1)
    wrong = np.where(free, np.abs(s), np.where(lam >= sol.upper[lost], s, -s))
    met = np.all(wrong <= ROUNDING * size[..., None] * n, axis=-1)
    return met & (resolution(normalise(K[lost], lam).K, free) >= _TRUST_SMALL)


def solve_in_coordinates(
    F: np.ndarray, h: np.ndarray | None, lower: np.ndarray, upper: np.ndarray, start: np.ndarray
) -> tuple[np.ndarray, int, Status]:
    """Solve one problem from its coordinates F, of rows of any norm; return lam, pivots and status."""
    base = np.where(np.isfinite(lower), lower, 0.0)
    A, a = F[:, :-1], F[:, -1] + F[:, :-1] @ base
    right = np.zeros(len(base)) if h is None else h
    n = np.linalg.norm(A, axis=0)
    rows, per_norm = n > 0, inverse(n)
    right = right * per_norm
    asked = np.where(np.isinf(lower), np.abs(right), np.maximum(right, 0.0))
    asked = np.minimum(asked, (upper - base) * np.where(rows, n, 1.0))  # no more than a penalty pulls
    size = max(float(np.linalg.norm(a)), float(asked.max(initial=0.0)))
    lam = base.copy()
    if size == 0.0 or not rows.any():
        return lam, 0, Status.OPTIMAL
    scale = n[rows] / size
    A, a, right = A[:, rows] / n[rows], a / size, right[rows] / size
    least, most = np.where(np.isinf(lower[rows]), -np.inf, 0.0), (upper - base)[rows] * scale
    first = np.clip((start - base)[rows] * scale, least, most)
    unit, pivots, residual = solve_active_set(Factorisation(A, a, right), least, most, first)
    lam[rows] += unit / scale
    status = Status.OPTIMAL if residual <= OPTIMAL_WITHIN * EPS else Status.STALLED
    # What the rounding of multipliers leaves along their rows tells whether float64 can hold them.
    if settle(A, a, unit, (unit > least) & (unit < most), right)[1] > _HOPELESS:
        status |= Status.UNRESOLVED
    return snap(lam, upper), pivots, status


def refine_directly(problem: Problem, sol: DualSolution, steps: int) -> DualSolution:
    """Correct the free multipliers by slacks that are computed from G, ``lam_P -= K_PP^-1 s_P``.

    Each step reads G and g once, on any device and without waiting for it. It gains the digits that
    K has: with rows at an angle of 1e-5 about six, with rows at an angle of 1e-8 none.
    """
    xp, free = namespace(sol.multipliers), sol.free
    (K, _, lower, upper), _ = standard_form(sol.gram.K, sol.gram.b, sol.bounds._replace(h=None))
    base = 0.0 if sol.bounds.base is None else sol.bounds.base
    mu = sol.multipliers - base
    for _ in range(steps):
        s = direct_slack(problem, base + mu, sol.bounds.h)
        s = xp.where(xp.isfinite(s), s, xp.zeros_like(s))
        unit = normalise(K, s, lower, upper, mu)
        step = solve_on(unit.K, unit.b, free)
        mu = clip(unit.start - step, unit.lower, unit.upper) * unit.scale
    return replace(sol, multipliers=xp.where(free, base + mu, sol.multipliers))


def direct_slack(problem: Problem, lam: Array, h: Array | None) -> Array:
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


def polish(problem: Problem, sol: DualSolution, x: list[Array]) -> None:
    """Take the rounding of large multipliers out of x: ``G_P x = h_P`` for the free rows P, in place.

    Where rows nearly cancel, multipliers are large, and so is the rounding of ``g + G'lam``. One more
    read and one more combination, for float64 problems that `return_to_rows` has solved, and no others.
    """
    factor = sol._factor
    if factor is None or any(v.dtype != problem.wide for v in problem.vector):
        return
    moved, step, free = replace(problem, vector=x), np.zeros(sol.multipliers.shape), sol.free
    for i in map(tuple, np.argwhere(factor.any(axis=(-2, -1)))):
        h = None if sol.bounds.h is None else sol.bounds.h[i]
        s = direct_slack(replace(moved.at(i), weight=None), np.zeros(problem.t), h)
        step[i] = -solve_on_rows(factor[i][:, :-1], np.where(np.isfinite(s), s, 0.0), free[i])
    select(moved).combine(moved, step, x)


def solve_on_free(sol: DualSolution, u: Array) -> Array:
    """Return ``K_PP^-1 u_P`` for the free rows P and zero for the others.

    Numerically dependent free rows get one of the solutions.
    """
    free, unit = sol.free, normalise(sol.gram.K, u)
    z = solve_on(unit.K, unit.b, free) * unit.scale
    if sol._factor is None:
        return z
    xp, device = namespace(z), device_of(z)
    z, u, free = np.array(to_numpy(z)), to_numpy(u), to_numpy(free)
    for i in map(tuple, np.argwhere(sol._factor.any(axis=(-2, -1)))):
        z[i] = solve_on_rows(sol._factor[i][:, :-1], u[i], free[i])
    return from_numpy(z, xp, device)
