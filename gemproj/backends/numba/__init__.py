"""Compiled loops for NumPy and torch on the CPU, if numba is installed (extra `fast`)."""

from __future__ import annotations

import warnings
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path


@lru_cache(maxsize=1)
def missing() -> str:
    """Return why compiled loops are not available, and what to do; empty if they are available."""
    if find_spec("numba") is None:
        return "numba is not installed: pip install '.[fast]' in a checkout of gemproj"
    try:
        import numba
    except Exception as error:  # for example, if numba does not support the NumPy version
        reason = f"numba is installed but cannot be imported ({error}): install compatible versions"
        warnings.warn(
            f"{reason}, or set GEMPROJ_BACKEND=portable. The portable backend is used, which is slower.",
            RuntimeWarning,
            stacklevel=2,
        )
        return reason
    if not Path(__file__).is_file():
        return "gemproj is imported from an archive, and numba needs its files: unpack it"
    return "numba is switched off: unset NUMBA_DISABLE_JIT" if numba.config.DISABLE_JIT else ""


def installed() -> bool:
    """Return whether numba is installed and its compiler is enabled."""
    return not missing()
