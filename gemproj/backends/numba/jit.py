"""How loops are compiled, and kept on disk."""

from __future__ import annotations

import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

import numba
from numba.core import event


def fast(function: Any) -> Any:
    """Compile sums so that they may run in any order, which lets them be vectorised; NaN stays NaN."""
    return _compiled(function, fastmath={"reassoc", "contract", "nsz"})


def strict(function: Any) -> Any:
    """Compile arithmetic as it is written."""
    return _compiled(function)


def _compiled(function: Any, **options: Any) -> Any:
    """Compile without the interpreter lock, and keep the result on disk where that is possible."""
    try:
        compiled = numba.njit(nogil=True, cache=True, error_model="numpy", **options)(function)
    except RuntimeError:  # no folder for the cache can be written
        return numba.njit(nogil=True, error_model="numpy", **options)(function)
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
                "Compiling loops for this machine; this takes about 25 seconds, once. "
                "python -m gemproj --compile does it ahead of time."
            )

    def on_end(self, event: Any) -> None:
        pass

    waiting = True


announcement = _Announcement()
event.register("numba:compile", announcement)
