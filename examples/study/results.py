"""The runs of the study, and where their records are."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from examples.common.metrics import Record
from examples.common.results import Results

from . import digest


@dataclass(frozen=True)
class AnyRun:
    """One method with a learning rate and a knob, on one stream or in one setting, with one seed.

    `phase` is "tune", whose records only have the score; "report"; or "time", whose records only have times.
    Each kind of run defines its `key`, the `space` of its settings, and the `score` of a record.
    """

    where: str
    method: str
    rate: float
    knob: float
    seed: int
    phase: str
    kind: ClassVar[str]  # the name of `where` in the records
    methods: ClassVar[Mapping[str, Any]]

    @property
    def title(self) -> str:
        """Name on the screen."""
        method = self.methods[self.method]
        return f"{self.where}, {method.title}, {setting_of(method, self.rate, self.knob)}, seed {self.seed}"

    def name(self, shaping: Any) -> str:
        """Return a unique name among the runs in the same place, with a hash of `shaping`."""
        numbers = f"lr{self.rate:g}-knob{self.knob:g}-seed{self.seed}"
        return f"{self.method}-{self.phase}-{numbers}-{digest.of_values(shaping)}"

    def named(self, key: str, **more: Any) -> Record:
        """Return the first entries of the record."""
        knob = self.knob if self.methods[self.method].knob else None
        record = {"key": key, self.kind: self.where, "method": self.method, "phase": self.phase}
        return record | more | {"lr": self.rate, "knob": knob, "seed": self.seed}


def results_of(stream: str, folder: Path) -> Results:
    """Return the finished runs of a stream."""
    return Results(folder / "runs" / f"{stream}.jsonl")


def setting_of(method: Any, rate: float, knob: float | None) -> str:
    """Write the learning rate and, if the method has one, the knob."""
    return f"lr {rate:g}" + (f", {method.knob} {knob:g}" if method.knob and knob is not None else "")
