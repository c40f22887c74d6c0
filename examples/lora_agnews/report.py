"""The summary of an experiment, and its tables."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..common.command import SetupError
from ..common.metrics import METRICS, Interval, Record, grouped, mean_std, metric, paired
from ..common.tables import difference, markdown_table, plus_minus, significant
from .methods import METHODS
from .record import PHASES

Summary = dict[str, dict[str, Any]]
CAPTIONS = (
    "Accuracy after the whole stream. {spread}. Over GEM: the difference in AvgAcc, in percentage points, "
    "paired over the seeds, ± half of its 95 % interval (Student's t). Noise: the interval includes zero, so "
    "these seeds do not tell the two apart.",
    "Milliseconds. Projection: mean of one call. The rest: means over all steps after the first "
    "task, in which all methods are alike. Batch includes the replayed rows. {spread}.",
    "Share of measured steps that point against a stored task: cos(g_k, v) < -0.001 for some k, "
    "where v is the gradient handed to the optimizer, or the step that the optimizer makes of it. Last "
    "column: the worst cosine of such a step. {spread}.",
)


def summarize(records: Sequence[Record]) -> Summary:
    """Return mean and standard deviation over the seeds of every number, by method."""
    summary: Summary = {}
    for method, runs in grouped("method", records).items():
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


def summarized(folder: Path) -> tuple[dict[str, Any], Summary]:
    """Return the content of a folder's results.json, and the summary of its runs."""
    path = folder / "results.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return found, summarize(found["runs"])
    except (ValueError, KeyError, TypeError) as error:
        raise SetupError(f"{path} is damaged ({error!r}); without --draw it is written again") from None


def _noise(found: Interval | None) -> str:
    return "" if found is None or found.excludes_zero else ", noise"


def markdown(records: Sequence[Record], summary: Summary) -> str:
    """Return three tables in GitHub's Markdown, each below its caption."""
    runs = grouped("method", records)
    seeds = max(len(numbers["seeds"]) for numbers in summary.values())
    spread = "One seed" if seeds == 1 else f"Mean ± sample standard deviation (n - 1) over {seeds} seeds"
    spread += ", too few to tell methods apart: see --seeds" if seeds == 2 else ""
    lines = []
    for name, numbers in summary.items():
        method = METHODS[name]
        gem = [] if name == "gem" else runs.get("gem", [])
        over = paired(runs[name], gem, metric("average_accuracy"))
        ms = {phase: 1e3 * seconds["mean"] for phase, seconds in numbers["seconds_per_step"].items()}
        first = {"Method": method.title}
        accuracy = first | {
            "AvgAcc (%)": plus_minus(numbers["average_accuracy"], 100, 1),
            "Over GEM": difference(over, brief=True) + _noise(over),
            "BWT": plus_minus(numbers["backward_transfer"], 1, 3),
            "FWT": plus_minus(numbers["forward_transfer"], 1, 3),
            "Forgetting": plus_minus(numbers["forgetting"], 1, 3),
        }
        cost = first | {
            "Projection": plus_minus(numbers["seconds_per_projection"], 1e3),
            "Batch": significant(ms["batch"]),
            "Constraint gradients": significant(ms["constraints"]) if method.promise else "-",
            "Optimizer": significant(ms["optimizer"]),
            "Whole step": significant(sum(ms.values())),
        }
        guarantee = first | {
            "Violated by gradient (%)": plus_minus(numbers["gradient_violated"], 100, 0),
            "Violated by step (%)": plus_minus(numbers["update_violated"], 100, 0),
            "Worst cosine": f"{numbers['worst_update_cosine']:.2f}",
        }
        lines.append((accuracy, cost, guarantee))
    parts = []
    for caption, table in zip(CAPTIONS, zip(*lines, strict=True), strict=True):
        rows = [[*line.values()] for line in table]
        parts += [caption.format(spread=spread), markdown_table([*table[0]], rows)]
    return "\n\n".join(parts) + "\n"
