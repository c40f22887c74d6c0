"""All runs of an experiment, side by side in worker processes; finished ones are kept and not run again."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import platform
import signal
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import gemproj

from . import train
from .config import Config
from .methods import METHODS
from .stream import Experience

BAR = 24
VERSIONS = {library.__name__: library.__version__ for library in (gemproj, torch, transformers, peft)}


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
    def name(self) -> str:
        """Name of its file: method, seed, and a hash of all that decides the result."""
        others = {"preset": "", "seeds": (), "methods": ()}
        shaping = [asdict(self.config) | others, self.experiences, str(self.folder), VERSIONS]
        return f"{self.method}-seed{self.seed}-{hashlib.sha256(repr(shaping).encode()).hexdigest()[:12]}"

    def __call__(self, progress: Any) -> dict[str, Any]:
        """Learn, and tell on the way how far it is."""
        if self.config.device == "cpu":
            torch.set_num_threads(1)
        start = time.perf_counter()
        result = train.run(
            self.config,
            self.method,
            self.seed,
            self.experiences,
            self.folder,
            lambda *state: progress.update({self.name: state}),
        )
        return result | {"wall_seconds": time.perf_counter() - start}


def compare(
    runs: Sequence[Run], folder: Path, jobs: int, console: Console
) -> tuple[list[dict[str, Any]], list[str]]:
    """Do all runs that no file in the folder has the result of.

    Returns
    -------
    records : list of dict
        The results, those of kept runs included, in the order of the runs.
    failed : list of str
        Titles of the runs that raised; their tracebacks are beside the results.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files = {run: folder / f"{run.name}.json" for run in runs}
    for run in runs:
        if files[run].is_file():
            console.print(f"[dim]kept      {run.title} (finished earlier with the same settings)")
    if waiting := [run for run in runs if not files[run].is_file()]:
        _work(waiting, files, jobs, console)
    records = [json.loads(path.read_text(encoding="utf-8")) for path in files.values() if path.is_file()]
    return records, [run.title for run in runs if not files[run].is_file()]


def _work(runs: Sequence[Run], files: dict[Run, Path], jobs: int, console: Console) -> None:
    context = multiprocessing.get_context("spawn")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(BAR),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with context.Manager() as manager, Progress(*columns, console=console) as progress:
        states = manager.dict()
        bars = {
            run: progress.add_task(f"{run.title:<20}", start=False, total=None, note="waiting")
            for run in runs
        }
        # Ctrl-C reaches every process of the terminal; the workers leave it to this one.
        ignore = signal.signal, (signal.SIGINT, signal.SIG_IGN)
        pool = ProcessPoolExecutor(min(jobs, len(runs)), context, *ignore)
        others = set(multiprocessing.active_children())
        try:
            futures: dict[Future[Any], Run] = {pool.submit(run, states): run for run in runs}
            pending = set(futures)
            while pending:
                done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                for run in runs:
                    if state := states.get(run.name):
                        progress.start_task(bars[run])
                        progress.update(bars[run], completed=state[0], total=state[1], note=state[2])
                for future in done:
                    progress.update(bars[futures[future]], visible=False)
                    settle(futures[future], future, files[futures[future]], progress.console)
            pool.shutdown()
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise


def settle(run: Run, future: Future[Any], path: Path, console: Console) -> None:
    """Write down how a run ended, and say so in a line that stays."""
    if error := future.exception():
        errors = path.with_suffix(".error.txt")
        errors.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        reason = escape(f"{type(error).__name__}: {error}")
        console.print(f"[red]failed[/]    {run.title}: {reason} (see {errors})")
        return
    result = future.result()
    write(path, json.dumps(result, indent=1))
    console.print(
        f"[green]finished[/]  {run.title:<20} {'━' * BAR} {result['wall_seconds']:5.0f} s, "
        f"average accuracy {result['metrics']['average_accuracy']:.1%}"
    )


def write(path: Path, content: str) -> None:
    """Write a file completely or not at all."""
    draft = path.with_name(path.name + ".draft")
    draft.write_text(content, encoding="utf-8")
    os.replace(draft, path)


def environment() -> dict[str, str]:
    """Return what a reader needs to know about the machine to place the timings."""
    found = {"python": platform.python_version(), "system": platform.system(), "machine": platform.machine()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return VERSIONS | found
