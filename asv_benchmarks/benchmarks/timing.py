"""Times of calls that take turns, each after the threads of the call before have gone to sleep."""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)

# Rounds of a call: shorter calls have more.
FEWEST, MOST = 5, 15
# A call that has taken so many seconds gets no further round.
LONGEST = 5.0
# A short call is repeated for so many seconds: after a pause the first calls run with cold caches and slow
# cores, unlike those of a training step.
BURST = 2e-2


class Call(NamedTuple):
    """A timed call, its preparation before each run, and the work of the machine just before it."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    just_before: Callable[[], object] = lambda: None


def in_turn(calls: Mapping[Key, Call], seconds: float) -> dict[Key, list[float]]:
    """Return the times of each call in seconds, taken in turn so that all see the same machine.

    Every call gets 5 rounds, and up to 15 rounds until it has taken `seconds` in all. A call that has taken
    more than 5 seconds gets no further round.
    """
    times: dict[Key, list[float]] = {key: [] for key in calls}
    for call in calls.values():  # not timed: libraries load, start threads and touch their memory
        call.prepare()
        call.run()
    for turn in range(MOST):
        for key, call in calls.items():
            if sum(times[key]) < (LONGEST if turn < FEWEST else seconds):
                settle()
                times[key] += burst(call)
    return times


def burst(call: Call, seconds: float = BURST) -> list[float]:
    """Return the times of repeated calls, for `seconds` including preparations."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        call.prepare()
        call.just_before()
        start = time.perf_counter()
        call.run()
        times.append(time.perf_counter() - start)
    return times


def settle(step: float = 0.01, limit: float = 0.5) -> None:
    """Wait until the threads of the call before have gone to sleep.

    After a call, the threads of a library spin in case another call follows: OpenMP's, which torch uses, for
    some milliseconds, OpenBLAS's, which NumPy uses, for a tenth of a second. Two libraries would compete for
    the cores, and the first would slow down the second. Threads sleep when the CPU time of this process stops
    rising; a `step` is longer than the interval at which the kernel counts it.
    """
    end = time.perf_counter() + limit
    while time.perf_counter() < end:
        used = time.process_time()
        time.sleep(step)
        if time.process_time() - used < 0.1 * step:
            return
