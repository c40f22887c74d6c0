"""``python -m asv_benchmarks.reports.cost_in_t``: what t rows cost, in the search and beside SciPy's NNLS.

Pivots and ratios carry over to other machines; times do not.
"""

from collections.abc import Iterator
from functools import partial
from typing import Annotated

import numpy as np
import scipy.optimize
import typer

from asv_benchmarks.benchmarks.common import LORA
from asv_benchmarks.benchmarks.timing import Call, in_turn
from asv_benchmarks.reports.families import FAMILIES
from asv_benchmarks.reports.machine import describe
from asv_benchmarks.reports.options import Page, numbers
from asv_benchmarks.reports.tables import Table, digits, publish
from gemproj import gram, project, solve_dual, solve_gram

NOTE = (
    "float64. Pivots: the most of all draws, rows that enter or leave. ms: the least time of `solve_gram`, "
    "the mean of all draws. A search ends after 12 pivots a row at the latest."
)
KINDS = ("random", "conflicting", "t = 2d")


def search(kind: str, counts: list[int], draws: int, seconds: float) -> Table:
    """Return the pivots and times of the exact search for one family of problems, by the number of rows."""
    table = Table(f"The search alone, {kind}", ["t", "pivots", "pivots / t", "ms", "largest KKT residual"])
    for t in counts:
        problems = [FAMILIES[kind].draw(np.random.default_rng([t, seed]), t) for seed in range(draws)]
        found = [solve_dual(G, g) for G, g in problems]
        pivots = max(int(sol.iterations) for sol in found)
        calls = {seed: Call(partial(solve_gram, *gram(G, g))) for seed, (G, g) in enumerate(problems)}
        ms = 1e3 * float(np.mean([min(taken) for taken in in_turn(calls, seconds / draws).values()]))
        worst = max(float(sol.kkt_residual()) for sol in found)
        table.rows.append([str(t), str(pivots), digits(pivots / t, 2), digits(ms), f"{worst:.0e}"])
    return table


def nnls(G: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Return the projection of g by SciPy's non-negative least squares, which needs G in float64."""
    return g + scipy.optimize.nnls(G.T, -g)[0] @ G


def beside_nnls(counts: list[int], d: int, seconds: float) -> Table:
    """Return the times of `project` and of SciPy's NNLS, by the number of rows."""
    table = Table(
        f"Beside SciPy's NNLS, d = {d:,}, float32", ["t", "project, ms", "nnls, ms", "nnls / project"]
    )
    for t in counts:
        rng = np.random.default_rng(t)
        shared = rng.standard_normal(d, np.float32)
        G = rng.standard_normal((t, d), np.float32) + shared
        g = rng.standard_normal(d, np.float32) - shared
        calls = {method: Call(partial(method, G, g)) for method in (project, nnls)}
        ours, theirs = (1e3 * min(taken) for taken in in_turn(calls, seconds).values())
        table.rows.append([str(t), digits(ours), digits(theirs), digits(theirs / ours, 2)])
    return table


def main(
    t: Annotated[
        str, typer.Option(help="Numbers of rows for the search, separated by commas.")
    ] = "2,8,32,128,512",
    d: Annotated[int, typer.Option(min=1, help="Number of parameters beside NNLS.")] = LORA,
    draws: Annotated[int, typer.Option(min=1, help="Problems of each number of rows.")] = 10,
    seconds: Annotated[float, typer.Option(help="Time for the repetitions of a call.")] = 0.5,
    out: Page = None,
) -> None:
    """Count pivots, and time the search and whole projections."""
    counts = numbers(t, "t")

    def parts() -> Iterator[object]:
        yield f"{describe()}\n\n{NOTE}\n"
        for kind in KINDS:
            yield search(kind, counts, draws, seconds)
        yield beside_nnls([t for t in (2, 9, 19) if t <= max(counts)], d, seconds)

    publish(parts(), out)


if __name__ == "__main__":
    typer.run(main)
