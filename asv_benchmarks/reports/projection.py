"""``make bench``: one projection of GPT-2 medium's LoRA gradient, every method and every published recipe.

Ratios carry over to other machines; times do not.
"""

from collections.abc import Iterator
from functools import partial
from statistics import median
from typing import Annotated, Any

import torch
import typer

from asv_benchmarks.benchmarks.common import LORA, Problem, batch, problem
from asv_benchmarks.benchmarks.peaks import peak_memory
from asv_benchmarks.benchmarks.peers import agem_published, floor
from asv_benchmarks.benchmarks.timing import FEWEST, MOST, Call, burst, in_turn, settle
from asv_benchmarks.reports.candidates import FLOOR, GIVEN, MEAN, READ, by_columns, candidates
from asv_benchmarks.reports.machine import describe
from asv_benchmarks.reports.options import Page, numbers
from asv_benchmarks.reports.quality import grade
from asv_benchmarks.reports.tables import Table, digits, power, publish
from gemproj import project

BACKENDS = {"numpy": "NumPy", "torch": "torch"}
SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000, 2_200_000)
# Constraints of the problems of different sizes.
SWEPT_T = 9
HEAD = [
    "", "ms", "ms after torch", "/ A-GEM given", "/ A-GEM mean", "/ floor", "violation", "error",
    "memory % of G",
]  # fmt: skip
NOTE = (
    f"ms: the least time of {FEWEST} to {MOST} rounds, in which all take turns on a machine at rest. "
    "After torch: right after a product of two matrices in torch, as in a training step. "
    "Violation: of G x >= 0, the worst one over |g_i| |g|. Error: |x - x*| / |g|. "
    "Memory: the peak beyond G and g, x included unless in place; good to about 1 MB. "
    "gemproj runs on torch tensors unless NumPy is named. By columns: strides (1, t)."
)


def compare(t: int, d: int, seconds: float) -> Table:
    """Measure all candidates on one problem."""
    G, g, _ = problem("torch", "float32", t, d)
    found = candidates(G, g)
    solving = [name for name in found if name not in (FLOOR, READ)]
    work = torch.ones(512, 512)
    calls = {(name, "at rest"): call for name, call in found.items()}
    calls |= {
        (name, "after torch"): found[name]._replace(just_before=lambda: work @ work) for name in solving
    }
    times = in_turn(calls, seconds)
    least = {key: 1e3 * min(taken) for key, taken in times.items()}
    answers = []
    for name in solving:
        found[name].prepare()
        answers.append(torch.as_tensor(found[name].run()).clone())
    qualities = dict(zip(solving, grade(G, g, answers), strict=True))

    table = Table(f"t = {t}: G has {digits(G.nbytes / 1e6, 2)} MB", HEAD)
    for name, call in found.items():
        ms = least[name, "at rest"]
        after = digits(least[name, "after torch"]) if name in solving else ""
        row = [name, digits(ms), after, *(digits(ms / least[o, "at rest"], 2) for o in (GIVEN, MEAN, FLOOR))]
        if name in solving:
            bytes_ = peak_memory(call)
            row += [power(q) for q in qualities[name]]
            row += ["-" if bytes_ is None else f"{100 * bytes_ / G.nbytes:.0f}"]
        table.rows.append(row + [""] * (len(HEAD) - len(row)))
    return table


def sizes(seconds: float, largest: int) -> Table:
    """Return a table of ratios, for problems that fit a core's cache up to those in main memory."""
    table = Table(
        f"Sizes: t = {SWEPT_T}, float32, `out=`; ratios of least times, that of exact in microseconds",
        ["d", "MB of G", "exact", f"exact / {FLOOR}", "exact / A-GEM mean", "by columns / by rows"],
    )
    for d in (size for size in SIZES if size < 1.1 * largest):
        G, g, _ = problem("torch", "float32", SWEPT_T, d)
        out = torch.empty_like(g)
        runs: list[Any] = [partial(project, rows, g, out=out) for rows in (G, by_columns(G))]
        runs += [partial(floor, G, g, out), lambda G=G, g=g: agem_published(G.mean(0), g)]
        times = in_turn({k: Call(run) for k, run in enumerate(runs)}, seconds / 4)
        exact, turned, least, mean = (min(taken) for taken in times.values())
        ratios = [digits(exact / least, 2), digits(exact / mean, 2), digits(turned / exact, 2)]
        table.rows.append([f"{d:,}", digits(G.nbytes / 1e6, 2), digits(1e6 * exact), *ratios])
    return table


def small(seconds: float) -> Iterator[Table]:
    """Yield tables for small problems: a single one, and batches of about 2^17 numbers."""
    alone = Table(
        "One tiny projection: t = 2, d = 1,000, float32; median, microseconds", ["", *BACKENDS.values()]
    )
    for method in ("exact", "agem"):
        taken = [_median(problem(backend, "float32", 2, 1000), method, seconds) for backend in BACKENDS]
        alone.rows.append([method, *(digits(1e6 * v) for v in taken)])
    yield alone
    many = Table(
        "Batches: d = 64, float32, method exact; problems per second", ["t", "batch", *BACKENDS.values()]
    )
    for t in (2, 8, 64):
        n = (1 << 17) // (t * 64)
        taken = [_median(batch(backend, "float32", n, t, 64), "exact", seconds) for backend in BACKENDS]
        many.rows.append([str(t), f"{n:,}", *(digits(n / v) for v in taken)])
    yield many


def _median(made: Problem, method: str, seconds: float) -> float:
    call = Call(partial(project, *made[:2], method=method))
    call.run()
    settle()
    return median(burst(call, seconds))


def main(
    t: Annotated[str, typer.Option(help="Numbers of constraints, separated by commas.")] = "1,2,9,19,49",
    d: Annotated[int, typer.Option(min=1, help="Number of parameters.")] = LORA,
    seconds: Annotated[
        float, typer.Option(help=f"Time for the repetitions of a call, {FEWEST} to {MOST} rounds.")
    ] = 0.5,
    out: Page = None,
) -> None:
    """Time one projection with every method and every published recipe."""
    counts = numbers(t, "t")

    def parts() -> Iterator[object]:
        yield f"d = {d:,}, float32. {describe()}\n\n{NOTE}\n"
        for count in counts:
            yield compare(count, d, seconds)
        yield sizes(seconds, d)
        yield from small(seconds)

    publish(parts(), out)


if __name__ == "__main__":
    typer.run(main)
