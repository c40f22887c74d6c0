"""Part 1: results of the device against results of the CPU."""

import math
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

import gemproj
from asv_benchmarks.reports.families import FAMILIES
from asv_benchmarks.reports.gpu import order
from asv_benchmarks.reports.gpu.device import DEVICE
from asv_benchmarks.reports.gpu.printing import Checks, Found
from asv_benchmarks.reports.gpu.problems import bound, draw, error, flat
from asv_benchmarks.reports.gpu.suites import run_suites
from gemproj import FISTA, PGD, Status

SIZES = (1, 2, 3, 5, 8, 9, 16, 17, 32, 33, 64, 100, 168, 256)
SOME = (2, 8, 12)
# Above 8 rows the CPU solves: this synchronises, and no graph can capture it.
ORDERED = (2, 8)
BATCHES = [(2, 64, (1000,)), (9, 40, (7, 1)), (33, 70, (100,)), (8, 4000, (20,)), (3, 5, (2, 3, 4))]
# Columns of usual, larger and large problems, and so many that three rows overflow 32-bit offsets.
D, LARGER, LARGE, HUGE = 5003, 100_060, 2_166_784, (1 << 30) + 5
# The most rows of hard problems; the number of integer problems of each size.
LARGEST = 120
FUZZ = [(4167, t, d) for t in range(1, 7) for d in range(1, 5)] + [(500, t, 4) for t in range(9, 13)]
# Families beyond a Gram matrix in float64. If the status says so, x is not judged.
BEYOND = ("opposite, tilt 1e-5", "opposite, tilt 1e-7", "condition", "Hilbert")


Case = tuple[Any, Any, dict[str, Any]]  # G, g and options, on the device


def cases() -> Iterator[tuple[str, torch.dtype, list[Case]]]:
    """Yield kinds of problems: a name, the dtype of x, and the problems."""
    f32, f64 = torch.float32, torch.float64
    for dtype, most in ((f32, 256), (f64, 100), (torch.float16, 33), (torch.bfloat16, 33)):
        sizes = [t for t in SIZES if t <= most]
        yield f"{dtype}, t = 1 to {most}", dtype, [(*draw(t, D, dtype), {}) for t in sizes]
    yield f"d = {LARGE:,}", f32, [(*draw(t, LARGE), {}) for t in SOME]
    wide, vector = draw(24, D)[0], draw(1, D - 9)[1]
    gaps = wide[::2, 3:-6]
    yield "rows with gaps", f32, [(gaps[:t], vector, {}) for t in SOME]
    yield "rows by columns", f32, [(gaps[:t].T.contiguous().T, vector, {}) for t in SOME]
    yield "blocks of three dtypes", f32, [_in_blocks(t) for t in SOME]
    yield "batches", f32, [(*draw(t, d, batch=batch), {}) for t, d, batch in BATCHES]
    h, off = (torch.tensor(value, dtype=f64, device=DEVICE) for value in (-0.1, -math.inf))
    options: list[dict[str, Any]] = [{"penalty": 0.1}, {"margin": 0.05}, {"equality": True}, {"h": h}]
    options += [{"method": method} for method in (PGD(steps=5), FISTA(steps=30), "agem")]
    for given in [*options, {"margin": 0.05, "h": off}]:
        some = [(*draw(t, D, f64), given) for t in SOME]
        yield ", ".join(map(str, given.values())) if "method" in given else " and ".join(given), f64, some


def _in_blocks(t: int) -> Case:
    G, g = draw(t, D)
    sizes, shapes = [60, 1, D - 61], [(5, 12), (), (D - 61,)]
    dtypes = torch.float64, torch.float16, torch.float32
    rows = [a.to(dtype).reshape(t, *s) for a, s, dtype in zip(G.split(sizes, 1), shapes, dtypes, strict=True)]
    return rows, [a.reshape(s) for a, s in zip(g.split(sizes), shapes, strict=True)], {}


def against_the_cpu(problems: list[Case], dtype: torch.dtype) -> Found:
    """Compare projections with those of the CPU."""
    errors = [error(gemproj.project(G, g, **options), G, g, **options) for G, g, options in problems]
    return Found(len(problems), float(np.max(errors)), bound(dtype))


def off(x: Any, right: np.ndarray, g: np.ndarray) -> float:
    """Return the error of a projection over the norm of g, or the largest of a batch."""
    return float((np.linalg.norm(flat(x) - right, axis=-1) / np.linalg.norm(g, axis=-1)).max())


def families() -> Found:
    """Project families of problems that are hard for one solver or another."""
    errors = []
    for name, family in FAMILIES.items():
        for G, g in family.problems(1, LARGEST):
            there = [torch.from_numpy(a).to(DEVICE) for a in (G, g)]
            resolved = int(gemproj.solve_gram(*gemproj.gram(G, g)).status) == Status.OPTIMAL  # by K alone
            if not name.startswith(BEYOND) or resolved:
                errors.append(off(gemproj.project(*there), gemproj.project(G, g), g))
    return Found(len(errors), float(np.max(errors)), 1e-8)


def fuzz() -> Found:
    """Project a batch of each size of small integers, whose rows repeat, cancel and depend on each other."""
    errors = []
    for n, t, d in FUZZ:
        rng = np.random.default_rng([t, d])
        G, g = rng.integers(-2, 3, (n, t, d)).astype(float), rng.integers(-3, 4, (n, d)).astype(float)
        g[~g.any(axis=1), 0] = 1.0
        # K is exact for integers, so that a return to the rows would add nothing.
        right = gemproj.combine(G, g, gemproj.solve_gram(*gemproj.gram(G, g)).multipliers)
        errors.append(off(gemproj.project(*(torch.from_numpy(a).to(DEVICE) for a in (G, g))), right, g))
    return Found(sum(size[0] for size in FUZZ), float(np.max(errors)), 1e-9)


def many_columns() -> Found:
    """Compare one array whose offsets need more than 32 bits with two blocks of it."""
    G, g = draw(3, HUGE, torch.bfloat16)
    x, half = gemproj.project(G, g), HUGE // 2
    parts = gemproj.project([G[:, :half], G[:, half:]], [g[:half], g[half:]])
    apart = float((x - torch.cat(parts)).abs_().max()) / float(x.abs().max())
    return Found(1, apart, 2 * bound(g.dtype))


def check_time(checks: Checks) -> None:
    """Check hard problems, and results that must not depend on the timing of the device."""
    checks.add("hard families", families)
    checks.add("degenerate integers", fuzz)
    checks.add("waits for the device", partial(order.waits, ORDERED, D))
    checks.add("two streams at once", partial(order.two_streams, 8, LARGER))
    for t in ORDERED:
        for split in (False, True):
            title = f"graph replayed on changed data, t = {t}{', two blocks' * split}"
            checks.add(title, partial(order.replays, t, LARGER, split))
    if find_spec("cupy") is None:
        checks.row("CuPy", "", "", "", "not there")
        return
    for own, stream in enumerate(("default stream", "a stream of its own")):
        checks.add(f"CuPy, {stream}", partial(order.in_cupy_stream, bool(own), 3, LARGER))


def main(seconds: float) -> int:
    """Check everything within `seconds`; return the exit code."""
    torch.manual_seed(20171208)
    wrong = run_suites(0.65 * seconds)
    checks = Checks("Against the CPU; errors are relative to the largest entry, or to the norm of g")
    for kind, dtype, problems in cases():
        checks.add(kind, partial(against_the_cpu, problems, dtype))
    checks.add(f"d = {HUGE:,}, one array against two blocks", many_columns)
    check_time(checks)
    return int(bool(wrong + checks.wrong))
