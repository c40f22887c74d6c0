"""The study: which method keeps what a model knows, and at what price.

Finished runs are kept, one line each: the same command goes on where it was stopped. Learning rates and main
settings are chosen on tuning seeds, and reported on others.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from examples.lora_agnews.config import SetupError


def parser() -> ArgumentParser:
    """Return the parser."""
    found = ArgumentParser("python -m examples.study", "%(prog)s [options] [stream ...]", __doc__)
    found.add_argument("streams", nargs="*", help="by default all of the settings")
    found.add_argument("--methods", default="", help="with commas between, by default all of the stream")
    found.add_argument(
        "--out", type=Path, default=Path("docs", "results", "study"), help="folder for results"
    )
    found.add_argument("--jobs", type=int, help="runs at once, by default one for each core")
    found.add_argument("--time", action="store_true", help="time steps, too, one run at a time")
    found.add_argument("--report", action="store_true", help="run nothing, draw what is there")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is missing, then write tables and figures; 0, 2 for an error, 130 if it was stopped."""
    given = parser().parse_args(arguments)
    console = Console(highlight=False)

    from . import publish, runs, settings  # torch takes seconds to import; --help should not wait

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    methods = tuple(filter(None, given.methods.split(",")))
    try:
        if not given.report:
            runs.complete(given.streams, methods, given.out, given.jobs or cores, given.time, console)
        for name in given.streams or settings.STREAMS:
            for path in publish.publish(name, runs.results_of(name, given.out), given.out):
                console.print(f"[bold]written[/]   {path}")
    except SetupError as error:
        console.print(f"[red]error[/]     {escape(str(error))}")
        return 2
    except KeyboardInterrupt:
        console.print("[yellow]stopped[/]   finished runs are kept; the same command goes on from here")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
