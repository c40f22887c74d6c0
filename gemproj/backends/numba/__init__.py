"""Compiled loops for the CPU: the same three stages as the portable form, where numba is installed."""

from __future__ import annotations

import os
from functools import lru_cache


@lru_cache(maxsize=1)
def installed() -> bool:
    """Tell whether numba is there (``pip install gemproj[fast]``) and ``GEMPROJ_COMPILED`` is not 0."""
    if os.environ.get("GEMPROJ_COMPILED", "1") == "0":
        return False
    try:
        import numba
    except ImportError:
        return False
    return not numba.config.DISABLE_JIT
