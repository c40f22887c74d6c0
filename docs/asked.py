"""Draws asked-light.svg and asked-dark.svg in docs/_static: the drift that was asked for, and what it became.

Run ``python docs/asked.py`` after the results have changed. All numbers come from the two tables in SOURCES.
"""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
SOURCES = {"study/skill.md": ("all weights", "adapters (LoRA)"), "keep-a-skill.md": ("another program",)}
HELD, REPLAYED = "KL held, tolerance ", "Replay of KL, weight "
LOOKS = (("C0", "o"), ("C1", "s"), ("C2", "^"))

Points = dict[float, tuple[float, float]]


def runs() -> dict[str, tuple[Points, Points]]:
    """Return for each setting what tolerances and what weights led to: drift, mean and standard deviation."""
    found = {}
    for name, settings in SOURCES.items():
        tables = re.findall(r"(?m)(?:^\|.*\n)+", (DOCS / "results" / name).read_text())
        for setting, table in zip(settings, tables, strict=False):
            head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
            drift = head.index("KL of reference")
            both: tuple[Points, Points] = {}, {}
            for cells in rows:
                for knob, points in zip((HELD, REPLAYED), both, strict=True):
                    if cells[0].lower().startswith(knob.lower()):
                        value = float(cells[0][len(knob) :].split()[0])
                        mean, spread = map(float, cells[drift].split(" ± "))
                        points[value] = mean, spread
            both[0].pop(0.0, None)  # on axes of logarithms
            found[setting] = both
    return found


def words() -> str:
    """Return what the figure shows."""
    tolerances: dict[float, list[float]] = {}
    weights: list[float] = []
    for held, replayed in runs().values():
        weights += [mean for mean, _ in replayed.values()]
        for tolerance, (mean, _) in held.items():
            tolerances.setdefault(tolerance, []).append(mean)
    asked = " and ".join(f"{value:g}" for value in tolerances)
    got = " and ".join(f"{min(means):.3f} to {max(means):.3f}" for means in tolerances.values())
    return (
        f"Drift after training, in three settings. Asked for {asked}, it was {got}. "
        f"With a KL term of weight 1 to 10 it was anything from {min(weights):.3f} to {max(weights):.3f}."
    )


def draw() -> list[Path]:
    """Write the two files."""
    sys.path.insert(0, str(DOCS / "_ext"))
    from looks import FAINT, STYLE, plt, write

    with plt.rc_context({**STYLE, "font.size": 11}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 3.5), sharey=True)
        for (setting, both), (colour, marker) in zip(runs().items(), LOOKS, strict=True):
            for axes, points in zip((left, right), both, strict=True):
                means, spreads = zip(*points.values(), strict=True)
                look = {"color": colour, "marker": marker, "capsize": 3, "label": setting}
                axes.errorbar(list(points), means, spreads, **look)
        ends = [0.022, 0.14]
        left.plot(ends, ends, ":", color=FAINT[0], linewidth=1.2)
        left.annotate("what was asked", (0.14, 0.14), (-4, 2), textcoords="offset points", ha="right")
        for axes, ticks in ((left, [0.03, 0.1]), (right, [1, 3, 10])):
            axes.set(xscale="log", yscale="log")
            axes.set_xticks(ticks, [f"{value:g}" for value in ticks])
            axes.set_yticks(grades := [0.01, 0.03, 0.1, 0.3], [f"{value:g}" for value in grades])
            axes.minorticks_off()
        left.set(xlabel="tolerance (nats per token)", ylabel="drift after training", title="A tolerance")
        right.set(xlabel="weight", title="The weight of a KL term")
        right.legend(fontsize=10)
        figure.set_label(words())
        written = write(figure, DOCS / "_static" / "asked")
        plt.close(figure)
    return written


if __name__ == "__main__":
    print(*draw(), sep="\n")
