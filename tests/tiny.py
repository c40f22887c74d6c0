"""A stream in miniature for tests of the study, also in processes of their own, which import little."""

from dataclasses import replace

from examples.study.settings import STREAMS

TINY = replace(
    STREAMS["permuted"],
    options={"tasks": 3, "rows": 60, "hidden": 16},
    methods=("plain", "gem"),
    seeds=(0, 1, 2, 3, 4, 5),
    rates=(0.02, 0.05, 0.1, 0.2, 0.5),
    per_task=8,
    eval_interval=3,
    probe_interval=2,
)


def one_by_one(waiting, keep, jobs, console):
    """Stand for `examples.common.workers.work` without processes."""
    for run in waiting:
        keep(run, {"wall_seconds": 0.0} | run(lambda *state: None))
