"""The whole experiment, from articles to figures."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gemproj import project

from . import backbone, figures, report, runs, small, stream
from .config import Config, SetupError
from .data import Articles
from .stream import Experience


def run(
    config: Config, articles: Articles, cache: Path, out: Path, jobs: int | None, console: Console
) -> bool:
    """Run an experiment and leave tables, figures and ``results.json`` in `out`.

    Parameters
    ----------
    config, articles
        The settings and the data.
    cache
        Where the small backbone is kept.
    out
        Where results go, and are looked for.
    jobs
        Number of worker processes; None takes all cores, or one on a GPU.
    console
        Where to tell what happens.

    Returns
    -------
    bool
        Whether every run succeeded.
    """
    config = replace(config, device=_device(config.device))
    console.print(f"[bold]data[/]      {escape(f'{articles.source} ({articles.reason})')}")
    shape = config.experiences, config.rows, config.dominant_share
    experiences = stream.build(articles.texts, articles.labels, *shape)
    for k, experience in enumerate(experiences):
        sizes = f"{len(experience.train.texts):,} train and {len(experience.test.texts):,} test rows"
        console.print(f"          experience {k + 1}: {sizes}, {config.dominant_share:.0%} {experience.name}")

    if config.backbone == "small":
        folder = _small_backbone(config, experiences, cache, console)
    else:
        folder = backbone.locate(config.backbone)
        console.print(f"[bold]backbone[/]  {config.backbone}")
    _compile_loops(console)

    workers = jobs or (_usable_cores() if config.device == "cpu" else 1)
    todo = [
        runs.Run(config, method, seed, experiences, folder)
        for method in config.methods
        for seed in config.seeds
    ]
    at_once = min(workers, len(todo))
    console.print(f"[bold]runs[/]      {len(todo)} on {config.device}, {at_once} at a time, into {out}")
    records, failed = runs.compare(todo, out / "runs", workers, console)
    if records:
        about = {"data": articles.source, "backbone": config.backbone, "environment": runs.environment()}
        summary = report.summarize(records)
        runs.write(out / "results.json", json.dumps(report.results(config, about, records, failed), indent=1))
        runs.write(out / "table.md", report.markdown(summary))
        paths = figures.draw(records, summary, out)
        console.print()
        report.show(summary, console)
        names = ", ".join(path.name for path in [out / "results.json", out / "table.md", *paths])
        console.print(f"[bold]written[/]   {names} in {out}")
    if failed:
        console.print(f"[red]{len(failed)} of {len(todo)} runs failed: {', '.join(failed)}; the rest is kept")
    return not failed


def _small_backbone(config: Config, experiences: Sequence[Experience], cache: Path, console: Console) -> Path:
    train, test = stream.merge(e.train for e in experiences), stream.merge(e.test for e in experiences)
    folder = small.cached(config, train.texts, cache)
    if folder.is_dir():
        console.print(f"[bold]backbone[/]  small GPT-2, pretrained earlier ({folder})")
        return folder
    console.print(
        f"[bold]backbone[/]  small GPT-2, to be pretrained once on the {len(train.texts):,} training articles"
    )
    columns = TextColumn("pretraining"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=config.small_steps)
        small.prepare(config, train.texts, folder, lambda done: progress.update(bar, completed=done))
    accuracy = small.probe(folder, config.max_length, train, test)
    console.print(f"          kept in {folder}")
    console.print(
        f"          a linear classifier on its frozen features reaches {accuracy:.1%} on the test rows"
    )
    return folder


def _compile_loops(console: Console) -> None:
    """Project something small, so that gemproj says it here, once, if it has to compile its loops first."""
    handler, logger = logging.Handler(logging.INFO), logging.getLogger("gemproj")
    handler.emit = lambda record: console.print(f"[bold]gemproj[/]   {escape(record.getMessage())}")  # type: ignore[method-assign]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    project(torch.ones(2, 1000), -torch.ones(1000))
    logger.removeHandler(handler)


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _device(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise SetupError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return name
