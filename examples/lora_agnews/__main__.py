"""Command line: ``python -m examples.lora_agnews``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import Field, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from . import data, stream
from .config import PRESETS, Config, SetupError

TEXT = """
Learn AG News as a stream of tasks with GPT-2 and LoRA, and compare continual-learning methods.

Each experience is dominated by another class. After the last one every method is judged on all of them: how
much it still knows, what the projection cost, and whether the steps it took kept GEM's promise.
Finished runs are kept: the same command after an interruption goes on where it stopped.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser: an option for every described setting of `Config`, and where things are."""
    found = argparse.ArgumentParser(
        "python -m examples.lora_agnews",
        description=TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    found.add_argument(
        "--preset",
        default="quick",
        help="quick: a small GPT-2, three seeds, minutes on a CPU; paper: the paper's settings, GPT-2 medium, "
        "for a GPU; mini: seconds, to see that everything works",
    )
    groups: dict[str, Any] = {}
    for setting in fields(Config):
        if setting.metadata:
            name = setting.metadata["group"]
            group = groups.setdefault(name, None) or found.add_argument_group(name)
            groups[name] = group
            group.add_argument(
                f"--{setting.name.replace('_', '-')}", help=setting.metadata["help"], **kind(setting)
            )
    folders = found.add_argument_group("folders and processes")
    folders.add_argument(
        "--data",
        type=Path,
        help="folder with AG News as train.csv (rows of label, title, description), by default $AGNEWS_DIR; "
        "without it the Hugging Face hub is asked, and if that is out of reach a built-in corpus is generated",
    )
    folders.add_argument(
        "--cache", type=Path, help="where the small GPT-2 is kept, by default the user's cache"
    )
    folders.add_argument("--out", type=Path, help="folder for results, by default runs/agnews-PRESET")
    folders.add_argument("--jobs", type=int, help="runs at once, by default one per core, or one on a GPU")
    return found


def kind(setting: Field[Any]) -> dict[str, Any]:
    """Return how argparse reads a setting; left out, the preset decides."""
    if isinstance(setting.default, bool):
        return {"action": argparse.BooleanOptionalAction}
    if not isinstance(setting.default, tuple):
        return {"type": type(setting.default), "metavar": type(setting.default).__name__.upper()}
    one = type(setting.default[0])

    def several(text: str) -> tuple[Any, ...]:
        return tuple(one(part.strip()) for part in text.split(",") if part.strip())

    several.__name__ = f"list of {one.__name__}"  # as argparse names it in errors
    return {"type": several, "metavar": "A,B,..."}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment; return 0, 1 if a run failed, 2 if it could not start, 130 if it was stopped."""
    given = vars(parser().parse_args(arguments))
    console = Console(highlight=False)
    try:
        if given["preset"] not in PRESETS:
            raise SetupError(f"unknown preset {given['preset']!r}; choose from {', '.join(PRESETS)}")
        settings = {f.name: given[f.name] for f in fields(Config) if given.get(f.name) is not None}
        config = replace(PRESETS[given["preset"]], **settings)
        folder, origin = given["data"], "--data"
        if folder is None and (named := os.environ.get("AGNEWS_DIR")):
            folder, origin = Path(named), "the environment variable AGNEWS_DIR"
        needed = stream.rows_needed(config.experiences, config.rows, config.dominant_share)
        articles = data.load(folder, origin, [sum(column) for column in zip(*needed, strict=True)])

        from . import experiment  # torch and transformers take seconds to import; --help should not wait

        cache = given["cache"] or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gemproj"
        out = given["out"] or Path("runs") / f"agnews-{config.preset}"
        return 0 if experiment.run(config, articles, cache, out, given["jobs"], console) else 1
    except SetupError as error:
        console.print(f"[red]error[/]     {escape(str(error))}")
        return 2
    except KeyboardInterrupt:
        console.print("[yellow]stopped[/]   finished runs are kept; the same command goes on from here")
        return 130


if __name__ == "__main__":
    sys.exit(main())
