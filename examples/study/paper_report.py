"""The I-GEM paper's two tables beside those of an experiment, its claims, and the differences."""

from typing import Any

from ..common.metrics import METRICS, grouped, metric, paired
from ..common.tables import markdown_table, plus_minus, significant
from ..lora_agnews.methods import METHODS
from ..lora_agnews.report import Summary

Results = dict[str, Any]  # the content of the experiment's results.json
# Statements of the paper, and its two tables of results.
BACKBONE = "GPT-2 medium (355M), NVIDIA H100"
SEEDS = (0, 2, 5, 7, 11)
NUMBERS = (*METRICS, "seconds_per_projection")
RESULTS = {  # mean and standard deviation of each number over the seeds
    "agem": ((0.7601, 0.0179), (-0.103, 0.037), (0.281, 0.027), (0.103, 0.037), (2.16e-4, 9.93e-6)),
    "gem": ((0.7745, 0.0326), (-0.104, 0.037), (0.279, 0.027), (0.104, 0.037), (1.959, 0.452)),
    "igem": ((0.7741, 0.0325), (-0.110, 0.018), (0.280, 0.033), (0.111, 0.019), (2.16e-3, 1.11e-3)),
}
PUBLISHED: Summary = {  # the published part of what `summarize` returns
    method: {name: {"mean": mean, "std": std} for name, (mean, std) in zip(NUMBERS, found, strict=True)}
    for method, found in RESULTS.items()
}


def markdown(results: Results, summary: Summary) -> str:
    """Return the page."""
    config = results["config"]
    spread = f"Mean ± standard deviation over the seeds {', '.join(map(str, config['seeds']))}"
    same = "" if tuple(config["seeds"]) == SEEDS else "; the paper has others"
    where = "paper", "here"
    columns = ("average_accuracy", 100, 2), ("seconds_per_projection", 1e3, None)
    accuracy = ["Method", "AvgAcc (%), paper", "AvgAcc (%), here", "Projection (ms), paper", "here"]
    transfer = ["Method", *(f"{name}, {one}" for name in ("BWT", "FWT", "Forgetting") for one in where)]
    parts = [
        f"{spread}{same}. Projection: mean time of one, without constraint gradients. A dash: not in the "
        "paper, or no projection.",
        markdown_table(accuracy, _rows(summary, *columns)),
        f"{spread}{same}.",
        markdown_table(transfer, _rows(summary, *((name, 1, 3) for name in list(METRICS)[1:]))),
        "What the paper concludes from its tables, and the same here: differences in AvgAcc are paired over "
        "the seeds, with the 95 % interval of Student's t; ratios are of means.",
        markdown_table(["Conclusion", "Paper", "Here"], claim_rows(results, summary)),
        "What differs, or is not given:",
        markdown_table(["", "Paper", "Here"], difference_rows(results)).replace("---:", "---"),
    ]
    return "\n\n".join(parts) + "\n"


def claim_rows(results: Results, summary: Summary) -> list[list[str]]:
    """Return the paper's conclusions in numbers, and differences that it does not report."""
    runs = grouped("method", results["runs"], summary)
    pairs = [("igem", "gem"), ("igem", "agem"), ("gem", "agem"), ("gem-step", "gem"), ("replay", "gem")]
    found = []
    for name, other in [*pairs, ("gem", "plain")]:
        difference = paired(runs.get(name, []), runs.get(other, []), metric("average_accuracy"))
        if difference is not None:
            there = [PUBLISHED[one] for one in (name, other) if one in PUBLISHED]
            means = [of["average_accuracy"]["mean"] for of in there]
            what = f"AvgAcc, {METHODS[name].title} minus {METHODS[other].title} (points)"
            here = f"{100 * difference.mean:+.2f} ± {100 * difference.half:.2f}"
            found.append([what, f"{100 * (means[0] - means[1]):+.2f}" if len(means) == 2 else "-", here])
    for name, other in (("gem", "igem"), ("igem", "agem")):
        if name in summary and other in summary:
            both = (PUBLISHED, summary)
            times = [[of[one]["seconds_per_projection"]["mean"] for one in (name, other)] for of in both]
            what = f"Time of a projection, {METHODS[name].title} over {METHODS[other].title}"
            found.append([what, *(significant(one / two, 2) for one, two in times)])
    return found


def difference_rows(results: Results) -> list[list[str]]:
    """Return settings that differ from the paper's or that it does not state: name, paper, here."""
    config, machine = results["config"], results["environment"]
    train = round(0.8 * config["rows"])
    learned = "pretrained on the training articles of the stream"
    small = f"GPT-2 with {config['small_layers']} layers of width {config['small_width']}, {learned}"
    device = f"{machine.get('gpu') or config['device'].upper()}, torch {machine['torch']}"
    return [
        ["Backbone", "GPT-2 medium, 355M", small if config["backbone"] == "small" else config["backbone"]],
        ["Trained parameters d", "not given; 2,166,784 follow", f"{results['parameters']:,}"],
        ["Length (tokens)", "512", str(config["max_length"])],
        ["Articles", "AG News", results["data"]],
        ["Rows of an experience", "not given", f"{train:,} to train, {config['rows'] - train:,} to test"],
        ["Class shares", "not given", f"{config['dominant_share']:.0%} of one class, the others equal"],
        ["Device", "NVIDIA H100", f"{device}, one thread a run" if config["device"] == "cpu" else device],
        [
            "GEM's projection",
            "a quadratic program, solver not named",
            "exact, on the t x t Gram matrix of the constraints",
        ],
        [
            "I-GEM's step size",
            "c / sigma, c from 0.5 to 0.9, sigma by power iteration",
            "1 / L with L never below the largest eigenvalue",
        ],
        ["Memory", "balance over labels advised, not said whether so", "balanced over the labels of a task"],
        ["Optimizer", "AdamW as an example, weight decay not given", "AdamW, weight decay 0.01"],
        ["FWT", "baseline: accuracy at random initialization", "the same run's accuracy before training"],
        ["Standard deviation", "not said which", "of a sample (n - 1)"],
    ]


def _rows(summary: Summary, *columns: tuple[str, float, int | None]) -> list[list[str]]:
    """Return rows of numbers by method, published and here; columns are (name, scale, decimals)."""
    rows = []
    for name in summary:
        cells = (
            plus_minus(found[name][number], scale, decimals) if name in found else "-"
            for number, scale, decimals in columns
            for found in (PUBLISHED, summary)
        )
        rows.append([METHODS[name].title, *cells])
    return rows
