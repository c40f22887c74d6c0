"""Tables and figures of the finished runs."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from ..common import colours
from ..common.command import SetupError
from ..common.drawing import INK, dark, plt, save
from ..common.metrics import Measure, Record, grouped
from ..common.results import Results
from ..common.tables import markdown_table, mean_of, table
from .run import KINDS, method

GATES = (0.02, 0.05, 0.1)
# The value of each method for somebody who tunes nothing; a tolerance is also set to the gate itself.
USUAL = {"plain": 0.0, "text": 1.0, "outputs": 1.0, "own": 1.0, "average": 0.5, "promise": 0.05}
MARKS = {"news": "o", "capitals": "s", "sequence": "^"}
TITLES = {"news": "News sections", "capitals": "Answers in capitals", "sequence": "Five tasks"}


def name_of(record: Record) -> str:
    """Return the name of a record's method, with its value."""
    text = method(record["kind"], record["value"], record.get("kept", 0), record.get("sets", 1))
    return text if record["adapters"] in ("lora", "osf") else f"{text}, all weights"


def publish(results: Results, folder: Path, console: Console) -> list[Path]:
    """Write tables and figures of the finished runs, and return their paths."""
    records = list(results.records.values())
    if not records:
        raise SetupError(f"{results.path} has no finished runs")
    text = page(records)
    console.print(text, markup=False, soft_wrap=True)
    written = [folder / "keep-chat.md"]
    written[0].write_text(text + "\n", encoding="utf-8")
    shown = compared(records)
    if any(record["kind"] == "promise" for record in usual_rate(shown)):
        for drawing, some in ((asked, usual_rate(shown)), (front, shown)):
            path = save(folder / f"{drawing.__name__}-light.svg", drawing, some, **LOOK)
            written += [path, dark(path)]
    return written


def compared(records: Sequence[Record]) -> list[Record]:
    """Return the records of the first form with all texts in one set: those of the second figure."""
    usual = [one for one in records if not one.get("kept") and one.get("sets", 1) == 1]
    return [one for one in usual if one["form"] == records[0]["form"]]


def usual_rate(records: Sequence[Record]) -> list[Record]:
    """Return the records at the rate of their form: those of the first figure and of the gates."""
    return [one for one in records if one["rate"] == one["form"]["rate"]]


def page(records: Sequence[Record]) -> str:
    """Return a table for each skill, and the table of gates."""
    parts = []
    records = [run for run in records if run["kind"] != "before" or not run["seed"]]  # the same for all
    for (skill, _), runs in grouped(lambda run: (run["skill"], str(run["form"])), records).items():
        steps, seeds = runs[0]["form"]["steps"], len({run["seed"] for run in runs})
        each = "s; a row without an interval has one" if seeds > 1 else ""
        where = f"the last {runs[0]['form']['layers']} layers" if runs[0]["form"]["layers"] else "all layers"
        shares = [run["half"] / run["held_out"] for run in runs if run["kind"] != "before"]
        share = f"{100 * mean(shares):.0f} %" if shares else "-"
        parts.append(
            f"**{TITLES[skill]}**: {steps} steps of {runs[0]['form']['batch']} texts and "
            f"{runs[0]['form']['drawn']} kept ones, adapters in {where}, {seeds} seed{each}. The 95 % "
            f"interval over a run's conversations is ± {share} of the divergence, on average."
            f"\n\n{losses(runs)}"
        )
    parts += [gates(usual_rate(compared(records))), ranges(usual_rate(records))]
    return "\n\n".join(filter(None, parts))


def losses(runs: Sequence[Record]) -> str:
    """Return the table of a skill: means over the seeds with their 95 % intervals."""
    plain = [run["step"] for run in usual_rate(runs) if (run["kind"], run["adapters"]) == ("plain", "lora")]
    base = mean(plain) if plain else None
    measures: dict[str, tuple[Measure, int]] = {
        "New skill: loss": (lambda run: run["new"], 3),
        "Right, %": (lambda run: None if "accuracy" not in run else 100 * run["accuracy"], 1),
        "Divergence held out": (lambda run: max(0.0, run["held_out"]), 4),  # below zero by rounding
        "Abilities, %": (lambda run: 100 * mean(run["abilities"].values()) if run["abilities"] else None, 1),
        "Largest on the way": (lambda run: run.get("worst"), 3),
        "Looks, %": (lambda run: 100 * run["looks"] if run["kind"] == "auto" else None, 0),
        # That of the Trainer includes what is stored, and the verdict.
        "Time of a step": (
            lambda run: run["step"] / base if base and "step" in run and run["kind"] != "trainer" else None,
            1,
        ),
    }
    rows = []
    by = grouped(lambda run: (name_of(run), run["rate"], run["adapters"]), runs)
    for (name, rate, _), found in by.items():
        rows.append((name if usual_rate(found) else f"{name}, rate {rate:g}", found))
    return table(
        rows,
        {
            head: mean_of(measure, 1, decimals, "half")
            for head, (measure, decimals) in measures.items()
            if any(measure(run) is not None for run in runs)
        },
    )


def gates(records: Sequence[Record]) -> str:
    """Return how many first runs pass a gate on the divergence, one run for each skill and seed."""
    usual: dict[str, tuple[str, float | None]] = {method(*setting): setting for setting in USUAL.items()}

    def passed(kind: str, value: float | None, gate: float) -> str:
        setting = kind, gate if value is None else value, "lora"
        runs = [run for run in records if (run["kind"], run["value"], run["adapters"]) == setting]
        below, near = (sum(run["held_out"] <= most for run in runs) for most in (gate, 1.1 * gate))
        return f"{below} ({near}) of {len(runs)}" if runs else "-"

    usual["Promise, tolerance as the gate"] = "promise", None
    rows = [[name, *(passed(*setting, gate) for gate in GATES)] for name, setting in usual.items()]
    head = ["First run at the usual setting", *(f"at most {gate:g}" for gate in GATES)]
    note = "Runs whose divergence held out passes the gate; in brackets, within a tenth of it."
    return f"{note}\n\n{markdown_table(head, [row for row in rows if {*row[1:]} != {'-'}])}"


def ranges(records: Sequence[Record]) -> str:
    """Return the least and the largest divergence of each method, over all runs; without methods, nothing."""

    def span(runs: Sequence[Record], digits: int, unit: float = 1.0) -> str:
        found = [run["held_out"] / unit for run in runs]
        return f"{min(found):.{digits}f} to {max(found):.{digits}f}"

    def over(runs: Sequence[Record]) -> str:
        return span(runs, 2, runs[0]["value"]) if runs[0]["kind"] == "promise" else "-"

    runs = [run for run in records if run["adapters"] == "lora" and run["kind"] in ("outputs", "promise")]
    columns = {"Number": lambda runs: str(len(runs)), "Divergence held out": lambda runs: span(runs, 4)}
    columns["Over what was asked"] = over
    return table(grouped(name_of, runs).items(), columns, "All runs") if runs else ""


TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
PALETTE = {
    "plain": colours.FINE_TUNING, "outputs": colours.REPLAY_OF_OUTPUTS, "promise": colours.GEM,
    "text": colours.REPLAY, "average": colours.AGEM, "own": colours.IGEM, "osf": colours.GEM_WEIGHTED,
}  # fmt: skip
# Text and axes have one colour, and the grid is seen on a dark page, too.
LOOK = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
LOOK["grid.color"] = "#c4c4c4"


def asked(records: Sequence[Record]) -> Figure:
    """Return a figure: the divergence asked for, and found on texts that no training saw."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(4.8, 3.2), sharey=True, width_ratios=(3, 2))
    found = [run["value"] for run in records if run["kind"] == "promise"]
    low, high = 0.75 * min(found), 1.5 * max(found)
    left.plot([low, high], [low, high], color=INK, linewidth=1, linestyle="--")
    skills = grouped("skill", records, MARKS)
    for (k, skill), kind in product(enumerate(skills), ("promise", "outputs", "plain")):
        runs = [run for run in skills[skill] if run["kind"] == kind]
        shift = 0.12 * (k - (len(skills) - 1) / 2)
        place = (kind == "outputs") + 2 * shift
        at = [run["value"] * (1 + shift) if kind == "promise" else place for run in runs]
        look: dict[str, Any] = {"marker": MARKS[skill], "linestyle": "none", "markersize": 6, "alpha": 0.8}
        axes = left if kind == "promise" else right
        drift = [run["held_out"] for run in runs]
        axes.plot(at, drift, color=PALETTE[kind], label=TITLES[skill], **look)
    ticks = sorted({run["value"] for run in records if run["kind"] == "promise"})
    left.set(xscale="log", yscale="log", xlabel="Tolerance asked for, nats per token")
    left.set_ylabel("Divergence found,\nnats per token")
    left.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    left.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
    left.minorticks_off()
    left.legend(loc="upper left")
    right.set_xticks([0, 1], ["fine-\ntuning", "KL term,\nweight 1"])
    right.set_xlim(-0.6, 1.6)
    left.text(high, high, "found as asked  ", ha="right", va="bottom", fontsize=9)
    left.set_title("With a tolerance", fontsize=10)
    right.set_title("Without", fontsize=10)
    return figure


def front(records: Sequence[Record]) -> Figure:
    """Return a figure: the loss on the new skill over the divergence on unseen texts, means of the seeds."""
    skills = grouped("skill", records, MARKS)
    figure, axes = plt.subplots(1, len(skills), figsize=(5.4, 3.3), squeeze=False)
    for (skill, runs), ax in zip(skills.items(), axes.flat, strict=True):
        shown = [run for run in runs if run["kind"] in PALETTE]
        for (kind, _), found in grouped(lambda run: (run["kind"], run["adapters"]), shown).items():
            look: dict[str, Any] = {"marker": "o", "color": PALETTE[kind]}
            points = sorted(
                (mean(run["held_out"] for run in some), mean(run["new"] for run in some), some[0]["value"])
                for some in grouped(lambda run: (name_of(run), run["rate"]), found).values()
            )
            ax.plot(*list(zip(*points, strict=True))[:2], label=KINDS[kind], **look)
            for x, y, value in points:
                if kind in ("promise", "outputs"):  # others would hide each other's labels
                    # A point that is alone has its label on the left, away from the lines; weights have
                    # theirs below, away from those of tolerances.
                    side, at = ("left", (3, 5)) if kind == "promise" else ("right", (2, -12))
                    side, at = (side, at) if len(points) > 1 else ("right", (-6, -4))
                    ax.annotate(
                        f"{value:g}", (x, y), at, textcoords="offset points", ha=side, color=PALETTE[kind],
                        fontsize=9,
                    )  # fmt: skip
        ax.set(xscale="log")
        ax.set_title(TITLES[skill], fontsize=10)
        ax.set_xticks(TICKS[1::2], [f"{tick:g}" for tick in TICKS[1::2]])
        ax.minorticks_off()
        ax.margins(y=0.16)  # for the labels
    figure.supylabel("Loss on the new skill, nats per token", fontsize=10)
    figure.supxlabel("Divergence held out, nats per token", fontsize=10)
    handles, labels = axes[0][0].get_legend_handles_labels()
    size = 10 if len(labels) < 5 else 8  # with all methods, two columns are as wide as the figure
    figure.legend(handles, labels, loc="outside upper center", ncols=2, fontsize=size)
    return figure
