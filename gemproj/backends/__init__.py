"""What runs the three stages: chosen once per call, here and nowhere else.

``portable`` serves every library and device. ``numba`` (extra `fast`) is the default on the CPU for
NumPy and torch. ``triton`` serves CUDA devices and is chosen by ``GEMPROJ_BACKEND=triton`` only, as long
as no measurement shows that it wins. ``GEMPROJ_BACKEND=portable`` switches both off.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from gemproj._arrays import Array
from gemproj._problem import Problem
from gemproj._tspace import Measured, Standard
from gemproj.backends.numba import installed
from gemproj.backends.portable import Portable
from gemproj.methods import Method, Outcome

__all__ = ["Backend", "Portable", "select", "solver_for"]

_PORTABLE = Portable()


class Backend(Protocol):
    """The stages on the arrays of one kind of problem."""

    name: str

    def gram(self, problem: Problem) -> Measured:
        """Stage 1: return K, b and |g|^2, and how they are rounded."""

    def solve(
        self, method: Method, dual: Standard, start: Array | None, *, only_multipliers: bool = False
    ) -> Outcome:
        """Stage 2: return what ``method.solve`` would.

        With `only_multipliers`, on a device, nothing else is read of the result, and rows of K and b that are
        not finite are to be left out.
        """

    def combine(self, problem: Problem, lam: Array, x: list[Array]) -> None:
        """Stage 3: write ``g + G'lam`` to x, rounded once. x may be g itself."""


def select(problem: Problem) -> Backend:
    """Return the backend of a problem, which keeps it for later stages."""
    if problem.backend is None:
        module = _module(problem.host, os.environ.get("GEMPROJ_BACKEND", ""))
        found = None if module is None else module.bind(problem)
        problem.backend = _PORTABLE if found is None else found
    return problem.backend


def solver_for(K: Array) -> Callable[..., Outcome]:
    """Return the `Backend.solve` for a Gram matrix: NumPy's, or on a device."""
    host = isinstance(K, np.ndarray)
    module = _module(host, os.environ.get("GEMPROJ_BACKEND", ""))
    if module is None or (not host and not module.available(K.device)):
        return _PORTABLE.solve
    return module.solve


@lru_cache(maxsize=16)
def _module(host: bool, wanted: str) -> Any:
    """Return the module with the fast backend for the CPU or for devices, as far as it is wanted."""
    if wanted not in ("", "portable", "numba", "triton"):
        raise ValueError(f"GEMPROJ_BACKEND must be portable, numba or triton; found {wanted!r}.")
    if host and wanted == "numba" and not installed():
        raise ImportError("GEMPROJ_BACKEND=numba needs numba: pip install 'gemproj[fast]'.")
    if host and wanted != "portable" and installed():
        from gemproj.backends.numba import backend

        return backend
    if not host and wanted == "triton":
        from gemproj.backends.triton import stages

        return stages
    return None
