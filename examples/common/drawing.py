"""The style of figures, and parts of them."""

import re
from collections.abc import Callable
from pathlib import Path
from textwrap import wrap
from typing import Any

import matplotlib

matplotlib.use("Agg")  # before pyplot: no window, also without a display

import matplotlib.pyplot as plt
import numpy as np
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

    Greys are turned around. Colours become paler, so that the lighter of two blues is so on both pages.
    """

    def turned(found: re.Match[str]) -> str:
        colour = np.array(list(bytes.fromhex(found[1])), float)
        colour = 255 - colour if np.ptp(colour) == 0 else 255 - 0.7 * (255 - colour)
        return f"#{bytes(colour.round().astype(np.uint8)).hex()}"

    copy = path.with_name(path.name.replace("-light", "-dark"))
    text = path.read_text(encoding="utf-8")
    copy.write_text(re.sub("#([0-9a-f]{6})", turned, text), encoding="utf-8")
    return copy


def noted(figure: Figure, text: str) -> Figure:
    """Write a note below a figure, in small type and in lines as long as it is wide; return the figure."""
    width = int(CHARACTERS * figure.get_figwidth())
    figure.supxlabel("\n".join(wrap(text, width)), fontsize=10, color="#666666")
    return figure
