"""The records of finished runs: one line of JSON for each, in a file that only grows."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from .command import SetupError
from .metrics import Record
from .origin import CODE
from .workers import work


class Results:
    """The finished runs in a file; a run has a unique `key`, and makes the `record` of its result.

    A line is either a record with a key, or the common facts of the records after it: versions, machine, and
    hashes of code, data and backbone. A last line without an end was cut off, because the process was killed
    or the disk was full. It is removed, and its run is repeated. Any other damage is an error that names the
    file and the line; of runs of other code than today's is only told. The first record creates the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        self._about: Mapping[str, Any] = {}
        codes: dict[str, Mapping[str, str]] = {}  # by key; those of old records are not known
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
                    codes[found["key"]] = self._about.get("code", {})
            except (ValueError, KeyError, TypeError) as error:
                raise SetupError(
                    f"{path}, line {number} is damaged ({error!r}); remove it, and its run is done again, or "
                    "the file, if the line is about all runs"
                ) from None
        changed = [{name for name in code if CODE.get(name) != code[name]} for code in codes.values()]
        if any(changed):
            names = ", ".join(sorted(set().union(*changed)))
            _warn(
                f"{path}: {sum(map(bool, changed))} of {len(changed)} runs are of other code than today's, "
                f"in {names}. Remove the file, and its runs are done again."
            )

    def __contains__(self, key: str) -> bool:
        return key in self.records

    def check(self, hashes: Mapping[str, str]) -> None:
        """Raise if the records depend on other data or another backbone."""
        if self._about and hashes != self._about["hashes"]:
            raise SetupError(
                f"{self.path} has results of other data or another backbone, {self._about['hashes']}; found "
                f"{hashes}. Remove the file, and its runs are done again, or use another folder for results."
            )

    def add(self, record: Record, about: Mapping[str, Any]) -> None:
        """Append a record, and the facts about it if they have changed."""
        about = json.loads(json.dumps(about))
        self.check(about["hashes"])
        lines = [json.dumps(record) + "\n"]
        if about != self._about:
            lines.insert(0, json.dumps({"about": about}) + "\n")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab", buffering=0) as file:
            file.write("".join(lines).encode())
            os.fsync(file.fileno())
        self.records[record["key"]], self._about = record, about

    def missing(self, runs: Iterable[Any]) -> list[Any]:
        """Return the runs without a record, each once."""
        return [run for key, run in {run.key: run for run in runs}.items() if key not in self]

    def complete(self, title: str, runs: Sequence[Any], jobs: int, console: Console) -> None:
        """Execute the runs without a record, `jobs` at a time, and append the record of each."""
        waiting = self.missing(runs)
        told = f"{len(waiting)} of {len(runs)} runs, {jobs} at a time, into {self.path.parent}"
        console.print(f"[bold]{title:<9}[/] {told}")
        work(waiting, lambda run, result: self.add(run.record(result), result["about"]), jobs, console)


@cache  # a report reads a file several times
def _warn(text: str) -> None:
    Console(stderr=True).print(f"[yellow]warning[/]   {escape(text)}")


def rounded(value: Any) -> Any:
    """Return plain values with five digits, as more is noise; None for numbers that JSON lacks."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: rounded(part) for name, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list | tuple) else value
