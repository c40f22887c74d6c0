"""Finished runs: one line of JSON for each, in a file that only grows."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from examples.common.command import SetupError

Record = dict[str, Any]


class Results:
    """The runs of a stream that are finished.

    A line is either a record, with its key, or what the records after it have in common: versions, machine,
    hashes of data and backbone. A line that was cut off, because the process was killed or the disk was
    full, has no end: it is removed, and its run is done again. Any other damage is an error.

    Parameters
    ----------
    path : Path
        The file, made with the first record.

    Raises
    ------
    SetupError
        For a line that is no record, with the file and the number of the line.
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


def results_of(stream: str, folder: Path) -> Results:
    """Return the finished runs of a stream."""
    return Results(folder / "runs" / f"{stream}.jsonl")
