"""Threads for work on NumPy arrays that releases the interpreter lock.

Threads of our own sleep between calls, survive a fork of the process and may be entered from several
threads at once, which the thread pools of compiled libraries do not all promise. Work is handed over without
Python's locks: a signal handler may interrupt its thread anywhere and call `share` itself, and what it raises
may end any wait.
"""

from __future__ import annotations

import _thread
import itertools
import os
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

# Seconds after which a thread that waits looks whether it still has to: an interrupt may have eaten its call.
_LOOK = 0.05


def cores() -> int:
    """Return the number of threads to use: ``OMP_NUM_THREADS``, else the cores this process may run on."""
    wanted = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    if wanted.isdecimal() and int(wanted):
        return int(wanted)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share(work: Callable[[int], None], count: int, threads: int | None = None, held: Any = None) -> None:
    """Call ``work(0) .. work(count - 1)``, each once, in the calling thread and up to ``threads - 1`` others.

    Without `threads`, as many as there are `cores`. If a call raises or the caller is interrupted, no
    further ones begin; what was raised first, or else an interrupt, is raised after all threads have stopped,
    since they may be writing to arrays that the caller then gives up. Until then they keep what is `held`.
    """
    if count == 1:
        work(0)
        return
    threads = cores() if threads is None else threads
    job, begun = _Job(work, count, held), False
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
    job.work = job.held = None  # a thread may only now find that there is nothing to do
    if job.errors:
        raise min(job.errors, key=lambda error: isinstance(error, Exception))


class _Job:
    """Calls that threads share. Those in `helping` may be in one; each says in `stopped` that it is not."""

    def __init__(self, work: Callable[[int], None], count: int, held: Any) -> None:
        self.work: Any = work
        self.held, self.count, self.numbers = held, count, itertools.count()
        self.errors: list[BaseException] = []
        self.helping: list[None] = []
        self.stopped: SimpleQueue[None] = SimpleQueue()

    def drain(self) -> None:
        """Make calls until none is left or one has raised."""
        while not self.errors and (i := next(self.numbers)) < self.count:
            self.work(i)

    def help(self) -> None:
        """Do the same beside the thread that waits for it."""
        self.helping.append(None)  # before looking for errors: the caller looks here after it had one
        try:
            self.drain()
        except BaseException as error:
            self.errors.append(error)
        self.helping.pop()
        self.stopped.put(None)


# Jobs that wait for threads, and the number of these, as the length of a list: to append takes no lock.
_jobs: SimpleQueue[_Job] = SimpleQueue()
_helpers: list[None] = []


def _ask_for_help(job: _Job, count: int) -> None:
    """Wake threads for a job; there are as many as `cores`, started when they are first wanted."""
    with suppress(RuntimeError):  # there are no new threads at the end of the process
        while len(_helpers) < min(count, cores()):
            _thread.start_new_thread(_help, (_jobs,))
            _helpers.append(None)
    for _ in range(min(count, len(_helpers))):
        _jobs.put(job)


def _help(jobs: SimpleQueue[_Job]) -> None:
    while True:
        jobs.get().help()


def _forget() -> None:
    """Forget the threads in a forked child, which has none of them."""
    global _jobs, _helpers
    _jobs, _helpers = SimpleQueue(), []


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
