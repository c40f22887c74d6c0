"""The study's figures; `common.drawing.save` writes one. Error bars and bands are 95 % intervals."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, NullLocator

from ..common.drawing import INK, noted, plt
from ..common.metrics import Interval, Record, grouped, interval
from . import compare
from .compare import Found
from .language import ENTROPY
from .settings import METHODS

MARKERS = "osD^vP*Xh<>"
DASHES: list[Any] = ["-", (0, (5, 2)), (0, (1.5, 1.5))]


def accuracy_over_stream(found: Found, selection: Sequence[str]) -> Figure:
    """Draw the mean accuracy on the tasks learned so far, after each task; for at most nine methods."""
    figure, axes = plt.subplots(figsize=(7.6, 4.4))
    lines = {}
    for name in (name for name in selection if name in found.runs):
        R = np.array([run["accuracies"] for run in found.runs[name]])  # (seeds, T + 1, T)
        seen = np.arange(1, R.shape[2] + 1)
        lines[name] = [interval(100 * R[:, j, :j].mean(axis=1)) for j in seen]
    order = sorted(lines, key=lambda name: -lines[name][-1].mean)  # the legend follows the ends of the lines
    for name, marker, dashes in zip(order, cycle(MARKERS), cycle(DASHES), strict=False):
        mean, half = (np.array([getattr(p, key) for p in lines[name]]) for key in ("mean", "half"))
        look = {"color": METHODS[name].colour, "label": METHODS[name].title}
        axes.plot(seen, mean, marker=marker, markersize=5, linestyle=dashes, linewidth=1.5, **look)
        if np.isfinite(half).all():
            band = {"color": METHODS[name].colour, "alpha": 0.12, "linewidth": 0}
            axes.fill_between(seen, mean - half, mean + half, **band)
    _over_tasks(axes, "Mean accuracy on the tasks learned so far (%)")
    return noted(figure, _note((line[-1] for line in lines.values()), "Bands"))


def paired_differences(found: Found, baseline: str = "replay") -> Figure:
    """Draw the accuracy of each method minus that of a baseline, paired over the seeds, by family."""
    rows: list[tuple[str, str, Interval | None]] = []  # text, colour, difference; None: a family
    others = [name for name in found.runs if name != baseline and not METHODS[name].joint]
    for family in dict.fromkeys(METHODS[name].family for name in others):
        rows.append((family, INK, None))
        for name in (name for name in others if METHODS[name].family == family):
            if one := found.minus(name, baseline):
                rows.append((METHODS[name].title, METHODS[name].colour, one))
    figure, axes = plt.subplots(figsize=(6.8, 1.2 + 0.23 * len(rows)))
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(rows)), [text for text, *_ in rows])
    for y, (text, (_, colour, one)) in enumerate(zip(axes.get_yticklabels(), rows, strict=True)):
        text.set_fontweight("normal" if one else "bold")
        if one:
            face = colour if one.excludes_zero else "white"
            look = {"color": colour, "markerfacecolor": face, "markersize": 6, "capsize": 2}
            axes.errorbar(100 * one.mean, y, xerr=100 * one.bar, fmt="o", **look)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"Final average accuracy minus that of {METHODS[baseline].title} (percentage points)")
    shown = [one for *_, one in rows if one]
    return noted(figure, _note(shown) + " Paired by seed. Filled: the interval excludes zero.")


def losses(records: Iterable[Record], methods: Mapping[str, Any], before: float) -> Figure:
    """Draw the loss on the old skill (X) over that on the new one (Y), a curve through each method's knobs.

    Both are above the entropy. Records have ``"loss": {"x": ..., "y": ...}``; `before` is the loss on X
    before fine-tuning.
    """
    curves, shown = {}, []
    groups = grouped("method", records, methods)
    for (name, group), marker, side in zip(groups.items(), cycle(MARKERS), cycle((1, -1)), strict=False):
        points, by_knob = [], grouped("knob", group)
        ends = next(iter(by_knob)), next(reversed(by_knob))
        for knob, found in by_knob.items():
            found = compare.one_setting(found)
            y, x = (interval(run["loss"][language] for run in found) for language in "yx")
            shown.append(x)
            text = f"{knob:g}" if knob is not None and knob in ends else ""
            points.append(((y.mean, y.bar), (x.mean, x.bar), text))
        curves[methods[name].title] = (methods[name].colour, marker, side), points
    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.subplots()
    for label, ((colour, marker, side), points) in curves.items():
        look: dict[str, Any] = {"color": colour, "marker": marker, "markeredgecolor": "white"}
        look |= {"markersize": 8, "ecolor": (colour, 0.4), "elinewidth": 1, "capsize": 2}
        numbers = [(b - ENTROPY, a - ENTROPY, da, db) for (b, db), (a, da), _ in points]
        at: Any = zip(*numbers, strict=True)
        axes.errorbar(*at, label=label, **look)
        align: dict[str, Any] = {"ha": "left", "va": "bottom"} if side > 0 else {"ha": "right", "va": "top"}
        for (right, up, *_), (*_, text) in zip(numbers, points, strict=True):
            look = {"textcoords": "offset points", "color": colour, **align}
            axes.annotate(text, (right, up), (5 * side, 5 * side), **look)
    axes.axhline(before - ENTROPY, color="#767676", linestyle="--", label="X before")
    axes.set(xscale="log", yscale="log")
    for axis, name in ((axes.xaxis, "Y"), (axes.yaxis, "X")):
        axis.set_label_text(f"Loss on {name}, above the entropy of {ENTROPY:.3f} nats")
        axis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    figure.legend(loc="outside upper center", ncols=3, frameon=False)
    note = f"Beside the ends of each line: its knobs. {_note(shown)}"
    figure.supxlabel(note, fontsize=8, color="#767676")
    return figure


def memory(records: Sequence[Record]) -> Figure:
    """Draw accuracy over ``record["per_task"]``, a line for each method and each policy of the memory."""
    figure, axes = plt.subplots(figsize=(7.2, 4.2))
    sizes = sorted(grouped("per_task", records))
    looks = dict(zip(grouped("policy", records), zip(MARKERS, cycle(DASHES), strict=False), strict=False))
    lines = {
        (name, policy): {
            size: _accuracy(compare.one_setting(runs))
            for size, runs in grouped("per_task", found, sizes).items()
        }
        for name, group in grouped("method", records, METHODS).items()
        for policy, found in grouped("policy", group, looks).items()
    }
    for ((name, policy), line), aside in zip(lines.items(), np.linspace(-1, 1, len(lines)), strict=True):
        marker, dashes = looks[policy]
        look = {"color": METHODS[name].colour, "linestyle": dashes, "marker": marker, "capsize": 2}
        look |= {"elinewidth": 1, "label": f"{METHODS[name].title}, {policy}"}
        _intervals(axes, 1.08**aside * np.array(list(line)), line.values(), **look)
    axes.set_xscale("log")
    axes.set_xticks(sizes, map(str, sizes))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("Examples kept of each task (log scale)")
    axes.set_ylabel("Final average accuracy (%)")
    figure.legend(loc="outside right center", handlelength=3)
    note = _note(point for line in lines.values() for point in line.values())
    return noted(figure, note + " Points of the same memory size stand side by side.")


def _accuracy(runs: Sequence[Record]) -> Interval:
    return interval(100 * compare.average_accuracy(run) for run in runs)


def _over_tasks(axes: Any, label: str) -> None:
    """Label the axes and add the legend of a figure with the number of learned tasks as abscissa."""
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("Tasks learned")
    axes.set_ylabel(label)
    axes.figure.legend(loc="outside right center", handlelength=3)


def _intervals(axes: Axes, x: Any, found: Iterable[Interval], scale: float = 1, **look: Any) -> None:
    """Draw means with their intervals."""
    means, bars = zip(*((scale * one.mean, scale * one.bar) for one in found), strict=True)
    axes.errorbar(x, means, bars, **look)


def _note(shown: Iterable[Interval], what: str = "Error bars") -> str:
    """Return the note on the error bars, with the number of seeds."""
    counts = [found.n for found in shown]
    low, high = min(counts, default=0), max(counts, default=0)
    return f"{what}: 95 % intervals of Student's t over {low if low == high else f'{low} to {high}'} seeds."
