"""What runs the three stages, chosen here and nowhere else: by the arrays for 1 and 3, by the device for 2.

``portable`` serves every library and device. ``numba`` (extra `fast`) is the default on the CPU for
NumPy and torch; ``GEMPROJ_BACKEND=portable`` switches it off. The variable is read when the package is
imported: to look it up takes as long as a twentieth of a small projection.
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
from gemproj.backends.numba import installed
from gemproj.backends.portable import Portable, solve
from gemproj.methods import Outcome

__all__ = ["Backend", "Portable", "select", "solver_for"]

_PORTABLE = Portable()
wanted = os.environ.get("GEMPROJ_BACKEND", "")


class Backend(Protocol):
    """Stages 1 and 3 on the arrays of one kind of problem.

    The problem is an argument of both, and never kept: it keeps its backend, and a cycle would keep G in
    memory for a while.
    """

    name: str

    def gram(self, problem: Problem) -> tuple[Gram, float]:
        """Stage 1: return K, b and |g|^2, and their relative rounding."""

    def combine(self, problem: Problem, lam: Array, x: list[Array]) -> None:
        """Stage 3: write ``g + G'lam`` to x, rounded once. x may be g itself."""


def select(problem: Problem) -> Backend:
    """Return the backend of a problem, which keeps it for later stages."""
    if problem.backend is None:
        module = _module(problem.host, wanted)
        found = None if module is None else module.bind(problem)
        problem.backend = _PORTABLE if found is None else found
    return problem.backend


def solver_for(b: Array) -> Callable[..., Outcome]:
    """Return what runs stage 2, as `portable.solve` does, for arrays of t-space: NumPy's, or on a device."""
    module = _module(isinstance(b, np.ndarray), wanted)
    return solve if module is None else module.solve


@lru_cache(maxsize=16)
def _module(host: bool, name: str) -> Any:
    """Return the module with the fast backend, where there is one and it is wanted."""
    if name not in ("", "portable", "numba"):
        raise ValueError(f"GEMPROJ_BACKEND must be portable or numba; found {name!r}.")
    if host and name == "numba" and not installed():
        raise ImportError(
            "GEMPROJ_BACKEND=numba needs numba: pip install '.[fast]' in a checkout of gemproj."
        )
    if host and name != "portable" and installed():
        from gemproj.backends.numba import backend

        return backend
    return None
