"""What remains of an experiment: a summary of its runs, and tables of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from ..common.metrics import METRICS, mean_std
from ..common.tables import markdown_table, plus_minus, significant
from .methods import METHODS
from .record import PHASES

Record = dict[str, Any]  # what a run returns
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
            **{name: mean_std(run["metrics"][name] for run in runs) for name in METRICS},
            "seconds_per_step": {phase: mean_std(t["per_step"][phase] for t in times) for phase in PHASES},
            "seconds_per_projection": mean_std(t["mean_projection"] for t in times if t["projections"]),
            "gradient_violated": mean_std(check["gradient"]["violated"] for check in checks),
            "update_violated": mean_std(check["update"]["violated"] for check in checks),
            "worst_update_cosine": min(check["update"]["worst_cosine"] for check in checks),
        }
    return summary


def tables(summary: Summary) -> dict[str, list[dict[str, str]]]:
    """Return the rows of the three tables: the text of each cell, by the heading of its column."""
    found: dict[str, list[dict[str, str]]] = {name: [] for name in CAPTIONS}
    for name, numbers in summary.items():
        method = METHODS[name]
        ms = {phase: 1e3 * seconds["mean"] for phase, seconds in numbers["seconds_per_step"].items()}
        rows = {
            "accuracy": {
                "AvgAcc (%)": plus_minus(numbers["average_accuracy"], 100, 1),
                "BWT": plus_minus(numbers["backward_transfer"], 1, 3),
                "FWT": plus_minus(numbers["forward_transfer"], 1, 3),
                "Forgetting": plus_minus(numbers["forgetting"], 1, 3),
            },
            "cost": {
                "Projection": plus_minus(numbers["seconds_per_projection"], 1e3),
                "Batch": significant(ms["batch"]),
                "Constraint gradients": significant(ms["constraints"]) if method.options else "-",
                "Optimizer": significant(ms["optimizer"]),
                "Whole step": significant(sum(ms.values())),
            },
            "guarantee": {
                "Violated by gradient (%)": plus_minus(numbers["gradient_violated"], 100, 0),
                "Violated by step (%)": plus_minus(numbers["update_violated"], 100, 0),
                "Worst cosine": f"{numbers['worst_update_cosine']:.2f}",
            },
        }
        for table, row in rows.items():
            found[table].append({"Method": method.title} | row)
    return found


def show(summary: Summary, console: Console) -> None:
    """Print the tables on the screen."""
    for name, rows in tables(summary).items():
        table = Table(box=SIMPLE_HEAD, caption=_caption(name, summary), caption_justify="left")
        for k, heading in enumerate(rows[0]):
            table.add_column(heading, justify="right" if k else "left")
        for row in rows:
            table.add_row(*row.values())
        console.print(table)
        console.print()


def markdown(summary: Summary) -> str:
    """Return the tables in GitHub's Markdown."""
    parts = []
    for name, rows in tables(summary).items():
        cells = [list(row.values()) for row in rows]
        parts += [_caption(name, summary), markdown_table(list(rows[0]), cells)]
    return "\n\n".join(parts) + "\n"


def _caption(name: str, summary: Summary) -> str:
    seeds = max(len(numbers["seeds"]) for numbers in summary.values())
    spread = "One seed" if seeds == 1 else f"Mean ± sample standard deviation (n - 1) over {seeds} seeds"
    return CAPTIONS[name].format(spread=spread)
