"""Tables in Markdown, on the terminal and in files."""

import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Table:
    """Rows of text below a title; all columns but the first hold numbers."""

    title: str
    head: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def __str__(self) -> str:
        # Non-breaking hyphens, so that no browser breaks a number.
        rows = [[row[0], *(cell.replace("-", "\u2011") for cell in row[1:])] for row in self.rows]
        return "\n".join([f"**{self.title}**", "", *markdown(self.head, rows)])


def digits(value: float, count: int = 3) -> str:
    """Write a positive number with `count` significant digits, without an exponent; NaN is empty."""
    if math.isnan(value):
        return ""
    return f"{value:,.{max(0, count - 1 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def power(value: float) -> str:
    """Write an error with one digit; zero is "0", and NaN is empty."""
    return "" if math.isnan(value) else "0" if value == 0 else f"{value:.0e}"


def markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table, all columns but the first aligned to the right."""
    lines = [head, [":--", *["--:"] * (len(head) - 1)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def publish(parts: Iterable[object], out: Path | None) -> None:
    """Print the parts of a page as soon as they are known; then write all to a file, if one is given."""
    # Not at the top: GPU machines use this file without rich.
    from rich.console import Console
    from rich.markdown import Markdown

    console, texts = Console(width=None if sys.stdout.isatty() else 110), list[str]()
    if out is not None:  # before what takes hours
        out.parent.mkdir(parents=True, exist_ok=True)
    for part in parts:
        texts.append(str(part))
        console.print(Markdown(texts[-1]), "")
    if out is not None:
        out.write_text("\n".join(texts).rstrip() + "\n", encoding="utf-8")
