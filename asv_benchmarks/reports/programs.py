"""Quadratic programs as projections, in the form that qpsolvers and qpbenchmark take.

The program ``min 1/2 x'Px + q'x, C x >= c`` with ``P = LL'`` and ``y = L'x`` is the projection of
``-L^-1 q`` onto ``{y : C L^-T y >= c}``. Two things are added to that:

- **Refinement.** An answer in float64 has the rounding of the factors. The same problem, with the residuals
  of the answer in place of q and c and its active rows as equalities, gives the correction. Its residuals
  are computed in `numpy.longdouble`, 80 bits on x86.
- **A proximal step.** If P is singular, or nearly so, L is the factor of ``P + shift I``, and ``-shift x``
  with the last x is added to q. The fixed point of these steps is a solution of the program itself.
"""

from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import qpsolvers
from scipy.linalg.lapack import dtrtri

from gemproj import solve_dual

# A squared pivot of P below this, relative to the largest entry of its diagonal, counts as zero.
SINGULAR = 1e-10
# Shifts of P, in the same units, from the root of the rounding of float64; one that needs more is not convex.
SHIFTS = (0.0, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4)
ROUNDS = 10  # at most, of a proximal step and a refinement


class Rows(NamedTuple):
    """The constraints of a program as rows ``C x >= c``, of which a mask are equalities."""

    C: np.ndarray
    c: np.ndarray
    equal: np.ndarray
    lower: Any  # indices of the variables with a row for their lower bound
    upper: Any

    @classmethod
    def of(cls, problem: qpsolvers.Problem) -> "Rows":
        """Stack A, -G and the finite bounds; a variable with equal bounds has one row, an equality."""
        _, q, G, h, A, b, lb, ub = problem.unpack_as_dense()
        parts = [(np.zeros((0, len(q))), np.zeros(0), np.zeros(0, dtype=bool))]
        given, lower, upper = ((A, b, 1.0), (G, h, -1.0)), np.zeros(0, dtype=int), np.zeros(0, dtype=int)
        parts += [(sign * a, sign * c, np.full(len(c), sign > 0)) for a, c, sign in given if a is not None]
        if lb is not None or ub is not None:
            lb, ub = (np.full(len(q), v) if a is None else a for a, v in ((lb, -np.inf), (ub, np.inf)))
            lower, upper = np.flatnonzero(lb > -np.inf), np.flatnonzero((ub < np.inf) & (lb != ub))
            one = np.eye(len(q))
            parts.append((one[lower], lb[lower], lb[lower] == ub[lower]))
            parts.append((-one[upper], -ub[upper], np.zeros(len(upper), dtype=bool)))
        C, c, equal = map(np.concatenate, zip(*parts, strict=True))
        C[c == -np.inf], c[c == -np.inf] = 0.0, 0.0  # rows that bound nothing
        return cls(C, c, equal, lower, upper)

    def solution(self, problem: qpsolvers.Problem, x: np.ndarray, lam: np.ndarray) -> qpsolvers.Solution:
        """Return x and the multipliers of the rows in the signs and names of qpsolvers."""
        m, k = (0 if a is None else len(a) for a in (problem.b, problem.h))
        of_bounds, z_box = lam[m + k :], np.zeros(len(x))
        z_box[self.lower] -= of_bounds[: len(self.lower)]
        z_box[self.upper] += of_bounds[len(self.lower) :]
        return qpsolvers.Solution(problem, found=True, x=x, y=-lam[:m], z=lam[m : m + k], z_box=z_box)


def solve_problem(
    problem: qpsolvers.Problem, initvals: Any = None, verbose: bool = False, eps_abs: float = 1e-9
) -> qpsolvers.Solution:
    """Solve a convex program to absolute residuals of `eps_abs`, or as far as float64 goes.

    `initvals` and `verbose`, which qpsolvers passes to every solver, are not used.
    """
    P, q, *_ = problem.unpack_as_dense()
    C, c, equal, *_ = rows = Rows.of(problem)
    inverse, shift = _inverse_factor(P)
    G = C @ inverse.T

    def step(linear: np.ndarray, right: np.ndarray, G: np.ndarray, equality: Any) -> tuple[np.ndarray, Any]:
        """Return x and the multipliers of ``min 1/2 |L'x|^2 + linear'x, G L'x >= right``."""
        g = -inverse @ linear
        lam = solve_dual(G, g, h=right, equality=equality).multipliers
        return inverse.T @ (g + lam @ G), lam

    x, lam, stationary, missing = np.zeros(len(q)), np.zeros(len(c)), q, c
    # Worse than x = 0 is no answer: the program has no minimum.
    best = qpsolvers.Solution(problem, found=False)
    least = max(np.max(abs(q)), np.max(np.where(equal, abs(c), c), initial=0.0))
    for turn in range(2 * ROUNDS if shift else 2):
        try:
            if turn % 2:
                active = equal | (lam > 0.0)
                dx, dlam = step(stationary.astype(float), missing[active].astype(float), G[active], True)
                x, lam[active] = x + dx, lam[active] + dlam
                lam[~equal] = np.maximum(lam[~equal], 0.0)
            else:
                x, lam = step(q - shift * x, c, G, equal if equal.any() else False)
        except ValueError:  # no x satisfies the constraints
            break
        for kind in (np.float64, np.longdouble):  # the second one only if the first does not settle it
            wide, weights = x.astype(kind), lam.astype(kind)
            stationary, missing = P @ wide + q - weights @ C, c - C @ wide
            gap, short = wide @ stationary - weights @ missing, np.where(equal, abs(missing), missing)
            worst = max(abs(gap), np.max(abs(stationary)), np.max(short, initial=0.0))
            if worst < 0.5 * eps_abs:
                break
        if worst <= least:
            best, least = rows.solution(problem, x, lam.copy()), worst
        if worst < eps_abs:
            break
    return best


def _inverse_factor(P: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the inverse of L and the shift of ``LL' = P + shift I``; no shift for a positive definite P."""
    size = float(np.max(np.diagonal(P), initial=0.0)) or 1.0
    for shift in SHIFTS:
        with suppress(np.linalg.LinAlgError):
            L = np.linalg.cholesky(P + shift * size * np.eye(len(P)) if shift else P)
            if shift or np.min(np.diagonal(L)) ** 2 > SINGULAR * size:
                return dtrtri(L, lower=1)[0], shift * size
    raise np.linalg.LinAlgError("P is not positive semidefinite")
