"""``make bench-stale``: what constraint gradients that are some steps old do to the promise."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from torch.nn.functional import cross_entropy

from asv_benchmarks.reports.tables import Table
from gemproj.torch import GEM
from gemproj.torch.losses import CrossEntropy

HEAD = [
    "rows every",
    "violated",
    "held loss\nrises by",
    "and by, held\nat its bound",
    "new loss",
    "and, with\nthe bound",
]
NOTE = (
    "A network of 20-64-5 units learns 200 points, then other labels for half of the same points, for 200 "
    "steps of AdamW (1e-2) with `on='both'`. Violated: share of applied steps whose cosine with the gradient "
    "of the held loss, computed afresh, is below -0.001. {seeds} seeds, mean and half the width of a 95 % "
    "interval (bootstrap over seeds). Nothing was chosen."
)
_TASKS, _STEPS = 200, 200


def main(
    intervals: Annotated[str, typer.Option(help="Steps between two computations.")] = "1,2,4,8,16",
    seeds: Annotated[int, typer.Option(help="Number of seeds.")] = 10,
    out: Annotated[Path | None, typer.Option(help="Markdown file to write.")] = None,
) -> None:
    """Train with rows of every age, with and without a bound."""
    torch.set_num_threads(1)  # so small a network gains nothing from more
    table = Table("Stale rows", HEAD)
    for interval in map(int, intervals.split(",")):
        plain, bound = (np.array([_run(seed, interval, b) for seed in range(seeds)]) for b in (None, 0.0))
        columns = (100 * plain[:, 0], plain[:, 1], bound[:, 1], plain[:, 2], bound[:, 2])
        violated, *losses = (_interval(values) for values in columns)
        table.rows.append(
            [
                str(interval),
                "{:.0f} ± {:.0f} %".format(*violated),
                *("{:.3f} ± {:.3f}".format(*v) for v in losses),
            ]
        )
    note = NOTE.format(seeds=seeds)
    console = Console()
    console.print(note, highlight=False)
    console.print(table.rich())
    if out is not None:
        out.write_text("\n".join([note, "", table.markdown()]))


def _run(seed: int, interval: int, bound: float | None) -> tuple[float, float, float]:
    """Return the share of violated steps, by how much the held loss rose, and the loss of the new labels."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5))
    x, y = torch.randn(_TASKS, 20), torch.randint(5, (_TASKS,))
    other = torch.where(torch.rand(_TASKS) < 0.5, y, torch.randint(5, (_TASKS,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    held = CrossEntropy(lambda model, batch: model(batch[0]), labels=1)
    gem = GEM(model, optimizer, held, per_task=_TASKS, on="both", interval=interval, bound=bound)
    gem.end_task([(x, y)])
    before, violated = _loss(model, x, y), 0
    for _ in range(_STEPS):
        row = _flat(torch.autograd.grad(cross_entropy(model(x), y), list(model.parameters())))
        start = _flat(model.parameters())
        optimizer.zero_grad()
        cross_entropy(model(x), other).backward()
        optimizer.step()
        step = start - _flat(model.parameters())
        violated += bool(row @ step < -1e-3 * row.norm() * step.norm())
    return violated / _STEPS, _loss(model, x, y) - before, _loss(model, x, other)


@torch.no_grad()
def _loss(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    return cross_entropy(model(x), y).item()


def _flat(tensors: object) -> torch.Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])  # type: ignore[attr-defined]


def _interval(values: np.ndarray) -> tuple[float, float]:
    """Return the mean, and half the width of the bootstrap's 95 % interval."""
    draws = np.random.default_rng(0).choice(values, (2000, len(values))).mean(axis=1)
    low, high = np.quantile(draws, [0.025, 0.975])
    return float(values.mean()), float(high - low) / 2


if __name__ == "__main__":
    typer.run(main)
