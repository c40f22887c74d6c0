"""Beyond the Gram matrix: what K = G G' has lost by squaring, G itself still knows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from gemproj._array import Array, Problem, namespace
from gemproj._certificate import near_span, settled
from gemproj._gram import Gram, factor_rows, stacked_tiles
from gemproj._rank import depends, rank, remainders
from gemproj._solution import DualSolution, from_units, in_units
from gemproj.methods._active_set import Factorisation, solve_active_set
from gemproj.methods._enumeration import solve_on
from gemproj.methods._method import Status, clip, normalise, snap
from gemproj.methods.equality import solve_rows, span
from gemproj.methods.exact import RESOLVED, Exact, resolution

# The resolution below which K is not trusted. Small problems lose no time by looking at G once more;
# where float32 products were summed K is good to 1e-8.
_SMALL, _NATIVE = 1e-2, 1e-3
_DEPENDENT = 3e-14  # sine of the angle to the span of active rows, below which rounding hides it
_COORDINATES = 3e-15  # rounding of a factor, relative to the norms of its columns
_HOPELESS = 1e-7  # error of x over |g| that even the factorisation cannot avoid


def return_to_rows(problem: Problem, sol: DualSolution, options: Any) -> DualSolution:
    """Solve anew, from a factorisation of G, the problems whose K has lost the digits that decide.

    One more read of G and g, for these problems only. Multipliers of methods that are approximate by
    design stay as they are; the factor then serves the certificates.
    """
    lost = _lost(problem, sol)
    if not lost.any():
        return sol
    t = problem.t
    factor = np.zeros((*problem.batch, t + 1, t + 1))
    lam, status, units = np.array(sol.multipliers), np.array(sol.status), sol.units
    iterations = np.broadcast_to(np.asarray(sol.iterations), status.shape).copy()
    upper = sol.standard().upper
    residues = {}
    for i in map(tuple, np.argwhere(lost)):
        unit = None if units is None else units[i]
        gram = Gram(sol.gram[(*i, ...)], sol.linear[(*i, ...)], sol.squared_norm[(*i, ...)])
        factor[i] = factor_rows(problem.at(i), gram, sol.rounding, unit)
        if sol.equality:
            A, a = factor[i][:, :t], factor[i][:, t]
            lam[i] = from_units(solve_rows(A, a), unit, check=options.check is not False)
            status[i] &= ~Status.UNRESOLVED
            singular = span(A)[1]
            if len(singular) < np.count_nonzero(np.any(A != 0, axis=0)):
                residues[i] = remainders(problem.at(i))
                # Rows that depend on others to rounding: exactly, or is it only rounding that hides the rest?
                if rank(residues[i]) > len(singular):
                    status[i] |= Status.UNRESOLVED
            if len(singular) and singular[-1] < _COORDINATES / _HOPELESS:
                status[i] |= Status.UNRESOLVED
            continue
        if not isinstance(options.method, Exact):
            residues[i] = remainders(problem.at(i))
            continue
        A, a = factor[i][:, :t], factor[i][:, t]
        a = a + A @ in_units(np.full(t, sol.margin), unit)
        top = np.full(t, np.inf) if upper is None else upper[i]
        found, pivots, ended = _solve(A, a, top, in_units(lam[i] - sol.margin, unit))
        # Rows of norm zero, or left out, keep what they have.
        raw = from_units(found, unit, check=options.check is not False)
        lam[i] = snap(np.where(np.any(A != 0, axis=0), sol.margin + raw, lam[i]), np.full(t, sol.penalty))
        status[i] = status[i] & ~(Status.UNRESOLVED | Status.STALLED) | ended
        # Rows that depend on active ones to rounding: exactly, or is it only rounding that hides the rest?
        free = (found > 0) & (found < top)
        hidden = _in_span(A, free)
        if problem.small or hidden.any():
            residues[i] = remainders(problem.at(i))
        if not all(depends(residues[i], int(j), free) for j in np.flatnonzero(hidden)):
            status[i] |= Status.UNRESOLVED
        iterations[i] += pivots
    return replace(
        sol, multipliers=lam, status=status, iterations=iterations, factor=factor, residues=residues
    )


def _lost(problem: Problem, sol: DualSolution) -> np.ndarray:
    if sol.resolution is not None and sol.rounding < 1e-12:
        below = _SMALL if problem.small else RESOLVED
        return (sol.resolution < below) | ((sol.status & int(Status.STALLED)) != 0)
    # Any row may decide, where the method does not say, or K is too coarse to tell.
    unit = normalise(sol.gram, sol.linear, None, None)
    return resolution(unit.K, np.ones(unit.b.shape, dtype=bool)) < (
        RESOLVED if sol.rounding < 1e-12 else _NATIVE
    )


def _in_span(A: np.ndarray, free: np.ndarray) -> np.ndarray:
    n = np.linalg.norm(A, axis=0)
    others = ~free & (n > 0)
    result = np.zeros(len(n), dtype=bool)
    if free.any() and others.any():
        result[others] = near_span(A / np.where(n > 0, n, 1.0), free, _DEPENDENT)[others]
    return result


def _solve(
    A: np.ndarray, a: np.ndarray, upper: np.ndarray, start: np.ndarray
) -> tuple[np.ndarray, int, Status]:
    """Solve for rows in the coordinates of the factor, of any norms; return lam, pivots and status."""
    n, size = np.linalg.norm(A, axis=0), float(np.linalg.norm(a))
    rows, lam = n > 0, np.zeros(A.shape[1])
    if size == 0.0 or not rows.any():
        return lam, 0, Status.OPTIMAL
    n = n[rows]
    A, a, upper = A[:, rows] / n, a / size, upper[rows] * n / size
    unit, pivots, residual = solve_active_set(Factorisation(A, a), None, upper, start[rows] * n / size)
    lam[rows] = unit * size / n
    status = Status.OPTIMAL if residual <= 1e-9 else Status.STALLED
    # What the rounding of multipliers leaves along their rows tells whether float64 can hold them.
    if settled(A, a, unit, np.linalg.qr(A[:, (unit > 0) & (unit < upper)])[0])[1] > _HOPELESS:
        status |= Status.UNRESOLVED
    return lam, pivots, status


def refine_directly(problem: Problem, sol: DualSolution, steps: int) -> DualSolution:
    """Correct the free multipliers by the residual ``s = G x`` itself, ``lam_P -= K_PP^-1 s_P``.

    Each step reads G and g once, on any device and without waiting for it. It gains the digits that
    K has: with rows at an angle of 1e-5 about six, with rows at an angle of 1e-8 none.
    """
    K, _, _, upper = sol.standard()
    xp = namespace(K)
    lam = in_units(sol.multipliers - sol.margin, sol.units)
    margin = in_units(0.0 * sol.multipliers + sol.margin, sol.units)
    free = sol.free()
    for _ in range(steps):
        s = direct_slope(problem, margin + lam, sol.units)
        s = xp.where(xp.isfinite(s), s, xp.zeros_like(s))
        if sol.equality:
            lam = lam - sol.solve_free(s)
            continue
        unit = normalise(K, s, lam, upper)
        lam = clip(unit.start - solve_on(unit.K, unit.b, free), unit.upper) * unit.scale
    lam = from_units(lam, sol.units, check=False) + sol.margin
    return replace(sol, multipliers=xp.where(free, lam, sol.multipliers))


def direct_slope(problem: Problem, lam: Array, units: Array | None) -> Array:
    """Return ``s = G x`` for ``x = g + G'lam``, from one read of G and g, in `units`."""
    xp, t = namespace(lam), problem.t
    one = xp.sum(0.0 * lam, axis=-1, keepdims=True) + 1.0
    weights, s = xp.concat([lam, one], axis=-1)[..., None, :], xp.zeros_like(lam)
    with problem.in_full_precision():
        for lead, tile in stacked_tiles(problem, units):
            part = weights[(*lead, ...)]
            # Zero times what is not finite is not zero, and a row that was left out may hold that.
            used = xp.where(xp.matrix_transpose(part) != 0, tile, xp.zeros_like(tile))
            s[(*lead, ...)] += xp.sum(tile[..., :t, :] * xp.matmul(part, used), axis=-1)
    return s
