"""Runs what is missing, side by side in worker processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from examples.common.command import SetupError
from examples.common.workers import work

from . import plan, streams
from .results import Results, results_of
from .settings import METHODS, STREAMS
from .train import Run


def check(names: Sequence[str], methods: Sequence[str]) -> None:
    """Raise for a stream or a method that there is not."""
    for kind, known, asked in (("stream", STREAMS, names), ("method", METHODS, methods)):
        if unknown := sorted(set(asked) - set(known)):
            raise SetupError(f"unknown {kind} {', '.join(unknown)}; choose from {', '.join(known)}")


def complete(
    names: Sequence[str], methods: Sequence[str], folder: Path, jobs: int, timing: bool, console: Console
) -> None:
    """Do all runs of the streams that have no record in the folder yet.

    With `timing`, steps are timed, too, one run at a time, after all others.
    """
    for name in names or STREAMS:
        hashes = streams.prepare(STREAMS[name].kind, **STREAMS[name].options)
        results = results_of(name, folder)

        def keep(run: Run, result: dict[str, Any], results: Results = results) -> None:
            results.add(run.record(result), result["about"])

        while waiting := plan.todo(name, results, methods):
            results.check(hashes)  # before anything is run in vain
            console.print(f"[bold]{name}[/]  {len(waiting)} runs, {jobs} at a time")
            work(waiting, keep, jobs, console)
        if timing and (waiting := plan.to_time(name, results, methods)):
            results.check(hashes)
            console.print(f"[bold]{name}[/]  {len(waiting)} runs to be timed")
            work(waiting, keep, 1, console)
