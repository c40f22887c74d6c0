"""The study's tables, as text in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from ..common.metrics import mean_std
from ..common.tables import difference, markdown_table, plus_minus
from . import compare
from .compare import Measure, Record, Runs

SPREAD = "Mean ± sample standard deviation (n - 1) over the seeds, whose number stands beside the method."


@dataclass(frozen=True)
class Column:
    """A column of numbers: its head, what it shows of a run, in which unit, with how many decimals.

    `ordered` says that it is about tasks that come one after the other: joint training has no such number.
    """

    head: str
    measure: Measure
    scale: float = 1.0
    decimals: int | None = None  # None: significant digits
    ordered: bool = True

    def cell(self, runs: Sequence[Record], joint: bool) -> str:
        """Return mean ± standard deviation, and from how many runs if some have no such number."""
        if joint and self.ordered:
            return "-"
        found = (self.measure(run) for run in runs)
        values = [value for value in found if value is not None and isfinite(value)]
        text = plus_minus(mean_std(values), self.scale, self.decimals)
        return text if len(values) in (0, len(runs)) else f"{text} ({len(values)} of {len(runs)} seeds)"


ACCURACY = [
    Column("AvgAcc (%)", compare.average_accuracy, 100, 1, ordered=False),
    Column("BWT", compare.backward_transfer, 1, 3),
    Column("FWT", lambda run: run["metrics"]["forward_transfer"], 1, 3),
    Column("Forgetting", lambda run: run["metrics"]["forgetting"], 1, 3),
    Column("Last task (%)", compare.last_accuracy, 100, 1, ordered=False),
    Column("Lowest of past tasks (%)", compare.lowest_past_accuracy, 100, 1),
]


def _spent(part: str) -> Measure:
    """Return the measure of the time of a part of a step; None where a method has no such part."""
    return lambda run: run["seconds"]["per_step"][part] or None


def _checked(what: str, number: str) -> Measure:
    """Return the measure of a number of the guarantee; None where nothing was probed."""
    return lambda run: (run["guarantee"][what] or {}).get(number)


PARTS = {
    "Batch": "batch",
    "Constraint gradients": "constraints",
    "Projection": "projection",
    "Optimizer": "optimizer",
}
COST = [
    *(Column(head, _spent(part), 1e3, ordered=False) for head, part in PARTS.items()),
    Column("Whole step", compare.seconds_per_step, 1e3, ordered=False),
]
MEMORY = Column("Memory (kB)", lambda run: run["bytes"], 1e-3)
PROMISES = [
    Column("Violated by gradient (%)", _checked("gradient", "violated"), 100, 1),
    Column("Violated by step (%)", _checked("update", "violated"), 100, 1),
    Column("Worst cosine of a step", _checked("update", "worst_cosine"), 1, 3),
    Column("Drift (nats)", lambda run: None if run.get("diverged") else run["drift"], 1, 3),
]
# All are better the higher they are.
DIFFERENCES = {
    "AvgAcc": compare.average_accuracy,
    "BWT": compare.backward_transfer,
    "Last task": compare.last_accuracy,
    "Lowest of past tasks": compare.lowest_past_accuracy,
}


def page(
    records: Iterable[Record],
    methods: Mapping[str, Any],
    baselines: Sequence[str] = ("replay", "gem"),
) -> str:
    """Return all tables of a stream, each below its caption.

    Parameters
    ----------
    records : iterable of dict
        Runs, of which the reported ones are taken.
    methods : mapping
        By key, in the order of the rows: objects with `title`, `knob`, the name of the main knob or "", and
        `joint`, whether all tasks are learned at once.
    baselines : sequence of str
        Keys of the methods that the others are compared with.
    """
    records = list(records)
    runs = compare.reported(records, methods)
    times = compare.timed(runs, records)
    parts = [accuracy(runs, methods), cost(times, methods), promises(runs, methods)] if runs else []
    parts += [differences(runs, methods, baseline) for baseline in baselines if baseline in runs]
    missing = [method.title for name, method in methods.items() if name not in runs]
    if missing:
        parts.append(f"No reported runs yet: {', '.join(missing)}.")
    return "\n\n".join(parts) + "\n"


def accuracy(runs: Runs, methods: Mapping[str, Any]) -> str:
    """Return the table of what is known after the stream, and on the way."""
    caption = (
        "Accuracy. Setting: learning rate and main knob, chosen on other seeds. Lowest of past tasks: the "
        "lowest accuracy of a task at any measured time after it was learned, mean over all but the last."
    )
    settings = [_setting(methods[name], found[0]) for name, found in runs.items()]
    return _table(caption, runs, methods, ACCURACY, {"Setting": settings})


def cost(runs: Runs, methods: Mapping[str, Any], plain: str = "plain") -> str:
    """Return the table of what a step and the memory cost."""
    caption = (
        "Cost: milliseconds per step by part, means over all steps after the first task. Batch includes the "
        "replayed examples."
    )
    columns = list(COST)
    if plain in runs:
        caption += f" Relative: whole step over the mean whole step of {methods[plain].title}."
        columns.append(
            Column("Relative", compare.seconds_per_step, 1 / compare.mean_step(runs[plain]), 2, False)
        )
    return _table(caption, runs, methods, [*columns, MEMORY])


def promises(runs: Runs, methods: Mapping[str, Any]) -> str:
    """Return the table of whether steps raise the loss of past tasks."""
    caption = (
        "Promises: share of measured steps with cos(g_k, v) < -0.001 for some stored task k, where v is the "
        "gradient handed to the optimizer, or the step that the optimizer makes of it; the worst cosine of a "
        "step in a run; and by how much the loss on the stored examples has risen at the end since they were "
        "stored. Runs that have diverged have no such rise."
    )
    return _table(caption, runs, methods, PROMISES)


def differences(runs: Runs, methods: Mapping[str, Any], baseline: str = "replay") -> str:
    """Return the table of differences to a baseline, paired over the seeds that both have."""
    caption = (
        f"Method minus {methods[baseline].title}, in percentage points, paired over the seeds of both: "
        "mean and 95 % interval of Student's t, bold where it excludes zero, as one interval in twenty does "
        "by chance. Higher is better in all columns."
    )
    rows = []
    for name in (name for name in runs if name != baseline and not methods[name].joint):
        found = [compare.paired(runs[name], runs[baseline], measure) for measure in DIFFERENCES.values()]
        seeds = str(found[0].n) if found[0] else "0"
        rows.append([methods[name].title, seeds, *map(difference, found)])
    return f"{caption}\n\n{markdown_table(['Method', 'Seeds', *DIFFERENCES], rows)}"


def after_each_task(runs: Runs, methods: Mapping[str, Any], reference: str, others: Iterable[str]) -> str:
    """Return the table of the differences to other methods after each task: from how many on they matter."""
    title, tasks = methods[reference].title, len(runs[reference][0]["boundaries"])
    caption = (
        f"{title} minus others after each task from the second on: mean accuracy over the tasks learned so "
        "far, in percentage points, paired over the seeds, with 95 % interval, bold where it excludes zero."
    )
    rows = []
    for name in (name for name in others if name in runs):
        cells = (compare.paired(runs[reference], runs[name], compare.after(k)) for k in range(2, tasks + 1))
        rows.append([methods[name].title, *map(difference, cells)])
    head = ["Other method", *(f"{k} tasks" for k in range(2, tasks + 1))]
    return f"{caption}\n\n{markdown_table(head, rows)}"


def variants(runs: Runs, methods: Mapping[str, Any], names: Iterable[str], times: Runs | None = None) -> str:
    """Return the table of methods that vary others, each compared with the one that it varies.

    With `times`, it has the time of a step, too.
    """
    caption = (
        "Variants, with the learning rate and the knob of the method that they vary, the line above each "
        "group. Minus it: differences in percentage points, paired over the seeds, with 95 % interval, bold "
        "where it excludes zero."
    )
    columns = [(ACCURACY[0], runs), *([(COST[-1], times)] if times else [])]
    caption += " Whole step: milliseconds." if times else ""
    rows: list[list[str]] = []
    shown = [name for name in names if name in runs and methods[name].like in runs]
    for base in dict.fromkeys(methods[name].like for name in shown):
        for name in (base, *(name for name in shown if methods[name].like == base)):
            pair = runs[name], runs[base]
            found = (compare.paired(*pair, measure) for measure in VARIED)
            minus = ["" for _ in VARIED] if name == base else [difference(one) for one in found]
            cells = [column.cell(source[name], False) for column, source in columns]
            rows.append([methods[name].title, str(len(runs[name])), *cells, *minus])
    head = ["Method", "Seeds", *(column.head for column, _ in columns)]
    head += ["AvgAcc minus it", "Lowest of past tasks minus it"]
    return f"{caption} {SPREAD}\n\n{markdown_table(head, rows)}"


VARIED = (compare.average_accuracy, compare.lowest_past_accuracy)


def equal_time(
    runs: Runs,
    times: Runs,
    methods: Mapping[str, Any],
    ladders: Sequence[Sequence[str]],
    budgets: Iterable[float],
    plain: str = "plain",
) -> str:
    """Return the table of what methods reach with the same time per step.

    Each ladder holds a method with more and fewer examples; of each the step that takes the longest within
    the budget is taken, whatever it reaches.
    """
    heads = [methods[ladder[0]].title for ladder in ladders]
    caption = (
        f"The same time per step: of {' and of '.join(heads)} with more or fewer examples, or rows that are "
        "kept for some steps, what takes the longest within the budget. No choice by results. AvgAcc in "
        f"percent; {heads[1]} minus {heads[0]}: paired over the seeds, with 95 % interval."
    )
    unit, rows = compare.mean_step(times[plain]), []
    for budget in budgets:
        taken = [compare.longest_within(times, ladder, budget * unit) for ladder in ladders]
        cells = []
        for name in taken:
            cost = f"{compare.mean_step(times[name]) / unit:.2f}" if name else ""
            cells += [methods[name].title, cost, ACCURACY[0].cell(runs[name], False)] if name else ["-"] * 3
        first, second = (runs.get(name or "", []) for name in taken)
        both = compare.paired(second, first, compare.average_accuracy)
        rows.append([f"{budget:g}", *cells, difference(both)])
    columns = [cell for head in heads for cell in (head, "takes", "AvgAcc")]
    return f"{caption}\n\n{markdown_table(['Budget (plain steps)', *columns, 'Difference'], rows)}"


def cheapest(
    runs: Runs, times: Runs, methods: Mapping[str, Any], names: Sequence[str], reference: str
) -> str:
    """Return a sentence on the cheapest of some methods that is within noise of a reference."""
    full = methods[reference].title
    name = compare.cheapest_within_noise(runs, times, names, reference)
    if name is None:
        return f"None of {', '.join(methods[name].title for name in names)} is within noise of {full}."
    found = compare.paired(runs[name], runs[reference], compare.average_accuracy)
    ms = 1e3 * compare.mean_step(times[name]), 1e3 * compare.mean_step(times[reference])
    return (
        f"The cheapest within noise of {full} is {methods[name].title}: {ms[0]:.3g} ms per step against "
        f"{ms[1]:.3g}, AvgAcc {difference(found)} points. Within noise means that the 95 % interval of the "
        "paired difference includes zero or lies above."
    )


def _table(
    caption: str,
    runs: Runs,
    methods: Mapping[str, Any],
    columns: Sequence[Column],
    text: Mapping[str, Sequence[str]] | None = None,
) -> str:
    """Return a table of columns for all methods, with columns of text before the numbers."""
    text = text or {}
    rows = [
        [methods[name].title, str(len(found)), *(column[k] for column in text.values())]
        + [column.cell(found, methods[name].joint) for column in columns]
        for k, (name, found) in enumerate(runs.items())
    ]
    head = ["Method", "Seeds", *text, *(column.head for column in columns)]
    return f"{caption} {SPREAD}\n\n{markdown_table(head, rows)}"


def _setting(method: Any, record: Record) -> str:
    knob = f", {method.knob} {record['knob']:g}" if method.knob and record["knob"] is not None else ""
    return f"lr {record['lr']:g}{knob}"
