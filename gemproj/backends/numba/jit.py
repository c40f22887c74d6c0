"""Compilation of the loops with numba, and their cache on disk."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from numba.core import event

# Flags of `fastmath` that allow sums in any order, so that LLVM vectorises them. NaN and infinity are kept.
_ANY_ORDER = {"reassoc", "contract", "nsz"}


def fast(function: Any) -> Any:
    """Return a loop compiled to be called by other loops, with sums in any order."""
    return _inner(function, fastmath=_ANY_ORDER)


def strict(function: Any) -> Any:
    """Return a loop compiled to be called by other loops, with arithmetic in the written order."""
    return _inner(function)


def fast_entry(function: Any) -> Any:
    """Return a loop compiled to be called by Python, with sums in any order."""
    return _entry(function, fastmath=_ANY_ORDER)


def strict_entry(function: Any) -> Any:
    """Return a loop compiled to be called by Python, with arithmetic in the written order."""
    return _entry(function)


# Without numba's runtime (`_nrt`) loops compile and run faster. They also cannot allocate an array, which
# numba could free while its address is in use.
_OPTIONS = {"no_cfunc_wrapper": True, "error_model": "numpy", "_nrt": False}


def _inner(function: Any, **options: Any) -> Any:
    """Return a function compiled without an interface to Python, cached with the loops that call it."""
    return numba.njit(no_cpython_wrapper=True, **_OPTIONS, **options)(function)


def _entry(function: Any, **options: Any) -> Any:
    """Return a function compiled to be called by Python without the GIL, cached on disk where possible."""
    options |= _OPTIONS | {"nogil": True}
    try:
        compiled = numba.njit(cache=_STAMP is not None, **options)(function)
    except RuntimeError:  # numba finds no writeable folder for the cache
        return numba.njit(**options)(function)
    # numba checks only the file of the function for changes; the stamp covers all functions that it calls.
    with suppress(AttributeError):
        compiled._cache._cache_file._source_stamp = _STAMP
        compiled._cache.save_overload = _if_possible(compiled._cache.save_overload)
    return compiled


def _if_possible(save: Any) -> Any:
    """Return a function that saves to the cache, unless the disk is full."""

    def saving(*given: Any) -> None:
        with suppress(OSError):
            save(*given)

    return saving


def _stamp() -> tuple[tuple[str, float, int], ...] | None:
    """Return the names, modification times and sizes of all source files of the compiled loops.

    None where there are no files, as in a zip archive.
    """
    here = Path(__file__).parent
    files = [*sorted(here.glob("*.py")), here.parents[1] / "_constants.py"]
    try:
        return tuple((file.name, file.stat().st_mtime, file.stat().st_size) for file in files)
    except OSError:
        return None


_STAMP = _stamp()


class _Announcement(event.Listener):
    """Listener that logs a message at the first compilation."""

    def on_start(self, event: Any) -> None:
        module = event.data["dispatcher"].py_func.__module__
        if self.waiting and module.startswith(__package__):
            self.waiting = False
            # A warning is shown even without a logging handler. The user should know why training pauses.
            logging.getLogger("gemproj").warning(
                "Compiling loops for this machine; this takes about 10 seconds, once. "
                "python -m gemproj --compile does it ahead of time."
            )

    def on_end(self, event: Any) -> None:
        pass

    waiting = True


announcement = _Announcement()
event.register("numba:compile", announcement)
