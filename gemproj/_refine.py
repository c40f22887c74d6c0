"""Solution from G if K = G G' is ill-conditioned; its condition number is the square of that of G."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from gemproj._arrays import Array, namespace
from gemproj._bounds import standard_form
from gemproj._combine import slack_of
from gemproj._constants import RESOLVED, ROUNDING, SLAB, SMALL, TRUST_SMALL
from gemproj._coordinates import inverse_on, of_problems, solve_in_coordinates
from gemproj._problem import Problem
from gemproj._solution import DualSolution
from gemproj._tspace import clip, identity_like, inverse_of, matvec, normalise
from gemproj.methods._method import Status
from gemproj.methods.exact import resolution

_STALLED = int(Status.STALLED)
_UNSETTLED = int(Status.STALLED | Status.UNRESOLVED)


def ill_conditioned(problem: Problem, sol: DualSolution, resolved: Any) -> np.ndarray | None:
    """Return the mask (...) of problems whose K is too ill-conditioned for the multipliers; None if none is.

    `resolved` is `Outcome.resolution`.
    """
    if resolved is None:
        return None
    trusted = TRUST_SMALL if problem.columns * (problem.t + 1) <= SMALL else RESOLVED
    return (resolved < trusted) | (sol._status & _STALLED > 0)


def uncertified(sol: DualSolution) -> np.ndarray | None:
    """Return the mask (...) of problems whose K is too ill-conditioned for certificates; None if none is.

    `ill_conditioned` suffices unless rows that the method treated as inactive may be nearly active. That is
    possible if the method is approximate, or if ``b - h`` is small relative to g, because the exact method
    normalises b.
    """
    (K, b, gg), h = sol.gram, sol.bounds.h
    apart = b if h is None else b - h
    if sol._exact and gg.ndim == 0:  # one problem: usually the first row decides; Python floats are faster
        large = 1e-4 * float(gg)
        if any(
            a * a > large * k > 1e-300 for a, k in zip(apart.tolist(), K.diagonal().tolist(), strict=True)
        ):
            return None
    squares = np.diagonal(K, 0, -2, -1)
    any_row = np.all(np.abs(apart) <= 1e-2 * np.sqrt(squares) * np.sqrt(gg)[..., None], axis=-1)
    any_row = any_row | (not sol._exact)
    if sol._coordinates is not None:
        any_row = any_row & ~sol.refined
    if not np.count_nonzero(any_row):
        return None
    return any_row & (_resolution(sol) < RESOLVED)


def _resolution(sol: DualSolution) -> np.ndarray:
    unit = normalise(sol.gram.K, sol.gram.b)
    return resolution(unit.K, np.ones(unit.b.shape, dtype=bool))


def return_to_rows(problem: Problem, sol: DualSolution, chosen: np.ndarray) -> DualSolution:
    """Return the solution with row coordinates of the chosen problems, from one more read of G and g.

    Multipliers are kept if the method is approximate, or if they are optimal in these coordinates (for
    example, with repeated rows). All other chosen problems are solved again in coordinates.
    """
    factor = of_problems(problem, sol.gram, sol._rounding, chosen)
    whole = (
        factor if sol._coordinates is None else np.where(chosen[..., None, None], factor, sol._coordinates)
    )
    if not sol._exact:
        return replace(sol, _coordinates=whole)
    lam, status = np.array(sol.multipliers), np.array(sol.status)
    iterations = np.broadcast_to(np.asarray(sol.iterations), status.shape).copy()
    lower, upper, confirmed = sol.lower, sol.upper, np.zeros_like(chosen)
    at, step = np.argwhere(chosen), max(1, SLAB // problem.t**2)
    for k in range(0, len(at), step):
        part = np.zeros_like(chosen)
        part[tuple(at[k : k + step].T)] = True
        confirmed[part] = _confirmed(sol, factor, part)
    status[confirmed] &= ~_UNSETTLED
    correction = sol._correction
    for i in map(tuple, np.argwhere(chosen & ~confirmed)):
        if correction is None:
            correction = np.zeros((*problem.batch, 2, problem.t, problem.t))
        h = None if sol.bounds.h is None else sol.bounds.h[i]
        found, pivots, ended = solve_in_coordinates(factor[i], h, lower[i], upper[i], lam[i])
        # Rows that have norm zero or were left out keep their multipliers.
        lam[i] = np.where(factor[i][:, :-1].any(axis=0), found, lam[i])
        status[i] = status[i] & ~_UNSETTLED | ended
        iterations[i] += pivots
        correction[i] = inverse_on(factor[i][:, :-1], (lam[i] > lower[i]) & (lam[i] < upper[i]))
    return replace(
        sol,
        multipliers=lam,
        _status=status,
        iterations=iterations,
        _coordinates=whole,
        _correction=correction,
    )


def _confirmed(sol: DualSolution, factor: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Return the mask of chosen problems whose solution is optimal in coordinates, to rounding.

    The mask is False if K does not resolve the free rows. If it does, dependent other rows do not change x.
    """
    F, lam, free = factor[chosen], sol.multipliers[chosen], sol.free[chosen]
    K = np.broadcast_to(sol.gram.K, (*sol.multipliers.shape, lam.shape[-1]))
    A, g = F[..., :-1], F[..., -1]
    x = g + matvec(A, lam)
    s = np.sum(A * x[..., :, None], axis=-2)
    if sol.bounds.h is not None:
        s = s - sol.bounds.h[chosen]
    n = np.sqrt(np.sum(A * A, axis=-2))
    size = np.sqrt(np.sum(g * g, axis=-1)) + np.sum(np.abs(lam) * n, axis=-1)
    wrong = np.where(free, np.abs(s), np.where(lam >= sol.upper[chosen], s, -s))
    met = np.all(wrong <= ROUNDING * size[..., None] * n, axis=-1)
    unit_K = normalise(K[chosen], np.ones_like(lam)).K
    return met & (resolution(unit_K, free) >= TRUST_SMALL)


def refine_directly(problem: Problem, sol: DualSolution, steps: int) -> DualSolution:
    """Return the solution after `steps` steps ``lam_P -= K_PP^-1 s_P`` for the free rows P; slacks s from G.

    Each step reads G and g once, without synchronising a device. It gains as many digits as K has: about
    six for rows at an angle of 1e-5, none for rows at an angle of 1e-8.
    """
    xp, free = namespace(sol.multipliers), sol.free
    (K, _, lower, upper), _ = standard_form(sol.gram.K, sol.gram.b, sol.bounds._replace(h=None))
    base = 0.0 if sol.bounds.base is None else sol.bounds.base
    mu, inverse = sol.multipliers - base, inverse_of(K, free)
    for _ in range(steps):
        s = slack_of(problem, base + mu, sol.bounds.h)
        s = xp.where(xp.isfinite(s), s, xp.zeros_like(s))
        mu = clip(mu - matvec(inverse, s), lower, upper)
    return replace(sol, multipliers=xp.where(free, base + mu, sol.multipliers))


def inverse_of_free(sol: DualSolution) -> Array:
    """Return ``K_PP^-1`` of the free rows P as two factors (..., 2, t, t), zero outside of P.

    If the free rows are numerically dependent, the factors give one of the solutions of ``K_PP z = u``.
    """
    free, xp = sol.free, namespace(sol.multipliers)
    inverse = inverse_of(sol.gram.K, free)
    found = xp.stack([inverse, xp.broadcast_to(identity_like(inverse), inverse.shape)], axis=-3)
    if sol._coordinates is not None:
        for i in map(tuple, np.argwhere(sol.refined)):
            found[i] = inverse_on(sol._coordinates[i][:, :-1], free[i])
    return found
