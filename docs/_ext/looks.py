"""How figures on these pages look: no ground of their own, one file for light pages and one for dark ones."""

import io
import re
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

# For light and for dark pages; each pair has a contrast of 4.5 or more with its ground.
INK = "#3a3f45", "#d3d7dc"
FAINT = "#6a7178", "#9aa2ab"
LINES = "#d9dde1", "#3b4148"
# Of methods and of vectors, always in these roles: what is proposed, what it is compared with, then others.
COLOURS = {
    "C0": ("#0b6db7", "#5cb0f2"),  # gemproj, exact
    "C1": ("#c2500a", "#f0894a"),  # without it; the vector that is projected
    "C2": ("#00805c", "#35c49a"),  # a constraint, a stored loss
    "C3": ("#9a4f84", "#dd92c5"),  # a shortcut
    "C4": ("#8a6d00", "#d9b83a"),
}
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": FAINT[0],
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK[0],
    "axes.prop_cycle": plt.cycler(color=[light for light, _ in COLOURS.values()]),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK[0],
    "figure.constrained_layout.use": True,
    "figure.facecolor": "none",
    "figure.figsize": (6.0, 3.6),
    "font.size": 11.5,
    "grid.color": LINES[0],
    "legend.frameon": False,
    "legend.labelcolor": INK[0],
    "lines.linewidth": 2,
    "svg.hashsalt": "gemproj",
    "text.color": INK[0],
    "xtick.color": FAINT[0],
    "xtick.labelcolor": INK[0],
    "ytick.color": FAINT[0],
    "ytick.labelcolor": INK[0],
}


def write(figure: Figure, path: Path) -> list[Path]:
    """Write a figure in `STYLE` to ``path-light.svg`` and ``path-dark.svg``, its label as title."""
    stream = io.StringIO()
    about = {"Date": None, "Creator": None, "Title": str(figure.get_label())}
    figure.savefig(stream, format="svg", metadata=about)
    light = re.sub(r"(?s)<!DOCTYPE.*?>\n|<metadata>.*?</metadata>", "", stream.getvalue())
    pairs = dict([INK, FAINT, LINES, *COLOURS.values()])
    dark = re.sub(r"#[0-9a-f]{6}", lambda found: pairs.get(found[0], found[0]), light)
    files = [path.with_name(f"{path.name}-{mode}.svg") for mode in ("light", "dark")]
    for file, text in zip(files, (light, dark), strict=True):
        file.write_text(text, encoding="utf-8")
    return files


def thumbnail(figure: Figure, file: Path) -> None:
    """Write the first panel of a figure without axes and words, in thick lines that can be told apart."""
    panel, *others = figure.axes
    for axes in others:
        axes.remove()
    for words in [panel.get_legend(), *panel.texts]:
        if words is not None:
            words.remove()
    panel.set_title("")
    panel.set_axis_off()
    figure.set_layout_engine("none")
    panel.set_position((0.03, 0.05, 0.94, 0.9))
    for line in panel.lines:
        line.set_linewidth(2.5 * line.get_linewidth())
    figure.set_size_inches(3.2, 2.0)
    figure.savefig(file)


def scrape(block: Any, block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Keep the figures of a block of a gallery script, for light and for dark pages; return the page's text.

    What the figure shows is its label, `figure.set_label`, which is its alt text.
    """
    written = []
    for number in plt.get_fignums():
        figure = plt.figure(number)
        alt = figure.get_label()
        if not alt:
            raise ValueError("A figure of the gallery needs an alt text: figure.set_label('What it shows.')")
        path = Path(next(block_vars["image_path_iterator"])).with_suffix("")
        for mode, file in zip(("light", "dark"), write(figure, path), strict=True):
            where = file.relative_to(gallery_conf["src_dir"])
            written.append(f".. image:: /{where.as_posix()}\n   :alt: {alt}\n   :class: only-{mode}\n")
        thumbnail(figure, path.with_suffix(".svg"))  # the name from which Sphinx-Gallery takes it
    plt.close("all")
    return "\n".join(written)


def reset(gallery_conf: dict[str, Any], name: str) -> None:
    """Start each script of the gallery in the same style."""
    plt.rcdefaults()
    plt.rcParams.update(STYLE)
