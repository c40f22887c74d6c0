"""How loops are compiled.

What is kept on disk belongs to one file and is made again when that changes, not when a function changes
that it calls in another file: after such an edit, `make clean-compiled`.
"""

from __future__ import annotations

from typing import Any

import numba


def fast(function: Any) -> Any:
    """Compile sums so that they may run in any order, which lets them be vectorised; NaN stays NaN."""
    return _compiled(function, fastmath={"reassoc", "contract", "nsz"})


def strict(function: Any) -> Any:
    """Compile arithmetic as it is written."""
    return _compiled(function)


def _compiled(function: Any, **options: Any) -> Any:
    """Compile without the interpreter lock, and keep the result on disk where that is possible."""
    try:
        return numba.njit(nogil=True, cache=True, error_model="numpy", **options)(function)
    except RuntimeError:  # no folder for the cache can be written
        return numba.njit(nogil=True, error_model="numpy", **options)(function)
