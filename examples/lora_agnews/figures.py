"""Two of the paper's figures, of an experiment alone or beside the published numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..common.drawing import INK, bar, noted, plt, save, ticks
from ..common.metrics import Record, grouped
from .methods import METHODS
from .report import Summary

Panels = Mapping[str, Summary]  # by title, from left to right; the last one summarizes the records


def draw(records: Sequence[Record], panels: Panels, out: Path) -> list[Path]:
    """Write the figures as PNG files; return their paths."""
    drawings = final_accuracy, accuracy_over_steps
    return [save(out / f"{drawing.__name__}.png", drawing, records, panels) for drawing in drawings]


def final_accuracy(records: Sequence[Record], panels: Panels) -> Figure:
    """Draw bars of the final average accuracy, with a dot for each seed."""
    widths = [1.4 + 0.95 * max(len(numbers), 2) for numbers in panels.values()]
    size = sum(widths), 3.4 + 0.4 * (len(panels) > 1)
    figure, [row] = plt.subplots(
        1, len(widths), figsize=size, sharey=True, width_ratios=widths, squeeze=False
    )
    for axes, (title, numbers) in zip(row, panels.items(), strict=True):
        axes.set_title(title, fontsize=9)
        for x, name in enumerate(numbers):
            bar(axes, x, numbers[name]["average_accuracy"], 100, 0.62, color=METHODS[name].colour)
        ticks(axes, [METHODS[name].title.replace(", ", ",\n") for name in numbers])
    for x, name in enumerate(numbers):
        values = [100 * run["metrics"]["average_accuracy"] for run in grouped("method", records)[name]]
        aside = np.linspace(0.12, 0.24, len(values))  # beside the error bar
        axes.scatter(x + aside, values, s=16, color="white", edgecolor=INK, linewidth=0.8, zorder=4)
    row[0].set(ylim=(0, 100), ylabel="Final average accuracy (%)")
    return noted(figure, f"Dots: seeds. Error bars: {spread(records)}.")


def accuracy_over_steps(records: Sequence[Record], panels: Panels) -> Figure:
    """Draw a panel for each task, in the order of learning: mean over the seeds, and their spread."""
    *_, title = panels
    edges = [0, *records[0]["boundaries"]]
    tasks = len(edges) - 1
    columns = min(tasks, 3)
    lines = -(-tasks // columns)
    size = 3.1 * columns, 2.7 * lines + 0.5
    figure, grid = plt.subplots(lines, columns, figsize=size, sharex=True, sharey=True, squeeze=False)
    for i, axes in enumerate(grid.flat[:tasks]):
        for k, (name, runs) in enumerate(grouped("method", records).items()):
            curves = [run["curve"] for run in runs]
            steps = [point["step"] for point in curves[0]]
            values = 100 * np.array([[point["accuracy"][i] for point in curve] for curve in curves])
            mean, method = values.mean(axis=0), METHODS[name]
            # Dashes, so that I-GEM and GEM can be distinguished if their lines coincide.
            dashes: Any = {"linestyle": (0, (4, 2)), "zorder": 3} if name == "igem" else {}
            axes.plot(steps, mean, color=method.colour, label=method.title, linewidth=1.6, **dashes)
            if len(values) > 1:
                std = values.std(axis=0, ddof=1)
                low, high = np.clip((mean - std, mean + std), 0, 100)
                own = [not k or step >= edges[1] for step in steps]  # in the first task all methods are alike
                axes.fill_between(steps, low, high, own, color=method.colour, alpha=0.13, linewidth=0)
        axes.axvspan(edges[i], edges[i + 1], color="#f3f3f3", zorder=0)
        for edge in edges[1:-1]:
            axes.axvline(edge, color="#999999", linewidth=0.8, linestyle=":")
        axes.set_title(f"Task {i + 1}", fontsize=10)
        axes.set_xlabel("Training step" if i + columns >= tasks else None)
        axes.set(xlim=(0, edges[-1]), ylim=(0, 100))
    for axes in grid.flat[tasks:]:
        axes.set_visible(False)
    figure.supylabel("Test accuracy (%)", fontsize=10)
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    where = title.replace("\n", ": ")
    where += ". The paper draws this figure, too, but gives no numbers for it.\n" if title else ""
    return noted(figure, f"{where}Grey: the task is being learned. Bands: {spread(records)}.")


def spread(records: Sequence[Record]) -> str:
    """Return a description of the error bars."""
    return f"standard deviation across {len({record['seed'] for record in records})} seeds"
