"""Runs, and what is kept of finished ones: one line of JSON for each, in a file that only grows."""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

from examples.common.command import SetupError
from examples.common.metrics import Record
from examples.common.workers import VERSIONS

from . import digest


@dataclass(frozen=True)
class AnyRun:
    """One method, with a learning rate and a knob, on one stream or in one setting, under one seed.

    `phase` is "tune", of which only the score is kept; "report"; or "time", of which only the times are. Each
    kind of run says what its `key` is, which settings are in its `space`, and how high the `score` of a
    record is.
    """

    where: str
    method: str
    rate: float
    knob: float
    seed: int
    phase: str
    kind: ClassVar[str]  # what `where` is the name of, in the records
    methods: ClassVar[Mapping[str, Any]]

    @property
    def title(self) -> str:
        """Name on the screen."""
        method = self.methods[self.method]
        return f"{self.where}, {method.title}, {setting_of(method, self.rate, self.knob)}, seed {self.seed}"

    def name(self, shaping: Any) -> str:
        """Return what tells it from other runs in the same place, with a hash of what shapes it."""
        numbers = f"lr{self.rate:g}-knob{self.knob:g}-seed{self.seed}"
        return f"{self.method}-{self.phase}-{numbers}-{digest.of_values(shaping)}"

    def named(self, key: str, **more: Any) -> Record:
        """Return the beginning of its record."""
        knob = self.knob if self.methods[self.method].knob else None
        record = {"key": key, self.kind: self.where, "method": self.method, "phase": self.phase}
        return record | more | {"lr": self.rate, "knob": knob, "seed": self.seed}


class Results:
    """The runs of a stream that are finished.

    A line is either a record, with its key, or what the records after it have in common: versions, machine,
    hashes of data and backbone. A line that was cut off, because the process was killed or the disk was
    full, has no end: it is removed, and its run is done again. Any other damage is an error that names the
    file and the line. The file is made with the first record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        self._about: Mapping[str, Any] = {}
        if not path.exists():
            return
        text = path.read_bytes()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            os.truncate(path, whole)
        for number, line in enumerate(text[:whole].splitlines(), 1):
            try:
                found = json.loads(line)
                if "about" in found:
                    self._about = found["about"]
                else:
                    self.records[found["key"]] = found
            except (ValueError, KeyError, TypeError) as error:
                raise SetupError(
                    f"{path}, line {number} is damaged ({error!r}); remove it, and its run is done again"
                ) from None

    def __contains__(self, key: str) -> bool:
        return key in self.records

    def check(self, hashes: Mapping[str, str]) -> None:
        """Raise where the records depend on other data or another backbone than these."""
        if self._about and hashes != self._about["hashes"]:
            raise SetupError(
                f"{self.path} has results of other data or another backbone, {self._about['hashes']}; found "
                f"{hashes}. Remove the file, and its runs are done again, or use another folder for results."
            )

    def add(self, record: Record, about: Mapping[str, Any]) -> None:
        """Append a record, which has a key, and what is to be known about it."""
        about = json.loads(json.dumps(about))
        self.check(about["hashes"])
        lines = [json.dumps(record) + "\n"]
        if about != self._about:
            lines.insert(0, json.dumps({"about": about}) + "\n")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with self.path.open("ab", buffering=0) as file:
                file.write("".join(lines).encode())
                os.fsync(file.fileno())
        except OSError as error:
            raise SetupError(f"{self.path} could not be written: {error.strerror}") from None
        self.records[record["key"]], self._about = record, about

    def keep(self, run: Any, result: Record) -> None:
        """Append the record of a run that has finished."""
        self.add(run.record(result), result["about"])


def results_of(stream: str, folder: Path) -> Results:
    """Return the finished runs of a stream."""
    return Results(folder / "runs" / f"{stream}.jsonl")


def setting_of(method: Any, rate: float, knob: float | None) -> str:
    """Return a learning rate and, where a method has one, its knob."""
    return f"lr {rate:g}" + (f", {method.knob} {knob:g}" if method.knob and knob is not None else "")


def origin(hashes: Mapping[str, str]) -> dict[str, Any]:
    """Return what results depend on besides their settings."""
    machine = {"machine": platform.processor() or platform.machine(), "system": platform.system()}
    return {"versions": VERSIONS, "hashes": dict(hashes)} | machine


def rounded(value: Any) -> Any:
    """Return plain values with five digits, as more is noise; None for what JSON has no number for."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: rounded(part) for name, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list | tuple) else value
