"""``make bench-gpu``: the kernels on an NVIDIA GPU, checked, then timed.

Cold times are taken with the L2 cache full of something else, warm ones with what the call before left
there. "floor" is the time in which a copy of the same device moves the bytes that must move: G and g read
once by gram, g and G (all rows of which count here) read once and x written by combine.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markdown import Markdown

import gemproj
from asv_benchmarks.benchmarks.common import LORA, problem
from gemproj import Exact

Call = Callable[[], object]


def as_graph(call: Call) -> Call:
    """Capture a call into a CUDA graph and return its replay."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def timed(call: Call, rounds: int, *, flush: torch.Tensor | None = None) -> float:
    """Return the median milliseconds of a call between events, with `flush` in the L2 cache before it."""
    for _ in range(3):
        call()
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(rounds)]
    for start, end in pairs:
        if flush is not None:
            # Read, not written: lines that must be written back first would count against the call.
            flush.sum()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in pairs)


def copy_bandwidth(rounds: int) -> float:
    """Return the bytes per millisecond, read and written, of a copy of 1 GiB."""
    source = torch.empty(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / timed(lambda: target.copy_(source), rounds)


def agem(g: torch.Tensor, reference: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Project on one reference gradient by torch's operations, without a wait for the device."""
    weight = torch.dot(g, reference).clamp(max=0.0) / torch.dot(reference, reference)
    return torch.sub(g, weight * reference, out=out)


class Stages:
    """The three stages on one problem of the benchmark."""

    def __init__(self, G: torch.Tensor, g: torch.Tensor) -> None:
        # Not at the top: machines without Triton must be able to say that they have no GPU.
        from gemproj.backends.triton.combine import combine
        from gemproj.backends.triton.gram import gram
        from gemproj.backends.triton.solve import solve

        self.rows, self.vector, self.x = [G], [g], torch.empty_like(g)
        self._gram, self._solve, self._combine = gram, solve, combine
        self.K, self.b, _ = self.gram()
        self.lam = self.solve()
        self.all_rows = torch.full_like(self.lam, 0.5)

    def gram(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Run stage 1."""
        return self._gram(self.rows, self.vector)

    def solve(self) -> torch.Tensor:
        """Run stage 2 on what stage 1 found before."""
        return self._solve(self.K, self.b, method=Exact()).multipliers

    def combine(self) -> None:
        """Run stage 3 with a multiplier for every row."""
        self._combine(self.rows, self.vector, self.all_rows, [self.x])

    def project(self) -> torch.Tensor:
        """Run all three as users do."""
        return gemproj.project(self.rows[0], self.vector[0], out=self.x)


def check(t: int, d: int) -> tuple[str, bool]:
    """Return a table row: one problem against the portable form, replayed; and whether it passed."""
    G, g, _ = problem("torch-cuda", "float32", t, d)
    stages = Stages(G, g)
    K, b, gg = gemproj.gram(G.double().cpu(), g.double().cpu())
    scale = float(torch.maximum(K.diagonal().max(), gg))
    found = stages.gram()
    gram_error = max(float((x.cpu() - y).abs().max()) for x, y in zip(found, (K, b, gg), strict=True)) / scale
    expected = gemproj.project(G.double().cpu(), g.double().cpu())
    error = float((stages.project().double().cpu() - expected).abs().max() / expected.abs().max())
    torch.cuda.set_sync_debug_mode("error")
    try:
        stages.project()
        waits = "none"
    except RuntimeError:
        waits = "waits"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    replay = as_graph(stages.project)
    replay()
    first, same = stages.x.clone(), 0
    for _ in range(100):
        stages.x.zero_()
        replay()
        same += int(torch.equal(stages.x, first))
    passed = gram_error < 1e-12 and error < 1e-6 and waits == "none" and same == 100
    return f"| {t} | {gram_error:.0e} | {error:.0e} | {waits} | {same} of 100 |", passed


def times(t: int, d: int, rounds: int, bandwidth: float, flush: torch.Tensor) -> list[str]:
    """Return the table rows of one number of constraints."""
    G, g, _ = problem("torch-cuda", "float32", t, d)
    stages = Stages(G, g)
    reference = G.mean(0)
    floor = {"gram": t + 1, "combine": t + 2, "all three": 2 * t + 3, "A-GEM, reference given": 5}
    floor["A-GEM, mean of rows"] = t + 6
    calls: dict[str, Call] = {
        "gram": stages.gram,
        "solve": stages.solve,
        "combine": stages.combine,
        "all three": stages.project,
        "A-GEM, reference given": lambda: agem(g, reference, stages.x),
        "A-GEM, mean of rows": lambda: agem(g, G.mean(0), stages.x),
    }
    lines = []
    for name, call in calls.items():
        replay = as_graph(call)
        cold = timed(call, rounds, flush=flush), timed(replay, rounds, flush=flush)
        warm = timed(call, rounds), timed(replay, rounds)
        least = floor[name] * d * 4 / bandwidth if name in floor else None
        share = "" if least is None else f"{least:.3f}"
        lines.append(
            f"| {t} | {name} | {cold[0]:.3f} | {cold[1]:.3f} | {warm[0]:.3f} | {warm[1]:.3f} | {share} |"
        )
    return lines


def batch(t: int, count: int, d: int, rounds: int) -> str:
    """Return the table row of a batch of small problems."""
    from gemproj.backends.triton.combine import combine_batch
    from gemproj.backends.triton.gram import gram_batch
    from gemproj.backends.triton.solve import solve

    G, g = torch.randn(count, t, d, device="cuda"), torch.randn(count, d, device="cuda")
    out = torch.empty_like(g)

    def run() -> None:
        gemproj.project(G, g, out=out)

    K, b, _ = gram_batch(G, g)
    lam = solve(K, b, method=Exact()).multipliers
    parts = (
        timed(lambda: gram_batch(G, g), rounds),
        timed(lambda: solve(K, b, method=Exact()), rounds),
        timed(lambda: combine_batch(G, g, lam, out), rounds),
        timed(run, rounds),
    )
    run()
    some = slice(0, 1000)
    expected = gemproj.project(G[some].double().cpu(), g[some].double().cpu())
    error = float((out[some].double().cpu() - expected).abs().max())
    cells = " | ".join(f"{part:.2f}" for part in parts)
    return f"| {t} | {cells} | {count / parts[-1] * 1e3:.2e} | {error:.0e} |"


def main(
    t: Annotated[str, typer.Option(help="Numbers of constraints, separated by commas.")] = "2,8,32,49,100",
    d: Annotated[int, typer.Option(help="Number of parameters.")] = LORA,
    problems: Annotated[int, typer.Option(help="Problems of a batch.")] = 1_000_000,
    rounds: Annotated[int, typer.Option(help="Runs of each candidate; the median counts.")] = 50,
    out: Annotated[Path | None, typer.Option(help="Also write the tables to this Markdown file.")] = None,
) -> None:
    """Check and time the kernels on the first NVIDIA GPU."""
    if not torch.cuda.is_available():
        typer.echo("This benchmark needs an NVIDIA GPU that torch can use, and found none.", err=True)
        raise typer.Exit(1)
    import triton

    counts = [int(part) for part in t.split(",")]
    bandwidth = copy_bandwidth(rounds)
    flush = torch.zeros(1 << 26, dtype=torch.float32, device="cuda")
    checks = [check(count, d) for count in counts]
    lines = [
        f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e6:.0f} GB/s, torch {torch.__version__}, "
        f"Triton {triton.__version__}; d = {d:,} float32, median of {rounds} runs.",
        "",
        "Errors against the portable form in float64, relative to the largest entry.",
        "",
        "| t | error of gram | error of x | waits for the device | bitwise equal replays |",
        "|--:|--:|--:|:--|--:|",
        *(line for line, _ in checks),
        "",
        "Milliseconds; eager calls include what the host takes to launch them where that is longer.",
        "",
        "| t | stage | cold, eager | cold, graph | warm, eager | warm, graph | floor |",
        "|--:|:--|--:|--:|--:|--:|--:|",
        *(line for count in counts for line in times(count, d, rounds, bandwidth, flush)),
        "",
        f"Batches of {problems:,} problems with d = 64, milliseconds, eager.",
        "",
        "| t | gram | solve | combine | all three | problems/s | error of x |",
        "|--:|--:|--:|--:|--:|--:|--:|",
        *(batch(count, problems, 64, rounds) for count in (2, 8)),
    ]
    Console().print(Markdown("\n".join(lines)))
    if out is not None:
        out.write_text("\n".join(lines) + "\n")
    if not all(passed for _, passed in checks):
        typer.echo("A check failed: see the first table.", err=True)
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
