"""Runs side by side in worker processes, with a progress bar for each."""

from __future__ import annotations

import importlib.metadata
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

# Asked without an import, which takes seconds that not all workers need.
VERSIONS = {name: importlib.metadata.version(name) for name in ("gemproj", "torch", "transformers", "peft")}

Tell = Callable[[int, int, str], None]  # of steps done, steps in total, and a word


def work(
    runs: Sequence[Any], keep: Callable[[Any, dict[str, Any]], None], jobs: int, console: Console
) -> None:
    """Do runs in worker processes, and hand the result of each to `keep`, in this process, as it finishes.

    Ctrl-C and a failed run end the others at once.
    """
    context = _context(type(runs[0]).__module__)
    name, note = TextColumn("{task.description:<24}"), TextColumn("{task.fields[note]}")
    columns = name, BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), note
    screen = Progress(*columns, console=console, refresh_per_second=4, auto_refresh=console.is_terminal)
    with screen as progress:
        told = context.SimpleQueue()
        hidden: Any = {"start": False, "total": None, "visible": False, "note": ""}
        bars = {run.title: progress.add_task(run.title, **hidden) for run in runs}
        others = set(multiprocessing.active_children())
        pool = ProcessPoolExecutor(min(jobs, len(runs)), context, _begin, (told, dict(os.environ)))
        futures = {pool.submit(_do, run): run for run in runs}
        pending = set(futures)
        try:
            while pending:
                done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                while not told.empty():
                    title, completed, total, word = told.get()
                    progress.start_task(bars[title])
                    progress.update(bars[title], completed=completed, total=total, note=word, visible=True)
                for future in done:
                    run, result = futures[future], future.result()
                    keep(run, result)
                    progress.update(bars[run.title], visible=False)
                    line = f"{run.title:<24} {result['wall_seconds']:5.0f} s, {run.brief(result)}"
                    progress.console.print(f"[green]finished[/]  {line}")
            pool.shutdown()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise


_told: Any = None  # in a worker: the queue of what it tells


def _context(module: str) -> Any:
    """Return how workers start: from a server that has imported the module once, where there is one."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])  # torch, transformers and peft take seconds
    return context


def _begin(told: Any, environment: Mapping[str, str]) -> None:
    """Prepare a worker: it leaves Ctrl-C, which reaches every process, to its parent, and ends with it."""
    global _told
    _told = told
    os.environ.update(environment)  # the server may have started in another one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _do(run: Any) -> dict[str, Any]:
    return run(lambda *state: _told.put((run.title, *state)))
