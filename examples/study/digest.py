"""Short hashes of what a result depends on."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

DIGITS = 12


def of_arrays(*arrays: np.ndarray) -> str:
    """Return a hash of dtypes, shapes and values."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()[:DIGITS]


def of_values(values: Any) -> str:
    """Return a hash of strings and numbers, in sequences and mappings."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=list).encode()).hexdigest()[:DIGITS]


def of_files(paths: Iterable[Path]) -> str:
    """Return a hash of the contents of files."""
    found = hashlib.sha256()
    for path in paths:
        found.update(np.memmap(path, mode="r"))  # files of weights are large
    return found.hexdigest()[:DIGITS]
