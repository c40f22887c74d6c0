"""The paper's four figures, of an experiment alone or beside the published numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..common.drawing import INK, bar, noted, plt, save, ticks
from ..common.metrics import Record, grouped
from ..common.tables import significant
from .methods import METHODS
from .report import Summary

Panels = Mapping[str, Summary]  # by title, from left to right; the last one summarizes the records
METRICS = {"Backward transfer": "higher", "Forward transfer": "higher", "Forgetting": "lower"}
HATCHED = {"facecolor": "white", "hatch": "////"}


def draw(records: Sequence[Record], panels: Panels, out: Path) -> list[Path]:
    """Write the figures as PNG files, the last one only if a method projects; return their paths."""
    *_, summary = panels.values()
    drawings = [final_accuracy, accuracy_over_steps, transfer]
    if any(numbers["seconds_per_projection"]["mean"] for numbers in summary.values()):
        drawings.append(projection_time)
    return [save(out / f"{drawing.__name__}.png", drawing, records, panels) for drawing in drawings]


def final_accuracy(records: Sequence[Record], panels: Panels) -> Figure:
    """Draw bars of the final average accuracy, with a dot for each seed."""
    figure, drawn = _side_by_side(panels)
    for axes, numbers in drawn:
        for x, name in enumerate(numbers):
            bar(axes, x, numbers[name]["average_accuracy"], 100, 0.62, color=METHODS[name].colour)
        ticks(axes, [METHODS[name].title.replace(", ", ",\n") for name in numbers])
    for x, name in enumerate(numbers):
        values = [100 * run["metrics"]["average_accuracy"] for run in grouped("method", records)[name]]
        aside = np.linspace(0.12, 0.24, len(values))  # beside the error bar
        axes.scatter(x + aside, values, s=16, color="white", edgecolor=INK, linewidth=0.8, zorder=4)
    drawn[0][0].set(ylim=(0, 100), ylabel="Final average accuracy (%)")
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


def transfer(records: Sequence[Record], panels: Panels) -> Figure:
    """Draw backward transfer, forward transfer and forgetting."""
    figure, drawn = _side_by_side(panels, 3.6, 0.4)
    for axes, numbers in drawn:
        width = 0.8 / len(numbers)
        for k, name in enumerate(numbers):
            for group, metric in enumerate(METRICS):
                x = group + (k - (len(numbers) - 1) / 2) * width
                look = {"color": METHODS[name].colour, "label": None if group else METHODS[name].title}
                bar(axes, x, numbers[name][metric.lower().replace(" ", "_")], 1, 0.9 * width, **look)
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.spines["bottom"].set_visible(False)
        ticks(axes, [f"{metric}\n({better} is better)" for metric, better in METRICS.items()])
    drawn[0][0].set_ylabel("Difference in accuracy")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return noted(figure, f"Error bars: {spread(records)}.")


def projection_time(records: Sequence[Record], panels: Panels) -> Figure:
    """Draw the time of a projection, and if known that of its constraint gradients."""
    panels = {
        title: {name: of for name, of in numbers.items() if of["seconds_per_projection"]["mean"]}
        for title, numbers in panels.items()
    }
    figure, drawn = _side_by_side(panels, 2.6, 1.1)
    tops = []
    for axes, numbers in drawn:
        for x, name in enumerate(numbers):
            colour, found = METHODS[name].colour, numbers[name]
            bars = [(found["seconds_per_projection"], {"color": colour})]
            if "seconds_per_step" in found:
                bars.append((found["seconds_per_step"]["constraints"], {"edgecolor": colour, **HATCHED}))
            for k, (estimate, look) in enumerate(bars):
                at = x + 0.4 * (k - (len(bars) - 1) / 2)
                bar(axes, at, estimate, 1e3, 0.36, **look)
                tops.append(1e3 * estimate["mean"])
                above = at, tops[-1] + 1e3 * (estimate["std"] or 0)
                axes.annotate(significant(tops[-1]), above, (0, 3), textcoords="offset points", ha="center")
        ticks(axes, [METHODS[name].title for name in numbers])
    first = drawn[0][0]
    first.set(yscale="log", ylabel="Time (ms, log scale)")
    first.set_ylim(10 ** np.floor(np.log10(min(tops)) - 0.3), 2 * 10 ** np.ceil(np.log10(max(tops))))
    first.yaxis.set_major_formatter("{x:g}")
    first.yaxis.set_minor_formatter("")
    looks = {"color": "#666666"}, {"edgecolor": "#666666", **HATCHED}
    keys: Any = [plt.Rectangle((0, 0), 1, 1, **look) for look in looks]
    names = ["One projection", "Constraint gradients of a step"]
    figure.legend(keys, names, loc="outside upper center", ncols=2)
    note = f"Means; error bars: {spread(records)}.\nMethods that do not project are left out."
    return noted(figure, note)


def spread(records: Sequence[Record]) -> str:
    """Return a description of the error bars."""
    return f"standard deviation across {len({record['seed'] for record in records})} seeds"


def _side_by_side(
    panels: Panels, base: float = 1.4, each: float = 0.95
) -> tuple[Figure, list[tuple[Axes, Summary]]]:
    """Return a figure, and its panels with a common scale, each as wide as its methods need."""
    widths = [base + each * max(len(numbers), 2) for numbers in panels.values()]
    size = sum(widths), 3.4 + 0.4 * (len(panels) > 1)
    figure, [row] = plt.subplots(
        1, len(widths), figsize=size, sharey=True, width_ratios=widths, squeeze=False
    )
    for axes, title in zip(row, panels, strict=True):
        axes.set_title(title, fontsize=9)
    return figure, list(zip(row, panels.values(), strict=True))
