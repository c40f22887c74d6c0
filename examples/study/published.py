"""The numbers of the I-GEM paper: the two tables of its results, and the settings it states."""

from typing import Any

from ..common.metrics import METRICS

BACKBONE = "GPT-2 medium (355M), NVIDIA H100"
SEEDS = (0, 2, 5, 7, 11)
NUMBERS = (*METRICS, "seconds_per_projection")
RESULTS = {  # of each number mean and standard deviation over the seeds
    "agem": ((0.7601, 0.0179), (-0.103, 0.037), (0.281, 0.027), (0.103, 0.037), (2.16e-4, 9.93e-6)),
    "gem": ((0.7745, 0.0326), (-0.104, 0.037), (0.279, 0.027), (0.104, 0.037), (1.959, 0.452)),
    "igem": ((0.7741, 0.0325), (-0.110, 0.018), (0.280, 0.033), (0.111, 0.019), (2.16e-3, 1.11e-3)),
}
SUMMARY: dict[str, dict[str, Any]] = {  # as `report.summarize` returns it, as far as it is published
    method: {name: {"mean": mean, "std": std} for name, (mean, std) in zip(NUMBERS, found, strict=True)}
    for method, found in RESULTS.items()
}
