"""The backbone of an experiment, ready in a folder before its runs start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import backbone, small, stream
from .config import Config
from .stream import Experience


def backbone_folder(config: Config, experiences: Sequence[Experience], cache: Path, console: Console) -> Path:
    """Return the folder of the backbone; the small one is made if it is not in the cache yet."""
    if config.backbone != "small":
        folder = backbone.locate(config.backbone)
        console.print(f"[bold]backbone[/]  {config.backbone}")
        return folder
    train, test = stream.merge(e.train for e in experiences), stream.merge(e.test for e in experiences)
    folder = small.cached(config, train.texts, cache)
    told = "[bold]backbone[/]  small GPT-2,"
    if folder.is_dir():
        console.print(f"{told} pretrained earlier ({folder})")
        return folder
    console.print(f"{told} to be pretrained once on the {len(train.texts):,} training articles")
    columns = TextColumn("pretraining"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=config.small_steps)
        small.prepare(config, train.texts, folder, lambda done: progress.update(bar, completed=done))
    share = small.probe(folder, config.max_length, train, test)
    console.print(f"          kept in {folder}")
    console.print(
        f"          a linear classifier on its frozen features reaches {share:.1%} on the test rows"
    )
    return folder
