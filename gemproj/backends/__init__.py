"""Choice of the backend, by the device and the arrays.

``portable`` supports every library and device. ``numba`` (extra `fast`) is the default on the CPU for
NumPy and torch. ``triton`` is the default for torch on NVIDIA GPUs, where torch installs it.
``GEMPROJ_BACKEND=portable`` switches both off. The variable is read when the package is imported, because
reading it takes a twentieth of the time of a small projection.
"""

from __future__ import annotations

import os
from functools import lru_cache
from typing import Any

import numpy as np

from gemproj._arrays import Array, is_torch
from gemproj._problem import Problem
from gemproj._tspace import Dual
from gemproj.backends import portable
from gemproj.backends.numba import installed, missing
from gemproj.backends.triton import available
from gemproj.backends.triton import missing as no_kernels

wanted = os.environ.get("GEMPROJ_BACKEND", "")


def select(problem: Problem) -> Any:
    """Return the backend of a problem, and store it in the problem for later stages.

    Its ``gram(problem)`` returns K, b and |g|^2 (stage 1). Its ``combine(problem, lam, x)`` writes
    ``g + G'lam`` to x, rounded once (stage 3); x may be g itself. It must not keep a reference to its
    problem, which refers to it: the cycle would keep G in memory until the next garbage collection.
    """
    if problem.backend is None:
        module = _on_host(wanted) if problem.host else _on_device(problem.vector[0], wanted)
        problem.backend = module.bind(problem) or portable
    return problem.backend


def search(dual: Dual) -> tuple[np.ndarray, ...]:
    """Return multipliers (..., t), status, pivots and sums of multipliers, see `gemproj._search.solve`."""
    return _on_host(wanted).solve(dual)


def solve_few(K: Array, b: Array, margin: Array | None = None) -> Array:
    """Return the solution for few rows on a device, which is not read; see `gemproj.backends.enumeration`."""
    return _on_device(b, wanted).solve_few(K, b, margin)


def check_name(name: str) -> None:
    """Raise for an unknown backend name."""
    if name not in ("", "portable", "numba", "triton"):
        raise ValueError(f"GEMPROJ_BACKEND must be portable, numba or triton; found {name!r}.")


@lru_cache(maxsize=4)
def _on_host(name: str) -> Any:
    """Return the module of the numba backend, or the portable one if numba is missing or switched off."""
    check_name(name)
    if name == "numba" and not installed():
        raise ImportError(f"GEMPROJ_BACKEND=numba is not available: {missing()}.")
    if name != "portable" and installed():
        from gemproj.backends.numba import backend

        return backend
    return portable


def _on_device(a: Array, name: str) -> Any:
    """Return the module of the triton backend for arrays that its kernels can read, else the portable one."""
    check_name(name)
    if name == "portable" or not is_torch(a):
        return portable
    if available(a):
        from gemproj.backends.triton import backend

        return backend
    if name == "triton" and a.device.type == "cuda" and (reason := no_kernels(a.device)):
        raise ImportError(f"GEMPROJ_BACKEND=triton is not available: {reason}")
    return portable
