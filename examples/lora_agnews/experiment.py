"""The whole experiment, from articles to figures."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import backbone, compare, data, figures, pretrain, ranks, report, stream
from .config import Config, SetupError
from .stream import Experience, Split


def run(
    config: Config,
    folder: Path | None,
    origin: str,
    cache: Path,
    out: Path,
    jobs: int | None,
    console: Console,
) -> bool:
    """Run an experiment and leave tables, figures and ``results.json`` in `out`.

    Parameters
    ----------
    config
        The settings.
    folder, origin
        Where AG News is, if anywhere, and who said so.
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
    needed = stream.rows_needed(config.experiences, config.rows, config.dominant_share)
    articles = data.load(folder, origin, [sum(column) for column in zip(*needed, strict=True)])
    console.print(f"[bold]data[/]      {escape(f'{articles.source} ({articles.reason})')}")
    experiences = stream.build(
        articles.texts, articles.labels, config.experiences, config.rows, config.dominant_share
    )
    for k, experience in enumerate(experiences):
        sizes = f"{len(experience.train.texts):,} train and {len(experience.test.texts):,} test rows"
        console.print(f"          experience {k + 1}: {sizes}, {config.dominant_share:.0%} {experience.name}")

    if config.backbone == "small":
        with ranks.first_goes_ahead():
            model = _small_backbone(config, experiences, cache, console)
    else:
        model = backbone.locate(config.backbone)
        console.print(f"[bold]backbone[/]  {config.backbone}")

    workers = jobs or (compare.usable_cores() if config.device == "cpu" else 1)
    count = len(config.methods) * len(config.seeds)
    at_once = f"{min(workers, count)} at a time"
    if ranks.count() > 1:
        at_once = f"each by {ranks.count()} processes together"
    console.print(f"[bold]runs[/]      {count} on {config.device}, {at_once}, into {out}")
    records, failed = compare.compare(config, experiences, model, out, workers, console)
    if records:
        about = {
            "data": {"source": articles.source, "fingerprint": stream.fingerprint(experiences)},
            "backbone": {"name": config.backbone, "fingerprint": backbone.fingerprint(model)},
            "environment": compare.environment(),
        }
        summary = report.summarize(records)
        everything = report.results(config, about, records, failed)
        compare.write(out / "results.json", json.dumps(everything, indent=1))
        compare.write(out / "table.md", report.markdown(summary))
        paths = figures.draw(records, summary, out)
        console.print()
        report.show(summary, console)
        names = ", ".join(path.name for path in [out / "results.json", out / "table.md", *paths])
        console.print(f"[bold]written[/]   {names} in {out}")
    if failed:
        console.print(f"[red]{len(failed)} of {count} runs failed: {', '.join(failed)}; the rest is kept")
    return not failed


def _small_backbone(config: Config, experiences: Sequence[Experience], cache: Path, console: Console) -> Path:
    recipe = pretrain.Recipe.of(config)
    texts = stream.training_texts(experiences)
    folder = pretrain.cached(recipe, texts, cache)
    if folder.is_dir():
        console.print(f"[bold]backbone[/]  small GPT-2, pretrained earlier ({folder})")
        return folder
    console.print(
        f"[bold]backbone[/]  small GPT-2, to be pretrained once on the {len(texts):,} training articles"
    )
    columns = TextColumn("pretraining"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=recipe.steps)
        pretrain.prepare(recipe, texts, cache, lambda done: progress.update(bar, completed=done))
    train, test = (_merge([getattr(e, part) for e in experiences]) for part in ("train", "test"))
    accuracy = pretrain.probe(folder, config.max_length, train, test)
    console.print(f"          kept in {folder}")
    console.print(
        f"          a linear classifier on its frozen features reaches {accuracy:.1%} on the test rows"
    )
    return folder


def _merge(splits: Sequence[Split]) -> Split:
    texts = chain.from_iterable(split.texts for split in splits)
    labels = chain.from_iterable(split.labels for split in splits)
    return Split(tuple(texts), tuple(labels))


def _device(name: str) -> str:
    if name in ("auto", "cuda") and ranks.count() > 1 and torch.cuda.is_available():
        return f"cuda:{os.environ['LOCAL_RANK']}"
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise SetupError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return name
