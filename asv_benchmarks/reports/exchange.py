"""``make bench-exchange``: what a projection that is sharded over processes exchanges, and how long it takes.

All processes are on this machine and share its cores; what carries over to another are the bytes.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import typer
from rich.console import Console

from asv_benchmarks.benchmarks.common import LORA
from asv_benchmarks.reports.machine import describe
from asv_benchmarks.reports.tables import Table, digits
from gemproj.torch.distributed import project

HEAD = [
    "t", "processes", "all-\nreduces", "bytes", "MB to\ngather G",
    "ms\nleast", "ms\nmedian", "exchange\nleast", "exchange\nmedian",
]  # fmt: skip
NOTE = (
    "One projection of `gemproj.torch.distributed.project`, columns spread evenly, over gloo. "
    "Bytes: what a process gives to all-reduces: one of t*t + t + 1 numbers in float64, and one of three "
    "integers, by which processes agree on t before. To gather G: t * d * 4 bytes, what a solver that needs "
    "all of G would move. Exchange: milliseconds of the same all-reduces alone. Times are those of the "
    "slowest process."
)


def main(
    t: Annotated[str, typer.Option(help="Numbers of constraints, separated by commas.")] = "2,9,19",
    d: Annotated[int, typer.Option(help="Number of parameters, of all processes together.")] = LORA,
    processes: Annotated[str, typer.Option(help="Numbers of processes, separated by commas.")] = "1,2,4",
    rounds: Annotated[int, typer.Option(help="Runs of each projection.")] = 50,
    out: Annotated[Path | None, typer.Option(help="Markdown file to write.")] = None,
) -> None:
    """Measure every number of constraints on every number of processes."""
    counts = [int(one) for one in t.split(",")]
    intro = f"d = {d:,}, float32. {describe()}\n\n{NOTE}\n"
    table = Table("Exchange of one projection", HEAD)
    for world in map(int, processes.split(",")):
        for line in measure(world, counts, d, rounds):
            table.rows.append(line)
    table.rows.sort(key=lambda row: int(row[0]))  # stable: processes stay in order
    console = Console()
    console.print(intro, highlight=False)
    console.print(table.rich())
    if out is not None:
        out.write_text("\n".join([intro, table.markdown()]))


def measure(world: int, counts: list[int], d: int, rounds: int) -> list[list[str]]:
    """Return a row of the table for each number of constraints."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, (world, counts, d, rounds, folder), nprocs=world)
        return torch.load(Path(folder, "rows"))


def _process(rank: int, world: int, counts: list[int], d: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    rows = [_row(t, d * (rank + 1) // world - d * rank // world, d, rounds) for t in counts]
    if rank == 0:
        torch.save(rows, Path(folder, "rows"))
    dist.destroy_process_group()


def _row(t: int, n: int, d: int, rounds: int) -> list[str]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    G = torch.randn(t, n, generator=generator)
    g = torch.randn(n, generator=generator) - 0.5 * G.sum(0)
    seen = _all_reduces(G, g)
    parts = [torch.zeros(count, dtype=dtype) for dtype, count in seen]

    def exchange() -> None:
        for part in parts:
            dist.all_reduce(part)

    out = torch.empty_like(g)
    whole, alone = _times(lambda: project(G, g, out=out), rounds), _times(exchange, rounds)
    size = sum(part.nbytes for part in parts)
    times = [digits(1e3 * of(taken)) for taken in (whole, alone) for of in (min, median)]
    return [str(t), str(dist.get_world_size()), str(len(seen)), f"{size:,}", digits(4e-6 * t * d), *times]


def _all_reduces(G: torch.Tensor, g: torch.Tensor) -> list[tuple[torch.dtype, int]]:
    """Return dtype and size of each all-reduce of a projection."""
    seen: list[tuple[torch.dtype, int]] = []
    plain = dist.all_reduce

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append((tensor.dtype, tensor.numel()))
        return plain(tensor, *args, **kwargs)

    dist.all_reduce = counting
    try:
        project(G, g)
    finally:
        dist.all_reduce = plain
    return seen


def _times(run: Any, rounds: int) -> list[float]:
    """Return the seconds of each run, those of the slowest process, which all begin together."""
    times = []
    for k in range(rounds + 1):
        dist.barrier()
        start = time.perf_counter()
        run()
        taken = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        dist.all_reduce(taken, op=dist.ReduceOp.MAX)
        if k:  # once for nothing
            times.append(float(taken))
    return times


if __name__ == "__main__":
    typer.run(main)
