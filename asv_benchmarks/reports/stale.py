"""``make bench-stale``: what constraint gradients that are some steps old do to the promise."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import track
from torch.nn.functional import cross_entropy

from asv_benchmarks.reports.tables import Table
from gemproj.torch import GEM
from gemproj.torch.losses import CrossEntropy

HEAD = [
    "every",
    "gradients\na step",
    "violated",
    "held loss\nrises by",
    "and by, held\nat its bound",
    "new loss",
    "and, with\nthe bound",
    "gradients\na step there",
]
NOTE = (
    "A network of 20-64-5 units learns 200 points, which are held as four tasks of 50, then other labels for "
    "half of the same points, for 200 steps of AdamW (1e-2) with `on='both'`. Every: steps between two "
    "computations of the rows. Gradients a step: constraint gradients that are computed, of four. Violated: "
    "share of applied steps whose cosine with the gradient of a held loss, computed afresh, is below -0.001. "
    "Held loss: the mean of the four. {seeds} seeds, mean and "
    "half the width of a 95 % interval (bootstrap over seeds). Nothing was chosen."
)
_POINTS, _TASKS, _STEPS = 200, 4, 200
INTERVALS = (1, 2, 4, 8, 16)


def main(
    seeds: Annotated[int, typer.Option(help="Number of seeds.")] = 10,
    out: Annotated[Path | None, typer.Option(help="Markdown file to write.")] = None,
) -> None:
    """Train with rows of every age, with and without a bound."""
    torch.set_num_threads(1)  # so small a network gains nothing from more
    table = Table("Stale rows", HEAD)
    for interval in track(INTERVALS, "intervals"):
        plain, bound = (np.array([_run(seed, interval, b) for seed in range(seeds)]) for b in (None, 0.0))
        violated = "{:.0f} ± {:.0f} %".format(*_interval(100 * plain[:, 0]))
        losses = [_interval(values) for values in (plain[:, 1], bound[:, 1], plain[:, 2], bound[:, 2])]
        cells = ["{:.3f} ± {:.3f}".format(*values) for values in losses]
        costs = [f"{runs[:, 3].mean():.2f}" for runs in (plain, bound)]
        table.rows.append([str(interval), costs[0], violated, *cells, costs[1]])
    note = NOTE.format(seeds=seeds)
    console = Console()
    console.print(note, highlight=False)
    console.print(table.rich())
    if out is not None:
        out.write_text("\n".join([note, "", table.markdown()]))


def _run(seed: int, interval: int, bound: float | None) -> tuple[float, ...]:
    """Return the share of violated steps, the rise of the held loss, the new loss, gradients a step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 5))
    x, y = torch.randn(_POINTS, 20), torch.randint(5, (_POINTS,))
    other = torch.where(torch.rand(_POINTS) < 0.5, y, torch.randint(5, (_POINTS,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    computed = 0

    def logits(model: torch.nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        nonlocal computed
        computed += torch.is_grad_enabled()
        return model(batch[0])

    held = CrossEntropy(logits, labels=1)
    gem = GEM(model, optimizer, held, _POINTS, on="both", interval=interval, bound=bound)
    tasks = list(zip(x.chunk(_TASKS), y.chunk(_TASKS), strict=True))
    for one in tasks:
        gem.end_task([one])
    before, violated = _loss(model, x, y), 0
    computed = 0
    for _ in range(_STEPS):
        parameters = list(model.parameters())
        G = torch.stack(
            [_flat(torch.autograd.grad(cross_entropy(model(a), b), parameters)) for a, b in tasks]
        )
        start = _flat(parameters)
        optimizer.zero_grad()
        cross_entropy(model(x), other).backward()
        optimizer.step()
        step = start - _flat(parameters)
        violated += bool((G @ step < -1e-3 * G.norm(dim=1) * step.norm()).any())
    return violated / _STEPS, _loss(model, x, y) - before, _loss(model, x, other), computed / _STEPS


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
