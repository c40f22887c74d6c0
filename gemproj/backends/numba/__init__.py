"""Compiled loops for NumPy and torch on the CPU, where numba is installed (extra `fast`)."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from gemproj._problem import Problem

__all__ = ["bind", "installed"]


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
