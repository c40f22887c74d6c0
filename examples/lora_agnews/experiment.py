"""The whole experiment, from articles to figures."""

import json
import platform
from dataclasses import asdict, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape

from ..common import command
from ..common.results import Results
from ..common.workers import VERSIONS, work
from . import small, stream
from .config import Config
from .data import Articles


def run(
    config: Config, articles: Articles, cache: Path, out: Path, jobs: int | None, console: Console
) -> None:
    """Run an experiment and write tables, figures and ``results.json`` into `out`.

    The small backbone is kept in `cache`. `jobs` is by default the number of cores, or 1 on a GPU.
    """
    config = replace(config, device=usable(config.device))
    out.mkdir(parents=True, exist_ok=True)  # if it cannot be made, the experiment ends here
    console.print(f"[bold]data[/]      {escape(f'{articles.source} ({articles.reason})')}")
    experiences = stream.build(articles.texts, articles.labels, config)
    for k, experience in enumerate(experiences):
        sizes = f"{len(experience.train.texts):,} train and {len(experience.test.texts):,} test rows"
        console.print(f"          experience {k + 1}: {sizes}, {config.dominant_share:.0%} {experience.name}")

    folder = small.backbone_folder(config, experiences, cache, console)
    from . import backbone, figures, report, runs

    stage = experiences, folder
    todo = [runs.Run(config, method, seed, *stage) for method in config.methods for seed in config.seeds]
    workers = min(jobs or (command.cores() if config.device == "cpu" else 1), len(todo))
    results = Results(out / "runs.jsonl")
    waiting = results.missing(todo)
    earlier = f"; {len(todo) - len(waiting)} are finished" if len(waiting) < len(todo) else ""
    where = f"{config.device}, {workers} at a time, into {out}{earlier}"
    console.print(f"[bold]runs[/]      {len(todo)} on {where}")
    work(waiting, results.keep, workers, console)
    records = [results.records[run.key] for run in todo]

    machine = {"python": platform.python_version(), "system": platform.system(), "cpu": platform.machine()}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    summary = report.summarize(records)
    about = {
        "config": asdict(config) | {"backbone": Path(config.backbone).name},
        "data": articles.source,
        "parameters": backbone.trained(folder),
        "environment": VERSIONS | machine,
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in about.items()]
    lines.append('"runs": [\n' + ",\n".join(map(json.dumps, records)) + "\n]")  # a line for each
    (out / "results.json").write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")
    tables = report.markdown(records, summary)
    (out / "table.md").write_text(tables, encoding="utf-8")
    paths = figures.draw(records, {"": summary}, out)
    console.print()
    console.print(Markdown(tables))
    names = ", ".join(["results.json", "table.md", *(path.name for path in paths)])
    console.print(f"[bold]written[/]   {names} in {out}")


def usable(name: str) -> str:
    """Return the name of an available device; "auto" means a GPU if there is one."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise command.SetupError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return name
