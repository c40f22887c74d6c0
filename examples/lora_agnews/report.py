"""What remains of an experiment: a summary, tables, and one JSON file with everything in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from .config import Config
from .methods import METHODS
from .metrics import mean_std
from .record import PHASES

Record = dict[str, Any]  # what train.run returns
Summary = dict[str, dict[str, Any]]
CAPTIONS = {
    "accuracy": "Accuracy after the whole stream. {spread}.",
    "cost": "Milliseconds. Projection: mean of one call. The rest: means over all steps after the first "
    "task, in which all methods are alike. Batch includes the replayed rows. {spread}.",
    "guarantee": "Share of measured steps that point against a stored task: cos(g_k, v) < -0.001 for some k, "
    "where v is the gradient handed to the optimizer, or the step that the optimizer makes of it. Last "
    "column: the worst cosine of such a step. {spread}.",
}


def summarize(records: Sequence[Record]) -> Summary:
    """Return mean and standard deviation over the seeds of every number, by method."""
    summary: Summary = {}
    for method in dict.fromkeys(record["method"] for record in records):
        runs = [record for record in records if record["method"] == method]
        times = [run["seconds"] for run in runs]
        checks = [run["guarantee"] for run in runs]
        summary[method] = {
            "seeds": [run["seed"] for run in runs],
            **{name: mean_std(run["metrics"][name] for run in runs) for name in runs[0]["metrics"]},
            "seconds_per_step": {phase: mean_std(t["per_step"][phase] for t in times) for phase in PHASES},
            "seconds_per_projection": mean_std(t["mean_projection"] for t in times if t["projections"]),
            "gradient_violated": mean_std(check["gradient"]["violated"] for check in checks),
            "update_violated": mean_std(check["update"]["violated"] for check in checks),
            "worst_update_cosine": min(check["update"]["worst_cosine"] for check in checks),
        }
    return summary


def tables(summary: Summary) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Return header and rows of the three tables as text."""
    accuracy, cost, guarantee = [], [], []
    for name, numbers in summary.items():
        title = METHODS[name].title
        accuracy.append(
            [
                title,
                _number(numbers["average_accuracy"], 100, 1),
                *(
                    _number(numbers[key], 1, 3)
                    for key in ("backward_transfer", "forward_transfer", "forgetting")
                ),
            ]
        )
        seconds = numbers["seconds_per_step"]
        cost.append(
            [
                title,
                _number(numbers["seconds_per_projection"], 1e3),
                significant(1e3 * seconds["batch"]["mean"]),
                significant(1e3 * seconds["constraints"]["mean"]) if METHODS[name].batches else "-",
                significant(1e3 * seconds["optimizer"]["mean"]),
                significant(1e3 * sum(seconds[phase]["mean"] for phase in PHASES)),
            ]
        )
        guarantee.append(
            [
                title,
                _number(numbers["gradient_violated"], 100, 0),
                _number(numbers["update_violated"], 100, 0),
                f"{numbers['worst_update_cosine']:.2f}",
            ]
        )
    return {
        "accuracy": (["Method", "AvgAcc (%)", "BWT", "FWT", "Forgetting"], accuracy),
        "cost": (
            ["Method", "Projection", "Batch", "Constraint gradients", "Optimizer", "Whole step"],
            cost,
        ),
        "guarantee": (
            ["Method", "Violated by gradient (%)", "Violated by step (%)", "Worst cosine"],
            guarantee,
        ),
    }


def show(summary: Summary, console: Console) -> None:
    """Print the tables on the screen."""
    for name, (header, rows) in tables(summary).items():
        table = Table(box=SIMPLE_HEAD, caption=_caption(name, summary), caption_justify="left")
        for k, column in enumerate(header):
            table.add_column(column, justify="right" if k else "left")
        for row in rows:
            table.add_row(*row)
        console.print(table)
        console.print()


def markdown(summary: Summary) -> str:
    """Return the tables in GitHub's Markdown."""
    parts = []
    for name, (header, rows) in tables(summary).items():
        lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
        parts += [_caption(name, summary), "\n".join(f"| {' | '.join(line)} |" for line in lines)]
    return "\n\n".join(parts) + "\n"


def results(
    config: Config, about: Mapping[str, Any], records: Sequence[Record], failed: Sequence[str]
) -> dict[str, Any]:
    """Return the content of ``results.json``."""
    return {
        "config": asdict(config),
        **about,
        "failed": list(failed),
        "summary": summarize(records),
        "runs": list(records),
    }


def significant(value: float, digits: int = 3) -> str:
    """Return a positive number with so many significant digits, and never in scientific notation."""
    return f"{value:,.0f}" if value >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def _number(value: Mapping[str, float | None], scale: float, decimals: int | None = None) -> str:
    """Return mean ± deviation, with fixed decimals or else significant digits."""
    if value["mean"] is None:
        return "-"
    mean = scale * value["mean"]
    text = significant(mean) if decimals is None else f"{mean:.{decimals}f}"
    if value["std"] is None:
        return text
    std = scale * value["std"]
    return f"{text} ± {significant(std, 2) if decimals is None else f'{std:.{decimals}f}'}"


def _caption(name: str, summary: Summary) -> str:
    seeds = max(len(numbers["seeds"]) for numbers in summary.values())
    spread = "One seed" if seeds == 1 else f"Mean ± sample standard deviation (n - 1) over {seeds} seeds"
    return CAPTIONS[name].format(spread=spread)
