"""Solvers side by side on a set of quadratic programs, as qpbenchmark's boards judge them.

A program counts as solved if the primal residual, the dual residual and the duality gap are all below 1e-9,
absolute: the boards' setting "high accuracy". Solvers get the tolerances of that setting.
"""

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import qpsolvers
import typer
from rich.progress import track

from asv_benchmarks.reports.machine import load, one_thread, processor, versions
from asv_benchmarks.reports.programs import solve_problem
from asv_benchmarks.reports.tables import Table, digits, power, publish

TOLERANCE = 1e-9
# Of the shifted geometric mean, in seconds, as on the boards: the shift, and the time of a missing answer.
SHIFT, LIMIT = 10.0, 1000.0
CALLS, SECONDS = 5, 0.5  # most calls of a solver, and their time

_both = {"eps_abs": TOLERANCE, "eps_rel": 0.0}
_gap = {"check_duality_gap": True, "eps_duality_gap_abs": TOLERANCE, "eps_duality_gap_rel": 0.0}
PEERS: dict[str, tuple[str, dict[str, Any]]] = {  # by name in qpsolvers: the package, and the settings
    "quadprog": ("quadprog", {}),
    "daqp": ("daqp", {"primal_tol": TOLERANCE, "dual_tol": TOLERANCE}),
    "piqp": ("piqp", _both | _gap),
    "proxqp": ("proxsuite", _both | _gap),
    "clarabel": ("clarabel", {"tol_feas": TOLERANCE, "tol_gap_abs": TOLERANCE, "tol_gap_rel": 0.0}),
    "osqp": ("osqp", _both | {"time_limit": LIMIT}),
}
Solve = Callable[[qpsolvers.Problem], qpsolvers.Solution]
Programs = dict[str, qpsolvers.Problem]


class Score(NamedTuple):
    """The time and the measures of an answer; without an answer, these are infinite."""

    seconds: float
    # Primal residual, dual residual and duality gap: computed in float64, as on the boards, and in 80 bits.
    residuals: list[float] = [np.inf] * 3
    precise: list[float] = [np.inf] * 3
    error: float = np.inf  # the distance from the right x, NaN where that is not known

    @property
    def found(self) -> bool:
        """Whether there is an answer."""
        return self.residuals[0] < np.inf

    @property
    def solved(self) -> bool:
        """Whether the answer counts on the boards."""
        return max(self.residuals) < TOLERANCE


def shortest(call: Callable[[], Any], most: float = SECONDS) -> tuple[float, Any]:
    """Return the shortest CPU time of some calls, of all threads, in seconds, and the last result.

    On a busy machine CPU time is less disturbed than the time of a clock.
    """
    times: list[float] = []
    while not times or (len(times) < CALLS and sum(times) < most):
        start = time.process_time()
        result = call()
        times.append(time.process_time() - start)
    return min(times), result


def residuals(solution: qpsolvers.Solution) -> list[float]:
    """Return the primal residual, the dual residual and the duality gap."""
    return [float(r()) for r in (solution.primal_residual, solution.dual_residual, solution.duality_gap)]


def in_80_bits(solution: qpsolvers.Solution) -> qpsolvers.Solution:
    """Return the same answer to the same program in `numpy.longdouble`, which has 80 bits on x86."""

    def wide(a: Any) -> Any:
        return a if a is None else np.asarray(a, dtype=np.longdouble)

    problem = qpsolvers.Problem(*map(wide, solution.problem.unpack_as_dense()))
    x, y, z, z_box = map(wide, (solution.x, solution.y, solution.z, solution.z_box))
    return replace(solution, problem=problem, x=x, y=y, z=z, z_box=z_box)


def score(solve: Solve, problem: qpsolvers.Problem, right: np.ndarray | None) -> Score:
    """Solve a program some times, and judge the answer."""

    def attempt() -> qpsolvers.Solution:
        try:
            return solve(problem)
        except Exception:  # any error means that there is no answer
            return qpsolvers.Solution(problem, found=False)

    seconds, solution = shortest(attempt)
    if not solution.found or solution.x is None or not np.isfinite(solution.x).all():
        return Score(seconds)
    error = np.nan if right is None else float(np.linalg.norm(solution.x - right))
    return Score(seconds, residuals(solution), residuals(in_80_bits(solution)), error)


def row(name: str, scores: list[Score], measures: int) -> list[str]:
    """Return the row of a solver in the table, with the largest values of its first measures."""
    worst = np.array([[*s.residuals, s.error] for s in scores if s.found] or [[np.nan] * 4]).max(axis=0)
    counts = sum(s.solved for s in scores), sum(max(s.precise) < TOLERANCE for s in scores)
    # Without an answer, the time of the first mean is the limit, and of the second what the call took.
    seconds = np.array([s.seconds if s.found else LIMIT for s in scores])
    shifted = np.exp(np.mean(np.log(seconds + SHIFT))) - SHIFT
    mean = 1e3 * np.exp(np.mean(np.log([s.seconds for s in scores])))
    solved = [f"{count} of {len(scores)}" for count in counts]
    return [name, *solved, *map(power, worst[:measures]), f"{shifted:.4f}", digits(float(mean))]


@one_thread()
def run(
    title: str, programs: Programs, peers: bool, out: Path | None, right: dict[str, np.ndarray] | None = None
) -> int:
    """Solve all programs, print and write the tables; return 1 if gemproj falls short of one, else 0."""
    solvers: dict[str, Solve] = {"gemproj": solve_problem}
    for name, (_, settings) in PEERS.items():
        if peers and name in qpsolvers.available_solvers:
            solvers[name] = partial(qpsolvers.solve_problem, solver=name, **settings)
    used = [PEERS[name][0] for name in solvers if name in PEERS]
    packages = ["gemproj", "numpy", "scipy", "qpsolvers", *used]
    if not programs:
        raise typer.BadParameter("no program was found in the folder")
    solve_problem(next(iter(programs.values())))  # compiled loops are loaded
    scores: dict[str, list[Score]] = {name: [] for name in solvers}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of conversions, and of answers that were not found
        for key, problem in track(programs.items(), "solving", transient=True):
            for name, solve in solvers.items():
                scores[name].append(score(solve, problem, None if right is None else right[key]))
    measures = ["primal", "dual", "gap", "error of x"][: 3 if right is None else 4]
    head = ["", "solved", "in 80 bits", *measures, "shifted mean, s", "mean, ms"]
    rows = [row(name, found, len(measures)) for name, found in scores.items()]
    table = Table(f"{title}: {len(programs)} programs", head, rows)
    head = ["", *measures[:3], *(f"{measure}, 80 bits" for measure in measures[:3])]
    short = Table("Programs in which gemproj falls short", head)
    for key, found in zip(programs, scores["gemproj"], strict=True):
        if max(*found.residuals, *found.precise) >= TOLERANCE:
            short.rows.append([key, *map(power, found.residuals), *map(power, found.precise)])
    basis = f"{processor()}, one thread{load()}. {versions(packages)}."
    publish([basis + "\n", table, *([short] if short.rows else [])], out)
    return int(not all(s.solved for s in scores["gemproj"]))
