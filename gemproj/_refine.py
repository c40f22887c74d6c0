"""The way back to G: what K = G G' has lost by squaring, G itself still knows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from gemproj._arrays import Array, namespace
from gemproj._bounds import standard_form
from gemproj._combine import slack_of
from gemproj._constants import RESOLVED, ROUNDING, SLAB, SMALL, TRUST_NARROW, TRUST_SMALL
from gemproj._coordinates import inverse_on, of_problems, solve_in_coordinates
from gemproj._problem import Problem
from gemproj._solution import DualSolution
from gemproj._tspace import clip, identity_like, inverse_of, matvec, normalise
from gemproj.methods._method import Status
from gemproj.methods.exact import resolution

_STALLED = int(Status.STALLED)
_UNSETTLED = int(Status.STALLED | Status.UNRESOLVED)


def lost(problem: Problem, sol: DualSolution, resolved: Any) -> np.ndarray:
    """Tell where K has lost digits that the exact method needs; `resolved` is from its `Outcome`."""
    if sol._rounding > 1e-12:  # K is too coarse to tell which rows are nearly active
        return _resolution(sol) < TRUST_NARROW
    trusted = TRUST_SMALL if problem.columns * (problem.t + 1) <= SMALL else RESOLVED
    if not resolved.ndim:  # plain numbers are the fastest to look at
        return np.array(resolved.item() < trusted or sol.status.item() & _STALLED > 0)
    return (resolved < trusted) | (sol.status & _STALLED > 0)


def unsure(sol: DualSolution) -> np.ndarray:
    """Tell where certificates need more than K: where any row may be nearly active, and K has lost digits.

    Any may where the method does not say which rows are active, and where ``b - h`` is so small next to g
    that the exact method takes nearly active rows for far ones.
    """
    (K, b, gg), h = sol.gram, sol.bounds.h
    apart = b if h is None else b - h
    norms = np.sqrt(np.diagonal(K, axis1=-2, axis2=-1))
    any_row = np.all(np.abs(apart) <= 1e-2 * norms * np.sqrt(gg)[..., None], axis=-1) | (not sol._exact)
    if sol._coordinates is not None:
        any_row = any_row & ~sol.refined
    if not np.count_nonzero(any_row):
        return any_row
    return any_row & (_resolution(sol) < (RESOLVED if sol._rounding < 1e-12 else TRUST_NARROW))


def _resolution(sol: DualSolution) -> np.ndarray:
    unit = normalise(sol.gram.K, sol.gram.b)
    return resolution(unit.K, np.ones(unit.b.shape, dtype=bool))


def return_to_rows(problem: Problem, sol: DualSolution, chosen: np.ndarray) -> DualSolution:
    """Give some problems of a solution coordinates of their rows, from one more read of G and g.

    What coordinates confirm stays, as where rows are repeated; so do multipliers of methods that are
    approximate by design. Others are solved anew.
    """
    if not np.count_nonzero(chosen):
        return sol
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
        # Rows of norm zero, or left out, keep their multipliers.
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
    """Tell of the chosen problems which meet the optimality conditions in coordinates to rounding.

    With free rows that K resolves; then it does not matter what the others depend on.
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
    return met & (resolution(normalise(K[chosen], lam).K, free) >= TRUST_SMALL)


def refine_directly(problem: Problem, sol: DualSolution, steps: int) -> DualSolution:
    """Correct the free multipliers by slacks that are computed from G, ``lam_P -= K_PP^-1 s_P``.

    Each step reads G and g once, on any device and without waiting for it. It gains the digits that
    K has: with rows at an angle of 1e-5 about six, with rows at an angle of 1e-8 none.
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
    """Return ``K_PP^-1`` of the free rows P, zero for the others, as two factors (..., 2, t, t).

    Of numerically dependent free rows, one of the solutions of ``K_PP z = u``.
    """
    free, xp = sol.free, namespace(sol.multipliers)
    inverse = inverse_of(sol.gram.K, free)
    found = xp.stack([inverse, xp.broadcast_to(identity_like(inverse), inverse.shape)], axis=-3)
    if sol._coordinates is not None:
        for i in map(tuple, np.argwhere(sol.refined)):
            found[i] = inverse_on(sol._coordinates[i][:, :-1], free[i])
    return found
