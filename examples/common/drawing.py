"""The style of figures, and parts of them."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: no window, also without a display

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK = "#333333"
CHARACTERS = 12  # of a note, to the inch
STYLE: dict[str, Any] = {
    "figure.dpi": 200,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.wspace": 0.06,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e5e5e5",
    "legend.frameon": False,
    "svg.hashsalt": "gemproj",  # the same file every time
    "svg.fonttype": "none",
}


def save(path: Path, drawing: Callable[..., Figure], *arguments: Any, **look: Any) -> Path:
    """Draw a figure in the common style with a changed `look`, write it to a file, and return the path.

    An SVG has no background, so that a light and a dark page show through.
    """
    svg: Any = {"transparent": True, "metadata": {"Date": None}} if path.suffix == ".svg" else {}
    with plt.rc_context(STYLE | look):
        figure = drawing(*arguments)
        figure.savefig(path, **svg)
        plt.close(figure)
    return path


def dark(path: Path) -> Path:
    """Write the copy of ``NAME-light.svg`` for dark pages, ``NAME-dark.svg``, and return its path.

    Lightness is turned around and hues are kept, as by the filter `invert(1) hue-rotate(180deg)` of CSS.
    """

    def turned(found: re.Match[str]) -> str:
        inverted = 1 - np.array(list(bytes.fromhex(found[1]))) / 255
        colour = np.clip(2 * inverted @ (0.213, 0.715, 0.072) - inverted, 0, 1)
        return f"#{bytes((255 * colour).round().astype(np.uint8)).hex()}"

    copy = path.with_name(path.name.replace("-light", "-dark"))
    copy.write_text(re.sub("#([0-9a-f]{6})", turned, path.read_text()))
    return copy


def bar(axes: Axes, x: float, estimate: Any, scale: float, width: float, **look: Any) -> None:
    """Draw a mean as a bar, with its standard deviation if there is one."""
    axes.bar(x, scale * estimate["mean"], width, **look)
    if estimate["std"] is not None:
        mean, std = scale * estimate["mean"], scale * estimate["std"]
        axes.errorbar(x, mean, std, color=INK, capsize=3, linewidth=1.1, zorder=3)


def ticks(axes: Axes, names: Sequence[str]) -> None:
    """Name the groups of bars."""
    axes.set_xticks(range(len(names)), names)
    axes.tick_params(axis="x", length=0)


def noted(figure: Figure, text: str) -> Figure:
    """Write a note below a figure, in small type and in lines as long as it is wide; return the figure."""
    width = int(CHARACTERS * figure.get_figwidth())
    figure.supxlabel("\n".join(wrap(text, width)), fontsize=10, color="#666666")
    return figure
