"""Quadratic programs as projections, in the form that qpsolvers and qpbenchmark take.

The program ``min 1/2 x'Px + q'x, C x >= c`` with ``P = LL'`` and ``y = L'x`` is the projection of
``-L^-1 q`` onto ``{y : C L^-T y >= c}``. Two things are added to that:

- **Refinement.** An answer in float64 has the rounding of the factors. The same problem, with the residuals of
  the answer in place of q and c and its active rows as equalities, gives the correction. Residuals are
  computed in `numpy.longdouble`, 80 bits on x86.
- **A proximal step.** If P is singular, or nearly so, L is the factor of ``P + shift I``, and ``-shift x``
  with the last x is added to q. The fixed point of these steps is a solution of the program itself.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import qpsolvers
from scipy.linalg import solve_triangular

from gemproj import combine, solve_dual

# A squared pivot of P below this, relative to the largest entry of its diagonal, counts as zero.
SINGULAR = 1e-10
# The shift of a singular P, in the same units: the root of the rounding of float64.
SHIFT = 1e-8
ROUNDS = 10  # at most, of a proximal step and a refinement


@dataclass(frozen=True, eq=False)
class Rows:
    """The constraints of a program as rows ``C x >= c``, of which a mask are equalities."""

    C: np.ndarray
    c: np.ndarray
    equal: np.ndarray
    fixed: np.ndarray  # indices of the variables with a lower bound, and of those with an upper bound
    capped: np.ndarray

    @classmethod
    def of(cls, problem: qpsolvers.Problem) -> "Rows":
        """Stack A, -G and the finite bounds; a variable with equal bounds has one row, an equality."""
        _, q, G, h, A, b, lb, ub = problem.unpack_as_dense()
        n = len(q)
        lb, ub = (np.full(n, v) if a is None else a for a, v in ((lb, -np.inf), (ub, np.inf)))
        A, b = (np.zeros((0, n)), np.zeros(0)) if A is None else (A, b)
        G, h = (np.zeros((0, n)), np.zeros(0)) if G is None else (G, h)
        fixed, capped = np.flatnonzero(lb > -np.inf), np.flatnonzero((ub < np.inf) & (lb < ub))
        one = np.eye(n) if len(fixed) or len(capped) else np.zeros((0, n))
        counts = len(b), len(h), len(fixed), len(capped)
        equal = np.repeat([True, False, False, False], counts)
        equal[len(b) + len(h) :][: len(fixed)] = lb[fixed] == ub[fixed]
        C = np.concatenate([A, -G, one[fixed], -one[capped]])
        return cls(C, np.concatenate([b, -h, lb[fixed], -ub[capped]]), equal, fixed, capped)

    def solution(self, problem: qpsolvers.Problem, x: np.ndarray, lam: np.ndarray) -> qpsolvers.Solution:
        """Return x and the multipliers of the rows in the signs and names of qpsolvers."""
        m, k = (0 if a is None else len(a) for a in (problem.b, problem.h))
        of_rows, z_box = lam[m + k :], np.zeros(len(x))
        z_box[self.fixed] -= of_rows[: len(self.fixed)]
        z_box[self.capped] += of_rows[len(self.fixed) :]
        y, z = -lam[:m], lam[m : m + k]
        return qpsolvers.Solution(problem, found=True, x=x, y=y, z=z, z_box=z_box)


def solve_problem(
    problem: qpsolvers.Problem, initvals: Any = None, verbose: bool = False, eps_abs: float = 1e-9
) -> qpsolvers.Solution:
    """Solve a convex program to absolute residuals of `eps_abs`, or as far as float64 goes.

    `initvals` and `verbose`, which qpsolvers passes to every solver, are not used.
    """
    P, q, *_ = problem.unpack_as_dense()
    rows, x = Rows.of(problem), np.zeros(len(q))
    C, c, equal = rows.C, rows.c, rows.equal
    L, shift = _factor(P)
    G = np.ascontiguousarray(solve_triangular(L, C.T, lower=True, check_finite=False).T)

    def step(linear: np.ndarray, right: np.ndarray, used: Any, equality: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return x and the multipliers of ``min 1/2 |L'x|^2 + linear'x`` under some of the rows."""
        g = -solve_triangular(L, linear, lower=True, check_finite=False)
        sol = solve_dual(G[used], g, h=right[used], equality=equality)
        y = combine(G[used], g, sol)
        return solve_triangular(L, y, lower=True, trans=1, check_finite=False), sol.multipliers

    best, least = qpsolvers.Solution(problem, found=False), np.inf
    for _ in range(ROUNDS if shift else 1):
        try:
            x, lam = step(q - shift * x, c, slice(None), equal)
        except ValueError:  # no x satisfies the constraints
            break
        for refined in (False, True):
            if refined:
                active, wide = equal | (lam > 0.0), np.longdouble
                stationary = P.astype(wide) @ x + q - lam.astype(wide) @ C
                missing = c - C.astype(wide) @ x
                dx, dlam = step(stationary.astype(float), missing.astype(float), active, True)
                x, lam[active] = x + dx, lam[active] + dlam
                lam[~equal] = np.maximum(lam[~equal], 0.0)
            found = rows.solution(problem, x, lam.copy())
            worst = max(found.primal_residual(), found.dual_residual(), found.duality_gap())
            if worst < least:
                best, least = found, worst
            if worst < eps_abs:
                return best
    return best


def _factor(P: np.ndarray) -> tuple[np.ndarray, float]:
    """Return L and the shift of ``LL' = P + shift I``; the shift is zero if P is positive definite."""
    size, shift = float(np.max(np.diagonal(P), initial=0.0)) or 1.0, 0.0
    while True:
        try:
            L = np.linalg.cholesky(P + shift * np.eye(len(P)) if shift else P)
            if shift or np.min(np.diagonal(L)) ** 2 > SINGULAR * size:
                return L, shift
        except np.linalg.LinAlgError:
            if shift > size:
                raise
        shift = 10.0 * shift or SHIFT * size
