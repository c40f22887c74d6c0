"""Threads for work on NumPy arrays that releases the interpreter lock.

Threads of our own sleep between calls, survive a fork of the process and may be entered from several
threads at once, which the thread pools of compiled libraries do not all promise.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress

_pool: ThreadPoolExecutor | None = None


def cores() -> int:
    """Return the number of threads to use: ``OMP_NUM_THREADS``, else the cores this process may run on."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if wanted.isdecimal() and int(wanted):
        return int(wanted)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share(work: Callable[[int], None], count: int, threads: int | None = None) -> None:
    """Call ``work(0) .. work(count - 1)``, each once, in the calling thread and up to ``threads - 1`` others.

    Without `threads`, as many as there are `cores`. If a call raises or the caller is interrupted, no
    further ones begin; what was raised first is raised after all threads have stopped, since they may be
    writing to arrays that the caller then gives up.
    """
    if count == 1:
        work(0)
        return
    threads = cores() if threads is None else threads
    numbers, helpers = itertools.count(), []
    errors: list[BaseException] = []

    def drain() -> None:
        try:
            while not errors and (i := next(numbers)) < count:
                work(i)
        except BaseException as error:
            errors.append(error)

    try:
        with suppress(RuntimeError):  # there are no new threads at the end of the process
            for _ in range(min(threads, count) - 1):
                helpers.append(_executor().submit(drain))
        drain()
    except BaseException as error:
        errors.append(error)
    while not all(helper.done() for helper in helpers):
        try:
            wait(helpers)
        except BaseException as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _executor() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(max(1, cores()), thread_name_prefix="gemproj")
    return _pool


def _forget() -> None:
    """Drop the pool in a forked child, which has none of its threads."""
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
