"""The device, and captured and timed calls on it. Without a GPU it is the CPU, to test the parts."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from statistics import median
from timeit import timeit
from typing import Any
from unittest.mock import patch

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Numbers in a buffer that exceeds every L2 cache.
FLUSH = 1 << 25
# Runs of a cold call; consecutive calls that are timed together, on the device and on the host.
FEWEST, MOST, WARM_CALLS, HOST_CALLS = 5, 30, 20, 100

Call = Callable[[], Any]


def backend(name: str) -> AbstractContextManager[Any]:
    """Temporarily choose the backend of the public functions."""
    return patch("gemproj.backends.wanted", name)


def as_graph(call: Call) -> Call:
    """Capture a call into a CUDA graph and return its replay."""
    call()  # the first call allocates, which a capture must not
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


class Clock:
    """Times of calls in microseconds, by events of the device."""

    def __init__(self) -> None:
        self._written, self._read = torch.zeros(2, FLUSH, device=DEVICE)

    def cold(self, call: Call, seconds: float = 0.1) -> float:
        """Return the median time of single calls with cold caches."""
        call()
        rounds = int(1e6 * seconds / self._single(call))
        return median(self._single(call) for _ in range(max(FEWEST, min(MOST, rounds))))

    def warm(self, call: Call) -> float:
        """Return the mean time of consecutive calls."""
        call()
        return self._between(lambda: [call() for _ in range(WARM_CALLS)]) / WARM_CALLS

    def _single(self, call: Call) -> float:
        self._written.zero_()
        # Then read: writing back dirty lines would count as time of the call.
        self._read.sum()
        return self._between(call)

    def _between(self, call: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        return 1e3 * start.elapsed_time(end)


def host_time(call: Call) -> float:
    """Return the microseconds until a call returns, without waiting for the device."""
    call()
    torch.cuda.synchronize()
    seconds = timeit(call, number=HOST_CALLS)
    torch.cuda.synchronize()
    return 1e6 * seconds / HOST_CALLS
