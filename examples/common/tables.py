"""Numbers and tables as text."""

from collections.abc import Mapping, Sequence

from .metrics import Interval


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in GitHub's Markdown, all columns but the first one aligned to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def significant(value: float, digits: int = 3) -> str:
    """Write a positive number with `digits` significant digits, never in scientific notation."""
    return f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def plus_minus(value: Mapping[str, float | None], scale: float, decimals: int | None = None) -> str:
    """Write mean ± deviation, with fixed decimals or else significant digits."""
    if value["mean"] is None:
        return "-"
    mean = scale * value["mean"]
    text = significant(mean) if decimals is None else f"{mean:.{decimals}f}"
    if value["std"] is None:
        return text
    std = scale * value["std"]
    return f"{text} ± {significant(std, 2) if decimals is None else f'{std:.{decimals}f}'}"


def difference(found: Interval | None, brief: bool = False) -> str:
    """Write a difference in percentage points with its interval, in bold if the interval excludes zero.

    The interval is written as its two ends, or with `brief` as half of its length.
    """
    if found is None:
        return "-"
    mean, half = 100 * found.mean, 100 * found.half
    if found.n == 1:
        return f"{mean:+.1f} (one seed)"
    ends = f"± {half:.1f}" if brief else f"[{mean - half:+.1f}, {mean + half:+.1f}]"
    text = f"{mean:+.1f} {ends}"
    return f"**{text}**" if found.excludes_zero else text
