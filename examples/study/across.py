"""Tables over all streams: for a question that several of them answer."""

from __future__ import annotations

from collections.abc import Mapping

from ..lora_agnews.report import markdown_table
from . import compare
from .compare import Interval, Measure, Runs
from .report import DIFFERENCES

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
    found = {
        title: [compare.paired(runs.get(a, []), runs.get(b, []), measure) for a, b in pairs.values()]
        for title, runs in streams.items()
    }
    found = {title: row for title, row in found.items() if any(row)}
    shown = [k for k, _ in enumerate(pairs) if any(row[k] for row in found.values())]
    corner = "Method" if turned else "Stream"
    lines = [[corner, "Seeds", *(head for k, head in enumerate(pairs) if k in shown)]]
    lines += [[title, seeds(row), *(short(row[k]) for k in shown)] for title, row in found.items()]
    return f"{caption} {NOTE}\n\n{_markdown(lines, turned)}"


def at_equal_settings(
    caption: str, streams: Mapping[str, Runs], method: str, baselines: tuple[str, ...]
) -> str:
    """Return the table of a method minus the baseline that has its learning rate and main setting."""
    lines = [["Stream", "Seeds", "Rate", "Weight", *MEASURED]]
    for title, runs in streams.items():
        own = _setting(runs, method)
        alike = [name for name in baselines if own and _setting(runs, name) == own]
        if own and alike:
            row = [compare.paired(runs[method], runs[alike[0]], DIFFERENCES[head]) for head in MEASURED]
            lines.append([title, seeds(row), *(f"{value:g}" for value in own), *map(short, row)])
    return f"{caption} {NOTE}\n\n{_markdown(lines)}"


def steps(caption: str, times: Mapping[str, Runs], titles: Mapping[str, str], plain: str = "plain") -> str:
    """Return the table of how long steps take, in plain steps, on the streams where they were timed alone."""
    lines = [["Method", *titles.values()]]
    for title, runs in times.items():
        alone = {
            name: compare.mean_step(found) for name, found in runs.items() if found[0]["phase"] == "time"
        }
        if plain in alone:
            cells = (f"{alone[name] / alone[plain]:.1f}" if name in alone else "-" for name in titles)
            lines.append([title, *cells])
    return f"{caption}\n\n{_markdown(lines, turned=True)}"


def seeds(row: list[Interval | None]) -> str:
    """Return the number of seeds of differences, or from the least to the largest."""
    counts = sorted({one.n for one in row if one})
    return " to ".join(map(str, counts[:: max(1, len(counts) - 1)]))


def short(found: Interval | None) -> str:
    """Return a difference in percentage points, bold where its interval excludes zero."""
    if found is None:
        return "-"
    text = f"{100 * found.mean:+.1f}" + (f" ± {100 * found.half:.1f}" if found.n > 1 else " (one seed)")
    return f"**{text}**" if found.excludes_zero else text


def _setting(runs: Runs, name: str) -> tuple[float, float] | None:
    return (runs[name][0]["lr"], runs[name][0]["knob"]) if name in runs else None


def _markdown(lines: list[list[str]], turned: bool = False) -> str:
    head, *rows = [list(line) for line in zip(*lines, strict=True)] if turned else lines
    return markdown_table(head, rows)
