"""How loops are compiled, and kept on disk."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from numba.core import event

# Sums may run in any order, which lets them be vectorised; NaN stays NaN.
_ANY_ORDER = {"reassoc", "contract", "nsz"}


def fast(function: Any) -> Any:
    """Compile a loop for other loops, with sums in any order."""
    return _inner(function, fastmath=_ANY_ORDER)


def strict(function: Any) -> Any:
    """Compile a loop for other loops, with arithmetic as it is written."""
    return _inner(function)


def fast_entry(function: Any) -> Any:
    """Compile a loop that Python calls, with sums in any order; like the loops above it can make no array."""
    return _entry(function, fastmath=_ANY_ORDER, _nrt=False)


def strict_entry(function: Any) -> Any:
    """Compile a loop that Python calls, with arithmetic as it is written; it may make arrays."""
    return _entry(function)


_OPTIONS = {"no_cfunc_wrapper": True, "error_model": "numpy"}


def _inner(function: Any, **options: Any) -> Any:
    """Compile without what Python needs to call it, and keep it in the loops that call it only.

    Without numba's memory (`_nrt`) loops compile and run faster, and none can make an array and lose it while
    its address is in use.
    """
    return numba.njit(no_cpython_wrapper=True, _nrt=False, **_OPTIONS, **options)(function)


def _entry(function: Any, **options: Any) -> Any:
    """Compile without the interpreter lock, and keep the result on disk where that is possible."""
    options |= _OPTIONS | {"nogil": True}
    try:
        compiled = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder for the cache can be written
        return numba.njit(**options)(function)
    # numba looks for changes in the file of the function only, not in those of the functions that it calls.
    with suppress(AttributeError):
        compiled._cache._cache_file._source_stamp = _STAMP
    return compiled


def _stamp() -> tuple[tuple[str, float, int], ...]:
    """Return names, times and sizes of all source files of the compiled loops."""
    here = Path(__file__).parent
    files = [*sorted(here.glob("*.py")), here.parents[1] / "_constants.py"]
    return tuple((file.name, file.stat().st_mtime, file.stat().st_size) for file in files)


_STAMP = _stamp()


class _Announcement(event.Listener):
    """Announce the first compilation, once."""

    def on_start(self, event: Any) -> None:
        module = event.data["dispatcher"].py_func.__module__
        if self.waiting and module.startswith(__package__):
            self.waiting = False
            # A warning, which is seen without a handler: a training loop stands still meanwhile.
            logging.getLogger("gemproj").warning(
                "Compiling loops for this machine; this takes about 10 seconds, once. "
                "python -m gemproj --compile does it ahead of time."
            )

    def on_end(self, event: Any) -> None:
        pass

    waiting = True


announcement = _Announcement()
event.register("numba:compile", announcement)
