"""What is to be run: settings are tuned on some seeds, and reported on others."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from .results import Record, Results
from .settings import MEMORIES, METHODS, POINTS, STREAMS, TIMED, TUNING_SEEDS
from .train import Run

Point = tuple[float, float]  # learning rate and knob


def todo(stream: str, results: Results, methods: Sequence[str] = ()) -> list[Run]:
    """Return the runs that can be done now and are not: more follow from what they find."""
    runs: list[Run] = []
    for name in methods or STREAMS[stream].methods:
        tuned = METHODS[name].like or name
        if chosen(stream, name, results) is None:
            tried = points(stream, tuned, results)
            runs += [run(stream, tuned, point, seed, "tune") for point in tried for seed in TUNING_SEEDS]
        runs += wanted(stream, name, "report", results)
    return missing(runs, results)


def to_time(stream: str, results: Results, methods: Sequence[str] = ()) -> list[Run]:
    """Return the runs that are left to be timed, one at a time and with nothing measured but times.

    What is stored does not change what a step costs.
    """
    names = (name for name in methods or STREAMS[stream].methods if name not in MEMORIES)
    return missing([one for name in names for one in wanted(stream, name, "time", results)], results)


def published(stream: str, results: Results) -> list[Record]:
    """Return the records of the present settings: there may be others of earlier ones."""
    names, phases = STREAMS[stream].methods, ("report", "time")
    keys = [one.key for name in names for phase in phases for one in wanted(stream, name, phase, results)]
    return [results.records[key] for key in keys if key in results]


def wanted(stream: str, name: str, phase: str, results: Results) -> list[Run]:
    """Return the runs of a method in the chosen setting; none as long as it is not chosen."""
    point, seeds = chosen(stream, name, results), STREAMS[stream].seeds
    if point is None:
        return []
    return [run(stream, name, point, seed, phase) for seed in (seeds[:TIMED] if phase == "time" else seeds)]


def missing(runs: Sequence[Run], results: Results) -> list[Run]:
    """Return the runs that have no record, each once."""
    return [one for key, one in {one.key: one for one in runs}.items() if key not in results]


def run(stream: str, method: str, point: Point, seed: int, phase: str) -> Run:
    """Return a run on a stream of the settings."""
    return Run(stream, STREAMS[stream], method, *point, seed, phase)


def points(stream: str, name: str, results: Results) -> list[Point]:
    """Return the settings to try, five for every method.

    With a knob: three learning rates at its middle value, then its other values at the best rate. Without:
    five learning rates.
    """
    setting, method = STREAMS[stream], METHODS[name]
    if not method.grid:
        return [(rate, 0.0) for rate in setting.rates]
    low, middle, high = method.grid
    first = [(rate, middle) for rate in setting.rates[1:4]]
    rate = best(stream, name, first, results)
    return first if rate is None else [*first, (rate[0], low), (rate[0], high)]


def best(stream: str, name: str, tried: Sequence[Point], results: Results) -> Point | None:
    """Return the setting with the highest mean accuracy on the tuning seeds; None until all are known."""
    scores = {}
    for point in tried:
        keys = [run(stream, name, point, seed, "tune").key for seed in TUNING_SEEDS]
        if not all(key in results for key in keys):
            return None
        scores[point] = mean(results.records[key]["metrics"]["average_accuracy"] for key in keys)
    return max(tried, key=scores.__getitem__)


def chosen(stream: str, name: str, results: Results) -> Point | None:
    """Return the setting with which a method is reported, its own or that of the method it is like."""
    name = METHODS[name].like or name
    tried = points(stream, name, results)
    return best(stream, name, tried, results) if len(tried) == POINTS else None
