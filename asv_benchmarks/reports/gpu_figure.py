"""The figure of the times of ``make bench-gpu`` over the number of constraints.

python -m asv_benchmarks.reports.gpu_figure [--report FILE] [--out FILE]
"""

import re
from pathlib import Path
from typing import Any

import typer
from matplotlib.figure import Figure

from asv_benchmarks.reports.figure import logarithmic, stacked
from examples.common.drawing import noted, save

RESULTS = Path("docs", "results")
# By column of the report: the label and the look of its line.
LINES: dict[str, tuple[str, dict[str, Any]]] = {
    "portable, eager": ("gemproj, array operations", {"color": "#999999", "marker": "s", "linestyle": ":"}),
    "eager": ("gemproj, called from Python", {"color": "#0072b2", "marker": "o", "linestyle": "--"}),
    "captured": ("gemproj, in a CUDA graph", {"color": "#0072b2", "marker": "o", "linewidth": 2.4}),
    "I-GEM": ("I-GEM as published", {"color": "#d55e00", "marker": "D"}),
    "A-GEM, mean": ("A-GEM on the mean of the rows, in a CUDA graph", {"color": "#009e73", "marker": "^"}),
    "floor": ("memory floor", {"color": "#333333", "marker": None, "linestyle": ":"}),
}
COLUMNS = (2_166_784, 33_554_432)


def read(report: str, d: int) -> dict[str, dict[int, float]]:
    """Return the milliseconds in each column of a float32 table of the report, by t."""
    table = report.split(f"**d = {d:,}, torch.float32**")[1].split("**")[0]
    head, _, *rows = ([c.strip() for c in line.split("|")[1:-1]] for line in table.split("\n") if "|" in line)
    found: dict[str, dict[int, float]] = {name: {} for name in head}
    for t, *cells in rows:
        for name, cell in zip(head[1:], cells, strict=True):
            if re.fullmatch(r"[\d.,]+", cell):
                found[name][int(t)] = float(cell.replace(",", "")) / 1e3
    return found


def draw(report: str) -> Figure:
    """Draw a panel for each number of parameters."""
    figure, panels = stacked()
    for axes, d in zip(panels, COLUMNS, strict=True):
        curves = read(report, d)
        logarithmic(axes, f"d = {d:,} parameters, float32", "Constraints t")
        for name, (label, look) in LINES.items():
            line = {"markersize": 7, "markeredgecolor": "white", "linewidth": 1.4} | look
            axes.plot(*zip(*curves[name].items(), strict=True), **line, label=label)
        axes.set_xticks(list(curves["eager"]), list(map(str, curves["eager"])))
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=1)
    device, *_ = report.split(",")
    note = (
        f"{device}. Medians of 5 to 30 calls with empty caches. Memory floor: G and g "
        "read twice, x written once, at the rate of a copy."
    )
    return noted(figure, note)


def main(report: Path = RESULTS / "bench-gpu.md", out: Path = RESULTS / "bench-gpu.png") -> None:
    """Write the figure."""
    save(out, draw, report.read_text(encoding="utf-8"))


if __name__ == "__main__":
    typer.run(main)
