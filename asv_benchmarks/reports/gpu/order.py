"""Checks that results do not depend on the timing of the device: waits, replays, streams."""

import math
import sys
import warnings
from itertools import product
from typing import Any

import numpy as np
import torch

import gemproj
from asv_benchmarks.reports.gpu.device import DEVICE, as_graph
from asv_benchmarks.reports.gpu.printing import Found
from asv_benchmarks.reports.gpu.problems import bound, draw, error

REPLAYS = 100
# Additions to 64 MB, which keep a stream busy for some milliseconds.
_ADDITIONS, _BUSY = 200, 1 << 24 if DEVICE.type == "cuda" else 1


def waits(sizes: tuple[int, ...], d: int) -> Found:
    """Count the calls that wait for the device, among numbers of rows and options that promise not to."""
    waited, choices = 0, [*product(sizes, ("none", "margin", "h", "margin and h", "fista"))]
    for t, name in choices:
        (G, g), h = draw(t, d), torch.linspace(-0.1, 0.1, t, dtype=torch.float64, device=DEVICE)
        h[0] = -math.inf
        options: dict[str, Any] = (
            {"margin": 0.05} if "margin" in name else {"method": name} if name == "fista" else {}
        )
        options |= {"h": h} if "h" in name.split() else {}
        gemproj.project(G, g, **options)  # compiles
        torch.cuda.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the debug mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            gemproj.project(G, g, out=g, **options)
        except RuntimeError as reason:
            print(f"t = {t}, {name}: {reason}", file=sys.stderr)
            waited += 1
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return Found(len(choices), waited, 0)


def replays(t: int, d: int, split: bool) -> Found:
    """Replay a captured projection on changed data, then many times on the same data."""
    G, g = draw(t, d)
    x, sizes = torch.empty_like(g), [d // 3, d - d // 3] if split else [d]
    rows, vectors, found = ([*a.split(sizes, dim=-1)] for a in (G, g, x))
    replay = as_graph(lambda: gemproj.project(rows, vectors, out=found))
    errors = []
    for _ in range(3):
        for old, new in zip((G, g), draw(t, d), strict=True):
            old.copy_(new)
        replay()
        errors.append(error(x, G, g))
    first = x.clone()
    for _ in range(REPLAYS):
        x.zero_()
        replay()
        errors.append(0.0 if torch.equal(x, first) else math.nan)
    return Found(REPLAYS, float(np.max(errors)), bound(g.dtype))


def two_streams(t: int, d: int) -> Found:
    """Project in two streams at once; count the results that differ in a bit from those of one stream."""
    problems = [draw(t, d) for _ in range(2)]
    alone = [gemproj.project(*problem) for problem in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    found = []
    for k in range(REPLAYS):
        with torch.cuda.stream(streams[k % 2]):
            found.append(gemproj.project(*problems[k % 2]))
    torch.cuda.synchronize()
    return Found(len(found), sum(not torch.equal(x, alone[k % 2]) for k, x in enumerate(found)), 0)


def in_cupy_stream(own: bool, t: int, d: int) -> Found:
    """Project data that a stream of CuPy has yet to write, and read x in it: the order must be kept."""
    import cupy

    problem = draw(t, d, torch.float64)
    late = [cupy.asarray(a.cpu().numpy()) for a in problem]
    with cupy.cuda.Stream(non_blocking=True) if own else cupy.cuda.Stream.null:
        busy = cupy.zeros(_BUSY, dtype="float32")
        for _ in range(2):  # compiling takes longer than the additions: the second run counts
            G, g = (cupy.zeros_like(a) for a in late)
            cupy.cuda.Device().synchronize()
            for _ in range(_ADDITIONS):
                busy += 1.0
            G[...], g[...] = late
            x = gemproj.project(G, g) + 0.0
        found = cupy.asnumpy(x)
    return Found(1, error(found, *problem), bound(torch.float64))
