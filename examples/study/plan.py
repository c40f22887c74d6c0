"""What is to be run: settings are tuned on some seeds, and reported on others."""

from collections.abc import Callable, Sequence
from functools import partial
from statistics import mean
from typing import Any

from .results import Record, Results
from .settings import MEMORIES, METHODS, SAME, STREAMS, TIMED, TUNING_SEEDS
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

    Neither what is stored nor a weight changes what a step costs.
    """
    names = (name for name in methods or STREAMS[stream].methods if name not in MEMORIES and name not in SAME)
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
    return _tuned(stream, name, results)[0]


def chosen(stream: str, name: str, results: Results) -> Point | None:
    """Return the setting with which a method is reported, its own or that of the method it is like."""
    name = METHODS[name].like or name
    return STREAMS[stream].fixed.get(name) or _tuned(stream, name, results)[1]


def tune(
    make: Callable[..., Any],
    rates: Sequence[float],
    grid: Sequence[float],
    score: Callable[[Record], float],
    results: Results,
) -> tuple[list[Point], Point | None]:
    """Return the settings to try as far as they are known, and the best one; None until all have results.

    First all rates at the grid's middle value, then its other values at the best rate. Runs are made of rate,
    knob, seed and phase; the mean score of their records over the tuning seeds is to be high.
    """

    def best(tried: Sequence[Point]) -> Point | None:
        scores = {}
        for point in tried:
            keys = [make(*point, seed, "tune").key for seed in TUNING_SEEDS]
            if not all(key in results for key in keys):
                return None
            scores[point] = mean(score(results.records[key]) for key in keys)
        return max(tried, key=scores.__getitem__)

    first = [(rate, grid[len(grid) // 2]) for rate in rates]
    found = best(first)
    if found is None:
        return first, None
    tried = list(dict.fromkeys([*first, *((found[0], knob) for knob in grid)]))
    return tried, best(tried)


def _tuned(stream: str, name: str, results: Results) -> tuple[list[Point], Point | None]:
    setting, method = STREAMS[stream], METHODS[name]
    rates, grid = (setting.rates[1:4], method.grid) if method.grid else (setting.rates, (0.0,))
    make = partial(Run, stream, setting, name)
    return tune(make, rates, grid, lambda record: record["metrics"]["average_accuracy"], results)
