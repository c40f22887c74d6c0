"""Problems whose times are not those of main memory: by size, one tiny one at a time, and in batches."""

from statistics import median
from typing import Any

import torch

from asv_benchmarks.benchmarks.common import batch, problem
from asv_benchmarks.benchmarks.peers import agem_published, floor
from asv_benchmarks.benchmarks.timing import Call, burst, in_turn, settle
from asv_benchmarks.reports.candidates import FLOOR, MEAN, by_columns
from asv_benchmarks.reports.tables import Table, digits
from gemproj import project

BACKENDS = ("numpy", "torch")
SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000, 2_200_000)


def sizes(seconds: float, largest: int = SIZES[-1], t: int = 9) -> Table:
    """Return a table of ratios for problems from a core's cache to main memory."""
    table = Table(
        f"Sizes: t = {t}, float32, `out=`; ratios of least times, that of exact in microseconds",
        ["d", "MB of G", "exact", f"exact\n/ {FLOOR}", "exact\n/ A-GEM mean", "by columns\n/ by rows"],
    )
    for d in (size for size in SIZES if size < 1.1 * largest):
        G, g, _ = problem("torch", "float32", t, d)
        columns, out = by_columns(G), torch.empty_like(g)
        times = in_turn(_calls(G, columns, g, out), seconds / 4)
        exact, turned, least, mean = (min(taken) for taken in times.values())
        ratios = [digits(exact / least, 2), digits(exact / mean, 2), digits(turned / exact, 2)]
        table.rows.append([f"{d:,}", digits(G.nbytes / 1e6, 2), digits(1e6 * exact), *ratios])
    return table


def overhead(seconds: float, t: int = 2, d: int = 1000) -> Table:
    """Return a table of the microseconds that one tiny projection takes."""
    table = Table(
        f"One tiny projection: t = {t}, d = {d:,}, float32; median, microseconds", ["", "NumPy", "torch"]
    )
    for method in ("exact", "agem"):
        taken = [_median(*problem(backend, "float32", t, d)[:2], method, seconds) for backend in BACKENDS]
        table.rows.append([method, *(digits(1e6 * v) for v in taken)])
    return table


def batches(
    seconds: float, counts: tuple[int, ...] = (2, 8, 64), d: int = 64, numbers: int = 1 << 17
) -> Table:
    """Return a table of problems per second, in batches of about so many numbers."""
    table = Table(
        f"Batches: d = {d}, float32, method exact; problems per second", ["t", "batch", "NumPy", "torch"]
    )
    for t in counts:
        n = max(1, numbers // (t * d))
        taken = [_median(*batch(backend, "float32", n, t, d)[:2], "exact", seconds) for backend in BACKENDS]
        table.rows.append([str(t), f"{n:,}", *(digits(n / v) for v in taken)])
    return table


def _calls(G: torch.Tensor, columns: torch.Tensor, g: torch.Tensor, out: torch.Tensor) -> dict[str, Call]:
    return {
        "exact": Call(lambda: project(G, g, out=out)),
        "by columns": Call(lambda: project(columns, g, out=out)),
        FLOOR: Call(lambda: floor(G, g, out)),
        MEAN: Call(lambda: agem_published(G.mean(0), g)),
    }


def _median(G: Any, g: Any, method: str, seconds: float) -> float:
    call = Call(lambda: project(G, g, method=method))
    call.run()
    settle()
    return median(burst(call, seconds))
