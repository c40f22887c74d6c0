"""``make accuracy``: every solver on hard families of projections, judged with a hundred digits.

Writes the tables and the figure of docs/accuracy.md. ``python docs/tables.py`` puts the first table into it.
"""

import platform
import re
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from rich.progress import track

from asv_benchmarks.reports.families import FAMILIES, Problem
from asv_benchmarks.reports.isolated import PROCESSES, Answer, Isolated
from asv_benchmarks.reports.judge import project_precisely
from asv_benchmarks.reports.machine import versions
from asv_benchmarks.reports.solvers import SOLVERS
from asv_benchmarks.reports.tables import markdown, power, publish
from examples.common.drawing import plt

# An answer with a larger distance to the projection, in units of |g|, is a failure.
TOLERANCE = 1e-6
# Rounding of x itself, which no bound on multipliers includes.
ROUNDING = 1e-15
REPEATS, LARGEST = 6, 120  # problems of each size, fewer of the large ones; the most constraints
RESULTS = Path("docs", "results")
PACKAGES = [
    "gemproj", "numpy", "scipy", "quadprog", "osqp", "qpsolvers", "daqp", "proxsuite", "piqp", "clarabel",
    "torchjd", "torch", "mpmath",
]  # fmt: skip


Case = tuple[np.ndarray, np.ndarray, np.ndarray]  # G, g and the projection of g


class Score(NamedTuple):
    """The measures of one answer; NaN for those that are missing."""

    t: int
    ms: float
    warned: bool
    primal: float = np.nan
    complementarity: float = np.nan
    error: float = np.nan
    bound: float = np.nan

    @property
    def failed(self) -> bool:
        """Whether the answer is missing, not finite or too far from the projection."""
        return not self.error <= TOLERANCE


class Cell:
    """The scores of one solver in one family; a solver that is approximate by design has no failures."""

    def __init__(self, scores: list[Score], aim: str) -> None:
        self.scores, self.aim = scores, aim
        self.failed = [score for score in scores if score.failed and aim != "approximate"]
        self.silent = sum(not score.warned for score in self.failed)

    def worst(self, measure: str) -> float:
        """Return the largest value of a measure; NaN if there is none."""
        values = [getattr(score, measure) for score in self.scores]
        return max((v for v in values if np.isfinite(v)), default=np.nan)

    @property
    def percent(self) -> int:
        """Failures in percent, rounded up: zero means none."""
        return -(-100 * len(self.failed) // len(self.scores))

    @property
    def entry(self) -> str:
        """The entry in the matrix: the worst error, or the share of failures."""
        return f"**FAIL {self.percent} %**" if self.failed else power(self.worst("error"))

    @property
    def details(self) -> list[str]:
        """The entries of a row of a detail table."""
        numbers = [power(self.worst(name)) for name in ("primal", "complementarity", "error", "bound")]
        time = f"{np.median([score.ms for score in self.scores]):.2f}"
        if self.aim == "approximate":
            return [*numbers, "by design", "", "", time]
        sizes = sorted({score.t for score in self.failed})
        failures = f"{len(self.failed)}/{len(self.scores)}"
        return [*numbers, failures, str(self.silent), ", ".join(map(str, sizes)), time]


Results = dict[str, dict[str, Cell]]  # by family and solver


def score(case: Case, answer: Answer) -> Score:
    """Measure an answer, in numbers that do not depend on the scale of g or of a row."""
    (G, g, right), (ms, x, (lam, warned, bound)) = case, answer
    if x is None or not np.all(np.isfinite(x)):
        return Score(len(G), ms, warned=x is None)
    unit, norms = np.linalg.norm(g), np.linalg.norm(G, axis=1)
    s = G @ x
    primal = np.max(-s / np.where(norms > 0, norms, 1.0) / unit, initial=0.0)
    error = float(np.linalg.norm(x - right) / unit)
    return Score(len(G), ms, warned, primal, np.max(np.abs(lam * s)) / unit**2, error, bound)


def judge(problem: Problem) -> Case:
    """Project a problem with a hundred digits."""
    return *problem, project_precisely(*problem)


def judged(families: dict[str, list[Problem]]) -> dict[str, list[Case]]:
    """Project every problem with a hundred digits, on all cores."""
    with ProcessPoolExecutor(mp_context=PROCESSES) as pool:
        found = {family: pool.map(judge, problems) for family, problems in families.items()}
        return {family: list(cases) for family, cases in track(found.items(), "judging", transient=True)}


def measure(solvers: list[str], cases: dict[str, list[Case]]) -> Results:
    """Call every solver on every case, one after the other."""
    results: Results = {family: {} for family in cases}
    for solver in track(solvers, "solving", transient=True):
        with closing(Isolated(solver)) as run:
            for family, members in cases.items():
                scores = [score(case, run(*case[:2])) for case in members]
                results[family][solver] = Cell(scores, SOLVERS[solver].aim)
    return results


def matrix(results: Results, solvers: list[str], aim: str) -> list[str]:
    """Return the table of families by solvers of one aim."""
    chosen = [solver for solver in solvers if SOLVERS[solver].aim == aim]
    rows = [[family, *(cells[solver].entry for solver in chosen)] for family, cells in results.items()]
    return markdown(["worst error", *chosen], rows) if chosen else []


def summary(results: Results, solvers: list[str]) -> list[str]:
    """Return the table of how many families each solver solves, by default and with care."""

    def counts(name: str) -> list[str]:
        cells = [cells[name] for cells in results.values()]
        missed = sum(len(cell.failed) for cell in cells)
        return [str(sum(not c.failed for c in cells)), str(missed), str(sum(c.silent for c in cells))]

    careful = {name.split(",")[0]: name for name in solvers if SOLVERS[name].aim == "careful"}
    rows = [
        [name, *counts(name), *(counts(careful[name]) if name in careful else [""] * 3)]
        for name in solvers
        if SOLVERS[name].aim == "exact"
    ]
    head = ["solver", f"families solved, of {len(results)}", "problems missed", "silently"]
    head += ["scaled, tight tolerances: families", "missed", "silently"]
    return markdown(head, sorted(rows, key=lambda row: -int(row[1]))) if rows else []


def details(results: Results) -> list[str]:
    """Return a folded table for each family."""
    head = ["solver", "r_p", "r_c", "error", "bound", "failures", "silent", "at t =", "ms"]
    lines = []
    for family, cells in results.items():
        lines += ["<details>", f"<summary>{family}</summary>", ""]
        lines += markdown(head, [[solver, *cell.details] for solver, cell in cells.items()])
        lines += ["</details>", ""]
    return lines


def trust(results: Results) -> str:
    """Write how often gemproj's error bounds held, and how many bad answers they reported."""
    scores = [s for cells in results.values() for cell in cells.values() for s in cell.scores]
    bounded = [s for s in scores if not np.isnan(s.bound)]
    held = sum(s.error <= s.bound + ROUNDING for s in bounded)
    far = [s for s in bounded if s.failed]
    found = sum(s.bound > TOLERANCE for s in far)
    return (
        f"gemproj's `error_bound` held for {held:,} of its {len(bounded):,} answers, all methods counted. "
        f"{len(far):,} of them are off by more than {TOLERANCE:g}, by design or not; "
        f"the bound said so for {found:,}."
    )


def read(text: str) -> dict[str, dict[str, tuple[float, int]]]:
    """Return of a page of details, by family and solver, the worst error and the failures in percent."""
    found: dict[str, dict[str, tuple[float, int]]] = {}
    for line in text.splitlines():
        if line.startswith("<summary>"):
            family = found.setdefault(line.removeprefix("<summary>").removesuffix("</summary>"), {})
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if cells and cells[0] in SOLVERS:
            failures = re.fullmatch(r"(\d+)/(\d+)", cells[5])
            percent = -(-100 * int(failures[1]) // int(failures[2])) if failures else 0
            family[cells[0]] = float(cells[3] or "nan"), percent
    return found


def picture(details: str, path: Path) -> None:
    """Draw the matrix of a page of details: powers of ten, paler is better, and percentages of failures.

    Colours also differ in brightness, for readers who see no hues; NaN is white. Texts have 9 pixels in a
    figure as wide as a phone, so only solvers are shown that aim at the exact answer.
    """
    found = read(details)
    solvers = [name for name in next(iter(found.values())) if SOLVERS[name].aim == "exact"]
    if not solvers:
        return
    errors = np.array([[cells[solver][0] for solver in solvers] for cells in found.values()])
    powers = np.log10(np.clip(errors, 1e-16, 1.0))
    width, size = 1.15 + 0.32 * len(solvers), 9.2
    figure, axes = plt.subplots(figsize=(width, 1.8 + 0.31 * len(found)), layout="constrained")
    look: dict[str, Any] = {"cmap": "OrRd", "vmin": -16, "vmax": 0, "edgecolors": "w", "linewidth": 1.2}
    image = axes.pcolormesh(powers, **look)
    axes.invert_yaxis()
    for (i, j), value in np.ndenumerate(powers):
        percent = list(found.values())[i][solvers[j]][1]
        text = f"{percent}" if percent else f"{round(value)}"
        weight, color = "bold" if percent else "normal", "w" if value > -5 else "k"
        axes.text(j + 0.5, i + 0.5, text, ha="center", va="center", size=size, weight=weight, color=color)
    look = {"rotation": 60, "ha": "right", "rotation_mode": "anchor", "size": size}
    axes.set_xticks(np.arange(len(solvers)) + 0.5, solvers, **look)
    axes.set_yticks(np.arange(len(found)) + 0.5, [fill(name, 16) for name in found], size=size)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    bar = figure.colorbar(image, location="bottom", fraction=0.03, pad=0.01, aspect=50)
    bar.set_label("power of ten of the worst error", size=size)
    bar.ax.tick_params(labelsize=size)
    figure.savefig(path, dpi=200)
    plt.close(figure)


def pick(names: Collection[str], wanted: str | None) -> list[str]:
    """Return the names that contain one of the wanted words; all of them if none is given."""
    words = [""] if wanted is None else [word.strip() for word in wanted.split(",")]
    if unknown := [word for word in words if not any(word in name for name in names)]:
        raise typer.BadParameter(f"no name contains {', '.join(unknown)}; there are: {'; '.join(names)}")
    return [name for name in names if any(word in name for word in words)]


Words = Annotated[str | None, typer.Option(help="Only those whose names contain one of these words.")]


def main(
    out: Annotated[
        Path | None, typer.Option(help="Folder for tables and figure, by default docs/results.")
    ] = None,
    families: Words = None,
    solvers: Words = None,
    draw: Annotated[bool, typer.Option("--draw", help="Measure nothing: draw the details in OUT.")] = False,
) -> None:
    """Measure the errors of all solvers in all families, and write tables and figure."""
    if out is None and (families, solvers) != (None, None):
        raise typer.BadParameter("a part of the tables does not replace docs/results; name a folder: --out")
    out = RESULTS if out is None else out
    if draw:
        if not (out / "accuracy-details.md").is_file():
            raise typer.BadParameter(f"{out} has no accuracy-details.md to draw")
        picture((out / "accuracy-details.md").read_text(encoding="utf-8"), out / "accuracy.png")
        return
    asked = pick(SOLVERS, solvers)
    used = [solver for solver in asked if not SOLVERS[solver].missing]
    drawn = {name: list(FAMILIES[name].problems(REPEATS, LARGEST)) for name in pick(FAMILIES, families)}
    results = measure(used, judged(drawn))

    count = sum(map(len, drawn.values()))
    basis = f"{count} problems. Python {platform.python_version()}, {versions(PACKAGES)}."
    if skipped := [f"{s} ({', '.join(SOLVERS[s].missing)} not installed)" for s in asked if s not in used]:
        basis += f" Left out: {', '.join(skipped)}."
    overview = [basis, "", trust(results), "", *summary(results, used)]
    for aim in ("exact", "careful", "approximate"):
        overview += matrix(results, used, aim)
    out.mkdir(parents=True, exist_ok=True)
    publish(["\n".join(overview)], out / "accuracy.md")
    (out / "accuracy-details.md").write_text("\n".join(details(results)), encoding="utf-8")
    picture((out / "accuracy-details.md").read_text(encoding="utf-8"), out / "accuracy.png")


if __name__ == "__main__":
    typer.run(main)
