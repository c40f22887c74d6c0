"""Copies tables of docs/results/ into the pages that show them: ``python docs/tables.py``.

In a page, ``<!-- results/FILE -->`` stands above the first table of that file, ``<!-- results/FILE N -->``
above its N-th. So pages can be read where nothing is built.
"""

import re
from pathlib import Path

DOCS = Path(__file__).parent
TABLE = r"(?:^\|.*\n)+"
PLACE = re.compile(rf"(?m)^<!-- (results/\S+?)(?: (\d+))? -->\n(?:\n{TABLE})?")


def copied(text: str) -> str:
    """Return the text of a page with the tables as they are in the files."""

    def table(place: re.Match[str]) -> str:
        tables = re.findall(rf"(?m){TABLE}", (DOCS / place[1]).read_text(encoding="utf-8"))
        number = f" {place[2]}" if place[2] else ""
        return f"<!-- {place[1]}{number} -->\n\n{tables[int(place[2] or 1) - 1]}"

    return PLACE.sub(table, text)


if __name__ == "__main__":
    for page in DOCS.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        if copied(text) != text:
            page.write_text(copied(text), encoding="utf-8")
            print(page.name)
