"""Times over the number of constraints and over the number of parameters, as a picture."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from asv_benchmarks.reports.candidates import FLOOR, LOOKS
from examples.common.drawing import STYLE, noted, plt

# By name, then by t or d: the least and the median time in ms.
Curves = dict[str, dict[int, tuple[float, float]]]

GREY = "#767676"
OWN = {
    "axes.grid.axis": "both",
    "lines.markersize": 7,
    "lines.markeredgecolor": "white",
    "lines.markeredgewidth": 0.7,
}


def draw(over_t: Curves, over_d: Curves, d: int, t: int, path: Path) -> None:
    """Draw both panels into a PNG."""
    with plt.rc_context(STYLE | OWN):
        figure, (left, right) = plt.subplots(1, 2, figsize=(10, 5.2))
        _panel(left, over_t)
        left.set_title(f"d = {d:,} parameters", fontsize=10, loc="left")
        left.set_xlabel("Constraints t")
        left.set_ylabel("Time of one projection (ms)")
        counts = sorted(over_t[FLOOR])
        left.set_xticks(counts, list(map(str, counts)))
        _panel(right, over_d)
        right.set_title(f"t = {t} constraints", fontsize=10, loc="left")
        right.set_xlabel("Parameters d")
        handles, labels = right.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=4)
        note = (
            "Lines: least time of all rounds; bands: from there up to the median. "
            "Memory floor: G and g read twice, x written once."
        )
        noted(figure, note).savefig(path)
        plt.close(figure)


def _panel(axes: Axes, curves: Curves) -> None:
    axes.set_xscale("log")
    axes.set_yscale("log")
    for name, (colour, marker) in LOOKS.items():
        x, least, middle = _columns(curves[name])
        width = 2.2 if name.startswith("gemproj") else 1.4
        axes.plot(x, least, color=colour, linewidth=width, marker=marker, label=name)
        axes.fill_between(x, least, middle, color=colour, alpha=0.2, linewidth=0)
    x, floor, _ = _columns(curves[FLOOR])
    axes.plot(x, floor, color=GREY, linestyle="--", linewidth=1.4, label=FLOOR)
    axes.fill_between(x, floor * 1e-9, floor, color="#f3f3f3", zorder=0)
    times = [time for curve in curves.values() for point in curve.values() for time in point]
    axes.set_ylim(min(times) / 2, max(times) * 2)
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.minorticks_off()


def _columns(curve: dict[int, tuple[float, float]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x = sorted(curve)
    return np.array(x), *np.array([curve[i] for i in x]).T
