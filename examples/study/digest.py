"""Short hashes of the data that a result depends on."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np


def of_arrays(*arrays: np.ndarray) -> str:
    """Return a hash of dtypes, shapes and values."""
    heads = (f"{array.dtype} {array.shape}".encode() for array in arrays)
    return _of(part for pair in zip(heads, map(np.ascontiguousarray, arrays), strict=True) for part in pair)


def of_values(values: Any) -> str:
    """Return a hash of strings and numbers, in sequences and mappings."""
    return _of([json.dumps(values, sort_keys=True, default=list).encode()])


def of_files(paths: Iterable[Path]) -> str:
    """Return a hash of the contents of files."""
    return _of(np.memmap(path, mode="r") for path in paths)  # files of weights are large


def _of(parts: Iterable[Any]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:12]
