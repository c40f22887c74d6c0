"""``python -m asv_benchmarks.reports.placed docs/boards.md``: copies result tables into a page.

A Git host shows no included files, so a page holds the tables themselves. This command writes what stands
between ``<!-- results/NAME.md -->``, a path relative to the page, and ``<!-- end -->``.
"""

import re
from pathlib import Path

import typer

PLACE = re.compile(r"(?s)<!-- (results/[\w-]+\.md) -->\n.*?<!-- end -->")


def placed(page: Path) -> str:
    """Return the text of a page with the present tables."""

    def tables(match: re.Match[str]) -> str:
        return f"<!-- {match[1]} -->\n\n{(page.parent / match[1]).read_text()}\n<!-- end -->"

    return PLACE.sub(tables, page.read_text())


def main(pages: list[Path]) -> None:
    """Write the present tables into the pages."""
    for page in pages:
        page.write_text(placed(page))


if __name__ == "__main__":
    typer.run(main)
