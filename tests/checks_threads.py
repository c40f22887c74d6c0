"""``python checks_threads.py NAME``: interrupts at every moment; a defect would hang the process.

`at_every_instruction` stops the thread that shares work at one instruction after the other, of its own or of
what it calls, which no signal could hit in so few attempts; `at_random` sends signals while projections run.
"""

import random
import signal
import sys
import threading
import time
from contextlib import suppress

import numpy as np

from gemproj import project
from gemproj.backends.numba import threads
from gemproj.backends.numba.threads import share


def at_every_instruction():
    main = threading.get_ident()

    def interrupt():
        raise KeyboardInterrupt

    for action in (interrupt, lambda: share(lambda i: None, 3, 3)):
        at, there = 0, True
        while there:
            began, ended, left = [], [], at

            def trace(frame, event, _, action=action):
                nonlocal left
                frame.f_trace_opcodes, frame.f_trace_lines = True, False
                if event == "opcode":
                    left -= 1
                    if left == -1:
                        action()
                return trace

            def work(i, began=began, ended=ended):
                began.append(i)
                if threading.get_ident() != main:
                    time.sleep(0.0005)  # so that the other thread waits
                ended.append(i)

            with suppress(KeyboardInterrupt):
                sys.settrace(trace)
                try:
                    share(work, 4, 3)
                finally:
                    sys.settrace(None)
            # What a call was interrupted in has begun and not ended.
            assert len(began) - len(ended) <= (action is interrupt), (began, ended)
            assert action is interrupt or sorted(ended) == [0, 1, 2, 3]
            at, there = at + 1, left < 0
        print(at, "instructions")


def at_random():
    threads._WORTH_THREADS = 0
    rng = np.random.default_rng(0)
    G, g = rng.standard_normal((6, 20_000)), rng.standard_normal(20_000)
    out, expected = np.empty_like(g), project(G, g)
    raised = projected = 0

    def interrupt(*_):
        raise KeyboardInterrupt

    def call(*_):
        nonlocal projected
        np.testing.assert_array_equal(project(G, g), expected)
        projected += 1

    for handler in (interrupt, call):
        signal.signal(signal.SIGALRM, handler)
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            try:
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 2e-3))
                for _ in range(5):
                    project(G, g, out=out)
                time.sleep(0.003)
            except KeyboardInterrupt:
                raised += 1
        np.testing.assert_array_equal(project(G, g, out=out), expected)
    assert raised
    assert projected
    print(raised, "interrupts,", projected, "projections in a signal handler")


if __name__ == "__main__":
    {"at_every_instruction": at_every_instruction, "at_random": at_random}[sys.argv[1]]()
