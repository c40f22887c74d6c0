"""The solvers that a user of GEM might call, each as a function of G and g."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import scipy.optimize

import gemproj
from gemproj import FISTA, PGD, Status

Vector = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Findings(NamedTuple):
    """The results of a solver in addition to x; NaN if it has none."""

    multipliers: Any = np.nan
    warned: bool = False
    bound: float = np.nan


@dataclass(frozen=True)
class Solver:
    """A solver, its requirements, and its additional results."""

    project: Vector
    # For the same problem: multipliers, whether a status warns, and an upper bound of the error.
    inspect: Callable[[np.ndarray, np.ndarray], Findings] = lambda G, g: Findings()
    # "exact" with default settings, "careful" if scaled and with tight tolerances; "approximate" by design:
    # errors, but no failures.
    aim: str = "exact"
    needs: tuple[str, ...] = ()  # packages

    @property
    def missing(self) -> list[str]:
        """Return the packages that are not installed."""
        return [package for package in self.needs if find_spec(package) is None]


def ours(method: gemproj.Method | str, aim: str = "exact", needs: tuple[str, ...] = ()) -> Solver:
    """Return a method of gemproj as a solver."""

    def inspect(G: np.ndarray, g: np.ndarray) -> Findings:
        sol = gemproj.solve_dual(G, g, method=method)
        return Findings(sol.multipliers, bool(sol.status & ~Status.APPROXIMATE), float(sol.error_bound()))

    return Solver(lambda G, g: gemproj.project(G, g, method=method), inspect, aim, needs)


def from_dual(dual: Vector, *needs: str, aim: str = "exact") -> Solver:
    """Return a solver that computes multipliers, and then ``x = g + G'lam``."""
    return Solver(lambda G, g: g + dual(G, g) @ G, lambda G, g: Findings(dual(G, g)), aim, needs)


def minimum(solver: str, G: np.ndarray, g: np.ndarray, settings: dict[str, float]) -> np.ndarray:
    """Solve ``min 1/2 lam'K lam + b'lam, lam >= 0`` through qpsolvers."""
    from qpsolvers import solve_qp

    lam = solve_qp(G @ G.T, G @ g, lb=np.zeros(len(G)), solver=solver, **settings)
    if lam is None:
        raise ArithmeticError(f"{solver} found no solution")
    return lam


def via_qpsolvers(solver: str, package: str) -> Solver:
    """Solve the dual problem as it is, with a solver's default settings."""
    return from_dual(lambda G, g: minimum(solver, G, g, {}), "qpsolvers", package)


def with_care(solver: str, package: str, **settings: float) -> Solver:
    """Solve the dual problem of rows and a gradient of norm one, to tight tolerances."""

    def dual(G: np.ndarray, g: np.ndarray) -> np.ndarray:
        norms, size = np.linalg.norm(G, axis=1), np.linalg.norm(g)
        norms[norms == 0.0] = 1.0
        return minimum(solver, G / norms[:, None], g / size, settings) * size / norms

    return from_dual(dual, "qpsolvers", package, aim="careful")


def primal_qp(G: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Solve ``min 1/2 |x - g|^2, -G x <= 0``, with a matrix of size d by d."""
    from qpsolvers import solve_qp

    return solve_qp(np.eye(len(g)), -g, -G, np.zeros(len(G)), solver="quadprog")


def gem_reference(G: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Project as in the code of the GEM paper, with its ridge of 1e-3."""
    import torch

    from asv_benchmarks.benchmarks.peers import gem_published

    return gem_published(torch.from_numpy(G), torch.from_numpy(g)).numpy()


def torchjd(G: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Project g onto the dual cone of the rows of [g; G]: g.x = |x|^2 >= 0 holds anyway."""
    import torch
    from torchjd.aggregation import DualProj

    rows = torch.from_numpy(np.vstack([g, G]))
    preference = torch.zeros(len(rows), dtype=rows.dtype)
    preference[0] = 1.0
    return DualProj(preference)(rows).numpy()


SOLVERS = {
    "gemproj exact": ours("exact"),
    "gemproj quadprog": ours("quadprog", needs=("quadprog",)),
    "gemproj osqp": ours("osqp", needs=("osqp",)),
    # min |G'lam + g|, lam >= 0: the dual problem without its Gram matrix.
    "SciPy NNLS": from_dual(lambda G, g: scipy.optimize.nnls(G.T, -g)[0]),
    "quadprog, primal": Solver(primal_qp, needs=("qpsolvers", "quadprog")),
    "quadprog": via_qpsolvers("quadprog", "quadprog"),
    "DAQP": via_qpsolvers("daqp", "daqp"),
    "ProxQP": via_qpsolvers("proxqp", "proxsuite"),
    "PIQP": via_qpsolvers("piqp", "piqp"),
    "Clarabel": via_qpsolvers("clarabel", "clarabel"),
    "GEM reference": Solver(gem_reference, needs=("torch", "quadprog")),
    "TorchJD": Solver(torchjd, needs=("torchjd", "qpsolvers", "quadprog")),
    # Each with the tolerance, of 1e-9 to 1e-13, at which it solves most families.
    "quadprog, scaled": with_care("quadprog", "quadprog"),
    "DAQP, scaled, 1e-11": with_care("daqp", "daqp", primal_tol=1e-11, dual_tol=1e-11),
    "ProxQP, scaled, 1e-12": with_care("proxqp", "proxsuite", eps_abs=1e-12, eps_rel=0.0),
    "PIQP, scaled, 1e-12": with_care(
        "piqp", "piqp", eps_abs=1e-12, eps_rel=1e-12, eps_duality_gap_abs=1e-12, eps_duality_gap_rel=1e-12
    ),
    "Clarabel, scaled, 1e-12": with_care(
        "clarabel", "clarabel", tol_feas=1e-12, tol_gap_abs=1e-12, tol_gap_rel=1e-12
    ),
    "gemproj fista, 100 steps": ours(FISTA(steps=100), "approximate"),
    "gemproj pgd, 100 steps": ours(PGD(steps=100), "approximate"),
    "gemproj agem": ours("agem", "approximate"),
}
