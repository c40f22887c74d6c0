"""Views of the memory of arrays, in the few forms for which loops are compiled."""

from __future__ import annotations

import sys
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from gemproj._arrays import Array

_FLOATS = ["float32", "float64", "torch.float32", "torch.float64", "torch.bfloat16"]


@lru_cache(maxsize=16)
def is_read(dtype: Any) -> bool:
    """Return whether loops read a dtype. NumPy names dtypes of the other byte order differently."""
    return str(dtype) in _FLOATS


@lru_cache(maxsize=64)
def is_plain(kind: Any) -> bool:
    """Return whether arrays of a type store their values as NumPy or torch do; subclasses may not."""
    of_torch = kind.__module__.startswith("torch") and kind.__name__ in ("Tensor", "Parameter")
    return kind is np.ndarray or of_torch


def view(a: Array) -> np.ndarray:
    """Return an array or tensor as a NumPy array that shares its memory; bfloat16 as its bits, uint16.

    Raise a RuntimeError for a tensor that has no memory of its own, or is negated by a flag.
    """
    if isinstance(a, np.ndarray):
        return np.asarray(a)  # for example of a file in memory
    if a.dtype.itemsize == 2:
        bits: np.ndarray = a.view(sys.modules["torch"].int16).numpy()
        return bits.view(np.uint16)
    seen: np.ndarray = a.numpy()
    return seen


def is_contiguous(a: np.ndarray) -> bool:
    """Return whether all entries of an array are adjacent, in row-major order, at aligned addresses."""
    flags = a.flags
    return flags.c_contiguous and flags.aligned


def copied(a: np.ndarray) -> np.ndarray:
    """Return an array that `is_contiguous`: the given one, or a copy."""
    return a if is_contiguous(a) else a.copy("C")


def flat(a: np.ndarray, start: int = 0) -> np.ndarray:
    """Return the entries of a contiguous array from `start` on: with one dimension, and not to be written.

    numba would compile a loop once for arrays that may be written and once for others.
    """
    a = a.reshape(-1)[start:] if start else a.reshape(-1)
    a.setflags(write=False)
    return a


def memory(a: np.ndarray) -> tuple[np.ndarray, list[int]] | None:
    """Return the memory of an array as `flat` does, and the steps of its axes in entries.

    Return None if entries of its last axis are not adjacent.
    """
    size, strides = a.itemsize, a.strides
    steps = [stride // size if n > 1 else 0 for n, stride in zip(a.shape, strides, strict=True)]
    if is_contiguous(a):
        return flat(a), steps
    adjacent = a.shape[-1] == 1 or strides[-1] == size
    if not (adjacent and a.flags.aligned and min(steps) >= 0) or any(stride % size for stride in strides):
        return None
    extent = 1 + sum((n - 1) * step for n, step in zip(a.shape, steps, strict=True))
    return flat(as_strided(a, (extent,), (size,))), steps
