"""What is to be run, and runs it: settings are tuned on some seeds, and reported on others."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console

from examples.common.workers import work

from . import streams
from .compare import Found, found_in
from .results import Results, results_of
from .settings import MEMORIES, METHODS, SAME, STREAMS, TIMED, TUNING_SEEDS
from .train import Run

Point = tuple[float, float]  # learning rate and knob


def complete(
    names: Sequence[str], methods: Sequence[str], folder: Path, jobs: int, timing: bool, console: Console
) -> None:
    """Do all runs of the streams that have no record in the folder yet, side by side in worker processes.

    With `timing`, steps are timed, too, one run at a time, after all others.
    """
    for name in names or STREAMS:
        # A stream that is loaded once has in the cache what each worker would make of its own.
        hashes = streams.load(STREAMS[name].kind, 0, **STREAMS[name].options).hashes
        results = results_of(name, folder)
        while waiting := todo(name, results, methods):
            results.check(hashes)  # before anything is run in vain
            console.print(f"[bold]{name}[/]  {len(waiting)} runs, {jobs} at a time")
            work(waiting, results.keep, jobs, console)
        if timing and (waiting := to_time(name, results, methods)):
            results.check(hashes)
            console.print(f"[bold]{name}[/]  {len(waiting)} runs to be timed")
            work(waiting, results.keep, 1, console)


def todo(stream: str, results: Results, methods: Sequence[str] = ()) -> list[Run]:
    """Return the runs that can be done now and are not: more follow from what they find."""
    runs: list[Run] = []
    for name in methods or STREAMS[stream].methods:
        tuned = METHODS[name].like or name
        if chosen(stream, name, results) is None:
            runs += tune(Run, stream, tuned, results)[0]
        runs += wanted(stream, name, "report", results)
    return missing(runs, results)


def to_time(stream: str, results: Results, methods: Sequence[str] = ()) -> list[Run]:
    """Return the runs that are left to be timed, one at a time and with nothing measured but times.

    Neither what is stored nor a weight changes what a step costs.
    """
    names = (name for name in methods or STREAMS[stream].methods if name not in {*MEMORIES, *SAME})
    return missing([one for name in names for one in wanted(stream, name, "time", results)], results)


def published(stream: str, results: Results) -> Found:
    """Return what was found in the present settings: there may be records of earlier ones."""
    names, phases = STREAMS[stream].methods, ("report", "time")
    keys = [one.key for name in names for phase in phases for one in wanted(stream, name, phase, results)]
    return found_in((results.records[key] for key in keys if key in results), METHODS)


def wanted(stream: str, name: str, phase: str, results: Results) -> list[Run]:
    """Return the runs of a method in the chosen setting; none as long as it is not chosen."""
    point, seeds = chosen(stream, name, results), STREAMS[stream].seeds
    if point is None:
        return []
    return [Run(stream, name, *point, seed, phase) for seed in (seeds[:TIMED] if phase == "time" else seeds)]


def missing(runs: Sequence[Any], results: Results) -> list[Any]:
    """Return the runs that have no record, each once."""
    return [one for key, one in {one.key: one for one in runs}.items() if key not in results]


def chosen(stream: str, name: str, results: Results) -> Point | None:
    """Return the setting with which a method is reported, its own or that of the method it is like."""
    name = METHODS[name].like or name
    return STREAMS[stream].fixed.get(name) or tune(Run, stream, name, results)[1]


def tune(kind: Any, where: str, name: str, results: Results) -> tuple[list[Any], Point | None]:
    """Return the runs of a kind to tune a method with, as far as they are known, and the best setting.

    First all rates at the grid's middle value, then its other values at the best rate. That is the one with
    the highest mean score over the tuning seeds; None until all have results.
    """
    rates, grid = kind.space(where, name)

    def runs(point: Point) -> list[Any]:
        return [kind(where, name, *point, seed, "tune") for seed in TUNING_SEEDS]

    def best(points: Sequence[Point]) -> Point | None:
        scores = {}
        for point in points:
            keys = [run.key for run in runs(point)]
            if not all(key in results for key in keys):
                return None
            scores[point] = mean(kind.score(results.records[key]) for key in keys)
        return max(points, key=scores.__getitem__)

    points = [(rate, grid[len(grid) // 2]) for rate in rates]
    found = best(points)
    if found is not None:
        points = list(dict.fromkeys([*points, *((found[0], knob) for knob in grid)]))
        found = best(points)
    return [run for point in points for run in runs(point)], found
