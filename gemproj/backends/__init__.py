"""Choice of the backend: by the arrays of the problem for stages 1 and 3, by the device for stage 2.

``portable`` supports every library and device. ``numba`` (extra `fast`) is the default on the CPU for
NumPy and torch; ``GEMPROJ_BACKEND=portable`` switches it off. The variable is read when the package is
imported, because reading it takes a twentieth of the time of a small projection.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from gemproj._arrays import Array
from gemproj._problem import Problem
from gemproj._tspace import Gram
from gemproj.backends.numba import installed, missing
from gemproj.backends.portable import Portable, solve
from gemproj.methods import Outcome

__all__ = ["Backend", "Portable", "select", "solver_for"]

_PORTABLE = Portable()
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
        module = _module(problem.host, wanted)
        found = None if module is None else module.bind(problem)
        problem.backend = _PORTABLE if found is None else found
    return problem.backend


def solver_for(b: Array) -> Callable[..., Outcome]:
    """Return the function that runs stage 2 on the device of b, with the arguments of `portable.solve`."""
    module = _module(isinstance(b, np.ndarray), wanted)
    return solve if module is None else module.solve


def check_name(name: str) -> None:
    """Raise for a backend that there is not."""
    if name not in ("", "portable", "numba"):
        raise ValueError(f"GEMPROJ_BACKEND must be portable or numba; found {name!r}.")


@lru_cache(maxsize=16)
def _module(host: bool, name: str) -> Any:
    """Return the module of the numba backend, or None on a device, without numba or if switched off."""
    check_name(name)
    if host and name == "numba" and not installed():
        raise ImportError(f"GEMPROJ_BACKEND=numba cannot be had: {missing()}.")
    if host and name != "portable" and installed():
        from gemproj.backends.numba import backend

        return backend
    return None
