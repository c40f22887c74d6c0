"""A table as a picture."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from examples.common.drawing import plt


def draw(
    errors: np.ndarray, texts: list[list[str]], rows: list[str], columns: list[str], split: int, path: Path
) -> None:
    """Colour errors (rows, columns) by their power of ten; what is NaN stays white.

    Colours differ in brightness too, for readers who see no hues. A text that begins with a cross is
    set in bold; `split` columns are set apart from the others.
    """
    powers = np.log10(np.clip(errors, 1e-16, 1.0))
    size = (3.4 + 0.64 * len(columns), 1.6 + 0.36 * len(rows))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    image = axes.imshow(powers, cmap="cividis_r", vmin=-16, vmax=0, aspect="auto")
    for (i, j), value in np.ndenumerate(powers):
        weight = "bold" if texts[i][j].startswith("✗") else "normal"
        color = "w" if value > -7 else "k"
        axes.text(j, i, texts[i][j], ha="center", va="center", size=7.5, weight=weight, color=color)
    for j in range(1, len(columns)):
        axes.axvline(j - 0.5, color="w", linewidth=8 if j == split else 1.5)
    for i in range(1, len(rows)):
        axes.axhline(i - 0.5, color="w", linewidth=1.5)
    axes.set_xticks(range(len(columns)), columns, rotation=40, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(rows)), rows)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    label = r"$\log_{10}$ of the worst error $|x - x^*| / |g|$"
    figure.colorbar(image, label=label, fraction=0.03, pad=0.01)
    figure.savefig(path, dpi=150)
    plt.close(figure)
