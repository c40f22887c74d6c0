"""A table as a picture."""

from pathlib import Path

import numpy as np

from examples.common.drawing import plt


def draw(
    errors: np.ndarray, texts: list[list[str]], rows: list[str], columns: list[str], split: int, path: Path
) -> None:
    """Colour errors (rows, columns) by their power of ten: the paler the better; what is NaN stays white.

    Colours differ in brightness too, for readers who see no hues. A text that begins with a cross is
    set in bold; `split` columns are set apart from the others. Texts have 9 pixels or more where the figure
    is as wide as a page of the documentation.
    """
    powers = np.log10(np.clip(errors, 1e-16, 1.0))
    size = (2.2 + 0.42 * len(columns), 1.9 + 0.27 * len(rows))
    figure, axes = plt.subplots(figsize=size, layout="constrained")
    image = axes.imshow(powers, cmap="OrRd", vmin=-16, vmax=0, aspect="auto")
    for (i, j), value in np.ndenumerate(powers):
        weight = "bold" if texts[i][j].startswith("✗") else "normal"
        color = "w" if value > -5 else "k"
        axes.text(j, i, texts[i][j], ha="center", va="center", size=9, weight=weight, color=color)
    for j in range(1, len(columns)):
        axes.axvline(j - 0.5, color="w", linewidth=8 if j == split else 1.5)
    for i in range(1, len(rows)):
        axes.axhline(i - 0.5, color="w", linewidth=1.5)
    names = [name.removesuffix(", 100 steps") for name in columns]
    axes.set_xticks(range(len(columns)), names, rotation=45, ha="right", rotation_mode="anchor", size=9)
    axes.set_yticks(range(len(rows)), rows, size=9)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    label = r"power of ten of the worst error $|x - x^*| / |g|$"
    bar = figure.colorbar(image, location="bottom", fraction=0.03, pad=0.01, aspect=50)
    bar.set_label(label, size=9)
    bar.ax.tick_params(labelsize=9)
    figure.savefig(path, dpi=200)
    plt.close(figure)
