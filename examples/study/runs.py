"""Runs of the study: settings are tuned on some seeds, and reported on others."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

from examples.common.metrics import Record
from examples.common.origin import digest
from examples.common.results import Results

from .settings import TIMED, TUNING_SEEDS

Point = tuple[float, float]  # learning rate and knob


@dataclass(frozen=True)
class AnyRun:
    """One method with a learning rate and a knob, on one stream or in one setting, with one seed.

    `phase` is "tune", whose records only have the score; "report"; or "time", whose records only have times.
    """

    where: str
    method: str
    rate: float
    knob: float
    seed: int
    phase: str
    kind: ClassVar[str]  # the name of `where` in the records
    places: ClassVar[Mapping[str, Any]]  # streams or settings
    methods: ClassVar[Mapping[str, Any]]
    every_knob: ClassVar[bool] = False  # whether all knobs are reported where they are tuned
    key: ClassVar[Any]
    space: ClassVar[Any]  # from `where` and the method to the learning rates and knobs that are tried
    score: ClassVar[Any]  # from a record to a number, higher is better

    @property
    def title(self) -> str:
        """Name on the screen."""
        method = self.methods[self.method]
        return f"{self.where}, {method.title}, {setting_of(method, self.rate, self.knob)}, seed {self.seed}"

    def name(self, shaping: Any) -> str:
        """Return a unique name among the runs in the same place, with a hash of `shaping`."""
        numbers = f"lr{self.rate:g}-knob{self.knob:g}-seed{self.seed}"
        return f"{self.method}-{self.phase}-{numbers}-{digest(shaping)}"

    def named(self, **more: Any) -> Record:
        """Return the first entries of the record."""
        knob = self.knob if self.methods[self.method].knob else None
        record = {"key": self.key, self.kind: self.where, "method": self.method, "phase": self.phase}
        return record | more | {"lr": self.rate, "knob": knob, "seed": self.seed}

    @classmethod
    def todo(cls, where: str, names: Iterable[str], results: Results) -> list[Any]:
        """Return the runs that are known already; others depend on the results of these."""
        runs = []
        for name in names:
            if cls.chosen(where, name, results) is None:
                runs += cls.tune(cls.places[where].tuned or where, cls.methods[name].like or name, results)[0]
            runs += cls.wanted(where, name, results)
        return runs

    @classmethod
    def wanted(cls, where: str, name: str, results: Results, phase: str = "report") -> list[Any]:
        """Return the runs of a method with the chosen setting; none until it is chosen."""
        point, place = cls.chosen(where, name, results), cls.places[where]
        if point is None:
            return []
        knobs = cls.methods[name].grid if cls.every_knob and not place.tuned else [point[1]]
        seeds = place.seeds[:TIMED] if phase == "time" else place.seeds
        return [cls(where, name, point[0], knob, seed, phase) for knob in knobs for seed in seeds]

    @classmethod
    def chosen(cls, where: str, name: str, results: Results) -> Point | None:
        """Return the setting with which a method is reported: its own, another's or elsewhere's."""
        name, place = cls.methods[name].like or name, cls.places[where]
        return place.fixed.get(name) or cls.tune(place.tuned or where, name, results)[1]

    @classmethod
    def tune(cls, where: str, name: str, results: Results) -> tuple[list[Any], Point | None]:
        """Return the tuning runs of a method that are known already, and the best setting.

        First all rates at the grid's middle value, then its other values at the best rate. The best setting
        has the highest mean score over the tuning seeds; it is None until all runs have results.
        """
        rates, grid = cls.space(where, name)

        def runs(point: Point) -> list[Any]:
            return [cls(where, name, *point, seed, "tune") for seed in TUNING_SEEDS]

        def best(points: Sequence[Point]) -> Point | None:
            scores = {}
            for point in points:
                keys = [run.key for run in runs(point)]
                if not all(key in results for key in keys):
                    return None
                scores[point] = mean(cls.score(results.records[key]) for key in keys)
            return max(points, key=scores.__getitem__)

        points = [(rate, grid[len(grid) // 2]) for rate in rates]
        found = best(points)
        if found is not None:
            points = list(dict.fromkeys([*points, *((found[0], knob) for knob in grid)]))
            found = best(points)
        return [run for point in points for run in runs(point)], found


def results_of(stream: str, folder: Path) -> Results:
    """Return the finished runs of a stream."""
    return Results(folder / "runs" / f"{stream}.jsonl")


def setting_of(method: Any, rate: float, knob: float | None) -> str:
    """Write the learning rate and, if the method has one, the knob."""
    return f"lr {rate:g}" + (f", {method.knob} {knob:g}" if method.knob and knob is not None else "")
