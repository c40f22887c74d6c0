"""A table for the terminal and for a Markdown file."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Table:
    """Rows of text below a title; all columns but the first hold numbers."""

    title: str
    head: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def markdown(self) -> str:
        """Return the title and a Markdown table."""
        head = [name.replace("\n", " ") for name in self.head]
        # Hyphens at which no browser breaks a number.
        rows = [[row[0], *(cell.replace("-", "\u2011") for cell in row[1:])] for row in self.rows]
        return "\n".join([f"**{self.title}**", "", *markdown(head, rows)])

    def rich(self) -> Any:
        """Return what a rich console prints; where it is narrow, the first column folds."""
        # Not at the top: machines with a GPU have no rich, and need the rest of this file.
        from rich import box
        from rich.console import Group
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for i, name in enumerate(self.head):
            table.add_column(name, justify="right" if i else "left", no_wrap=bool(i))
        for row in self.rows:
            table.add_row(*row)
        return Group(Text(self.title, style="bold"), table)


def digits(value: float, count: int = 3) -> str:
    """Write a positive number with so many significant digits and without an exponent."""
    return f"{value:,.{max(0, count - 1 - math.floor(math.log10(value)))}f}" if value > 0 else "0"


def power(value: float) -> str:
    """Write an error with one digit; zero is short, and what was not measured empty."""
    return "" if math.isnan(value) else "0" if value == 0 else f"{value:.0e}"


def markdown(head: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table with numbers to the right."""
    lines = [head, [":--", *["--:"] * (len(head) - 1)], *rows]
    return [f"| {' | '.join(line)} |" for line in lines] + [""]


def publish(lines: list[str], out: Path | None) -> None:
    """Print lines of Markdown, and also write them to a file, if one is given."""
    text = "\n".join(lines)
    print(text)
    if out is not None:
        out.write_text(text.rstrip() + "\n")
