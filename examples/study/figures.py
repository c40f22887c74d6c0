"""The study's figures; `common.drawing.save` writes one. Error bars are 95 % intervals."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from ..common.drawing import INK, noted, plt
from ..common.metrics import Record, Spread, grouped, spread
from .compare import Found, average_accuracy
from .settings import METHODS

LOOKS: list[Any] = [("o", "-"), ("s", (0, (5, 2))), ("D", (0, (1.5, 1.5)))]  # of the policies: marker, dashes


def paired_differences(found: Found, baseline: str = "replay") -> Figure:
    """Draw the accuracy of each method minus that of a baseline, paired over the seeds, by family."""
    rows: list[tuple[str, str, Spread]] = []  # text, colour, difference; of a family none
    others = [name for name in found.runs if name != baseline and not METHODS[name].joint]
    for family in dict.fromkeys(METHODS[name].family for name in others):
        rows.append((family, INK, spread([])))
        for name in (name for name in others if METHODS[name].family == family):
            if one := found.minus(name, baseline):
                rows.append((METHODS[name].title, METHODS[name].colour, one))
    figure, axes = plt.subplots(figsize=(5.4, 1.2 + 0.23 * len(rows)))
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [text for text, *_ in rows])
    for y, (text, (_, colour, one)) in enumerate(zip(axes.get_yticklabels(), rows, strict=True)):
        text.set_fontweight("normal" if one else "bold")
        if one:
            face = colour if one.excludes_zero else "white"
            look = {"color": colour, "markerfacecolor": face, "markersize": 6, "capsize": 2}
            axes.errorbar(100 * one.mean, y, xerr=100 * one.half, fmt="o", **look)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"Accuracy minus that of {METHODS[baseline].title}, percentage points")
    shown = [one for *_, one in rows if one]
    return noted(figure, _note(shown) + " Paired by seed. Filled: the interval excludes zero.")


def memory(records: Sequence[Record]) -> Figure:
    """Draw accuracy over ``record["per_task"]``, a line for each method and each policy of the memory."""
    figure, axes = plt.subplots(figsize=(7.2, 4.2))
    sizes = sorted(grouped("per_task", records))
    looks = dict(zip(grouped("policy", records), LOOKS, strict=False))
    lines = {
        (name, policy): {
            size: spread(100 * average_accuracy(run) for run in runs)
            for size, runs in grouped("per_task", found, sizes).items()
        }
        for name, group in grouped("method", records, METHODS).items()
        for policy, found in grouped("policy", group, looks).items()
    }
    for ((name, policy), line), aside in zip(lines.items(), np.linspace(-1, 1, len(lines)), strict=True):
        marker, dashes = looks[policy]
        look = {"color": METHODS[name].colour, "linestyle": dashes, "marker": marker, "capsize": 2}
        look |= {"elinewidth": 1, "label": f"{METHODS[name].title}, {policy}"}
        means, bars = zip(*((one.mean, one.half) for one in line.values()), strict=True)
        axes.errorbar(1.08**aside * np.array(list(line)), means, bars, **look)
    axes.set_xscale("log")
    axes.set_xticks(sizes, map(str, sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("Examples kept of each task (log scale)")
    axes.set_ylabel("Final average accuracy (%)")
    figure.legend(loc="outside right center", handlelength=3)
    note = _note(point for line in lines.values() for point in line.values())
    return noted(figure, note + " Points of the same memory size stand side by side.")


def _note(shown: Iterable[Spread]) -> str:
    """Return the note on the error bars, with the number of seeds."""
    counts = [found.n for found in shown]
    low, high = min(counts, default=0), max(counts, default=0)
    return (
        f"Error bars: 95 % intervals of Student's t over {low if low == high else f'{low} to {high}'} seeds."
    )
