"""Teach a chat model something new, and measure how far it drifts from what it says elsewhere.

SmolLM2-135M-Instruct, or another chat model, writes conversations by itself. It then learns a skill: news
sections, which does not conflict with them, or answers in capital letters, which does. Each method is trained
alike; the divergence from the model before is measured in nats per token, on conversations that no training
has seen. Finished runs are kept: after an interruption the same command continues where it stopped.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape

from ..common import command
from ..common.results import Results
from . import model as chat
from . import report
from .prepared import FORMS, Texts
from .run import KINDS, WITHOUT_VALUE, Run

ADAPTERS = ("lora", "osf", "all")
SKILLS = ("news", "capitals", "sequence")
OF_KEPT = ("text", "outputs", "promise", "auto", "trainer")
LAPTOP = "before plain outputs:1 promise:0.02 promise:0.05 promise:0.1"
METHODS = {
    "laptop": LAPTOP,
    "long": "before plain outputs:1 promise:0.05 auto:0.05",
    "sixteen": "before plain promise:0.05 auto:0.05",
    "whole": "before plain promise:0.05 outputs:1",
    "many": "before plain outputs:1 "
    + " ".join(f"promise:{tolerance}#{n}" for n in (32, 128, 512) for tolerance in (0.01, 0.05, 0.3)),
    "gpu": "before plain plain@0.1 plain@0.3 plain@3 average:0.5 text:1 outputs:0.1 outputs:1 outputs:10 "
    "own:1 promise:0.02 promise:0.05 promise:0.1 promise-own:0.05 promise:0.05@3 intruder osf "
    "plain@0.1/all outputs:1@0.1/all promise:0.05@0.1/all",
    "tiny": f"{LAPTOP} auto:0.05*3 promise:0.05#4 trainer:0.05",
}


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser("python -m examples.keep_chat", description=__doc__.splitlines()[0])
    found.add_argument("--form", choices=FORMS, help="size of the runs; laptop, or gpu where there is one")
    found.add_argument("--model", default="smollm2", help="a folder, or a name on the hub, of a chat model")
    found.add_argument("--data", type=Path, help="folder with AG News' train.csv, by default $AGNEWS_DIR")
    found.add_argument("--instructions", type=Path, help="file of tasks, for the skill 'sequence'")
    found.add_argument(
        "--abilities",
        type=Path,
        help="file of multiple choice, to be measured as well: for the tables, 40 questions each of "
        "movie_recommendation, phrase_relatedness and similarities_abstraction of BIG-bench",
    )
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


def method_of(word: str, form: str) -> dict[str, Any]:
    """Return what KIND:VALUE*SETS#TEXTS@RATE/ADAPTERS sets of a run."""
    parts = re.match("([^:*#@/]*)(:[^*#@/]*)?([*][^#@/]*)?(#[^@/]*)?(@[^/]*)?(/.*)?", word)
    assert parts is not None  # an empty text matches, too
    kind, given = parts[1], [(part or "")[1:] for part in parts.groups()[1:]]
    command.check_known("methods", [kind], KINDS)
    adapters = given[4] or ("osf" if kind == "osf" else "lora")
    command.check_known("adapters", [adapters], ADAPTERS)
    try:
        value, sets, kept = float(given[0] or 0), int(given[1] or 1), int(given[2] or 0)
        rate = FORMS[form].rate * float(given[3] or 1)
    except ValueError:
        raise command.SetupError(f"method {word!r}: VALUE, SETS, TEXTS and RATE are numbers") from None
    least, most = 3 if kind == "trainer" else 1, FORMS[form].kept  # it holds a fifth out
    for holds, rule in (
        (bool(given[0]) != (kind in WITHOUT_VALUE), f"{kind} takes {'no' if given[0] else 'a'} value"),
        (0 <= value < inf, "VALUE is finite, and not negative"),
        (0 < rate < inf, "RATE is positive and finite"),
        (not kept or kind in OF_KEPT, f"TEXTS are for {', '.join(OF_KEPT)}"),
        (not kept or least <= kept <= most, f"TEXTS are {least} to {most}"),
        (sets == 1 or kind in ("promise", "auto"), "SETS are for promise and auto"),
        (1 <= sets <= (kept or most), f"SETS are 1 to {kept or most}, as many as there are texts"),
        (adapters == "lora" or kind not in ("average", "intruder"), f"{kind} is for lora"),
        (adapters == "osf" or kind != "osf", "osf has adapters of its own"),
    ):
        if not holds:
            raise command.SetupError(f"method {word!r}: {rule}")
    return dict(kind=kind, value=value, rate=rate, adapters=adapters, kept=kept, sets=sets)  # noqa: C408


@command.finishing
def main(arguments: Sequence[str] | None, console: Console) -> list[Path]:
    """Execute the missing runs, then write tables and figures."""
    options = parser().parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options.form = options.form or ("gpu" if device == "cuda" else "laptop")
    if options.report and options.out is None:
        raise command.SetupError("--report needs --out FOLDER, which has results")
    if options.report:
        results = Results(options.out / "runs.jsonl")
    else:
        skills = [skill.strip() for skill in options.skills.split(",")]
        command.check_known("skills", skills, SKILLS)
        words = (options.methods or METHODS[options.form]).split()
        methods = [method_of(word, options.form) for word in words]
        if "sequence" in skills and any(method["kind"] == "trainer" for method in methods):
            raise command.SetupError("method trainer: the Trainer shuffles, and sequence is about an order")
        cache = options.cache or command.cache_folder()
        cache.mkdir(parents=True, exist_ok=True)
        texts = Texts.read(options.form, chat.locate(options.model, cache), skills, vars(options))
        if texts.news:
            told = f"{texts.news.source} ({texts.news.reason})"
            console.print(f"[bold]news[/]      {escape(told)}")
        file = texts.file(cache)
        wanted = [
            Run(options.form, texts.model, file, skill, seed=seed, device=device, **method)
            for seed, skill, method in product(range(options.seeds), skills, methods)
            if method["kind"] != "before" or not seed  # the same for all seeds
        ]
        options.out = options.out or Path("runs", "keep_chat", file.stem)
        results = Results(options.out / "runs.jsonl")
        results.check({"texts": file.stem})
        if not file.is_file():
            console.print("The model writes conversations, and texts are encoded: minutes, only this time.")
            texts.prepare(device, file)
        jobs = options.jobs or (1 if device == "cuda" else command.cores())
        results.complete("keep_chat", wanted, jobs, console)
    return report.publish(results, options.out, console)


if __name__ == "__main__":
    sys.exit(main())
