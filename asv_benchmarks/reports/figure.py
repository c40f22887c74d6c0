"""The figure of times over the number of constraints and over the number of parameters."""

from statistics import median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from asv_benchmarks.reports.candidates import FLOOR, LOOKS
from examples.common.drawing import noted, plt

# By name, then by t or d: the seconds of all rounds.
Curves = dict[str, dict[int, list[float]]]
MARKS: dict[str, Any] = {"markersize": 7, "markeredgecolor": "white", "markeredgewidth": 0.7}


def draw(over_t: Curves, over_d: Curves, d: int, t: int) -> Figure:
    """Draw both panels."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 5.2))
    for axes, curves, title, label in (
        (left, over_t, f"d = {d:,} parameters", "Constraints t"),
        (right, over_d, f"t = {t} constraints", "Parameters d"),
    ):
        logarithmic(axes, title, label)
        _fill(axes, curves)
    left.set_ylabel("Time of one projection (ms)")
    counts = sorted(over_t[FLOOR])
    left.set_xticks(counts, list(map(str, counts)))
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    note = (
        "Lines: least time of all rounds; bands: from there up to the median. "
        "Memory floor: G and g read twice, x written once."
    )
    return noted(figure, note)


def logarithmic(axes: Axes, title: str, label: str) -> None:
    """Prepare a panel of times on logarithmic scales, with plain numbers at the ticks."""
    axes.set_title(title, fontsize=10, loc="left")
    axes.set(xscale="log", yscale="log", xlabel=label)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.minorticks_off()
    axes.grid(True)


def _fill(axes: Axes, curves: Curves) -> None:
    shown = list[float]()
    for name, look in LOOKS.items():
        x, rounds = zip(*sorted(curves[name].items()), strict=True)
        least, middle = ([1e3 * of(times) for times in rounds] for of in (min, median))
        width = 2.2 if name.startswith("gemproj") else 1.4
        axes.plot(x, least, **look, **MARKS, linewidth=width, label=name)
        if name == FLOOR:
            axes.fill_between(x, 1e-9 * min(least), least, color="#f3f3f3", zorder=0)
        else:
            axes.fill_between(x, least, middle, color=look["color"], alpha=0.2, linewidth=0)
        shown += least + middle
    axes.set_ylim(min(shown) / 2, max(shown) * 2)
