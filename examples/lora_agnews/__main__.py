"""Command line: ``python -m examples.lora_agnews``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from .config import METHODS, SetupError, configure

app = typer.Typer(add_completion=False, rich_markup_mode="markdown", pretty_exceptions_enable=False)

DATA, STREAM, LEARNING, MODEL, RUNNING = "Data", "Stream", "Learning", "Model", "Running"


def option(text: str, panel: str, **more: object) -> typer.models.OptionInfo:
    """Describe an option; left out on the command line, the preset decides."""
    return typer.Option(help=text, rich_help_panel=panel, show_default=False, **more)  # type: ignore[arg-type]


@app.command()
def main(
    context: typer.Context,
    preset: Annotated[
        str,
        typer.Option(
            help="**quick**: a small GPT-2, three seeds, minutes on a CPU. **paper**: the paper's settings, "
            "GPT-2 medium, for a GPU. **mini**: seconds, to see that everything works."
        ),
    ] = "quick",
    data: Annotated[
        Path | None,
        option(
            "Folder with AG News as train.csv (rows of label, title, description). Without it the Hugging "
            "Face hub is asked, and if that is out of reach a built-in corpus is generated.",
            DATA,
            envvar="AGNEWS_DIR",
        ),
    ] = None,
    cache: Annotated[
        Path | None,
        option("Where the pretrained small GPT-2 is kept, by default the user's cache folder.", DATA),
    ] = None,
    methods: Annotated[
        str | None, option(f"Methods to compare, with commas between: {', '.join(METHODS)}.", LEARNING)
    ] = None,
    seeds: Annotated[str | None, option("Seeds, with commas between, for example 0,2,5.", LEARNING)] = None,
    epochs: Annotated[int | None, option("Passes over each experience.", LEARNING)] = None,
    lr: Annotated[float | None, option("Learning rate of AdamW.", LEARNING)] = None,
    batch_size: Annotated[int | None, option("Rows in a training batch.", LEARNING)] = None,
    eval_batch_size: Annotated[int | None, option("Rows in an evaluation batch.", LEARNING)] = None,
    margin: Annotated[float | None, option("Memory strength of GEM and I-GEM.", LEARNING)] = None,
    pgd_steps: Annotated[int | None, option("Iterations of I-GEM.", LEARNING)] = None,
    projection_interval: Annotated[int | None, option("Project every that many steps.", LEARNING)] = None,
    on: Annotated[
        str | None, option("What gem-step projects: gradient, update (the applied step) or both.", LEARNING)
    ] = None,
    metric: Annotated[
        str | None, option("Distance between steps for gem-step: euclidean or adam.", LEARNING)
    ] = None,
    penalty: Annotated[float | None, option("Weight of SOFT-GEM's hinges.", LEARNING)] = None,
    dropout: Annotated[bool | None, option("Whether the model drops out while it learns.", LEARNING)] = None,
    per_task: Annotated[int | None, option("Rows kept of each finished experience.", LEARNING)] = None,
    sample_size: Annotated[
        int | None, option("Rows drawn from all memories for A-GEM and for replay.", LEARNING)
    ] = None,
    experiences: Annotated[int | None, option("Number of experiences.", STREAM)] = None,
    rows: Annotated[int | None, option("Rows of an experience, 80 % of them for training.", STREAM)] = None,
    dominant_share: Annotated[
        float | None, option("Share of the class that dominates an experience.", STREAM)
    ] = None,
    backbone: Annotated[
        str | None,
        option(
            "**small** (pretrained here), a GPT-2 on the hub such as gpt2-medium, or a local folder.", MODEL
        ),
    ] = None,
    max_length: Annotated[int | None, option("Tokens of an article that the model sees.", MODEL)] = None,
    small_steps: Annotated[int | None, option("Pretraining steps of the small GPT-2.", MODEL)] = None,
    device: Annotated[str | None, option("cpu, cuda, cuda:1, mps, or auto.", MODEL)] = None,
    eval_interval: Annotated[
        int | None, option("Steps between two points of the accuracy curves.", RUNNING)
    ] = None,
    eval_rows: Annotated[int | None, option("Test rows of a task behind such a point.", RUNNING)] = None,
    probe_interval: Annotated[
        int | None, option("Steps between two measurements of violated constraints.", RUNNING)
    ] = None,
    jobs: Annotated[
        int | None,
        option("Runs at once, by default one for each core, or one on a GPU.", RUNNING, min=1),
    ] = None,
    out: Annotated[
        Path | None, option("Folder for results, by default runs/agnews-PRESET.", RUNNING, file_okay=False)
    ] = None,
) -> None:
    """Learn AG News as a stream of tasks with GPT-2 and LoRA, and compare continual-learning methods.

    Each experience is dominated by another class. After the last one every method is judged on all of them:
    how much it still knows, what the projection cost, and whether the steps it took kept GEM's promise.

    Started by torchrun, its processes learn together: `torchrun --nproc-per-node 2 -m examples.lora_agnews`.
    With --no-dropout they end with the numbers of one.

    Finished runs are kept: the same command after an interruption goes on where it stopped.
    """
    overrides = {
        "methods": None if methods is None else _split(methods),
        "seeds": None if seeds is None else _integers(seeds),
        "epochs": epochs,
        "lr": lr,
        "batch_size": batch_size,
        "eval_batch_size": eval_batch_size,
        "margin": margin,
        "pgd_steps": pgd_steps,
        "projection_interval": projection_interval,
        "on": on,
        "metric": metric,
        "penalty": penalty,
        "dropout": dropout,
        "per_task": per_task,
        "sample_size": sample_size,
        "experiences": experiences,
        "rows": rows,
        "dominant_share": dominant_share,
        "backbone": backbone,
        "max_length": max_length,
        "small_steps": small_steps,
        "device": device,
        "eval_interval": eval_interval,
        "eval_rows": eval_rows,
        "probe_interval": probe_interval,
    }
    named_by = context.get_parameter_source("data")
    from_environment = named_by is not None and named_by.name == "ENVIRONMENT"
    origin = "the environment variable AGNEWS_DIR" if from_environment else "--data"
    console = Console(highlight=False)
    try:
        config = configure(preset, overrides)

        from . import (
            experiment,
            ranks,
        )  # torch and transformers take seconds to import; --help should not wait

        ranks.start(config.device)
        console.quiet = ranks.rank() > 0
        succeeded = experiment.run(
            config,
            data,
            origin,
            cache or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gemproj",
            out or Path("runs") / f"agnews-{preset}",
            jobs,
            console,
        )
    except SetupError as error:
        console.print(f"[red]error[/]     {escape(str(error))}")
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        console.print("[yellow]stopped[/]   finished runs are kept; the same command goes on from here")
        raise typer.Exit(130) from None
    if not succeeded:
        raise typer.Exit(1)


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in _split(text))
    except ValueError:
        raise typer.BadParameter(f"whole numbers with commas between expected, not {text!r}") from None


if __name__ == "__main__":
    app(prog_name="python -m examples.lora_agnews")
