"""All runs of an experiment, side by side in worker processes; finished ones are kept and not run again."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import platform
import queue
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import gemproj

from . import backbone, ranks, stream, train
from .config import Config
from .methods import METHODS
from .stream import Experience

Record = dict[str, Any]
BAR = 24
ELSEWHERE = ("preset", "seeds", "methods", "backbone")  # the model is identified by its files, like the data


@dataclass(frozen=True)
class Run:
    """One (method, seed), and the file its result belongs in."""

    method: str
    seed: int
    path: Path

    @property
    def title(self) -> str:
        """Name on the screen."""
        return f"{METHODS[self.method].title}, seed {self.seed}"


def compare(
    config: Config, experiences: Sequence[Experience], folder: Path, out: Path, jobs: int, console: Console
) -> tuple[list[Record], list[str]]:
    """Run what is not finished yet.

    Parameters
    ----------
    config, experiences, folder
        Settings, stream, and the backbone's folder.
    out
        Results go to ``out/runs``, one file for each run, written when it is finished.
    jobs
        Number of worker processes. On the CPU each computes with one thread.

    Returns
    -------
    records : list of dict
        The finished runs, kept ones included, in the order of the settings.
    failed : list of str
        Names of the runs that raised; their tracebacks are beside the results.
    """
    (out / "runs").mkdir(parents=True, exist_ok=True)
    identity: Record = {
        "settings": {k: v for k, v in asdict(config).items() if k not in ELSEWHERE and k[:6] != "small_"},
        "data": stream.fingerprint(experiences),
        "backbone": backbone.fingerprint(folder),
        "versions": versions(),
    }
    runs = [
        Run(method, seed, out / "runs" / f"{method}-seed{seed}.json")
        for method in config.methods
        for seed in config.seeds
    ]
    if ranks.count() > 1:
        identity["processes"] = ranks.count()
    waiting = []
    for run in runs:
        if finished(run, identity):
            console.print(f"[dim]kept      {run.title} (finished earlier with the same settings)")
        else:
            waiting.append(run)
    work = config, experiences, folder
    if ranks.count() > 1:
        failed = _run_together(ranks.as_the_first(waiting), identity, work, console)
        runs = runs if ranks.rank() == 0 else []
    else:
        failed = _run_all(waiting, identity, work, jobs, console) if waiting else []
    done = [run for run in runs if run.title not in failed]
    return [json.loads(run.path.read_text(encoding="utf-8"))["result"] for run in done], failed


def finished(run: Run, identity: Record) -> bool:
    """Return whether a run's file exists and was made under the same settings."""
    try:
        stored = json.loads(run.path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return stored.get("fingerprint") == fingerprint(run, identity)


def fingerprint(run: Run, identity: Record) -> str:
    """Return a short hash of everything that decides a run's result."""
    parts = json.dumps([run.method, run.seed, identity], sort_keys=True)
    return hashlib.sha256(parts.encode()).hexdigest()[:16]


def write(path: Path, content: str) -> None:
    """Write a file completely or not at all."""
    draft = path.with_name(path.name + ".draft")
    draft.write_text(content, encoding="utf-8")
    os.replace(draft, path)


def usable_cores() -> int:
    """Return on how many cores this process may run."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions() -> dict[str, str]:
    """Return the versions of the libraries that a result depends on."""
    return {library.__name__: library.__version__ for library in (gemproj, torch, transformers, peft)}


def environment() -> dict[str, str]:
    """Return what a reader needs to know about the machine to place the timings."""
    found = {"python": platform.python_version(), "system": platform.system(), "machine": platform.machine()}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return versions() | found


def _run_all(
    runs: Sequence[Run], identity: Record, work: tuple[Any, ...], jobs: int, console: Console
) -> list[str]:
    context = multiprocessing.get_context("spawn")
    failed = []
    columns = (
        TextColumn("{task.description}"),
        BarColumn(BAR),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with context.Manager() as manager, Progress(*columns, console=console) as progress:
        messages = manager.Queue()
        others = set(multiprocessing.active_children())
        pool = ProcessPoolExecutor(min(jobs, len(runs)), mp_context=context)
        steps = sum(train.task_steps(*work[:2]))
        bars = [
            progress.add_task(f"{run.title:<20}", start=False, total=steps, note="waiting") for run in runs
        ]
        # Ctrl-C reaches every process of the terminal; the workers inherit that they ignore it.
        ctrl_c = signal.signal(signal.SIGINT, signal.SIG_IGN)
        futures = {pool.submit(_work_apart, work, run, k, messages): k for k, run in enumerate(runs)}
        signal.signal(signal.SIGINT, ctrl_c)
        try:
            pending: set[Future[Record]] = set(futures)
            while pending:
                done, pending = wait(pending, timeout=0.1, return_when=FIRST_COMPLETED)
                _show(messages, progress, bars)
                for future in done:
                    run, bar = runs[futures[future]], bars[futures[future]]
                    if not _settle(future, run, identity, progress, bar):
                        failed.append(run.title)
            pool.shutdown()
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise
    return failed


def _run_together(
    runs: Sequence[Run], identity: Record, work: tuple[Any, ...], console: Console
) -> list[str]:
    """Do one run after the other, each with all processes; the first one keeps the results."""
    failed = []
    with Progress(
        TextColumn("{task.description}"), BarColumn(BAR), MofNCompleteColumn(), console=console
    ) as progress:
        for run in runs:
            bar = progress.add_task(f"{run.title:<20}")
            future: Future[Record] = Future()
            try:
                future.set_result(_work(work, run, partial(_advance, progress, bar)))
            except Exception as error:
                future.set_exception(error)
            if ranks.rank() == 0 and not _settle(future, run, identity, progress, bar):
                failed.append(run.title)
    return failed


def _advance(progress: Progress, bar: Any, done: int, total: int, note: str) -> None:
    progress.update(bar, completed=done, total=total)


def _work(
    work: tuple[Config, Sequence[Experience], Path], run: Run, on_step: Callable[[int, int, str], None]
) -> Record:
    """Do one run."""
    config, experiences, folder = work
    if config.device == "cpu":
        torch.set_num_threads(1)
    start = time.perf_counter()
    result = train.run(config, run.method, run.seed, experiences, folder, on_step)
    return result | {"wall_seconds": time.perf_counter() - start}


def _work_apart(
    work: tuple[Config, Sequence[Experience], Path], run: Run, index: int, messages: Any
) -> Record:
    """Do one run in a worker process, which tells of it in messages."""
    return _work(work, run, lambda *news: messages.put((index, *news)))


def _show(messages: Any, progress: Progress, bars: Sequence[Any]) -> None:
    """Bring the bars up to date with what the workers said."""
    while True:
        try:
            index, done, total, note = messages.get_nowait()
        except queue.Empty:
            return
        progress.start_task(bars[index])
        progress.update(bars[index], completed=done, total=total, note=note)


def _settle(future: Future[Record], run: Run, identity: Record, progress: Progress, bar: Any) -> bool:
    """Write down how a run ended, replace its bar by a line that stays, and return whether it succeeded."""
    errors = run.path.with_suffix(".error.txt")
    error = future.exception()
    if error is not None:
        progress.update(bar, visible=False)
        errors.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        reason = escape(f"{type(error).__name__}: {error}")
        progress.console.print(f"[red]failed[/]    {run.title}: {reason} (see {errors})")
        return False
    result = future.result()
    stored = {"fingerprint": fingerprint(run, identity)} | identity | {"result": result}
    write(run.path, json.dumps(stored, indent=1))
    errors.unlink(missing_ok=True)
    progress.update(bar, visible=False)
    progress.console.print(
        f"[green]finished[/]  {run.title:<20} {'━' * BAR} {result['wall_seconds']:5.0f} s, "
        f"average accuracy {result['metrics']['average_accuracy']:.1%}"
    )
    return True
