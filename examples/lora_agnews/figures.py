"""The paper's four figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: no window, also without a display

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .methods import METHODS
from .report import Record, Summary, significant

STYLE = {
    "figure.dpi": 200,
    "figure.constrained_layout.use": True,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e5e5e5",
    "figure.constrained_layout.wspace": 0.06,
    "legend.frameon": False,
}
INK = "#333333"


def draw(records: Sequence[Record], summary: Summary, out: Path) -> list[Path]:
    """Write the figures as PNG files and return their paths."""
    drawings: dict[str, Callable[[], Figure]] = {
        "final_accuracy": lambda: final_accuracy(records, summary),
        "accuracy_over_steps": lambda: accuracy_over_steps(records),
        "transfer": lambda: transfer(summary),
        "projection_time": lambda: projection_time(summary),
    }
    paths = []
    for name, drawing in drawings.items():
        with plt.rc_context(STYLE):
            figure = drawing()
            paths.append(out / f"{name}.png")
            figure.savefig(paths[-1])
            plt.close(figure)
    return paths


def final_accuracy(records: Sequence[Record], summary: Summary) -> Figure:
    """Bars of the final average accuracy, a dot for each seed."""
    figure, axes = plt.subplots(figsize=(1.4 + 0.95 * len(summary), 3.4))
    for x, (name, numbers) in enumerate(summary.items()):
        estimate = numbers["average_accuracy"]
        axes.bar(x, 100 * estimate["mean"], 0.62, color=METHODS[name].colour)
        _whisker(axes, x, estimate, 100)
        values = [100 * r["metrics"]["average_accuracy"] for r in records if r["method"] == name]
        spread = np.linspace(0.12, 0.24, len(values))  # beside the error bar
        axes.scatter(x + spread, values, s=16, color="white", edgecolor=INK, linewidth=0.8, zorder=4)
    _name_methods(axes, summary)
    axes.set_ylim(0, 100)
    axes.set_ylabel("Final average accuracy (%)")
    _footnote(figure, "Dots: seeds. Error bars: standard deviation across seeds.")
    return figure


def accuracy_over_steps(records: Sequence[Record]) -> Figure:
    """One panel for each task, in the order of learning: mean over the seeds, and their spread."""
    tasks = len(records[0]["curve"][0]["accuracy"])
    columns = min(tasks, 3)
    shape = (-(-tasks // columns), columns)
    figure, grid = plt.subplots(
        *shape, figsize=(3.1 * columns, 2.7 * shape[0] + 0.5), sharex=True, sharey=True, squeeze=False
    )
    for i, axes in enumerate(grid.flat[:tasks]):
        for name in dict.fromkeys(record["method"] for record in records):
            curves = [record["curve"] for record in records if record["method"] == name]
            steps = [point["step"] for point in curves[0]]
            values = 100 * np.array([[point["accuracy"][i] for point in curve] for curve in curves])
            mean, method = values.mean(axis=0), METHODS[name]
            axes.plot(steps, mean, color=method.colour, label=method.title, linewidth=1.6, **_dashes(name))
            if len(values) > 1:
                std = values.std(axis=0, ddof=1)
                axes.fill_between(steps, mean - std, mean + std, color=method.colour, alpha=0.13, linewidth=0)
        edges = [0, *records[0]["boundaries"]]
        axes.axvspan(edges[i], edges[i + 1], color="#f3f3f3", zorder=0)
        for edge in edges[1:-1]:
            axes.axvline(edge, color="#999999", linewidth=0.8, linestyle=":")
        axes.set_title(f"Task {i + 1}", fontsize=10)
        axes.set_xlabel("Training step" if i + columns >= tasks else None)
        axes.set_ylim(0, 100)
        axes.set_xlim(0, edges[-1])
    for axes in grid.flat[tasks:]:
        axes.set_visible(False)
    figure.supylabel("Test accuracy (%)", fontsize=10)
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside upper center", ncols=6)
    _footnote(figure, "Grey: the task is being learned. Bands: standard deviation across seeds.")
    return figure


def transfer(summary: Summary) -> Figure:
    """Backward transfer, forward transfer and forgetting."""
    metrics = {
        "Backward transfer\n(higher is better)": "backward_transfer",
        "Forward transfer\n(higher is better)": "forward_transfer",
        "Forgetting\n(lower is better)": "forgetting",
    }
    figure, axes = plt.subplots(figsize=(6.8, 3.4))
    width = 0.8 / len(summary)
    for k, (name, numbers) in enumerate(summary.items()):
        for group, key in enumerate(metrics.values()):
            x = group + (k - (len(summary) - 1) / 2) * width
            label = METHODS[name].title if group == 0 else None
            axes.bar(x, numbers[key]["mean"], 0.9 * width, color=METHODS[name].colour, label=label)
            _whisker(axes, x, numbers[key], 1)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.spines["bottom"].set_visible(False)
    axes.set_xticks(range(len(metrics)), list(metrics))
    axes.tick_params(axis="x", length=0)
    axes.set_ylabel("Difference in accuracy")
    figure.legend(loc="outside upper center", ncols=6)
    _footnote(figure, "Error bars: standard deviation across seeds.")
    return figure


def projection_time(summary: Summary) -> Figure:
    """Time of a projection, and beside it that of the gradients it needs."""
    names = [name for name in summary if summary[name]["seconds_per_projection"]["mean"]]
    figure, axes = plt.subplots(figsize=(2.6 + 1.1 * max(len(names), 2), 3.4))
    if not names:
        axes.text(0.5, 0.5, "No method here projects its gradient.", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return figure
    for x, name in enumerate(names):
        colour = METHODS[name].colour
        looks: list[dict[str, Any]] = [
            {"color": colour},
            {"color": "white", "edgecolor": colour, "hatch": "////"},
        ]
        for offset, estimate, look in zip((-0.2, 0.2), _times(summary[name]), looks, strict=True):
            top = 1e3 * estimate["mean"]
            axes.bar(x + offset, top, 0.36, **look)
            _whisker(axes, x + offset, estimate, 1e3)
            above = top + 1e3 * (estimate["std"] or 0)
            axes.annotate(
                significant(top), (x + offset, above), (0, 3), textcoords="offset points", ha="center"
            )
    _name_methods(axes, names)
    axes.set_yscale("log")
    heights = [1e3 * part["mean"] for name in names for part in _times(summary[name])]
    axes.set_ylim(10 ** np.floor(np.log10(min(heights)) - 0.3), 2 * 10 ** np.ceil(np.log10(max(heights))))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")
    axes.set_ylabel("Time (ms, log scale)")
    keys: list[Any] = [
        plt.Rectangle((0, 0), 1, 1, color="#666666"),
        plt.Rectangle((0, 0), 1, 1, facecolor="white", edgecolor="#666666", hatch="////"),
    ]
    figure.legend(
        keys, ["One projection", "Constraint gradients of a step"], loc="outside upper center", ncols=2
    )
    _footnote(
        figure,
        "Means; error bars: standard deviation across seeds.\nMethods that do not project are left out.",
    )
    return figure


def _times(numbers: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the time of one projection, and that of the constraint gradients of a step."""
    return [numbers["seconds_per_projection"], numbers["seconds_per_step"]["constraints"]]


def _whisker(axes: Axes, x: float, estimate: dict[str, float | None], scale: float) -> None:
    if estimate["mean"] is not None and estimate["std"] is not None:
        axes.errorbar(
            x,
            scale * estimate["mean"],
            scale * estimate["std"],
            color=INK,
            capsize=3,
            linewidth=1.1,
            zorder=3,
        )


def _name_methods(axes: Axes, names: Any) -> None:
    axes.set_xticks(range(len(names)), [METHODS[name].title for name in names])
    axes.tick_params(axis="x", length=0)


def _dashes(name: str) -> dict[str, Any]:
    """Tell I-GEM from GEM where one covers the other."""
    return {"linestyle": (0, (4, 2)), "zorder": 3} if name == "igem" else {}


def _footnote(figure: Figure, text: str) -> None:
    figure.supxlabel(text, fontsize=8, color="#666666")
