"""The peak memory of a call."""

import ctypes
import gc
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from types import ModuleType

from .timing import Call

PROC = Path("/proc/self")


def peak_memory(call: Call, repeats: int = 3) -> float | None:
    """Return the peak memory of a call, its result included, minus the memory in use before, in bytes.

    It is the kernel's count of resident pages, which sees the allocations of every library (tracemalloc
    does not see torch's). Writing 5 to ``/proc/self/clear_refs`` resets the peak, VmHWM, to the present
    value, VmRSS. Before that, free pages are returned to the kernel, or the call would fill them unseen. The
    first call is not counted, because libraries then allocate buffers that they keep. The kernel counts pages
    of each core in batches, so the number is good to about a megabyte. Returns the median of `repeats` runs;
    None if the kernel has no such count.
    """
    call.prepare()
    call.run()
    grown = []
    try:
        for _ in range(repeats):
            call.prepare()
            rest()
            before = status("VmRSS")
            if status("VmHWM") > before + (1 << 20):
                return None  # the peak of this process cannot be reset
            call.run()
            grown.append(max(0.0, status("VmHWM") - before))
    except (OSError, KeyError):
        return None
    return median(grown)


def peak_on_device(run: Callable[[], object], xp: ModuleType) -> int:
    """Return the rise in bytes of allocated CUDA memory during a call of torch or CuPy."""
    if xp.__name__ == "torch":
        xp.cuda.synchronize()
        xp.cuda.reset_peak_memory_stats()
        before = xp.cuda.memory_allocated()
        run()
        xp.cuda.synchronize()
        return xp.cuda.max_memory_allocated() - before
    pool = xp.get_default_memory_pool()
    pool.free_all_blocks()
    before = pool.total_bytes()
    run()
    return pool.total_bytes() - before


def rest() -> None:
    """Return free memory to the kernel and, on Linux, reset the peak of this process."""
    gc.collect()
    with suppress(AttributeError, OSError):  # another C library than GNU's
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError):
        (PROC / "clear_refs").write_text("5")  # proc_pid_clear_refs(5): the peak resident set size


def status(name: str) -> float:
    """Return an entry of /proc/self/status in bytes, such as VmRSS or its peak, VmHWM."""
    lines = dict(line.split(":", 1) for line in (PROC / "status").read_text().splitlines())
    return 1024.0 * int(lines[name].split()[0])
