"""All runs of an experiment, side by side in worker processes; finished ones are kept and not run again."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import gemproj

from . import train
from .config import Config, SetupError
from .methods import METHODS
from .stream import Experience

BAR = 24
VERSIONS = {library.__name__: library.__version__ for library in (gemproj, torch, transformers, peft)}


Tell = Callable[[int, int, str], None]  # of steps done, steps in total, and a word


@dataclass(frozen=True)
class Run:
    """One method under one seed, with the stream and the backbone's folder."""

    config: Config
    method: str
    seed: int
    experiences: Sequence[Experience]
    folder: Path

    @property
    def title(self) -> str:
        """Name on the screen."""
        return f"{METHODS[self.method].title}, seed {self.seed}"

    @property
    def file(self) -> str:
        """Name of the file for the result: method, seed, and a hash of all that decides it."""
        others = {"preset": "", "seeds": (), "methods": ()}
        shaping = [asdict(self.config) | others, self.experiences, str(self.folder), VERSIONS]
        digest = hashlib.sha256(repr(shaping).encode()).hexdigest()
        return f"{self.method}-seed{self.seed}-{digest[:12]}.json"

    @staticmethod
    def found(result: dict[str, Any]) -> str:
        """Say in a few words what was found."""
        return f"average accuracy {result['metrics']['average_accuracy']:.1%}"

    def __call__(self, tell: Tell) -> dict[str, Any]:
        """Learn, and tell how far it is."""
        if self.config.device == "cpu":
            torch.set_num_threads(1)
        start, stage = time.perf_counter(), (self.experiences, self.folder)
        result = train.run(self.config, self.method, self.seed, *stage, tell)
        return result | {"wall_seconds": time.perf_counter() - start}


def compare(runs: Sequence[Run], folder: Path, jobs: int, console: Console) -> list[dict[str, Any]]:
    """Do all runs that have no file in the folder yet, and return the results of all."""
    folder.mkdir(parents=True, exist_ok=True)
    waiting = [run for run in runs if not (folder / run.file).is_file()]
    for run in runs:
        if run not in waiting:
            console.print(f"[dim]kept      {run.title} (finished earlier with the same settings)")

    def keep(run: Run, result: dict[str, Any]) -> None:
        draft = folder / f"{run.file}.draft"  # the file appears complete or not at all
        draft.write_text(json.dumps(result, indent=1), encoding="utf-8")
        draft.replace(folder / run.file)

    if waiting:
        work(waiting, keep, jobs, console)
    return [_read(folder / run.file) for run in runs]


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SetupError(f"{path} is damaged ({error}); remove it, and the run is done again") from None


def work(
    runs: Sequence[Any], keep: Callable[[Any, dict[str, Any]], None], jobs: int, console: Console
) -> None:
    """Do runs in worker processes, and hand the result of each to `keep`, in this process, as it finishes.

    Ctrl-C and a failed run end the others at once.
    """
    context = _context(type(runs[0]).__module__)
    name, note = TextColumn("{task.description:<20}"), TextColumn("{task.fields[note]}")
    columns = name, BarColumn(BAR), MofNCompleteColumn(), TimeElapsedColumn(), note
    screen: dict[str, Any] = {
        "console": console,
        "refresh_per_second": 4,
        "auto_refresh": console.is_terminal,
    }
    with Progress(*columns, **screen) as progress:
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
                    line = f"{run.title:<20} {'━' * BAR} {result['wall_seconds']:5.0f} s, {run.found(result)}"
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
