"""What runs the three stages: chosen once per call, here and nowhere else.

``portable`` serves every library and device. ``numba`` (extra `fast`) is the default on the CPU for
NumPy and torch. ``triton`` serves CUDA devices and is chosen by ``GEMPROJ_BACKEND=triton`` only, as long
as no measurement shows that it wins. ``GEMPROJ_BACKEND=portable`` switches both off.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

import numpy as np

from gemproj._arrays import Array
from gemproj._problem import Problem
from gemproj._tspace import Measured
from gemproj.backends.portable import Portable
from gemproj.methods import Method, Outcome

__all__ = ["Backend", "Portable", "select", "solver_for"]

_PORTABLE = Portable()
_NAMES = ("portable", "numba", "triton")


class Backend(Protocol):
    """The stages on the arrays of one kind of problem."""

    name: str

    def gram(self, problem: Problem) -> Measured:
        """Stage 1: return K, b and |g|^2, and how they are rounded."""

    def solve(
        self,
        method: Method,
        K: Array,
        b: Array,
        lower: Array | None,
        upper: Array | None,
        start: Array | None,
    ) -> Outcome:
        """Stage 2 in standard form, see `gemproj._tspace`: return what ``method.solve`` would."""

    def combine(self, problem: Problem, lam: Array, x: list[Array]) -> None:
        """Stage 3: write ``g + G'lam`` to x, rounded once. x may be g itself."""


def select(problem: Problem) -> Backend:
    """Return the backend of a problem, which keeps it for later stages."""
    if problem.backend is None:
        problem.backend = _select(problem)
    return problem.backend


def solver_for(K: Array) -> Any:
    """Return the `Backend.solve` for a Gram matrix: NumPy's, or on a device."""
    wanted = _wanted()
    if type(K) is np.ndarray:
        if wanted != "portable":
            from gemproj.backends import numba

            if numba.installed():
                from gemproj.backends.numba.backend import solve

                return solve
    elif wanted == "triton":
        from gemproj.backends import triton

        if triton.available(K.device):
            from gemproj.backends.triton.stages import Triton

            return Triton().solve
    return _PORTABLE.solve


def _select(problem: Problem) -> Backend:
    wanted = _wanted()
    if problem.host and wanted != "portable":
        from gemproj.backends import numba

        found: Backend | None = numba.bind(problem)
        if found is not None:
            return found
    if not problem.host and wanted == "triton":
        from gemproj.backends import triton

        found = triton.bind(problem)
        if found is not None:
            return found
    return _PORTABLE


def _wanted() -> str:
    """Return the backend that the user has asked for, or an empty string."""
    wanted = os.environ.get("GEMPROJ_BACKEND", "")
    if wanted and wanted not in _NAMES:
        raise ValueError(f"GEMPROJ_BACKEND must be one of {', '.join(_NAMES)}; found {wanted!r}.")
    return wanted
