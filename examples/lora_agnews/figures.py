"""Two of the paper's figures, of an experiment alone or beside the published numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..common.drawing import noted, plt, save
from ..common.metrics import Record, Spread, grouped, spread
from .methods import METHODS
from .report import average_accuracy

Panel = Mapping[str, Spread]  # final average accuracy, by method


def draw(records: Sequence[Record], out: Path) -> list[Path]:
    """Write the figures as PNG files, and return their paths."""
    drawings = final_accuracy, accuracy_over_steps
    return [save(out / f"{drawing.__name__}.png", drawing, records) for drawing in drawings]


def final_accuracy(
    records: Sequence[Record], title: str = "", others: Mapping[str, Panel] | None = None
) -> Figure:
    """Draw a row for each method: its mean final average accuracy, and below it a dot for each seed."""
    runs = grouped("method", records)
    here = {name: spread(map(average_accuracy, found)) for name, found in runs.items()}
    panels = {**(others or {}), title: here}
    counts = [len(panel) for panel in panels.values()]
    size = 4.8, 1.1 + 0.34 * sum(counts) + 0.5 * (len(panels) > 1)
    figure, column = plt.subplots(
        len(counts), 1, figsize=size, sharex=True, height_ratios=counts, squeeze=False
    )
    for axes, (name_of_panel, panel) in zip(column.flat, panels.items(), strict=True):
        axes.set_title(name_of_panel, fontsize=10, loc="left")
        for y, (name, found) in enumerate(panel.items()):
            look: dict[str, Any] = {"color": METHODS[name].colour}
            std = 100 * found.std if found.n > 1 else None
            axes.errorbar(100 * found.mean, y, xerr=std, fmt="o", capsize=3, markersize=7, **look)
            if panel is here:  # the published numbers are means
                values = [100 * average_accuracy(run) for run in runs[name]]
                axes.plot(values, [y + 0.33] * len(values), "o", markersize=3, alpha=0.8, **look)
        axes.set_yticks(range(len(panel)), [METHODS[name].title for name in panel])
        axes.set_ylim(len(panel) - 0.4, -0.6)
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=True, axis="both")
    axes.set(xlim=(0, 100), xlabel="Final average accuracy (%)")
    return noted(figure, f"Small dots: seeds. Error bars: {seeds_of(records)}.")


def accuracy_over_steps(records: Sequence[Record]) -> Figure:
    """Draw a panel for each task, in the order of learning: mean over the seeds, and their spread."""
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
    return noted(figure, f"Grey: the task is being learned. Bands: {seeds_of(records)}.")


def seeds_of(records: Sequence[Record]) -> str:
    """Return a description of the error bars."""
    return f"standard deviation across {len({record['seed'] for record in records})} seeds"
