"""Numbers and tables as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in GitHub's Markdown, all columns but the first one aligned to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def significant(value: float, digits: int = 3) -> str:
    """Return a positive number with so many significant digits, and never in scientific notation."""
    return f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def plus_minus(value: Mapping[str, float | None], scale: float, decimals: int | None = None) -> str:
    """Return mean ± deviation, with fixed decimals or else significant digits."""
    if value["mean"] is None:
        return "-"
    mean = scale * value["mean"]
    text = significant(mean) if decimals is None else f"{mean:.{decimals}f}"
    if value["std"] is None:
        return text
    std = scale * value["std"]
    return f"{text} ± {significant(std, 2) if decimals is None else f'{std:.{decimals}f}'}"
