"""Compilation of the loops with numba, and their cache on disk."""

from __future__ import annotations

import hashlib
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from numba.core import event

# `fastmath` flags that let LLVM reorder sums to vectorise them. NaN and infinity keep their meaning.
_ANY_ORDER = {"reassoc", "contract", "nsz"}


def fast(function: Any) -> Any:
    """Compile a loop that other loops call; sums may be reordered."""
    return _inner(function, fastmath=_ANY_ORDER)


def strict(function: Any) -> Any:
    """Compile a loop that other loops call; arithmetic keeps the order of the source."""
    return _inner(function)


def fast_entry(function: Any) -> Any:
    """Compile a loop that Python calls; sums may be reordered."""
    return _entry(function, fastmath=_ANY_ORDER)


def strict_entry(function: Any) -> Any:
    """Compile a loop that Python calls; arithmetic keeps the order of the source."""
    return _entry(function)


# Without numba's runtime (`_nrt`), loops compile and run faster. They also cannot allocate arrays, which
# numba could free while their addresses are in use.
_OPTIONS = {"no_cfunc_wrapper": True, "error_model": "numpy", "_nrt": False}


def _inner(function: Any, **options: Any) -> Any:
    """Compile a function without an interface to Python; it is cached with the loops that call it."""
    return numba.njit(no_cpython_wrapper=True, **_OPTIONS, **options)(function)


def _entry(function: Any, **options: Any) -> Any:
    """Compile a function that Python calls and that releases the GIL; cache it on disk if possible."""
    options |= _OPTIONS | {"nogil": True}
    try:
        compiled = numba.njit(cache=_STAMP is not None, **options)(function)
    except RuntimeError:  # numba finds no writable folder for the cache
        kept.clear()
        return numba.njit(**options)(function)
    # numba checks only the file of the function for changes; the stamp covers all functions that it calls.
    with suppress(AttributeError):
        compiled._cache._cache_file._source_stamp = _STAMP
        _guard(compiled._cache)
        kept[:] = [compiled._cache.cache_path]
    return compiled


def _guard(cache: Any) -> None:
    """Make a cache recompile if its files are damaged, and continue without the cache if the disk is full."""
    load, save = cache.load_overload, cache.save_overload

    def loading(*given: Any) -> Any:
        try:
            return load(*given)
        except Exception:
            return None

    def saving(*given: Any) -> None:
        try:
            try:
                save(*given)
            except OSError:
                raise
            except Exception:
                cache.flush()
                save(*given)
        except OSError:
            kept.clear()

    cache.load_overload, cache.save_overload = loading, saving


def _stamp() -> str | None:
    """Return a hash of all source files of the loops; None if they cannot be read, as in an archive.

    Modification times do not suffice, because container images and archives truncate them.
    """
    here = Path(__file__).parent
    files = [*sorted(here.glob("*.py")), here.parents[1] / "_constants.py"]
    try:
        return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    except OSError:
        return None


_STAMP = _stamp()
kept: list[str] = []  # the folder of the cached loops; empty if they are not cached
NOT_KEPT = "in every process: no cache folder is writable. Set NUMBA_CACHE_DIR to a writable folder."


class _Announcement(event.Listener):
    """Listener that logs a message at the first compilation."""

    def on_start(self, event: Any) -> None:
        module = event.data["dispatcher"].py_func.__module__
        if self.waiting and module.startswith(__package__):
            self.waiting = False
            # A warning is shown even without a logging handler. The user should know why training pauses.
            logging.getLogger("gemproj").warning(
                "Compiling loops for this machine; this takes about 10 seconds, %s",
                "once. python -m gemproj --compile does it ahead of time." if kept else NOT_KEPT,
            )

    def on_end(self, event: Any) -> None:
        pass

    waiting = True


announcement = _Announcement()
event.register("numba:compile", announcement)
