"""Times of calls that take turns, each on a machine that has come to rest."""

import time
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple, TypeVar

Key = TypeVar("Key", bound=Hashable)

# Rounds of a call: the more, the shorter it is.
FEWEST, MOST = 5, 15
# No further rounds of a call that has taken so many seconds.
LONGEST = 5.0
# A short call is repeated for so many seconds: the first ones after a pause run on caches and cores that
# have cooled down, and a training step's do not.
BURST = 2e-2


class Call(NamedTuple):
    """What is timed, what has to be done again before, and what the machine does just before; in seconds."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None
    just_before: Callable[[], object] = lambda: None


def in_turn(calls: Mapping[Key, Call], seconds: float) -> dict[Key, list[float]]:
    """Return the times of each call, taken in turn so that all see the same machine.

    Every call gets 5 rounds, and up to 15 of them as long as it has not taken `seconds` in all. One that has
    taken more than 5 seconds gets no further round.
    """
    times: dict[Key, list[float]] = {key: [] for key in calls}
    for call in calls.values():  # once for nothing: libraries load, make their threads and touch their memory
        call.prepare()
        call.run()
    for turn in range(MOST):
        for key, call in calls.items():
            if sum(times[key]) < (LONGEST if turn < FEWEST else seconds):
                settle()
                times[key] += burst(call)
    return times


def burst(call: Call, seconds: float = BURST) -> list[float]:
    """Return the times of one call after the other, for `seconds` with all that is not timed."""
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

    After a call, threads of a library spin in case there is another one: OpenMP's, which torch uses,
    for some milliseconds, OpenBLAS's, which NumPy uses, for a tenth of a second. Two libraries would
    fight for the cores, and the first one would be measured by the second one's times. They sleep when
    the CPU time of this process stands still; a `step` is longer than the kernel takes to count it.
    """
    end = time.perf_counter() + limit
    while time.perf_counter() < end:
        used = time.process_time()
        time.sleep(step)
        if time.process_time() - used < 0.1 * step:
            return
