"""Tables over all streams: for a question that several of them answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..common.tables import markdown_table
from . import compare
from .compare import Interval, Measure, Runs
from .report import DIFFERENCES, difference

NOTE = (
    "Percentage points, paired over the seeds: mean ± half of the 95 % interval of Student's t, bold "
    "where it excludes zero, as one interval in twenty does by chance."
)
MEASURED = ("AvgAcc", "Last task", "Lowest of past tasks")


def differences(
    caption: str,
    streams: Mapping[str, Runs],
    pairs: Mapping[str, tuple[str, str]],
    measure: Measure = compare.average_accuracy,
    *,
    turned: bool = False,
) -> str:
    """Return the table of methods minus others, as far as there are runs of both.

    Parameters
    ----------
    caption : str
    streams : mapping
        Reported runs by the title of their stream, a row each.
    pairs : mapping
        Keys of a method and of the one to subtract, by the head of their column.
    measure : callable
    turned : bool
        Whether a stream has a column and a pair a row.
    """
    shown = {
        head: pair
        for head, pair in pairs.items()
        if any(set(pair) <= runs.keys() for runs in streams.values())
    }
    lines = [["Method" if turned else "Stream", "Seeds", *shown]]
    for title, runs in streams.items():
        row = [compare.paired(runs.get(a, []), runs.get(b, []), measure) for a, b in shown.values()]
        if any(row):
            lines.append([title, *cells(row)])
    return f"{caption} {NOTE}\n\n{_markdown(lines, turned)}"


def at_equal_settings(
    caption: str, streams: Mapping[str, Runs], method: str, baselines: tuple[str, ...]
) -> str:
    """Return the table of a method minus the baseline that has its learning rate and main setting."""
    lines = [["Stream", "Rate", "Weight", "Seeds", *MEASURED]]
    for title, runs in streams.items():
        own = _setting(runs, method)
        alike = [name for name in baselines if _setting(runs, name) == own]
        if own is not None and alike:
            row = [compare.paired(runs[method], runs[alike[0]], DIFFERENCES[head]) for head in MEASURED]
            lines.append([title, *(f"{value:g}" for value in own), *cells(row)])
    return f"{caption} {NOTE}\n\n{_markdown(lines)}"


def relative_times(
    caption: str, times: Mapping[str, Runs], titles: Mapping[str, str], plain: str = "plain"
) -> str:
    """Return the table of how long steps take, in plain steps, on the streams where they were timed alone."""
    lines = [["Method", *titles.values()]]
    for title, runs in times.items():
        alone = {
            name: compare.mean_step(found) for name, found in runs.items() if found[0]["phase"] == "time"
        }
        if plain in alone:
            steps = (f"{alone[name] / alone[plain]:.1f}" if name in alone else "-" for name in titles)
            lines.append([title, *steps])
    return f"{caption}\n\n{_markdown(lines, turned=True)}"


def cells(row: Sequence[Interval | None]) -> list[str]:
    """Return the number of seeds of differences, from the least to the largest, and the differences."""
    counts = sorted({one.n for one in row if one})
    seeds = " to ".join(map(str, counts[:: max(1, len(counts) - 1)]))
    return [seeds, *(difference(one, brief=True) for one in row)]


def _setting(runs: Runs, name: str) -> tuple[float, float] | None:
    return (runs[name][0]["lr"], runs[name][0]["knob"]) if name in runs else None


def _markdown(lines: list[list[str]], turned: bool = False) -> str:
    head, *rows = [list(line) for line in zip(*lines, strict=True)] if turned else lines
    return markdown_table(head, rows)
