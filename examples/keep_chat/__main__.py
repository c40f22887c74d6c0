"""Teach a chat model something new, and measure how far it drifts from what it says elsewhere.

SmolLM2-135M-Instruct, or another chat model, writes conversations by itself. It then learns a skill: news
sections, which does not conflict with them, or answers in capital letters, which does. Each method is trained
alike; the divergence from the model before is measured in nats per token, on conversations that no training
has seen. Finished runs are kept: after an interruption the same command continues where it stopped.
"""

import argparse
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape

from ..common import command
from ..common.results import Results
from . import model as chat
from . import report
from .prepared import FORMS, load, named, prepare
from .run import KINDS, WITHOUT_VALUE, Run

ADAPTERS = ("lora", "osf", "all")
SKILLS = ("news", "capitals", "sequence")
OF_KEPT = ("text", "outputs", "promise", "auto", "trainer")
LAPTOP = "before plain outputs:1 promise:0.02 promise:0.05 promise:0.1"
GPU = (
    "before plain plain@0.1 plain@0.3 plain@3 average:0.5 text:1 outputs:0.1 outputs:1 outputs:10 own:1 "
    "promise:0.02 promise:0.05 promise:0.1 promise-own:0.05 promise:0.05@3 intruder osf "
    "plain@0.1/all outputs:1@0.1/all promise:0.05@0.1/all"
)
LONG = "before plain outputs:1 promise:0.05 auto:0.05"
MANY = "before plain outputs:1 " + " ".join(
    f"promise:{tolerance}#{texts}" for texts in (32, 128, 512) for tolerance in (0.01, 0.05, 0.3)
)
METHODS = {
    "laptop": LAPTOP,
    "long": LONG,
    "many": MANY,
    "gpu": GPU,
    "tiny": f"{LAPTOP} auto:0.05*3 promise:0.05#4 trainer:0.05",
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser("python -m examples.keep_chat", description=__doc__.splitlines()[0])
    found.add_argument("--form", choices=FORMS, help="size of the runs; laptop, or gpu where there is one")
    found.add_argument("--model", default="smollm2", help="a folder, or a name on the hub, of a chat model")
    found.add_argument("--data", type=Path, help="folder with AG News' train.csv, by default $AGNEWS_DIR")
    found.add_argument("--instructions", type=Path, help="file of tasks, for the skill 'sequence'")
    found.add_argument("--abilities", type=Path, help="file of multiple choice, to be measured as well")
    found.add_argument("--skills", default="news,capitals", help=f"separated by commas: {', '.join(SKILLS)}")
    found.add_argument(
        "--methods",
        help="separated by spaces: KIND:VALUE*SETS#TEXTS@RATE/ADAPTERS, with the number of sets in which "
        "texts are kept, the number of texts to use, a factor of the form's rate, and "
        f"{', '.join(ADAPTERS)}; kinds are {', '.join(KINDS)}",
    )
    found.add_argument("--seeds", type=command.count, default=1, help="number of seeds, from 0")
    found.add_argument("--cache", type=Path, help="folder for the model and the texts it wrote")
    found.add_argument(
        "--out", type=Path, help="folder for results, by default runs/keep_chat/ and the name of the texts"
    )
    found.add_argument("--jobs", type=command.count, help="runs at once, by default one for each core or GPU")
    found.add_argument("--report", action="store_true", help="only write tables and figures")
    return found


def runs_of(
    text: str, form: str, where: str, prepared: Path, skill: str, seed: int, device: str
) -> list[Run]:
    """Return the runs of a list of methods."""
    runs = []
    for word in text.split():
        first, _, adapters = word.partition("/")
        first, _, factor = first.partition("@")
        first, _, texts = first.partition("#")
        first, _, sets = first.partition("*")
        kind, _, value = first.partition(":")
        command.check_known("methods", [kind], KINDS)
        trained = adapters or ("osf" if kind == "osf" else "lora")
        command.check_known("adapters", [trained], ADAPTERS)
        try:
            numbers = float(value or 0), FORMS[form].rate * float(factor or 1)
            kept, parts = int(texts or 0), int(sets or 1)
        except ValueError:
            raise command.SetupError(f"method {word!r}: VALUE, SETS, TEXTS and RATE are numbers") from None
        least, most = 3 if kind == "trainer" else 1, FORMS[form].kept  # it holds a fifth out
        for holds, rule in (
            (bool(value) != (kind in WITHOUT_VALUE), f"{kind} takes {'no' if value else 'a'} value"),
            (0 <= numbers[0] < inf, "VALUE is finite, and not negative"),
            (0 < numbers[1] < inf, "RATE is positive and finite"),
            (not kept or kind in OF_KEPT, f"TEXTS are for {', '.join(OF_KEPT)}"),
            (not kept or least <= kept <= most, f"TEXTS are {least} to {most}"),
            (parts == 1 or kind in ("promise", "auto"), "SETS are for promise and auto"),
            (1 <= parts <= (kept or most), f"SETS are 1 to {kept or most}, as many as there are texts"),
            (trained == "lora" or kind not in ("average", "intruder"), f"{kind} is for lora"),
            (trained == "osf" or kind != "osf", "osf has adapters of its own"),
        ):
            if not holds:
                raise command.SetupError(f"method {word!r}: {rule}")
        if kind != "before" or not seed:  # the same for all seeds
            runs.append(Run(form, where, prepared, skill, kind, *numbers, trained, seed, kept, parts, device))
    return runs


@command.finishing
def main(arguments: Sequence[str] | None, console: Console) -> None:
    """Execute the missing runs, then write tables and figures."""
    options = parser().parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options.form = options.form or ("gpu" if device == "cuda" else "laptop")
    if options.report:
        if options.out is None:
            raise command.SetupError("--report needs --out FOLDER, which has results")
        results = Results(options.out / "runs.jsonl")
    else:
        skills = [skill.strip() for skill in options.skills.split(",")]
        command.check_known("skills", skills, SKILLS)
        cache = options.cache or command.cache_folder()
        cache.mkdir(parents=True, exist_ok=True)
        form, where = FORMS[options.form], chat.locate(options.model, cache)
        sources = load(skills, vars(options))
        if sources.news:
            told = f"{sources.news.source} ({sources.news.reason})"
            console.print(f"[bold]news[/]      {escape(told)}")
        file = named(form, where, skills, sources, cache)
        text = options.methods or METHODS[options.form]
        wanted = [
            run
            for seed in range(options.seeds)
            for skill in skills
            for run in runs_of(text, options.form, where, file, skill, seed, device)
        ]
        options.out = options.out or Path("runs", "keep_chat", file.stem)
        results = Results(options.out / "runs.jsonl")
        results.check({"texts": file.stem})
        if not file.is_file():
            console.print("The model writes conversations, and texts are encoded: minutes, only this time.")
        prepare(form, where, skills, sources, device, file)
        jobs = options.jobs or (1 if device == "cuda" else command.cores())
        results.complete("keep_chat", wanted, jobs, console)
    for path in report.publish(results, options.out, console):
        console.print(f"[bold]written[/]   {path}")


if __name__ == "__main__":
    sys.exit(main())
