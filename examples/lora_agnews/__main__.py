"""Learn AG News as a stream of tasks with a language model and LoRA, and compare continual-learning methods.

Another class dominates each experience. After the last one, each method is compared on all experiences: its
accuracy, the cost of its projection, and whether its steps kept GEM's promise. Finished runs are kept: after
an interruption the same command continues where it stopped.
"""

import json
import platform
import sys
from argparse import ArgumentParser, BooleanOptionalAction
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markdown import Markdown
from rich.markup import escape

from ..common import command
from ..common.origin import VERSIONS
from ..common.results import Results
from . import data, stream
from .config import METHODS, PRESETS, Config


def parser() -> ArgumentParser:
    """Return the parser, with an option for each described setting of `Config`, and for folders."""
    found = ArgumentParser("python -m examples.lora_agnews", "%(prog)s [options]", __doc__)
    found.add_argument(
        "--preset",
        default="quick",
        choices=list(PRESETS),
        help="quick (default): a small GPT-2, minutes on CPUs. paper: the paper's settings, GPT-2 medium, "
        "for a GPU. mini: seconds, to see that everything works",
    )
    found.add_argument(
        "--data",
        type=Path,
        help="folder with AG News as train.csv (rows of label, title, description), by default $AGNEWS_DIR; "
        "otherwise the articles come from the Hugging Face hub, or else from a generated corpus",
    )
    found.add_argument("--cache", type=Path, help="folder for the small GPT-2, by default the user's cache")
    found.add_argument("--out", type=Path, help="folder for results, by default runs/agnews-PRESET")
    found.add_argument("--draw", action="store_true", help="run nothing: draw OUT/results.json")
    found.add_argument(
        "--jobs", type=command.count, help="runs at once, by default one for each core, or one on a GPU"
    )
    settings = found.add_argument_group("settings", "By default those of the preset.")
    for one in fields(Config):
        if one.metadata:
            how = {"action": BooleanOptionalAction} if one.default is True else {"type": _reader(one.default)}
            settings.add_argument(f"--{one.name.replace('_', '-')}", help=one.metadata["help"], **how)
    return found


def _reader(default: Any) -> Any:
    """Return the function that parses an argument into a value of the default's type."""
    if not isinstance(default, tuple):
        return type(default)

    def values(text: str) -> tuple[Any, ...]:
        return tuple(type(default[0])(part.strip()) for part in text.split(",") if part.strip())

    values.__name__ = f"list of {type(default[0]).__name__}"  # for argparse's error
    return values


def run(arguments: Sequence[str] | None, console: Console) -> list[Path]:
    """Do the missing runs, write tables, figures and ``results.json``, and return their paths."""
    given = vars(parser().parse_args(arguments))
    settings = {one.name: given[one.name] for one in fields(Config) if given.get(one.name) is not None}
    if settings.get("methods") == ("all",):
        settings["methods"] = METHODS
    config = replace(PRESETS[given["preset"]], **settings)
    out = given["out"] or Path("runs", f"agnews-{config.preset}")
    if given["draw"]:
        from . import figures, report

        return figures.draw(report.read(out)["runs"], out)
    per_class = [sum(column) for column in zip(*stream.rows_needed(config), strict=True)]
    articles = data.load(given["data"], per_class)

    # These take seconds to import; --help should not wait.
    import torch

    from . import backbone, figures, report, small, train

    config = replace(config, device=usable(config.device))
    out.mkdir(parents=True, exist_ok=True)  # if it cannot be made, the experiment ends here
    console.print(f"[bold]data[/]      {escape(f'{articles.source} ({articles.reason})')}")
    experiences = stream.build(articles.texts, articles.labels, config)
    for k, experience in enumerate(experiences):
        sizes = f"{len(experience.train.texts):,} train and {len(experience.test.texts):,} test rows"
        console.print(f"          experience {k + 1}: {sizes}, {config.dominant_share:.0%} {experience.name}")

    folder = small.backbone_folder(config, experiences, given["cache"] or command.cache_folder(), console)
    stage = experiences, folder
    runs = [train.Run(config, method, seed, *stage) for method in config.methods for seed in config.seeds]
    results = Results(out / "runs.jsonl")
    jobs = given["jobs"] or (command.cores() if config.device == "cpu" else 1)
    results.complete("runs", runs, jobs, console)
    records = [results.records[run.key] for run in runs]

    machine = {"python": platform.python_version(), "system": platform.system(), "cpu": platform.machine()}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name()
    about = {
        "config": asdict(config) | {"backbone": Path(config.backbone).name},
        "data": articles.source,
        "parameters": backbone.trained(folder, config),
        "environment": VERSIONS | machine,
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in about.items()]
    lines.append('"runs": [\n' + ",\n".join(map(json.dumps, records)) + "\n]")  # a line for each
    (out / "results.json").write_text("{" + ",\n".join(lines) + "}\n", encoding="utf-8")
    tables = report.markdown(records)
    (out / "table.md").write_text(tables, encoding="utf-8")
    console.print()
    console.print(Markdown(tables))
    return [out / "results.json", out / "table.md", *figures.draw(records, out)]


def usable(name: str) -> str:
    """Return the name of an available device; "auto" means a GPU if there is one."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        raise command.SetupError(f"device {name!r} cannot be used: {str(error).splitlines()[0]}") from None
    return name


main = command.finishing(run)

if __name__ == "__main__":
    sys.exit(main())
