"""Calls to solvers in separate processes, because some solvers never return and some crash Python."""

import multiprocessing
import signal
import time
import warnings
from contextlib import suppress
from typing import Any

import numpy as np

from asv_benchmarks.reports.solvers import SOLVERS, Findings, Solver

# Not forked, because libraries with threads do not survive a fork.
PROCESSES = multiprocessing.get_context("spawn")


# Milliseconds, x, and the other findings of a solver. x is None if the solver found nothing, raised, crashed
# or ran out of time.
Answer = tuple[float, np.ndarray | None, Findings]


class Isolated:
    """A solver in its own process, which is replaced when a call takes too long.

    `limit` is in seconds of processor time, because a busy machine is no fault of a solver; a call that takes
    none ends after `patience` seconds.
    """

    def __init__(self, name: str, limit: float = 3.0, patience: float = 60.0) -> None:
        self._name, self._limit, self._patience = name, limit, patience
        self._start()

    def __call__(self, G: np.ndarray, g: np.ndarray) -> Answer:
        """Project g once."""
        start = time.perf_counter()
        with suppress(EOFError, OSError):  # the process died
            self._pipe.send((G, g))
            if self._pipe.poll(self._patience):
                return *self._pipe.recv(), self._pipe.recv()  # findings have no limit
        ms = 1e3 * (time.perf_counter() - start)
        self.close()
        self._start()
        return ms, None, Findings()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _start(self) -> None:
        self._pipe, far_end = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=_serve, args=(self._name, self._limit, far_end), daemon=True)
        self._process.start()
        far_end.close()
        self._pipe.recv()  # wait for a first answer, so that no call includes the start


def _serve(name: str, limit: float, pipe: Any) -> None:
    """Answer every (G, g) that comes through the pipe; the process dies in a call that is out of time."""
    solver = SOLVERS[name]
    warnings.simplefilter("ignore")
    pipe.send(_answer(solver, np.eye(2), -np.ones(2)))
    while True:
        G, g = pipe.recv()
        signal.setitimer(signal.ITIMER_PROF, limit)
        ms, x = _answer(solver, G, g)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        pipe.send((ms, x))
        pipe.send(Findings() if x is None else solver.inspect(G, g))


def _answer(solver: Solver, G: np.ndarray, g: np.ndarray) -> tuple[float, np.ndarray | None]:
    start = time.perf_counter()
    try:
        x = solver.project(G, g)
    except Exception:  # any error means that there is no answer
        x = None
    return 1e3 * (time.perf_counter() - start), x
