"""A thread pool for compiled loops, which release the GIL.

Its threads sleep between calls. Unlike the thread pools of some compiled libraries, the pool works after a
fork of the process and can be used from several threads at once. Work is handed over without Python's locks:
a signal handler may interrupt a thread anywhere and call `share`, and an exception raised by the handler may
end any wait.
"""

from __future__ import annotations

import _thread
import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

# Seconds after which the waiting caller checks whether threads are still working: an interrupt may have
# removed the message that the caller waits for.
_LOOK = 0.05
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

    If a call raises or the caller is interrupted, no further call begins. The interrupt, or else the first
    exception, is raised after all threads have stopped, because they may be writing to the caller's arrays.
    """
    job, begun = _Job(work, count), False
    while True:
        try:
            if not begun:
                begun = True
                _ask_for_help(job, min(threads, count) - 1)
                job.drain()
            while job.helping:
                with suppress(Empty):
                    job.stopped.get(timeout=_LOOK)
            break
        except BaseException as error:
            job.errors.append(error)
    job.work = None  # a thread that takes the job later must not hold the caller's arrays
    if job.errors:
        raise min(job.errors, key=lambda error: isinstance(error, Exception))


class _Job:
    """Calls to share between threads, with one entry in `helping` per working thread of the pool.

    Each of these threads puts a message into `stopped` after its last call.
    """

    def __init__(self, work: Callable[[int], object], count: int) -> None:
        self.work: Any = work
        self.count, self.numbers = count, itertools.count()
        self.errors: list[BaseException] = []
        self.helping: list[None] = []
        self.stopped: SimpleQueue[None] = SimpleQueue()

    def drain(self) -> None:
        """Make calls until no call is left or a call has raised."""
        while not self.errors and (i := next(self.numbers)) < self.count:
            self.work(i)

    def help(self) -> None:
        """Make calls in a pool thread, append any exception to `errors`, then notify the caller."""
        # Append before `drain` reads `errors`, because the caller records an error and then reads `helping`.
        self.helping.append(None)
        try:
            self.drain()
        except BaseException as error:
            self.errors.append(error)
        self.helping.pop()
        self.stopped.put(None)


# Waiting jobs, and one entry per pool thread: a list, because appending to a list takes no lock.
_jobs: SimpleQueue[_Job] = SimpleQueue()
_helpers: list[None] = []


def _ask_for_help(job: _Job, count: int) -> None:
    """Wake up to `count` pool threads for a job; threads are started at first use, at most `cores()`."""
    with suppress(RuntimeError):  # no thread can be started at the end of the process
        while len(_helpers) < min(count, cores()):
            _thread.start_new_thread(_help, (_jobs,))
            _helpers.append(None)
    for _ in range(min(count, len(_helpers))):
        _jobs.put(job)


def _help(jobs: SimpleQueue[_Job]) -> None:
    while True:
        jobs.get().help()


def _forget() -> None:
    """Reset the pool in a forked child process, in which its threads do not exist."""
    global _jobs, _helpers
    _jobs, _helpers = SimpleQueue(), []


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
