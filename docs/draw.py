"""Draw the figures that the README and the front page show, from committed runs: ``python docs/draw.py``."""

import json
import sys
from pathlib import Path
from statistics import mean, stdev

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "_ext"))

from looks import FAINT, STYLE, plt, write  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402

# Method and knob in the study, which chose it on other seeds; what the figure calls it; its colour.
BARS = [
    ("plain", None, "fine-tuning", FAINT[0]),
    ("text", 0.3, "the stored texts replayed", "C2"),
    ("kl", 3.0, "the stored outputs replayed", "C3"),
    ("kl-held", 0.0, "the stored outputs held\nat a bound (gemproj)", "C0"),
]
ENTROPY = 1.208


def losses(method: str, knob: float | None) -> list[dict[str, float]]:
    """Return the losses of all seeds that the study reports, all weights, 48 references, 150 steps."""
    lines = (DOCS / "results" / "study" / "runs" / "skill.jsonl").read_text().splitlines()[1:]
    runs = [json.loads(line) for line in lines]
    wanted = {"setting": "full", "phase": "report", "method": method, "knob": knob}
    found = [run for run in runs if wanted.items() <= run.items()]
    return [run["loss"] for run in found]


def skill() -> Figure:
    """Loss on the old skill and on the new one, by what is done to keep the old one."""
    figure, both = plt.subplots(1, 2, figsize=(8.4, 2.7), sharey=True, width_ratios=(3, 1.6))
    figure.set_label(
        "Loss on the old skill, 1.28 before: fine-tuning 2.34, stored texts replayed 1.95, stored outputs "
        "replayed 1.37, stored outputs held at a bound 1.35. Loss on the new one: 1.63, 1.44, 1.36, 1.40."
    )
    names = [title for *_, title, _ in BARS]
    for axes, key, title in zip(
        both,
        "xy",
        ("Loss on the old skill (bars start at its floor, 1.21)", "Loss on the new one"),
        strict=True,
    ):
        for place, (method, knob, _, colour) in enumerate(BARS):
            found = [loss[key] - ENTROPY for loss in losses(method, knob)]
            axes.barh(place, mean(found), 0.62, color=colour)
            axes.errorbar(
                mean(found), place, xerr=stdev(found), color=plt.rcParams["text.color"], capsize=2, lw=1
            )
            text = f"{mean(found) + ENTROPY:.2f}"
            axes.annotate(
                text, (mean(found) + stdev(found), place), (6, 0), textcoords="offset points", va="center"
            )
        axes.set_title(title, loc="left", fontsize=11)
        axes.grid(False)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.tick_params(length=0, labelbottom=False)
        axes.margins(x=0.2)
    before = mean(loss["before"] for loss in losses("plain", None))
    both[0].axvline(before - ENTROPY, color=FAINT[0], lw=1, ls="--")
    both[0].annotate(
        f"before: {before:.2f}",
        (before - ENTROPY, 3.35),
        (5, -1),
        textcoords="offset points",
        va="top",
        fontsize=9,
        color=FAINT[0],
    )
    both[0].set_yticks(range(len(names)), names)
    both[0].set_ylim(3.9, -0.5)
    return figure


if __name__ == "__main__":
    plt.rcParams.update(STYLE)
    for file in write(skill(), DOCS / "_static" / "skill"):
        print(file)
