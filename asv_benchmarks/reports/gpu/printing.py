"""The output of a part: tables in Markdown, each row as soon as it is known."""

import traceback
from collections.abc import Callable
from typing import NamedTuple

from asv_benchmarks.reports.tables import markdown, power


def say(*lines: str) -> None:
    """Print lines and flush, because the reading process may kill this one at any time."""
    print(*lines, sep="\n", flush=True)


class Running:
    """A table that is printed row by row."""

    def __init__(self, title: str, head: list[str]) -> None:
        say("", f"**{title}**", "", *markdown(head, [])[:-1])

    def row(self, *cells: str) -> None:
        """Print one row."""
        say(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")


class Targets(Running):
    """A table of numbers and their targets, which are upper limits."""

    def __init__(self, title: str) -> None:
        super().__init__(title, ["", "target", "found", "met"])

    def add(self, name: str, found: float, most: float, write: Callable[[float], str]) -> None:
        """Print a number, its target `most`, and whether it is met; `write` formats both."""
        self.row(name, write(most), write(found), "yes" if found <= most else "no")


class Found(NamedTuple):
    """The result of a check: number of problems, worst error, and the largest error that is right."""

    number: int
    worst: float
    bound: float


class Checks(Running):
    """A table of checks; `wrong` counts failures. If a check raises, it failed, and the next one runs."""

    def __init__(self, title: str) -> None:
        super().__init__(title, ["check", "count", "worst error", "bound", "verdict"])
        self.wrong = 0

    def add(self, name: str, check: Callable[[], Found]) -> None:
        """Run a check and print its row."""
        try:
            number, worst, bound = check()
            cells = [f"{number:,}", power(worst) or "NaN", power(bound)]
            verdict = "right" if worst <= bound else "**wrong**"  # which NaN is
        except Exception as error:
            traceback.print_exc()
            cells = ["", f"{type(error).__name__}: {error}".partition("\n")[0], ""]
            verdict = "**failed**"
        self.wrong += verdict != "right"
        self.row(name, *cells, verdict)
