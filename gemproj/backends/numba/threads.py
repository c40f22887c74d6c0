"""Threads for compiled loops, which release the GIL. They sleep between calls."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import lru_cache
from typing import Any

# Jobs per thread: handing over a job takes as long as reading 100 kB.
_JOBS = 4
# Numbers to read below which waking threads takes longer.
_WORTH_THREADS = 1 << 21


def cores() -> int:
    """Return the number of threads to use: ``OMP_NUM_THREADS``, else the cores this process may run on."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if wanted.isdecimal() and int(wanted):
        return int(wanted)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_pieces(
    run: Callable[[int, int], object], count: int, work: int, threads: Callable[[], int] = cores
) -> None:
    """Call ``run(begin, end)`` for parts of `count` pieces, in threads if there is enough `work`.

    `work` is in numbers to read.
    """
    if work < _WORTH_THREADS or count < 2 or (wanted := threads()) == 1:
        run(0, count)
        return
    step = -(-count // (_JOBS * wanted))
    share(lambda i: run(i * step, min((i + 1) * step, count)), -(-count // step), wanted)


def share(work: Callable[[int], object], count: int, threads: int) -> None:
    """Call ``work(0) .. work(count - 1)``, each once, in at most `threads` threads, including the caller's.

    If a call raises or the caller is interrupted, no further call begins. The error is raised after all
    threads have stopped, because they may be writing to the caller's arrays.
    """
    numbers, failed = itertools.count(), False

    def drain() -> None:
        nonlocal failed
        try:
            while not failed and (i := next(numbers)) < count:
                work(i)
        except BaseException:
            failed = True
            raise

    helping: list[Future[None]] = []
    try:
        with suppress(RuntimeError):  # no thread can be started at the end of the process
            helping += (_pool().submit(drain) for _ in range(min(count, threads, cores() + 1) - 1))
        drain()
    finally:
        begun = [one for one in helping if not one.cancel()]
        wait(begun)
    for one in begun:
        one.result()


@lru_cache(maxsize=1)
def _pool() -> Any:
    return ThreadPoolExecutor(cores(), thread_name_prefix="gemproj")


if hasattr(os, "register_at_fork"):  # in a forked child the threads do not exist
    os.register_at_fork(after_in_child=_pool.cache_clear)
