"""How much memory a call needs at its peak."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median

from benchmarks.timing import nothing

PROC = Path("/proc/self")


def peak_memory(
    run: Callable[[], object], prepare: Callable[[], object] = nothing, repeats: int = 3
) -> float | None:
    """Return the most memory that a call holds beyond what was there before, its result included, in bytes.

    It is the kernel's count of resident pages, which sees every library's allocations: writing 5 to
    ``/proc/self/clear_refs`` sets the peak, VmHWM, back to the present, VmRSS. Before that, free pages
    go back to the kernel, or the call would fill them unseen. A first call does not count, because
    libraries make buffers then that they keep. The kernel counts pages of each core in lots, so the
    number is good to about a megabyte; of `repeats` runs the median is taken. None where the kernel
    offers no such count.
    """
    prepare()
    run()
    try:
        return median(_grown(run, prepare) for _ in range(repeats))
    except (OSError, KeyError):
        return None


def _grown(run: Callable[[], object], prepare: Callable[[], object]) -> float:
    prepare()
    with suppress(OSError, AttributeError):  # not the C library of GNU
        ctypes.CDLL(None).malloc_trim(0)
    (PROC / "clear_refs").write_text("5")
    before = _status("VmRSS")
    run()
    return max(0.0, _status("VmHWM") - before)


def _status(name: str) -> float:
    """Return an entry of /proc/self/status in bytes."""
    lines = dict(line.split(":", 1) for line in (PROC / "status").read_text().splitlines())
    return 1024.0 * int(lines[name].split()[0])
