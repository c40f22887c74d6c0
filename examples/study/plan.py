"""The runs of the streams: executed, and found again."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from ..common.metrics import Record
from . import streams
from .compare import Found
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
    """Return the runs with the present settings; the records may include earlier settings.

    Times are taken from runs that had the machine to themselves, if there are any; bytes from reported runs.
    """

    def done(name: str, phase: str) -> list[Record]:
        keys = [run.key for run in Run.wanted(stream, name, results, phase)]
        return [results.records[key] for key in keys if key in results]

    names = [name for name in METHODS if name in STREAMS[stream].methods]
    runs = {name: found for name in names if (found := done(name, "report"))}
    times = {
        name: [one | {"bytes": found[0]["bytes"]} for one in done(name, "time")] or found
        for name, found in runs.items()
    }
    return Found(runs, times)
