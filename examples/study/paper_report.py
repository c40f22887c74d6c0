"""The I-GEM paper's two tables beside those of an experiment, its claims, and the differences."""

from collections.abc import Mapping
from typing import Any

from ..common.metrics import METRICS, Measure, Spread, grouped, metric, paired, spread
from ..common.tables import markdown_table, plus_minus, significant
from ..lora_agnews.methods import METHODS
from ..lora_agnews.report import average_accuracy, projection

Results = Mapping[str, Any]  # the content of the experiment's results.json
Numbers = dict[str, dict[str, Any]]  # spreads, by method and name
# Statements of the paper, and its two tables of results.
BACKBONE = "GPT-2 medium (355M), NVIDIA H100"
SEEDS = (0, 2, 5, 7, 11)
MEASURES: dict[str, Measure] = {name: metric(name) for name in METRICS} | {"projection": projection}
RESULTS = {  # mean and standard deviation of each number over the seeds
    "agem": ((0.7601, 0.0179), (-0.103, 0.037), (0.281, 0.027), (0.103, 0.037), (2.16e-4, 9.93e-6)),
    "gem": ((0.7745, 0.0326), (-0.104, 0.037), (0.279, 0.027), (0.104, 0.037), (1.959, 0.452)),
    "igem": ((0.7741, 0.0325), (-0.110, 0.018), (0.280, 0.033), (0.111, 0.019), (2.16e-3, 1.11e-3)),
}
PUBLISHED: Numbers = {
    method: {name: Spread(*one, len(SEEDS)) for name, one in zip(MEASURES, found, strict=True)}
    for method, found in RESULTS.items()
}


def markdown(results: Results) -> str:
    """Return the page."""
    config = results["config"]
    here = numbers(results)
    seeds = f"Mean ± standard deviation over the seeds {', '.join(map(str, config['seeds']))}"
    seeds += "" if tuple(config["seeds"]) == SEEDS else "; the paper has others"
    where = "paper", "here"
    columns = ("average_accuracy", 100, 2), ("projection", 1e3, None)
    accuracy = ["Method", "AvgAcc (%), paper", "AvgAcc (%), here", "Projection (ms), paper", "here"]
    transfer = ["Method", *(f"{name}, {one}" for name in ("BWT", "FWT", "Forgetting") for one in where)]
    parts = [
        f"{seeds}. Projection: mean time of one, without constraint gradients. A dash: not in the "
        "paper, or no projection.",
        markdown_table(accuracy, _rows(here, *columns)),
        f"{seeds}.",
        markdown_table(transfer, _rows(here, *((name, 1, 3) for name in list(METRICS)[1:]))),
        "What the paper concludes from its tables, and the same here: differences in AvgAcc are paired over "
        "the seeds, with the 95 % interval of Student's t; ratios are of means.",
        markdown_table(["Conclusion", "Paper", "Here"], claim_rows(results)),
        "What differs, or is not given:",
        markdown_table(["", "Paper", "Here"], difference_rows(results)).replace("---:", "---"),
    ]
    return "\n\n".join(parts) + "\n"


def numbers(results: Results) -> Numbers:
    """Return the numbers of the paper's tables, found here."""
    return {
        method: {name: spread(map(measure, runs)) for name, measure in MEASURES.items()}
        for method, runs in grouped("method", results["runs"]).items()
    }


def claim_rows(results: Results) -> list[list[str]]:
    """Return the paper's conclusions in numbers, and differences that it does not report."""
    runs, here = grouped("method", results["runs"]), numbers(results)
    pairs = [("igem", "gem"), ("igem", "agem"), ("gem", "agem"), ("gem-step", "gem"), ("replay", "gem")]
    found = []
    for name, other in [*pairs, ("gem", "plain")]:
        difference = paired(runs.get(name, []), runs.get(other, []), average_accuracy)
        if difference:
            means = [PUBLISHED[one]["average_accuracy"].mean for one in (name, other) if one in PUBLISHED]
            what = f"AvgAcc, {METHODS[name].title} minus {METHODS[other].title} (points)"
            there = f"{100 * (means[0] - means[1]):+.2f}" if len(means) == 2 else "-"
            found.append([what, there, f"{100 * difference.mean:+.2f} ± {100 * difference.half:.2f}"])
    for name, other in (("gem", "igem"), ("igem", "agem")):
        if name in here and other in here:
            ratios = (of[name]["projection"].mean / of[other]["projection"].mean for of in (PUBLISHED, here))
            what = f"Time of a projection, {METHODS[name].title} over {METHODS[other].title}"
            found.append([what, *(significant(ratio, 2) for ratio in ratios)])
    return found


def difference_rows(results: Results) -> list[list[str]]:
    """Return settings that differ from the paper's or that it does not state: name, paper, here."""
    config, machine = results["config"], results["environment"]
    train = round(0.8 * config["rows"])
    learned = "pretrained on the training articles of the stream"
    named = {
        "small": f"GPT-2 with {config['small_layers']} layers of width {config['small_width']}, {learned}",
        "smollm2": "SmolLM2-135M-Instruct, weights of 4 bits",
    }
    backbone = named.get(config["backbone"], config["backbone"])
    last = config.get("last_layers", 1_000)  # there are results of before it was a setting
    backbone += f", adapters in the last {last} layers" if last < 1_000 else ""
    device = f"{machine.get('gpu') or config['device'].upper()}, torch {machine['torch']}"
    return [
        ["Backbone", "GPT-2 medium, 355M", backbone],
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


def _rows(here: Numbers, *columns: tuple[str, float, int | None]) -> list[list[str]]:
    """Return rows of numbers by method, published and here; columns are (name, scale, decimals)."""
    rows = []
    for name in here:
        cells = (
            plus_minus(found[name][number], scale, decimals) if name in found else "-"
            for number, scale, decimals in columns
            for found in (PUBLISHED, here)
        )
        rows.append([METHODS[name].title, *cells])
    return rows
