"""Choice of the backend: by the arrays of the problem for stages 1 and 3, by the device for stage 2.

``portable`` supports every library and device. ``numba`` (extra `fast`) is the default on the CPU for
NumPy and torch, and ``triton`` for torch on NVIDIA GPUs, where torch brings it along.
``GEMPROJ_BACKEND=portable`` switches both off. The variable is read when the package is imported, because
reading it takes a twentieth of the time of a small projection.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from gemproj._arrays import Array, is_torch
from gemproj._problem import Problem
from gemproj._tspace import Gram
from gemproj.backends import portable
from gemproj.backends.numba import installed, missing
from gemproj.backends.portable import Portable
from gemproj.backends.triton import available

__all__ = ["Backend", "Portable", "select", "stage_two"]

_PORTABLE, _HOST = Portable(), "host"
wanted = os.environ.get("GEMPROJ_BACKEND", "")


class Backend(Protocol):
    """Stages 1 and 3 for the arrays of one problem.

    A backend must not keep a reference to the problem, which refers to its backend: the reference cycle would
    keep G in memory until the next garbage collection.
    """

    name: str

    def gram(self, problem: Problem) -> tuple[Gram, float]:
        """Return K, b and |g|^2, and their relative rounding error (stage 1)."""

    def combine(self, problem: Problem, lam: Array, x: list[Array]) -> None:
        """Write ``g + G'lam`` to x, rounded once (stage 3); x may be g itself."""


def select(problem: Problem) -> Backend:
    """Return the backend of a problem, and store it in the problem for later stages."""
    if problem.backend is None:
        module = _module(_HOST if problem.host else problem.device if problem.is_torch else None, wanted)
        found = None if module is None else module.bind(problem)
        problem.backend = _PORTABLE if found is None else found
    return problem.backend


def stage_two(b: Array) -> Any:
    """Return the module that solves on the device of b.

    It has a function `solve`, with the arguments of `portable.solve`, and for devices `drop_not_finite`.
    """
    place = _HOST if isinstance(b, np.ndarray) else b.device if is_torch(b) else None
    return _module(place, wanted) or portable


def check_name(name: str) -> None:
    """Raise for a backend that there is not."""
    if name not in ("", "portable", "numba", "triton"):
        raise ValueError(f"GEMPROJ_BACKEND must be portable, numba or triton; found {name!r}.")


@lru_cache(maxsize=16)
def _module(place: Any, name: str) -> Any:
    """Return the module of a faster backend than the portable one, or None.

    `place` is the host, a device of torch, or None for devices of other libraries.
    """
    check_name(name)
    if name == "portable":
        return None
    if place == _HOST:
        if name == "numba" and not installed():
            raise ImportError(f"GEMPROJ_BACKEND=numba cannot be had: {missing()}.")
        if installed():
            from gemproj.backends.numba import backend as compiled

            return compiled
    elif place is not None and available(place):
        from gemproj.backends.triton import backend as kernels

        return kernels
    return None
