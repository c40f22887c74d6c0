"""Solvers side by side on a set of quadratic programs, as qpbenchmark's boards judge them.

A program counts as solved if the primal residual, the dual residual and the duality gap are all below 1e-9,
absolute: at the setting "high accuracy" of these boards. Solvers get the tolerances of that setting.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import qpsolvers
from rich.progress import track

from asv_benchmarks.reports.machine import load, processor, versions
from asv_benchmarks.reports.programs import solve_problem
from asv_benchmarks.reports.tables import Table, digits, power, publish

TOLERANCE = 1e-9
# Of the shifted geometric mean, in seconds, as on the boards: the shift, and the time of a missing answer.
SHIFT, LIMIT = 10.0, 1000.0
CALLS, SECONDS = 5, 0.5  # most calls of a solver, and their time; the shortest counts

_both = {"eps_abs": TOLERANCE, "eps_rel": 0.0}
_gap = {"check_duality_gap": True, "eps_duality_gap_abs": TOLERANCE, "eps_duality_gap_rel": 0.0}
PEERS: dict[str, tuple[str, dict[str, float]]] = {  # by name in qpsolvers: the package, and the settings
    "quadprog": ("quadprog", {}),
    "daqp": ("daqp", {"primal_tol": TOLERANCE, "dual_tol": TOLERANCE}),
    "piqp": ("piqp", _both | _gap),
    "proxqp": ("proxsuite", _both | _gap),
    "clarabel": ("clarabel", {"tol_feas": TOLERANCE, "tol_gap_abs": TOLERANCE, "tol_gap_rel": 0.0}),
    "osqp": ("osqp", _both | {"time_limit": LIMIT}),
}
Solve = Callable[[qpsolvers.Problem], qpsolvers.Solution]
Programs = dict[str, qpsolvers.Problem]


@dataclass(frozen=True)
class Score:
    """The time of an answer, and its residuals: primal, dual, gap; infinite without an answer."""

    seconds: float
    residuals: tuple[float, float, float]
    precise: tuple[float, float, float]  # the same ones of the same answer, computed in 80 bits

    @property
    def found(self) -> bool:
        """Whether there is an answer."""
        return np.isfinite(self.residuals).all()


def residuals(solution: qpsolvers.Solution) -> tuple[float, float, float]:
    """Return the primal residual, the dual residual and the duality gap."""
    each = solution.primal_residual(), solution.dual_residual(), solution.duality_gap()
    return tuple(map(float, each))


def in_80_bits(solution: qpsolvers.Solution) -> qpsolvers.Solution:
    """Return the same answer to the same program in `numpy.longdouble`, which has 80 bits on x86."""

    def wide(a: np.ndarray | None) -> np.ndarray | None:
        return a if a is None else a.astype(np.longdouble)

    problem = qpsolvers.Problem(*map(wide, solution.problem.unpack_as_dense()))
    return replace(solution, problem=problem, **{k: wide(getattr(solution, k)) for k in ("x", "y", "z", "z_box")})


def score(solve: Solve, problem: qpsolvers.Problem) -> Score:
    """Solve a program some times, and judge the answer."""
    times: list[float] = []
    while not times or (len(times) < CALLS and sum(times) < SECONDS):
        start = time.perf_counter()
        try:
            solution = solve(problem)
        except Exception:  # any error means that there is no answer
            solution = qpsolvers.Solution(problem, found=False)
        times.append(time.perf_counter() - start)
    if not solution.found or solution.x is None or not np.isfinite(solution.x).all():
        return Score(min(times), (np.inf,) * 3, (np.inf,) * 3)
    return Score(min(times), residuals(solution), residuals(in_80_bits(solution)))


def shifted_mean(scores: list[Score]) -> float:
    """Return the shifted geometric mean of the times, in seconds; a missing answer took the limit."""
    seconds = np.array([s.seconds if s.found else LIMIT for s in scores])
    return float(np.exp(np.mean(np.log(seconds + SHIFT))) - SHIFT)


def row(name: str, scores: list[Score]) -> list[str]:
    """Return the row of a solver."""
    solved, precise = ([max(r) < TOLERANCE for r in rs] for rs in zip(*[(s.residuals, s.precise) for s in scores]))
    ms = 1e3 * float(np.exp(np.mean(np.log([s.seconds for s in scores]))))
    worst = np.array([s.residuals for s in scores if s.found]).max(axis=0, initial=0.0)
    counts = [f"{sum(each)} of {len(scores)}" for each in (solved, precise)]
    return [name, *counts, *map(power, worst), f"{shifted_mean(scores):.4f}", digits(ms)]


def short(programs: Programs, scores: list[Score]) -> list[list[str]]:
    """Return a row for each program that falls short, by float64 or by 80 bits."""
    pairs = zip(programs, scores, strict=True)
    return [
        [name, *map(power, s.residuals), *map(power, s.precise)]
        for name, s in pairs
        if max(*s.residuals, *s.precise) >= TOLERANCE
    ]


def run(title: str, programs: Programs, peers: bool, out: Path | None) -> int:
    """Solve all programs, print and write the tables; return 1 if gemproj falls short of one, else 0."""
    solvers: dict[str, Solve] = {"gemproj": solve_problem}
    if peers:
        for name, (_, settings) in PEERS.items():
            if name in qpsolvers.available_solvers:
                solvers[name] = lambda p, n=name, s=settings: qpsolvers.solve_problem(p, solver=n, **s)
    packages = ["gemproj", "numpy", "scipy", "qpsolvers", *(PEERS[n][0] for n in solvers if n in PEERS)]
    basis = f"{processor()}, one thread{load()}. {versions(packages)}."
    solve_problem(next(iter(programs.values())))  # compiled loops are loaded
    scores: dict[str, list[Score]] = {name: [] for name in solvers}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of conversions, and of answers that were not found
        for problem in track(programs.values(), "solving", transient=True):
            for name, solve in solvers.items():
                scores[name].append(score(solve, problem))
    head = ["", "solved", "in 80 bits", "primal", "dual", "gap", "shifted mean, s", "mean, ms"]
    table = Table(f"{title}: {len(programs)} programs", head, [row(n, s) for n, s in scores.items()])
    parts: list[object] = [basis, table]
    if missed := short(programs, scores["gemproj"]):
        head = ["", "primal", "dual", "gap", "primal, 80 bits", "dual, 80 bits", "gap, 80 bits"]
        parts.append(Table("Programs in which gemproj falls short", head, missed))
    publish(parts, out)
    return int(any(max(s.residuals) >= TOLERANCE for s in scores["gemproj"]))
