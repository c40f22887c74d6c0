"""The tables of an experiment."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..common.command import SetupError
from ..common.metrics import Record, checked, grouped, metric, paired, spent, whole_step
from ..common.tables import difference, mean_of, table
from .methods import METHODS

ACCURACY = (
    "Accuracy after the whole stream. {spread}. Over GEM: the difference in AvgAcc, in percentage points, "
    "paired over the seeds, ± half of its 95 % interval (Student's t). Noise: the interval includes zero, so "
    "these seeds do not tell the two apart."
)
COST = (
    "Milliseconds. Projection: mean of one call. The rest: means over all steps after the first "
    "task, in which all methods are alike. Batch includes the replayed rows. {spread}."
)
GUARANTEE = (
    "Share of measured steps that point against a stored task: cos(g_k, v) < -0.001 for some k, "
    "where v is the gradient handed to the optimizer, or the step that the optimizer makes of it. Last "
    "column: the worst cosine of such a step. {spread}."
)
average_accuracy = metric("average_accuracy")
worst_cosine: Any = checked("update", "worst_cosine")


def projection(record: Record) -> float | None:
    """Return the mean time of a projection; None if there was none."""
    return record["seconds"]["mean_projection"]


def read(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's results.json, whose tables can be made."""
    path = folder / "results.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        markdown(found["runs"])
    except (ValueError, KeyError, TypeError) as error:
        raise SetupError(f"{path} is damaged ({error!r}); without --draw it is written again") from None
    return found


def markdown(records: Sequence[Record]) -> str:
    """Return three tables in GitHub's Markdown, each below its caption."""
    runs = grouped("method", records)
    gem = runs.get("gem", [])

    def over_gem(found: Sequence[Record]) -> str:
        over = paired(found, [] if found is gem else gem, average_accuracy)
        noise = ", noise" if over and not over.excludes_zero else ""
        return difference(over, brief=True) + noise

    seeds = max(map(len, runs.values()))
    spread = "One seed" if seeds == 1 else f"Mean ± sample standard deviation (n - 1) over {seeds} seeds"
    spread += ", too few to tell methods apart: see --seeds" if seeds == 2 else ""
    tables = {
        ACCURACY: {
            "AvgAcc (%)": mean_of(average_accuracy, 100, 1),
            "Over GEM": over_gem,
            "BWT": mean_of(metric("backward_transfer"), 1, 3),
            "FWT": mean_of(metric("forward_transfer"), 1, 3),
            "Forgetting": mean_of(metric("forgetting"), 1, 3),
        },
        COST: {
            "Projection": mean_of(projection, 1e3),
            "Batch": mean_of(spent("batch"), 1e3, beside=""),
            "Constraint gradients": mean_of(spent("constraints"), 1e3, beside=""),
            "Optimizer": mean_of(spent("optimizer"), 1e3, beside=""),
            "Whole step": mean_of(whole_step, 1e3, beside=""),
        },
        GUARANTEE: {
            "Violated by gradient (%)": mean_of(checked("gradient", "violated"), 100, 0),
            "Violated by step (%)": mean_of(checked("update", "violated"), 100, 0),
            "Worst cosine": lambda found: f"{min(map(worst_cosine, found)):.2f}",
        },
    }
    rows = [(METHODS[name].title, found) for name, found in runs.items()]
    parts = [
        f"{caption.format(spread=spread)}\n\n{table(rows, columns)}" for caption, columns in tables.items()
    ]
    return "\n\n".join(parts) + "\n"
