"""What several commands take: a page to write, and numbers in a list."""

from pathlib import Path
from typing import Annotated

import typer

Page = Annotated[
    Path | None, typer.Option(dir_okay=False, help="Also write the tables to this Markdown file.")
]


def numbers(text: str, name: str) -> list[int]:
    """Return numbers that are separated by commas; raise unless all are at least 1."""
    found = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(found) < 1:
        raise typer.BadParameter(f"{name} must be numbers of at least 1, such as 1,2,9; found {text!r}")
    return found
