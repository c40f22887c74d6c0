"""Compilation with numba, and its cache on disk."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import numba
from numba.core import event, options

# `fastmath` flags that let LLVM reorder sums to vectorise them; NaN and infinity keep their meaning.
_OPTIONS = {"fastmath": {"reassoc", "contract", "nsz"}, "error_model": "numpy", "no_cfunc_wrapper": True}
# Counting references to arrays takes two thirds of the time of a small search. A function that counts none
# cannot allocate. The option has no public name; a numba without it counts.
_UNCOUNTED = {"_nrt": False} if hasattr(options.DefaultOptions, "_nrt") else {}
_HERE = Path(__file__).parent
_FILES = [*sorted(_HERE.glob("*.py")), *(_HERE.parents[1] / name for name in ("_constants.py", "_search.py"))]
_HASH = hashlib.sha256(b"".join(file.read_bytes() for file in _FILES if file.is_file())).hexdigest()[:16]
NOT_KEPT = "in every process: no cache folder is writable. Set NUMBA_CACHE_DIR to a writable folder."


def fast(function: Any, **options: Any) -> Any:
    """Compile a function that only compiled functions call; sums may be reordered."""
    return numba.njit(no_cpython_wrapper=True, **_OPTIONS, **options)(function)


def entry(function: Any) -> Any:
    """Compile a function that Python calls and that releases the GIL; cache it on disk if possible."""
    # numba names its files after the function and checks only the file of the function for changes. With the
    # hash of all sources in its name, no function can be loaded that was compiled from other sources.
    function.__qualname__ += f"_{_HASH}"
    try:
        return numba.njit(cache=_HERE.is_dir(), nogil=True, **_OPTIONS)(function)
    except RuntimeError:  # no folder is writable
        return numba.njit(nogil=True, **_OPTIONS)(function)


def compile_module(module: Any, replace: dict[str, Any] | None = None) -> Any:
    """Return a compiled copy of a module of functions; Python calls those named in ``module.ENTRIES``.

    Only these may make arrays. The functions in `replace` take the place of the module's functions with the
    same names.
    """
    spec: Any = importlib.util.spec_from_file_location(f"{module.__name__}_compiled", module.__file__)
    copy = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    for name, function in (vars(copy) | (replace or {})).items():
        if isinstance(function, FunctionType):
            called = name in module.ENTRIES
            setattr(copy, name, entry(function) if called else fast(function, **_UNCOUNTED))
    return copy


class _Announcement(event.Listener):
    waiting = True  # for the first compilation

    def on_start(self, event: Any) -> None:
        function = event.data["dispatcher"]
        if self.waiting and function.py_func.__module__.startswith("gemproj."):
            self.waiting = False
            ahead = "once. python -m gemproj --check does most of it ahead of time."
            # A warning is shown even without a logging handler. The user should know why training pauses.
            logging.getLogger("gemproj").warning(
                "Compiling loops for this machine; this takes about 10 seconds, %s",
                ahead if function.stats.cache_path else NOT_KEPT,
            )

    def on_end(self, event: Any) -> None:
        pass


announcement = _Announcement()
event.register("numba:compile", announcement)
