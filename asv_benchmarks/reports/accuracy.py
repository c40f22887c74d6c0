"""``make accuracy``: every solver on hard families of projections, judged with a hundred digits.

Writes the tables and the figure of docs/accuracy.md. ``python docs/tables.py`` puts the first table into it.
"""

import platform
from collections.abc import Collection
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Annotated, NamedTuple

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


def picture(results: Results, solvers: list[str], path: Path) -> None:
    """Draw the matrix: powers of ten, paler is better, and crosses with percentages of failures.

    Colours also differ in brightness, for readers who see no hues; NaN is white. Texts have 9 pixels or more
    in a figure as wide as a page of the documentation.
    """
    rows = [[cells[solver] for solver in solvers] for cells in results.values()]
    errors = np.array([[cell.worst("error") for cell in row] for row in rows])
    exact = sum(SOLVERS[solver].aim == "exact" for solver in solvers)
    centers = np.arange(len(solvers)) + 0.5
    centers[exact:] += 0.2  # set apart from the others
    powers = np.log10(np.clip(errors, 1e-16, 1.0))
    size = (2.2 + 0.42 * len(solvers), 1.9 + 0.27 * len(rows))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    look = {"cmap": "OrRd", "vmin": -16, "vmax": 0, "edgecolors": "w", "linewidth": 1.5}
    for part in filter(len, (np.arange(exact), np.arange(exact, len(solvers)))):
        edges = np.append(centers[part] - 0.5, centers[part[-1]] + 0.5), np.arange(len(rows) + 1)
        image = axes.pcolormesh(*edges, powers[:, part], **look)
    axes.invert_yaxis()
    for (i, j), value in np.ndenumerate(powers):
        cell = rows[i][j]
        text = f"✗{cell.percent}" if cell.failed else f"{round(np.log10(max(cell.worst('error'), 1e-16)))}"
        weight, color = "bold" if cell.failed else "normal", "w" if value > -5 else "k"
        axes.text(centers[j], i + 0.5, text, ha="center", va="center", size=9, weight=weight, color=color)
    names = [solver.removesuffix(", 100 steps") for solver in solvers]
    axes.set_xticks(centers, names, rotation=45, ha="right", rotation_mode="anchor", size=9)
    axes.set_yticks(np.arange(len(rows)) + 0.5, list(results), size=9)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    label = r"power of ten of the worst error $|x - x^*| / |g|$"
    bar = figure.colorbar(image, location="bottom", fraction=0.03, pad=0.01, aspect=50)
    bar.set_label(label, size=9)
    bar.ax.tick_params(labelsize=9)
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
) -> None:
    """Measure the errors of all solvers in all families, and write tables and figure."""
    if out is None and (families, solvers) != (None, None):
        raise typer.BadParameter("a part of the tables does not replace docs/results; name a folder: --out")
    out = RESULTS if out is None else out
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
    (out / "accuracy-details.md").write_text("\n".join(details(results)))
    picture(results, [solver for solver in used if SOLVERS[solver].aim != "careful"], out / "accuracy.png")


if __name__ == "__main__":
    typer.run(main)
