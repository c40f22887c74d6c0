"""Compiled loops for NumPy and torch on the CPU, where numba is installed (extra `fast`)."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from gemproj._arrays import Array
from gemproj._problem import Problem

__all__ = ["bind", "installed", "solve"]


@lru_cache(maxsize=1)
def installed() -> bool:
    """Return whether numba can be imported and compiles."""
    if find_spec("numba") is None:
        return False
    import numba

    return not numba.config.DISABLE_JIT


def bind(problem: Problem) -> Any:
    """Return the backend for a problem on the CPU; None where the loops cannot read its arrays."""
    if not installed():
        return None
    from gemproj.backends.numba.addresses import locate
    from gemproj.backends.numba.backend import Numba

    table = locate(problem)
    return None if table is None else Numba(table)


def solve(
    method: Any, K: Array, b: Array, lower: Array | None, upper: Array | None, start: Array | None
) -> Any:
    """Run stage 2 on NumPy arrays, see `gemproj.backends.Backend`."""
    from gemproj.backends.numba.backend import solve_exact
    from gemproj.methods import Exact

    if type(method) is Exact and b.shape[-1]:
        return solve_exact(K, b, lower, upper, start)
    return method.solve(K, b, lower, upper, start)
