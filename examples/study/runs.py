"""Runs what is missing, side by side in worker processes."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from examples.common.workers import work

from . import plan, streams
from .results import results_of
from .settings import STREAMS


def complete(
    names: Sequence[str], methods: Sequence[str], folder: Path, jobs: int, timing: bool, console: Console
) -> None:
    """Do all runs of the streams that have no record in the folder yet.

    With `timing`, steps are timed, too, one run at a time, after all others.
    """
    for name in names or STREAMS:
        hashes = streams.prepare(STREAMS[name].kind, **STREAMS[name].options)
        results = results_of(name, folder)
        while waiting := plan.todo(name, results, methods):
            results.check(hashes)  # before anything is run in vain
            console.print(f"[bold]{name}[/]  {len(waiting)} runs, {jobs} at a time")
            work(waiting, results.keep, jobs, console)
        if timing and (waiting := plan.to_time(name, results, methods)):
            results.check(hashes)
            console.print(f"[bold]{name}[/]  {len(waiting)} runs to be timed")
            work(waiting, results.keep, 1, console)
