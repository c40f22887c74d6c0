"""A stream from your own files: one CSV or JSONL file of labelled texts for each task."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ...common.command import SetupError
from ...lora_agnews.data import csv_rows
from ...lora_agnews.stream import SPLIT_SEED, TRAIN_SHARE, Experience, split
from . import Stream, text

Row = tuple[str, str]  # text and label


def files(seed: int, paths: Sequence[str], tests: Sequence[str] | None = None, **settings: Any) -> Stream:
    """Learn one file after the other, in the given order.

    Files are CSV with the columns ``text`` and ``label`` (other columns are ignored), or JSONL with these
    keys. Labels are strings or integers. One head has the labels of all files as its classes. `tests` may
    name a test file for each path. Otherwise a fifth of each file is kept for testing, the same for every
    seed. Test texts of a task are left out of its training texts. The model is that of `agnews`.
    """
    if len(paths) < 2:
        raise SetupError(f"paths must name at least 2 files, one for each task; got {len(paths)}")
    if tests is not None and len(tests) != len(paths):
        raise SetupError(f"tests must name a file for each of the {len(paths)} paths, got {len(tests)}")
    config = text.configure(settings)
    read = [_deal(Path(path), Path(tests[k]) if tests else None) for k, path in enumerate(paths)]
    classes = sorted({label for parts in read for part in parts for _, label in part})
    if len(classes) < 2:
        raise SetupError(
            f"all rows of {', '.join(map(str, paths))} have the label {classes[0]!r}; 2 are needed"
        )
    experiences = []
    for path, parts in zip(paths, read, strict=True):
        numbered = ([(words, classes.index(label)) for words, label in part] for part in parts)
        experiences.append(Experience(Path(path).stem, *map(split, numbered)))
    return text.build(config, experiences, range(len(paths)), seed, len(classes))


def _deal(path: Path, test_path: Path | None) -> tuple[list[Row], list[Row]]:
    """Return the training rows and the test rows of a task, without duplicates."""
    rows = list(dict(_read(path)).items())
    if test_path:
        test = dict(_read(test_path))
        train, rest = [row for row in rows if row[0] not in test], list(test.items())
    else:
        random.Random(SPLIT_SEED).shuffle(rows)
        cut = round(TRAIN_SHARE * len(rows))
        train, rest = rows[:cut], rows[cut:]
    if not (train and rest):
        found = f"{len(train)} different texts to train on and {len(rest)} to test on"
        raise SetupError(f"{path}: {found}; give more rows, or rows that are not in the test file")
    return train, rest


def _read(path: Path) -> Iterator[Row]:
    readers = {".csv": _read_csv, ".jsonl": _read_jsonl}
    if path.suffix not in readers:
        raise SetupError(f"{path}: the name must end in {' or '.join(readers)}")
    for line, found, label in readers[path.suffix](path):
        if not isinstance(found, str) or not found.strip():
            raise SetupError(f"{path}, line {line}: text must be a string that is not empty, found {found!r}")
        if isinstance(label, bool) or not isinstance(label, str | int) or not str(label).strip():
            raise SetupError(f"{path}, line {line}: label must be a string or an integer, found {label!r}")
        yield " ".join(found.split()), str(label).strip()


def _read_csv(path: Path) -> Iterator[tuple[int, Any, Any]]:
    rows = csv_rows(path, "columns text and label are")
    _, header = next(rows)
    if not {"text", "label"} <= set(header):
        raise SetupError(f"{path}, line 1: name the columns text and label; found {', '.join(header)}")
    at = header.index("text"), header.index("label")
    for line, row in rows:
        if row and len(row) != len(header):
            raise SetupError(
                f"{path}, line {line}: {len(header)} fields expected as in line 1, {len(row)} found"
            )
        if row:
            yield line, row[at[0]], row[at[1]]


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any, Any]]:
    if not path.is_file():
        raise SetupError(f"{path}: no such file (lines with the keys text and label are expected there)")
    with path.open("rb") as file:
        for line, content in enumerate(file, 1):
            if not content.strip():
                continue
            try:
                row = json.loads(content)
            except ValueError as error:  # including characters that are not UTF-8
                raise SetupError(f"{path}, line {line}: no JSON: {error}") from None
            if not isinstance(row, dict) or not {"text", "label"} <= set(row):
                found = ", ".join(row) if isinstance(row, dict) else type(row).__name__
                raise SetupError(f"{path}, line {line}: the keys text and label are needed; found {found}")
            yield line, row["text"], row["label"]
