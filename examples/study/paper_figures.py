"""The paper's four figures: on the left what it published, on the right the same of an experiment here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..common.drawing import INK, bar, noted, plt, ticks
from ..common.tables import significant
from ..lora_agnews import figures
from ..lora_agnews.figures import spread
from ..lora_agnews.methods import METHODS
from ..lora_agnews.report import Record, Summary
from . import published

TRANSFER = ("Backward transfer", "Forward transfer", "Forgetting")


def final_accuracy(records: Sequence[Record], summary: Summary, here: str) -> Figure:
    """Bars of the final average accuracy."""

    def draw(axes: Axes, numbers: Summary) -> None:
        for x, name in enumerate(numbers):
            bar(axes, x, numbers[name]["average_accuracy"], 100, 0.62, color=METHODS[name].colour)
        ticks(axes, [METHODS[name].title for name in numbers])

    figure, (left, _) = _beside(draw, summary, here)
    left.set_ylim(0, 100)
    left.set_ylabel("Final average accuracy (%)")
    return noted(figure, f"Error bars: {spread(records)}.")


def accuracy_over_steps(records: Sequence[Record], summary: Summary, here: str) -> Figure:
    """One panel for each task; the paper gives no numbers for this figure."""
    figure = figures.accuracy_over_steps(records, summary)
    bands = f"Grey: the task is being learned. Bands: {spread(records)}."
    return noted(figure, f"{here}. The paper draws this figure, too, but gives no numbers for it.\n{bands}")


def transfer(records: Sequence[Record], summary: Summary, here: str) -> Figure:
    """Backward transfer, forward transfer and forgetting."""

    def draw(axes: Axes, numbers: Summary) -> None:
        width = 0.8 / len(numbers)
        for k, name in enumerate(numbers):
            for group, metric in enumerate(TRANSFER):
                x = group + (k - (len(numbers) - 1) / 2) * width
                estimate = numbers[name][metric.lower().replace(" ", "_")]
                bar(axes, x, estimate, 1, 0.9 * width, color=METHODS[name].colour)
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.spines["bottom"].set_visible(False)
        ticks(axes, [metric.replace(" ", "\n") for metric in TRANSFER])

    figure, (left, _) = _beside(draw, summary, here, (2, 3))
    left.set_ylabel("Difference in accuracy")
    keys: Any = [plt.Rectangle((0, 0), 1, 1, color=METHODS[name].colour) for name in summary]
    titles = [METHODS[name].title for name in summary]
    figure.legend(keys, titles, loc="outside upper center", ncols=6)
    return noted(figure, f"Error bars: {spread(records)}. Higher is better, but for forgetting.")


def projection_time(records: Sequence[Record], summary: Summary, here: str) -> Figure:
    """Mean time of one projection, constraint gradients apart."""

    def draw(axes: Axes, numbers: Summary) -> None:
        for x, name in enumerate(numbers):
            found = numbers[name]["seconds_per_projection"]
            bar(axes, x, found, 1e3, 0.62, color=METHODS[name].colour)
            above = 1e3 * (found["mean"] + (found["std"] or 0))
            text = significant(1e3 * found["mean"])
            axes.annotate(text, (x, above), (0, 3), textcoords="offset points", ha="center")
        ticks(axes, [METHODS[name].title for name in numbers])

    projecting = {name: found for name, found in summary.items() if found["seconds_per_projection"]["mean"]}
    figure, (left, _) = _beside(draw, projecting, here)
    left.set_yscale("log")
    both = *published.SUMMARY.values(), *projecting.values()
    means = [1e3 * found["seconds_per_projection"]["mean"] for found in both]
    left.set_ylim(min(means) / 3, 5 * max(means))
    left.yaxis.set_major_formatter("{x:g}")
    left.yaxis.set_minor_formatter("")
    left.set_ylabel("Mean projection (ms, log scale)")
    return noted(figure, f"Error bars: {spread(records)}. Methods that do not project are left out.")


FIGURES = (final_accuracy, accuracy_over_steps, transfer, projection_time)


def _beside(
    draw: Callable[[Axes, Summary], None], summary: Summary, here: str, ratios: Sequence[float] = ()
) -> tuple[Figure, Sequence[Axes]]:
    """Draw the published numbers and those of the experiment on axes of one scale."""
    ratios = ratios or (len(published.SUMMARY), len(summary))
    width = 2.2 + 0.95 * (len(published.SUMMARY) + len(summary))
    figure, both = plt.subplots(1, 2, figsize=(width, 3.8), sharey=True, width_ratios=ratios)
    titles = f"I-GEM paper\n{published.BACKBONE}", f"Here\n{here}"
    for axes, numbers, title in zip(both, (published.SUMMARY, summary), titles, strict=True):
        draw(axes, numbers)
        axes.set_title(title, fontsize=9)
    return figure, both
