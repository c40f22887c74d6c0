"""The study's tables in Markdown: of one stream, and over all streams."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite

from ..common.metrics import Interval, Measure, Record, Runs, mean_std
from ..common.tables import difference, markdown_table, plus_minus
from . import compare
from .compare import Found
from .results import setting_of
from .settings import BUDGETS, LADDERS, METHODS, SAME

SPREAD = "Mean ± sample standard deviation (n - 1) over the seeds, whose number stands beside the method."
OVER_STREAMS = (
    "Percentage points, paired over the seeds: mean ± half of the 95 % interval of Student's t, bold "
    "where it excludes zero, as one interval in twenty does by chance."
)


@dataclass(frozen=True)
class Column:
    """A column of numbers: its head, the measure of a run, its scale, and the number of decimals.

    An `ordered` measure needs tasks that come one after the other; joint training has no such number.
    """

    head: str
    measure: Measure
    scale: float = 1.0
    decimals: int | None = None  # None: significant digits
    ordered: bool = True

    def cell(self, runs: Sequence[Record], joint: bool = False) -> str:
        """Write mean ± standard deviation, with the number of seeds if some have no such number."""
        if joint and self.ordered:
            return "-"
        found = (self.measure(run) for run in runs)
        values = [value for value in found if value is not None and isfinite(value)]
        text = plus_minus(mean_std(values), self.scale, self.decimals)
        return text if len(values) in (0, len(runs)) else f"{text} ({len(values)} of {len(runs)} seeds)"


def _spent(part: str) -> Measure:
    """Return the measure of the time of a part of a step; None if a method has no such part."""
    return lambda run: run["seconds"]["per_step"][part] or None


def _checked(what: str, number: str) -> Measure:
    """Return the measure of a number of the guarantee; None if no step was probed."""
    return lambda run: (run["guarantee"][what] or {}).get(number)


ACCURACY = [
    Column("AvgAcc (%)", compare.average_accuracy, 100, 1, ordered=False),
    Column("BWT", compare.metric("backward_transfer"), 1, 3),
    Column("FWT", compare.metric("forward_transfer"), 1, 3),
    Column("Forgetting", compare.metric("forgetting"), 1, 3),
    # The cost of remembering: less is learned.
    Column("Last task (%)", lambda run: run["accuracies"][-1][-1], 100, 1, ordered=False),
    Column("Lowest of past tasks (%)", compare.lowest_past_accuracy, 100, 1),
]
COST = [
    Column("Batch", _spent("batch"), 1e3, ordered=False),
    Column("Constraint gradients", _spent("constraints"), 1e3, ordered=False),
    Column("Projection", _spent("projection"), 1e3, ordered=False),
    Column("Optimizer", _spent("optimizer"), 1e3, ordered=False),
    Column("Whole step", compare.seconds_per_step, 1e3, ordered=False),
]
MEMORY = Column("Memory (kB)", lambda run: run["bytes"], 1e-3)
PROMISES = [
    Column("Violated by gradient (%)", _checked("gradient", "violated"), 100, 1),
    Column("Violated by step (%)", _checked("update", "violated"), 100, 1),
    Column("Worst cosine of a step", _checked("update", "worst_cosine"), 1, 3),
    Column("Drift (nats)", lambda run: None if run.get("diverged") else run["drift"], 1, 3),
]
# Higher is better in all of them.
DIFFERENCES = {one.head.removesuffix(" (%)"): one.measure for one in (*ACCURACY[:2], *ACCURACY[4:])}


def accuracy(found: Found) -> str:
    """Return the table of accuracies after the stream and during it."""
    caption = (
        "Accuracy. Setting: learning rate and main knob, chosen on other seeds. Lowest of past tasks: the "
        "lowest accuracy of a task at any measured time after it was learned, mean over all but the last."
    )
    settings = [setting_of(METHODS[name], run["lr"], run["knob"]) for name, [run, *_] in found.runs.items()]
    return _table(caption, found.runs, ACCURACY, Setting=settings)


def cost(found: Found) -> str:
    """Return the table of the costs of a step and of the memory."""
    caption = (
        "Cost: milliseconds per step by part, means over all steps after the first task. Batch includes the "
        "replayed examples."
    )
    columns = list(COST)
    if "plain" in found.runs:
        caption += f" Relative: whole step over the mean whole step of {METHODS['plain'].title}."
        columns.append(Column("Relative", compare.seconds_per_step, 1 / found.step("plain"), 2, False))
    return _table(caption, found.times, [*columns, MEMORY])


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
    rows = []
    for name in (name for name in found.runs if name != baseline and not METHODS[name].joint):
        cells = [found.minus(name, baseline, measure) for measure in DIFFERENCES.values()]
        rows.append([METHODS[name].title, str(cells[0].n if cells[0] else 0), *map(difference, cells)])
    return f"{caption}\n\n{markdown_table(['Method', 'Seeds', *DIFFERENCES], rows)}"


def after_each_task(found: Found, reference: str, others: Iterable[str]) -> str:
    """Return the table of the differences to other methods after each task."""
    caption = (
        f"{METHODS[reference].title} minus others after each task from the second on: mean accuracy over the "
        "tasks learned so far, in percentage points, paired over the seeds, with 95 % interval, bold where "
        "it excludes zero."
    )
    counts = range(2, len(found.runs[reference][0]["boundaries"]) + 1)
    rows = []
    for name in (name for name in others if name in found.runs):
        cells = (found.minus(reference, name, compare.after(k)) for k in counts)
        rows.append([METHODS[name].title, *map(difference, cells)])
    return f"{caption}\n\n{markdown_table(['Other method', *(f'{k} tasks' for k in counts)], rows)}"


def variants(found: Found, names: Iterable[str], timed: bool = False) -> str:
    """Return the table of variants, each compared with the method that it varies."""
    caption = (
        "Variants, with the learning rate and the knob of the method that they vary, the line above each "
        "group. Minus it: differences in percentage points, paired over the seeds, with 95 % interval, bold "
        "where it excludes zero." + " Whole step: milliseconds." * timed
    )
    heads = ["AvgAcc", "Lowest of past tasks"]
    columns = [(ACCURACY[0], found.runs), (COST[-1], found.times)][: 1 + timed]
    rows: list[list[str]] = []
    shown = [name for name in names if name in found.runs and METHODS[name].like in found.runs]
    for base in dict.fromkeys(METHODS[name].like for name in shown):
        for name in (base, *(name for name in shown if METHODS[name].like == base)):
            minus = [difference(found.minus(name, base, DIFFERENCES[head])) for head in heads]
            cells = [column.cell(source[name]) for column, source in columns]
            counted = [METHODS[name].title, str(len(found.runs[name]))]
            rows.append([*counted, *cells, *(["", ""] if name == base else minus)])
    head = ["Method", "Seeds", *(column.head for column, _ in columns), *(f"{one} minus it" for one in heads)]
    return f"{caption} {SPREAD}\n\n{markdown_table(head, rows)}"


def equal_time(found: Found) -> str:
    """Return the table of accuracies with the same time per step.

    Each ladder holds a method with more and fewer examples. For each budget the longest step within it is
    taken, whatever its accuracy.
    """
    heads = [METHODS[ladder[0]].title for ladder in LADDERS]
    caption = (
        f"The same time per step: of {' and of '.join(heads)} with more or fewer examples, or rows that are "
        "kept for some steps, what takes the longest within the budget. No choice by results. AvgAcc in "
        f"percent; {heads[1]} minus {heads[0]}: paired over the seeds, with 95 % interval."
    )
    unit, rows = found.step("plain"), []
    for budget in BUDGETS:
        first, second = (found.longest_within(ladder, budget * unit) for ladder in LADDERS)
        row = [f"{budget:g}"]
        for name in (first, second):
            taken = [METHODS[name].title, f"{found.step(name) / unit:.2f}"] if name else ["-", "-"]
            row += [*taken, ACCURACY[0].cell(found.runs[name]) if name else "-"]
        rows.append([*row, difference(found.minus(second or "", first or ""))])
    columns = [cell for head in heads for cell in (head, "takes", "AvgAcc")]
    return f"{caption}\n\n{markdown_table(['Budget (plain steps)', *columns, 'Difference'], rows)}"


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
    lines = [["Method" if turned else "Stream", "Seeds", *shown]]
    for title, found in streams.items():
        row = [found.minus(*pair) for pair in shown.values()]
        if any(row):
            lines.append([title, *_cells(row)])
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


def _cells(row: Sequence[Interval | None]) -> list[str]:
    """Return the range of the numbers of seeds, and the differences."""
    counts = sorted({one.n for one in row if one})
    seeds = " to ".join(map(str, counts[:: max(1, len(counts) - 1)]))
    return [seeds, *(difference(one, brief=True) for one in row)]


def _lines(caption: str, lines: list[list[str]], turned: bool = False) -> str:
    head, *rows = [list(line) for line in zip(*lines, strict=True)] if turned else lines
    return f"{caption}\n\n{markdown_table(head, rows)}"


def _table(caption: str, runs: Runs, columns: Sequence[Column], **text: Sequence[str]) -> str:
    """Return a table with a row for each method; columns of text come before the numbers."""
    rows = [
        [METHODS[name].title, str(len(found)), *(column[k] for column in text.values())]
        + [column.cell(found, METHODS[name].joint) for column in columns]
        for k, (name, found) in enumerate(runs.items())
    ]
    head = ["Method", "Seeds", *text, *(column.head for column in columns)]
    return f"{caption} {SPREAD}\n\n{markdown_table(head, rows)}"
