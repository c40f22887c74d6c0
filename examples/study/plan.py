"""Plans and executes the runs: settings are tuned on some seeds, and reported on others."""

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
    """Execute the runs of the streams that have no record in the folder, in worker processes.

    With `timing`, steps are also timed, one run at a time, after all other runs.
    """
    for name in names or STREAMS:
        # Loading a stream once fills the cache, so that workers do not all pretrain a backbone.
        hashes = streams.load(STREAMS[name].kind, 0, **STREAMS[name].options).hashes
        results = results_of(name, folder)
        for due, at_once in ((todo, jobs), (to_time, 1))[: 1 + timing]:
            while waiting := due(name, results, methods):
                results.check(hashes)  # raises before any run starts
                console.print(f"[bold]{name}[/]  {len(waiting)} runs, {at_once} at a time")
                work(waiting, results.keep, at_once, console)


def todo(stream: str, results: Results, methods: Sequence[str] = ()) -> list[Run]:
    """Return the missing runs that are known already; others depend on the results of these."""
    runs: list[Run] = []
    for name in methods or STREAMS[stream].methods:
        tuned = METHODS[name].like or name
        if chosen(stream, name, results) is None:
            runs += tune(Run, stream, tuned, results)[0]
        runs += wanted(stream, name, "report", results)
    return results.missing(runs)


def to_time(stream: str, results: Results, methods: Sequence[str] = ()) -> list[Run]:
    """Return the runs that are left to be timed, one at a time, without other measurements.

    Methods that only vary the stored examples or a weight are not timed: their steps cost the same.
    """
    names = (name for name in methods or STREAMS[stream].methods if name not in {*MEMORIES, *SAME})
    return results.missing(one for name in names for one in wanted(stream, name, "time", results))


def published(stream: str, results: Results) -> Found:
    """Return the runs with the present settings; the records may include earlier settings."""
    names, phases = STREAMS[stream].methods, ("report", "time")
    keys = [one.key for name in names for phase in phases for one in wanted(stream, name, phase, results)]
    return found_in((results.records[key] for key in keys if key in results), METHODS)


def wanted(stream: str, name: str, phase: str, results: Results) -> list[Run]:
    """Return the runs of a method with the chosen setting; none until it is chosen."""
    point, seeds = chosen(stream, name, results), STREAMS[stream].seeds
    if point is None:
        return []
    return [Run(stream, name, *point, seed, phase) for seed in (seeds[:TIMED] if phase == "time" else seeds)]


def chosen(stream: str, name: str, results: Results) -> Point | None:
    """Return the setting with which a method is reported, its own or that of the method in `like`."""
    name = METHODS[name].like or name
    return STREAMS[stream].fixed.get(name) or tune(Run, stream, name, results)[1]


def tune(kind: Any, where: str, name: str, results: Results) -> tuple[list[Any], Point | None]:
    """Return the tuning runs of a method that are known already, and the best setting.

    First all rates at the grid's middle value, then its other values at the best rate. The best setting has
    the highest mean score over the tuning seeds; it is None until all runs have results.
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
