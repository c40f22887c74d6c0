"""Two of the paper's figures, of an experiment alone or beside the published numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..common.drawing import noted, plt, save
from ..common.metrics import Record, grouped
from .methods import METHODS
from .report import Summary

Panels = Mapping[str, Summary]  # by title, from left to right; the last one summarizes the records


def draw(records: Sequence[Record], panels: Panels, out: Path) -> list[Path]:
    """Write the figures as PNG files; return their paths."""
    drawings = final_accuracy, accuracy_over_steps
    return [save(out / f"{drawing.__name__}.png", drawing, records, panels) for drawing in drawings]


def final_accuracy(records: Sequence[Record], panels: Panels) -> Figure:
    """Draw a row for each method: its mean final average accuracy, and below it a dot for each seed."""
    counts = [len(numbers) for numbers in panels.values()]
    size = 4.8, 1.1 + 0.34 * sum(counts) + 0.5 * (len(panels) > 1)
    figure, column = plt.subplots(
        len(counts), 1, figsize=size, sharex=True, height_ratios=counts, squeeze=False
    )
    runs = grouped("method", records)
    for axes, (title, numbers) in zip(column.flat, panels.items(), strict=True):
        axes.set_title(title, fontsize=10, loc="left")
        for y, name in enumerate(numbers):
            estimate, colour = numbers[name]["average_accuracy"], METHODS[name].colour
            std = None if estimate["std"] is None else 100 * estimate["std"]
            axes.errorbar(100 * estimate["mean"], y, xerr=std, fmt="o", color=colour, capsize=3, markersize=7)
            if title == [*panels][-1]:  # the published numbers are means
                values = [100 * run["metrics"]["average_accuracy"] for run in runs[name]]
                axes.plot(values, [y + 0.33] * len(values), "o", color=colour, markersize=3, alpha=0.8)
        axes.set_yticks(range(len(numbers)), [METHODS[name].title for name in numbers])
        axes.set_ylim(len(numbers) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=True, axis="both")
    axes.set(xlim=(0, 100), xlabel="Final average accuracy (%)")
    return noted(figure, f"Small dots: seeds. Error bars: {spread(records)}.")


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
