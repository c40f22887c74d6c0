"""The paper's four figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from ..common.drawing import INK, bar, noted, plt, save, ticks
from ..common.tables import significant
from .methods import METHODS
from .report import Record, Summary


def draw(records: Sequence[Record], summary: Summary, out: Path) -> list[Path]:
    """Write the figures as PNG files, that of projections if there are any; return their paths."""
    drawings = [final_accuracy, accuracy_over_steps, transfer]
    if any(numbers["seconds_per_projection"]["mean"] for numbers in summary.values()):
        drawings.append(projection_time)
    return [save(out / f"{drawing.__name__}.png", drawing, records, summary) for drawing in drawings]


def final_accuracy(records: Sequence[Record], summary: Summary) -> Figure:
    """Bars of the final average accuracy, a dot for each seed."""
    figure, axes = plt.subplots(figsize=(1.4 + 0.95 * len(summary), 3.4))
    for x, (name, numbers) in enumerate(summary.items()):
        bar(axes, x, numbers["average_accuracy"], 100, 0.62, color=METHODS[name].colour)
        values = [100 * r["metrics"]["average_accuracy"] for r in records if r["method"] == name]
        aside = np.linspace(0.12, 0.24, len(values))  # beside the error bar
        axes.scatter(x + aside, values, s=16, color="white", edgecolor=INK, linewidth=0.8, zorder=4)
    ticks(axes, [METHODS[name].title.replace(", ", ",\n") for name in summary])
    axes.set_ylim(0, 100)
    axes.set_ylabel("Final average accuracy (%)")
    return noted(figure, f"Dots: seeds. Error bars: {spread(records)}.")


def accuracy_over_steps(records: Sequence[Record], summary: Summary) -> Figure:
    """One panel for each task, in the order of learning: mean over the seeds, and their spread."""
    edges = [0, *records[0]["boundaries"]]
    tasks = len(edges) - 1
    columns = min(tasks, 3)
    lines = -(-tasks // columns)
    size = 3.1 * columns, 2.7 * lines + 0.5
    figure, grid = plt.subplots(lines, columns, figsize=size, sharex=True, sharey=True, squeeze=False)
    for i, axes in enumerate(grid.flat[:tasks]):
        for k, name in enumerate(summary):
            curves = [record["curve"] for record in records if record["method"] == name]
            steps = [point["step"] for point in curves[0]]
            values = 100 * np.array([[point["accuracy"][i] for point in curve] for curve in curves])
            mean, method = values.mean(axis=0), METHODS[name]
            # I-GEM is told from GEM where one covers the other.
            dashes: Any = {"linestyle": (0, (4, 2)), "zorder": 3} if name == "igem" else {}
            axes.plot(steps, mean, color=method.colour, label=method.title, linewidth=1.6, **dashes)
            if len(values) > 1:
                std = values.std(axis=0, ddof=1)
                low, high = np.clip((mean - std, mean + std), 0, 100)
                own = [not k or step >= edges[1] for step in steps]  # in the first task all are alike
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
    return noted(figure, f"Grey: the task is being learned. Bands: {spread(records)}.")


def transfer(records: Sequence[Record], summary: Summary) -> Figure:
    """Backward transfer, forward transfer and forgetting."""
    metrics = {"Backward transfer": "higher", "Forward transfer": "higher", "Forgetting": "lower"}
    figure, axes = plt.subplots(figsize=(6.8, 3.4))
    width = 0.8 / len(summary)
    for k, (name, numbers) in enumerate(summary.items()):
        for group, metric in enumerate(metrics):
            x = group + (k - (len(summary) - 1) / 2) * width
            look = {"color": METHODS[name].colour, "label": None if group else METHODS[name].title}
            bar(axes, x, numbers[metric.lower().replace(" ", "_")], 1, 0.9 * width, **look)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.spines["bottom"].set_visible(False)
    ticks(axes, [f"{metric}\n({better} is better)" for metric, better in metrics.items()])
    axes.set_ylabel("Difference in accuracy")
    figure.legend(loc="outside upper center", ncols=4)
    return noted(figure, f"Error bars: {spread(records)}.")


def projection_time(records: Sequence[Record], summary: Summary) -> Figure:
    """Time of a projection, and beside it that of the gradients it needs."""
    names = [name for name in summary if summary[name]["seconds_per_projection"]["mean"]]
    figure, axes = plt.subplots(figsize=(2.6 + 1.1 * max(len(names), 2), 3.4))
    tops = []
    hatched = {"facecolor": "white", "hatch": "////"}
    for x, name in enumerate(names):
        parts = summary[name]["seconds_per_projection"], summary[name]["seconds_per_step"]["constraints"]
        looks = {"color": METHODS[name].colour}, {"edgecolor": METHODS[name].colour, **hatched}
        for at, estimate, look in zip((x - 0.2, x + 0.2), parts, looks, strict=True):
            bar(axes, at, estimate, 1e3, 0.36, **look)
            tops.append(1e3 * estimate["mean"])
            above = tops[-1] + 1e3 * (estimate["std"] or 0)
            axes.annotate(significant(tops[-1]), (at, above), (0, 3), textcoords="offset points", ha="center")
    ticks(axes, [METHODS[name].title for name in names])
    axes.set_yscale("log")
    axes.set_ylim(10 ** np.floor(np.log10(min(tops)) - 0.3), 2 * 10 ** np.ceil(np.log10(max(tops))))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.set_ylabel("Time (ms, log scale)")
    looks = {"color": "#666666"}, {"edgecolor": "#666666", **hatched}
    keys: Any = [plt.Rectangle((0, 0), 1, 1, **look) for look in looks]
    names = ["One projection", "Constraint gradients of a step"]
    figure.legend(keys, names, loc="outside upper center", ncols=2)
    note = f"Means; error bars: {spread(records)}.\nMethods that do not project are left out."
    return noted(figure, note)


def spread(records: Sequence[Record]) -> str:
    """Return what error bars are."""
    return f"standard deviation across {len({record['seed'] for record in records})} seeds"
