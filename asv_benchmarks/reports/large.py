"""``make bench-large``: one projected step of as many weights as the memory of the machine holds."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from asv_benchmarks.reports.tables import Table
from gemproj.torch import GradientProjector

_WIDTH, _GIB = 8192, 1 << 30
NOTE = (
    "Linear layers of {width} x {width} in bfloat16, all weights trained, {t} tasks of 2 examples, rows in "
    "bfloat16, `on='gradient'`; {threads} threads, {memory:.1f} GiB of memory. Two bytes of each weight go "
    "to the weight, its gradient, that gradient in one vector, and each row."
)


def main(
    layers: Annotated[
        int | None, typer.Option(help="Layers; by default what 85 % of the memory hold.")
    ] = None,
    t: Annotated[int, typer.Option(help="Number of tasks.")] = 4,
    out: Annotated[Path | None, typer.Option(help="Markdown file to write.")] = None,
) -> None:
    """Compute constraint gradients and project the gradient of a model that fills the memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if layers is None:
        layers = max(1, int(0.85 * memory / (2 * (3 + t) * _WIDTH**2)))
    torch.manual_seed(0)
    seconds: dict[str, float] = {}
    start = time.perf_counter()

    def note(part: str) -> None:
        nonlocal start
        now = time.perf_counter()
        seconds[part], start = now - start, now

    stack = [torch.nn.Linear(_WIDTH, _WIDTH, bias=False, dtype=torch.bfloat16) for _ in range(layers)]
    model = torch.nn.Sequential(*stack)
    note("weights")
    tasks = [torch.randn(2, _WIDTH, dtype=torch.bfloat16) for _ in range(t)]
    projector = GradientProjector(model.parameters())
    projector.recall(model, tasks, loss)
    note("constraint gradients")
    (-loss(model, torch.stack(tasks).mean(0))).backward()
    note("gradient")
    done = projector.project_()
    note("projection")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    table = Table(
        "Many weights",
        ["d", "rows, GiB", "peak, GiB", *(f"{part}, s" for part in seconds), "violated", "KKT residual"],
    )
    d = layers * _WIDTH**2
    residual = float(done.solution.kkt_residual())
    table.rows.append(
        [
            f"{d:,}",
            f"{2 * t * d / _GIB:.1f}",
            f"{peak / _GIB:.1f}",
            *(f"{value:.1f}" for value in seconds.values()),
            str(int(done.num_violated)),
            f"{residual:.0e}",
        ]
    )
    text = NOTE.format(width=_WIDTH, t=t, threads=torch.get_num_threads(), memory=memory / _GIB)
    Console().print(text, highlight=False)
    Console().print(table.rich())
    if out is not None:
        out.write_text("\n".join([text, "", table.markdown()]))


def loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Return how far the outputs are from the inputs."""
    return (model(x).float() - x.float()).square().mean()


if __name__ == "__main__":
    typer.run(main)
