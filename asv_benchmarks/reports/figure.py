"""The figure of the times of ``make bench`` over the number of constraints and over that of parameters.

python -m asv_benchmarks.reports.figure [--report FILE] [--out FILE]
"""

import re
from pathlib import Path
from typing import Any

import typer
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asv_benchmarks.reports.candidates import FLOOR, LOOKS, MEAN
from examples.common.drawing import noted, plt, save

RESULTS = Path("docs", "results")
Curves = dict[str, dict[int, float]]  # by name, then by t or d: milliseconds
MARKS: dict[str, Any] = {"markersize": 7, "markeredgecolor": "white", "markeredgewidth": 0.7}


def rows(table: str) -> list[list[str]]:
    """Return the rows below the head of the first table in a text."""
    lines = re.search(r"(?:^\|.*\n?)+", table, re.MULTILINE)
    assert lines is not None
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[0].splitlines()[2:]]


def over_t(report: str) -> Curves:
    """Return the times of the tables of a report by the number of constraints."""
    found: Curves = {name: {} for name in LOOKS}
    for t, table in re.findall(r"(?s)\*\*t = (\d+): .*?\*\*(.*?)(?=\*\*|$)", report):
        for name, ms, *_ in rows(table):
            if name in LOOKS:
                found[name][int(t)] = number(ms)
    return found


def over_d(report: str) -> Curves:
    """Return the times of the table of sizes, whose ratios are those of the exact method."""
    found: Curves = {"gemproj exact": {}, FLOOR: {}, MEAN: {}}
    for d, _, exact, *ratios in rows(report.partition("**Sizes: ")[2]):
        for name, ratio in zip(found, ("1", *ratios), strict=False):
            found[name][int(number(d))] = number(exact) / 1e3 / number(ratio)
    return found


def number(text: str) -> float:
    """Return a number that has commas."""
    return float(text.replace(",", ""))


def draw(report: str) -> Figure:
    """Draw both panels, one above the other."""
    figure, panels = stacked()
    (d,) = re.findall(r"(?m)^d = ([\d,]+), ", report)
    (t,) = re.findall(r"Sizes: t = (\d+)", report)
    for axes, curves, title, label in (
        (panels[0], over_t(report), f"d = {d} parameters", "Constraints t"),
        (panels[1], over_d(report), f"t = {t} constraints", "Parameters d"),
    ):
        logarithmic(axes, title, label)
        for name, curve in curves.items():
            width = 2.2 if name.startswith("gemproj") else 1.4
            x, ms = zip(*sorted(curve.items()), strict=True)
            axes.plot(x, ms, **LOOKS[name], **MARKS, linewidth=width, label=name)
    counts = sorted(over_t(report)[FLOOR])
    panels[0].set_xticks(counts, list(map(str, counts)))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return noted(figure, "Least time of all rounds. Memory floor: G and g read twice, x written once.")


def stacked() -> tuple[Figure, Any]:
    """Return a figure of two panels, one above the other, with the label of their y axes.

    It is as narrow as it must be for its type to be read on a phone.
    """
    figure, panels = plt.subplots(2, 1, figsize=(5.0, 7.0))
    figure.supylabel("Time of one projection (ms)", fontsize=10)
    return figure, panels


def logarithmic(axes: Axes, title: str, label: str) -> None:
    """Prepare a panel of times on logarithmic scales, with plain numbers at the ticks."""
    axes.set_title(title, fontsize=10, loc="left")
    axes.set(xscale="log", yscale="log", xlabel=label)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.minorticks_off()
    axes.grid(True)


def main(report: Path = RESULTS / "bench-cpu.md", out: Path = RESULTS / "bench-cpu.png") -> None:
    """Write the figure."""
    save(out, draw, report.read_text(encoding="utf-8"))


if __name__ == "__main__":
    typer.run(main)
