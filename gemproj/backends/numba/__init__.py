"""Compiled loops for NumPy and torch on the CPU, where numba is installed (extra `fast`)."""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec

__all__ = ["installed"]


@lru_cache(maxsize=1)
def installed() -> bool:
    """Return whether numba is installed and its compiler is enabled."""
    if find_spec("numba") is None:
        return False
    import numba

    return not numba.config.DISABLE_JIT
