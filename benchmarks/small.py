"""Small problems, where Python's share of the time shows: one at a time, and in batches."""

from __future__ import annotations

from statistics import median

import numpy as np
import torch

from benchmarks.tables import Table, digits
from benchmarks.timing import Call, burst, settle
from gemproj import project


def overhead(seconds: float, t: int = 2, d: int = 1000) -> Table:
    """Return a table of the microseconds that one tiny projection takes."""
    table = Table(
        f"One tiny projection: t = {t}, d = {d:,}, float32; median, microseconds", ["", "NumPy", "torch"]
    )
    rng = np.random.default_rng(0)
    G, g = rng.standard_normal((t, d), dtype=np.float32), rng.standard_normal(d, dtype=np.float32)
    for method in ("exact", "agem"):
        table.rows.append([method, *(digits(1e6 * v) for v in _medians(G, g, method, seconds))])
    return table


def batches(
    seconds: float, sizes: tuple[int, ...] = (2, 8, 64), d: int = 64, numbers: int = 1 << 17
) -> Table:
    """Return a table of problems per second, in batches of about so many numbers."""
    table = Table(
        f"Batches: d = {d}, float32, method exact; problems per second", ["t", "batch", "NumPy", "torch"]
    )
    rng = np.random.default_rng(0)
    for t in sizes:
        count = max(1, numbers // (t * d))
        G = rng.standard_normal((count, t, d), dtype=np.float32)
        g = rng.standard_normal((count, d), dtype=np.float32)
        rates = [digits(count / v) for v in _medians(G, g, "exact", seconds)]
        table.rows.append([str(t), f"{count:,}", *rates])
    return table


def _medians(G: np.ndarray, g: np.ndarray, method: str, seconds: float) -> list[float]:
    """Return the median time on NumPy and on torch."""
    medians = []
    for rows, vector in ((G, g), (torch.from_numpy(G), torch.from_numpy(g))):
        call = Call(lambda rows=rows, vector=vector: project(rows, vector, method=method))  # type: ignore[misc]
        call.run()
        settle()
        medians.append(median(burst(call, seconds)))
    return medians
