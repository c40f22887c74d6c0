"""The study's tables in Markdown: of one stream, and over all streams."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from ..common.metrics import Measure, Record, Runs, Spread, checked, metric, paired, spent, whole_step
from ..common.tables import Cell, difference, markdown_table, mean_of, table
from . import compare
from .compare import Found, average_accuracy
from .runs import setting_of
from .settings import METHODS, SAME

SPREAD = "Mean ± sample standard deviation (n - 1) over the seeds, whose number stands beside the method."
OVER_STREAMS = (
    "Percentage points, paired over the seeds: mean ± half of the 95 % interval of Student's t, bold "
    "where it excludes zero, as one interval in twenty does by chance."
)


def in_turn(measure: Measure) -> Measure:
    """Return a measure that needs tasks one after the other; joint training has no such number."""
    return lambda run: None if METHODS[run["method"]].joint else measure(run)


Shown = dict[str, tuple[Measure, float, int | None]]  # by head of a column: measure, scale, decimals
ACCURACY: Shown = {
    "AvgAcc (%)": (average_accuracy, 100, 1),
    "BWT": (in_turn(metric("backward_transfer")), 1, 3),
    "FWT": (in_turn(metric("forward_transfer")), 1, 3),
    "Forgetting": (in_turn(metric("forgetting")), 1, 3),
    # The cost of remembering: less is learned.
    "Last task (%)": (lambda run: run["accuracies"][-1][-1], 100, 1),
    "Lowest of past tasks (%)": (in_turn(compare.lowest_past_accuracy), 100, 1),
}
COST: Shown = {
    "Batch": (spent("batch"), 1e3, None),
    "Constraint gradients": (spent("constraints"), 1e3, None),
    "Projection": (spent("projection"), 1e3, None),
    "Optimizer": (spent("optimizer"), 1e3, None),
    "Whole step": (whole_step, 1e3, None),
}
MEMORY: Shown = {"Memory (kB)": (in_turn(lambda run: run["bytes"]), 1e-3, None)}
PROMISES: Shown = {
    "Violated by gradient (%)": (in_turn(checked("gradient", "violated")), 100, 1),
    "Violated by step (%)": (in_turn(checked("update", "violated")), 100, 1),
    "Worst cosine of a step": (in_turn(checked("update", "worst_cosine")), 1, 3),
    "Drift (nats)": (in_turn(lambda run: None if run.get("diverged") else run["drift"]), 1, 3),
}
# Higher is better in all of them.
HIGHER = ("AvgAcc (%)", "BWT", "Last task (%)", "Lowest of past tasks (%)")
DIFFERENCES = {head.removesuffix(" (%)"): ACCURACY[head][0] for head in HIGHER}


def accuracy(found: Found) -> str:
    """Return the table of accuracies after the stream and during it."""
    caption = (
        "Accuracy. Setting: learning rate and main knob, chosen on other seeds. Lowest of past tasks: the "
        "lowest accuracy of a task at any measured time after it was learned, mean over all but the last."
    )

    def setting(runs: Sequence[Record]) -> str:
        return setting_of(METHODS[runs[0]["method"]], runs[0]["lr"], runs[0]["knob"])

    return _table(caption, found.runs, ACCURACY, {"Setting": setting})


def cost(found: Found) -> str:
    """Return the table of the costs of a step and of the memory."""
    caption = (
        "Cost: milliseconds per step by part, means over all steps after the first task. Batch includes the "
        "replayed examples."
    )
    columns = dict(COST)
    if "plain" in found.runs:
        caption += f" Relative: whole step over the mean whole step of {METHODS['plain'].title}."
        columns["Relative"] = whole_step, 1 / found.step("plain"), 2
    return _table(caption, found.times, columns | MEMORY)


def promises(found: Found) -> str:
    """Return the table of violated constraints and of the drift of past losses."""
    caption = (
        "Promises: share of measured steps with cos(g_k, v) < -0.001 for some stored task k, where v is the "
        "gradient handed to the optimizer, or the step that the optimizer makes of it; the worst cosine of a "
        "step in a run; and by how much the loss on the stored examples has risen at the end since they were "
        "stored. Runs that have diverged have no such rise."
    )
    return _table(caption, found.runs, PROMISES)


def differences(found: Found, baseline: str) -> str:
    """Return the table of differences to a baseline, paired over their common seeds."""
    caption = (
        f"Method minus {METHODS[baseline].title}, in percentage points, paired over the seeds of both: "
        "mean and 95 % interval of Student's t, bold where it excludes zero, as one interval in twenty does "
        "by chance. Higher is better in all columns."
    )
    base = found.runs[baseline]

    def minus(measure: Measure) -> Cell:
        return lambda runs: difference(paired(runs, base, measure))

    def seeds(runs: Sequence[Record]) -> str:
        return str(paired(runs, base, average_accuracy).n)

    others = [name for name in found.runs if name != baseline and not METHODS[name].joint]
    columns = {"Seeds": seeds} | {head: minus(measure) for head, measure in DIFFERENCES.items()}
    return f"{caption}\n\n{table(titled(found.runs, others), columns)}"


def variants(found: Found, names: Iterable[str], timed: bool = False) -> str:
    """Return the table of variants, each compared with the method that it varies."""
    caption = (
        "Variants, with the learning rate and the knob of the method that they vary, the line above each "
        "group. Minus it: differences in percentage points, paired over the seeds, with 95 % interval, bold "
        "where it excludes zero." + " Whole step: milliseconds." * timed
    )
    columns: dict[str, Callable[[str], str]] = {
        "Seeds": lambda name: str(len(found.runs[name])),
        "AvgAcc (%)": lambda name: mean_of(*ACCURACY["AvgAcc (%)"])(found.runs[name]),
    }
    if timed:
        columns["Whole step"] = lambda name: mean_of(*COST["Whole step"])(found.times[name])

    def minus(measure: Measure) -> Callable[[str], str]:
        like = {name: METHODS[name].like for name in shown}
        return lambda name: difference(found.minus(name, like[name], measure)) if name in like else ""

    shown = [name for name in names if name in found.runs and METHODS[name].like in found.runs]
    for head in ("AvgAcc", "Lowest of past tasks"):
        columns[f"{head} minus it"] = minus(DIFFERENCES[head])
    bases = dict.fromkeys(METHODS[name].like for name in shown)
    groups = ((base, *(name for name in shown if METHODS[name].like == base)) for base in bases)
    rows = [(METHODS[name].title, name) for group in groups for name in group]
    return f"{caption} {SPREAD}\n\n{table(rows, columns)}"


def over_streams(
    caption: str,
    streams: Mapping[str, Found],
    pairs: Mapping[str, tuple[str, str]],
    turned: bool = True,
) -> str:
    """Return the table of differences between methods, for the streams that have runs of both.

    `pairs` maps the name of a line to a method and the one to subtract. In a `turned` table a stream has a
    column and a pair a row.
    """
    known = [found.runs.keys() for found in streams.values()]
    shown = {head: pair for head, pair in pairs.items() if any(set(pair) <= names for names in known)}
    rows = {title: [found.minus(*pair) for pair in shown.values()] for title, found in streams.items()}
    lines = [["Method" if turned else "Stream", "Seeds", *shown]]
    lines += [[title, *_cells(row)] for title, row in rows.items() if any(row)]
    return _lines(f"{caption} {OVER_STREAMS}", lines, turned)


def at_equal_settings(streams: Mapping[str, Found]) -> str:
    """Return the table of GEM with a weight minus replay with the same learning rate and weight."""
    caption = "GEM with a weight minus replay at the same learning rate and weight."
    heads = ["AvgAcc", "Last task", "Lowest of past tasks"]
    lines = [["Stream", "Rate", "Weight", "Seeds", *heads]]
    for title, found in streams.items():
        settings = {name: (run["lr"], run["knob"]) for name, [run, *_] in found.runs.items()}
        of_gem = settings.get("gem-weight")
        alike = [name for name in ("replay", *SAME) if of_gem and settings.get(name) == of_gem]
        if of_gem and alike:
            row = [found.minus("gem-weight", alike[0], DIFFERENCES[head]) for head in heads]
            lines.append([title, *(f"{value:g}" for value in of_gem), *_cells(row)])
    return _lines(f"{caption} {OVER_STREAMS}", lines)


def _cells(row: Sequence[Spread]) -> list[str]:
    """Return the range of the numbers of seeds, and the differences."""
    counts = sorted({one.n for one in row if one})
    seeds = " to ".join(map(str, counts[:: max(1, len(counts) - 1)]))
    return [seeds, *(difference(one, brief=True) for one in row)]


def _lines(caption: str, lines: list[list[str]], turned: bool = False) -> str:
    head, *rows = [list(line) for line in zip(*lines, strict=True)] if turned else lines
    return f"{caption}\n\n{markdown_table(head, rows)}"


def _table(caption: str, runs: Runs, numbers: Shown, texts: Mapping[str, Cell] | None = None) -> str:
    """Return a table with a row for each method; columns of text come before the numbers."""
    columns = {"Seeds": lambda found: str(len(found)), **(texts or {})}
    columns |= {head: mean_of(*how) for head, how in numbers.items()}
    return f"{caption} {SPREAD}\n\n{table(titled(runs), columns)}"


def titled(runs: Runs, names: Iterable[str] | None = None) -> list[tuple[str, list[Record]]]:
    """Return the runs of those methods that have some, by title."""
    return [(METHODS[name].title, runs[name]) for name in (runs if names is None else names) if name in runs]
