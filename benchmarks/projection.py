"""``make bench``: one projection of GPT-2 medium's LoRA gradient, every method and every published recipe.

All of a row of the table is timed in one process, round robin, and the least disturbed run counts; what
carries over to another machine are the ratios, not the times.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markdown import Markdown
from rich.progress import track

import gemproj
from benchmarks.recipes import agem_published, gem_published, igem_published
from gemproj import PGD, gram

# GPT-2 medium, LoRA r = 8 on c_attn, c_proj and mlp.c_proj, and a head of four classes.
LORA_GPT2_MEDIUM = 2_166_784


def problem(t: int, d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return constraints of related tasks and a gradient that violates about half of them."""
    generator = torch.Generator().manual_seed(t)
    G = torch.randn(t, d, generator=generator) + 0.3 * torch.randn(d, generator=generator)
    return G, -0.3 * G.mean(0) + torch.randn(d, generator=generator)


def candidates(G: torch.Tensor, g: torch.Tensor) -> dict[str, Callable[[], torch.Tensor]]:
    """Return what is timed, by name."""
    out = torch.empty_like(g)
    rows, vector = G.numpy(), g.numpy()
    return {
        "memory floor": lambda: floor(G, g, out),
        "A-GEM, published": lambda: agem_published(G, g),
        "GEM, reference recipe": lambda: gem_published(G, g),
        "I-GEM, published": lambda: igem_published(G, g),
        "gemproj exact (torch)": lambda: gemproj.project(G, g, out=out),
        "gemproj exact (NumPy)": lambda: torch.from_numpy(gemproj.project(rows, vector)),
        "gemproj pgd": lambda: gemproj.project(G, g, method=PGD(steps=3), out=out),
        "gemproj agem": lambda: gemproj.project(G, g, method="agem", out=out),
    }


def floor(G: torch.Tensor, g: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Read G and g twice and write x once, without doing anything with them."""
    for _ in range(2):
        G.sum(), g.sum()
    return out.fill_(0.0)


def residual(G: torch.Tensor, g: torch.Tensor, x: torch.Tensor) -> float:
    """Return the largest violation of a constraint, in units of |g_i| |g|."""
    K, s, _ = gram(G, x)
    scale = K.diagonal().sqrt() * g.double().norm()
    return float((-s / scale).clamp(min=0.0).max())


def best_times(calls: dict[str, Callable[[], torch.Tensor]], rounds: int) -> dict[str, float]:
    """Return the shortest of `rounds` times of each call, taken in turn so that all see the same machine."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def main(
    t: Annotated[str, typer.Option(help="Numbers of constraints, separated by commas.")] = "1,2,9,19,49",
    d: Annotated[int, typer.Option(help="Number of parameters.")] = LORA_GPT2_MEDIUM,
    rounds: Annotated[int, typer.Option(help="Runs of each candidate; the shortest counts.")] = 15,
    out: Annotated[Path | None, typer.Option(help="Also write the table to this Markdown file.")] = None,
) -> None:
    """Time one projection with every method and every published recipe."""
    lines = [
        f"d = {d:,} float32, {torch.get_num_threads()} threads, torch {torch.__version__}, "
        f"best of {rounds} runs.",
        "",
        "| t | candidate | ms | / A-GEM | / floor | worst violation |",
        "|--:|:--|--:|--:|--:|--:|",
    ]
    for count in track([int(part) for part in t.split(",")], "constraints", transient=True):
        G, g = problem(count, d)
        calls = candidates(G, g)
        times = best_times(calls, rounds)
        for name, call in calls.items():
            ms, agem, least = (1e3 * times[key] for key in (name, "A-GEM, published", "memory floor"))
            error = "" if name == "memory floor" else f"{residual(G, g, call()):.0e}"
            lines.append(f"| {count} | {name} | {ms:.2f} | {ms / agem:.1f} | {ms / least:.1f} | {error} |")
    Console().print(Markdown("\n".join(lines)))
    if out is not None:
        out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    typer.run(main)
