"""Runs side by side in worker processes."""

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

from rich.console import Console
from rich.progress import track

# With glibc, a process keeps memory that was freed. To return it and get it anew is a tenth of a small step.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 32)}


def work(
    runs: Sequence[Any], keep: Callable[[Any, dict[str, Any]], None], jobs: int, console: Console
) -> None:
    """Execute runs in worker processes; this process calls `keep` with each result as it arrives.

    A run has a `title`, and the format `brief` of what is shown of its result. Ctrl-C and a failed run end
    the others at once.
    """
    if not runs:
        return
    others = set(multiprocessing.active_children())
    # Where it can, a server imports what runs need, once for all workers.
    how = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(how)
    if how == "forkserver":
        os.environ.update(KEEP_MEMORY)
        context.set_forkserver_preload([type(runs[0]).__module__])
    pool = ProcessPoolExecutor(min(jobs, len(runs)), context, _begin, (dict(os.environ),))
    futures = {pool.submit(_timed, run): run for run in runs}
    try:
        found = as_completed(futures)
        for future in track(found, "runs", len(runs), console=console, disable=not console.is_terminal):
            run, result = futures[future], future.result()
            keep(run, result)
            line = f"{run.title:<24} {result['wall_seconds']:5.0f} s, {run.brief.format(**result)}"
            console.print(f"[green]finished[/]  {line}")
        pool.shutdown()
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in set(multiprocessing.active_children()) - others:
            worker.terminate()
        raise


def _timed(run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    start = time.perf_counter()
    return run() | {"wall_seconds": time.perf_counter() - start}


def _begin(environment: Mapping[str, str]) -> None:
    """Prepare a worker: it ignores Ctrl-C, which reaches every process, and ends with its parent."""
    os.environ.update(environment)  # the server may have started in another environment
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
