"""The runs of the streams: executed, and found again."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from . import streams
from .compare import Found, found_in
from .runs import Results, results_of
from .settings import MEMORIES, METHODS, SAME, STREAMS
from .train import Run


def complete(
    names: Sequence[str], methods: Sequence[str], folder: Path, jobs: int, timing: bool, console: Console
) -> None:
    """Execute the runs of the streams that have no record in the folder, in worker processes.

    With `timing`, steps are also timed, one run at a time, after all other runs.
    """
    for name in names or STREAMS:
        # Loading a stream once fills the cache, so that workers do not all pretrain a backbone.
        hashes = streams.load(STREAMS[name].kind, 0, **STREAMS[name].options).hashes
        results, asked = results_of(name, folder), methods or STREAMS[name].methods
        for due, at_once in ((Run.todo, jobs), (to_time, 1))[: 1 + timing]:
            while waiting := results.missing(due(name, asked, results)):
                results.check(hashes)  # raises before any run starts
                results.complete(name, waiting, at_once, console)


def to_time(stream: str, names: Iterable[str], results: Results) -> list[Run]:
    """Return the runs that are timed, one at a time, without other measurements.

    Methods that only vary the stored examples or a weight are not timed: their steps cost the same.
    """
    timed = (name for name in names if name not in {*MEMORIES, *SAME})
    return [run for name in timed for run in Run.wanted(stream, name, results, "time")]


def published(stream: str, results: Results) -> Found:
    """Return the runs with the present settings; the records may include earlier settings."""
    names, phases = STREAMS[stream].methods, ("report", "time")
    keys = [one.key for name in names for phase in phases for one in Run.wanted(stream, name, results, phase)]
    return found_in((results.records[key] for key in keys if key in results), METHODS)
