"""Numbers and tables as text."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from .metrics import Measure, Record, Spread, spread

Row = TypeVar("Row")
Cell = Callable[[Sequence[Record]], str]  # what a column shows of the runs of a row


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in GitHub's Markdown, all columns but the first one aligned to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table(
    rows: Iterable[tuple[str, Row]], columns: Mapping[str, Callable[[Row], str]], head: str = "Method"
) -> str:
    """Return the table of named rows, such as the runs of a method; a column writes a cell of each row."""
    cells = ([name, *(column(row) for column in columns.values())] for name, row in rows)
    return markdown_table([head, *columns], cells)


def mean_of(measure: Measure, scale: float = 1.0, decimals: int | None = None, beside: str = "std") -> Cell:
    """Return the column of means over the runs, with the number of those that have such a number."""

    def cell(runs: Sequence[Record]) -> str:
        found = spread(map(measure, runs))
        text = plus_minus(found, scale, decimals, beside)
        return text if found.n in (0, len(runs)) else f"{text} ({found.n} of {len(runs)} seeds)"

    return cell


def significant(value: float, digits: int = 3) -> str:
    """Write a positive number with `digits` significant digits, never in scientific notation."""
    return f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def plus_minus(found: Spread, scale: float, decimals: int | None = None, beside: str = "std") -> str:
    """Write a mean, with fixed decimals or else significant digits, ± its "std" or "half", or alone."""
    if not found:
        return "-"
    mean = scale * found.mean
    text = significant(mean) if decimals is None else f"{mean:.{decimals}f}"
    if not beside or found.n == 1:
        return text
    part = scale * getattr(found, beside)
    return f"{text} ± {significant(part, 2) if decimals is None else f'{part:.{decimals}f}'}"


def difference(found: Spread, brief: bool = False) -> str:
    """Write a difference in percentage points with its interval, in bold if the interval excludes zero.

    The interval is written as its two ends, or with `brief` as half of its length.
    """
    if not found:
        return "-"
    mean, half = 100 * found.mean, 100 * found.half
    if found.n == 1:
        return f"{mean:+.1f} (one seed)"
    ends = f"± {half:.1f}" if brief else f"[{mean - half:+.1f}, {mean + half:+.1f}]"
    text = f"{mean:+.1f} {ends}"
    return f"**{text}**" if found.excludes_zero else text
