"""``make bench``: one projection of GPT-2 medium's LoRA gradient, every method and every published recipe.

What carries over to another machine are the ratios, not the times.
"""

import sys
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console

from asv_benchmarks.benchmarks.common import LORA, problem
from asv_benchmarks.benchmarks.peaks import peak_memory
from asv_benchmarks.benchmarks.timing import FEWEST, MOST, Call, in_turn
from asv_benchmarks.reports import figure as drawing
from asv_benchmarks.reports.candidates import FLOOR, GIVEN, MAIN, MEAN, candidates
from asv_benchmarks.reports.figure import Curves
from asv_benchmarks.reports.machine import describe
from asv_benchmarks.reports.quality import grade
from asv_benchmarks.reports.small import batches, overhead, sizes
from asv_benchmarks.reports.tables import Table, digits, power

# Constraints of the problems in the figure's second panel.
SWEPT_T = 9
HEAD = [
    "", "ms", "ms after\ntorch", "/ A-GEM\ngiven", "/ A-GEM\nmean", "/ floor", "violation", "error",
    "memory\n% of G",
]  # fmt: skip
NOTE = (
    f"ms: the least time of {FEWEST} to {MOST} rounds, in which all take turns on a machine at rest. "
    "After torch: right after a product of two matrices in torch, as in a training step. "
    "Violation: of G x >= 0, the worst one over |g_i| |g|. Error: |x - x*| / |g|. "
    "Memory: the peak beyond G and g, x included unless in place; good to about 1 MB. "
    "gemproj runs on torch tensors unless NumPy is named. By columns: strides (1, t)."
)


def compare(t: int, d: int, seconds: float, curves: Curves) -> Table:
    """Measure all candidates on one problem, and add the main ones to the curves over t."""
    G, g, _ = problem("torch", "float32", t, d)
    found = candidates(G, g)
    work = torch.ones(512, 512)
    calls = {(c.name, "at rest"): Call(c.run, c.prepare) for c in found}
    calls |= {
        (c.name, "after torch"): Call(c.run, c.prepare, lambda: work @ work)
        for c in found
        if c.role != "floor"
    }
    times = in_turn(calls, seconds)
    least = {key: 1e3 * min(taken) for key, taken in times.items()}
    answers = {}
    for c in found:
        if c.role != "floor":
            c.prepare()
            answers[c.name] = torch.as_tensor(c.run()).clone()
    qualities = dict(zip(answers, grade(G, g, list(answers.values())), strict=True))

    table = Table(f"t = {t}: G has {digits(G.nbytes / 1e6, 2)} MB", HEAD)
    for c in found:
        ms, after = least[c.name, "at rest"], least.get((c.name, "after torch"))
        ratios = [digits(ms / least[other, "at rest"], 2) for other in (GIVEN, MEAN, FLOOR)]
        row = [c.name, digits(ms), digits(after) if after else "", *ratios]
        if c.name in qualities:
            bytes_ = peak_memory(c.run, c.prepare)
            row += [power(q) for q in qualities[c.name]]
            row += ["-" if bytes_ is None else f"{100 * bytes_ / G.nbytes:.0f}"]
        table.rows.append(row + [""] * (len(HEAD) - len(row)))
        if c.name in MAIN:
            curves.setdefault(c.name, {})[t] = spread(times[c.name, "at rest"])
    return table


def sweep(d: int, seconds: float) -> Curves:
    """Return the curves of the main candidates over the number of parameters, up to d."""
    curves: Curves = {name: {} for name in MAIN}
    below = [size for power in range(3, 9) for size in (10**power, 3 * 10**power) if size < 0.8 * d]
    for size in [*below, d]:
        G, g, _ = problem("torch", "float32", SWEPT_T, size)
        calls = {c.name: Call(c.run, c.prepare) for c in candidates(G, g) if c.name in MAIN}
        for name, taken in in_turn(calls, seconds).items():
            curves[name][size] = spread(taken)
    return curves


def spread(times: list[float]) -> tuple[float, float]:
    """Return the least and the median time in milliseconds."""
    return 1e3 * min(times), 1e3 * median(times)


def main(
    t: Annotated[str, typer.Option(help="Numbers of constraints, separated by commas.")] = "1,2,9,19,49",
    d: Annotated[int, typer.Option(help="Number of parameters.")] = LORA,
    seconds: Annotated[
        float, typer.Option(help=f"A call is repeated for so long: {FEWEST} to {MOST} rounds.")
    ] = 0.5,
    out: Annotated[Path | None, typer.Option(help="Also write the tables to this Markdown file.")] = None,
    figure: Annotated[Path | None, typer.Option(help="Also draw times over t and d into this PNG.")] = None,
) -> None:
    """Time one projection with every method and every published recipe."""
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    intro = f"d = {d:,}, float32. {describe()}\n\n{NOTE}\n"
    console.print(intro)
    tables: list[Table] = []
    curves: Curves = {}

    def show(table: Table) -> None:
        tables.append(table)
        console.print(table.rich())

    for count in map(int, t.split(",")):
        show(compare(count, d, seconds, curves))
    show(sizes(seconds, d))
    show(overhead(seconds))
    show(batches(seconds))
    if out is not None:
        out.write_text("\n".join([intro, *(table.markdown() for table in tables)]))
    if figure is not None:
        drawing.draw(curves, sweep(d, seconds), d, SWEPT_T, figure)


if __name__ == "__main__":
    typer.run(main)
