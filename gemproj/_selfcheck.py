"""``python -m gemproj --check``: problems with known answers, in each library, device and backend."""

from __future__ import annotations

import importlib
from collections import namedtuple
from collections.abc import Collection, Iterator
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np

import gemproj
from gemproj import backends
from gemproj._arrays import to_numpy
from gemproj.backends.numba import installed
from gemproj.backends.triton import missing as no_kernels

PROBLEMS = 200
WITHIN = {"float64": 1e-9, "float32": 1e-6}  # tolerances for |x - x*| / |g|
KINDS = ["generic", "parallel", "mixed norms", "repeated", "opposite", "more rows than columns", "zero row"]
OPTIONS = ["h", "equality", "margin", "penalty", "metric"]
Known = namedtuple("Known", "G g x options")  # x is the projection


def draw(rng: np.random.Generator, kind: str, t: int, d: int, names: Collection[str] = ()) -> Known:
    """Draw x, rows (the active rows orthogonal to x), multipliers and options; then ``g = x - G'lam / w``."""
    d = max(2, t // 2) if kind == "more rows than columns" else d
    x, G = rng.standard_normal(d), rng.standard_normal((t, d))
    if kind == "parallel":
        G = rng.standard_normal(d) + 0.03 * G
    active, x_unit = rng.random(t) < 0.6, x / np.linalg.norm(x)
    active[[0, -1]] |= kind == "opposite"
    for _ in range(2):  # twice, because the first pass loses digits of rows nearly parallel to x
        G[active] -= np.outer(G[active] @ x_unit, x_unit)
    G[~active] *= np.where(G[~active] @ x < 0, -1.0, 1.0)[:, None]
    if kind == "repeated":
        G[t // 2 :], active[t // 2 :] = G[: t - t // 2], active[: t - t // 2]
    G[-1] = -G[0] if kind == "opposite" else G[-1]
    G *= 10.0 ** (rng.uniform(-6, 6, (t, 1)) * (kind == "mixed norms"))
    G[rng.integers(t)] *= kind != "zero row"
    n = np.linalg.norm(G, axis=1)
    unit = 1.0 / np.where(n > 0, n, 1.0)  # the unit of the multipliers
    margin = 0.3 * rng.random(t) * unit * ("margin" in names)
    lam = np.where(active, rng.random(t), 0.0) * unit + margin
    held = active & (rng.random(t) < 0.3) & ("penalty" in names)  # multipliers at their upper bound
    penalty = lam + np.where(held, 0.0, rng.choice([1.0, np.inf], t)) * unit
    equality = active & ~held & (rng.random(t) < 0.5) & ("equality" in names)
    lam *= np.where(equality, rng.choice([-1.0, 1.0], t), 1.0)
    x = x + rng.standard_normal(d) * ("h" in names)
    h = G @ x - np.where(held, -1.0, np.where(active, 0.0, 1.0)) * rng.random(t) * n
    metric = 10.0 ** (rng.uniform(-1, 1, d) * ("metric" in names))
    options = {"h": h, "equality": equality, "margin": margin, "penalty": penalty, "metric": metric}
    return Known(G, x - G.T @ lam / metric, x, {name: options[name] for name in names})


def problem(seed: int) -> tuple[str, str, Known]:
    """Return name, dtype and problem: half of them have some of all options, a quarter is large."""
    rng, form, dtype, kind = np.random.default_rng(seed), seed // 7 % 4, "float64", KINDS[seed % 7]
    t, d = (int(rng.integers(1, 9)), int(rng.integers(2, 9))) if form < 3 else (int(rng.integers(9, 60)), 99)
    names = [name for name in OPTIONS if form % 2 and rng.random() < 0.5]
    if form == 2:  # in other families, rounding to float32 tilts dependent rows, which changes x
        dtype, kind, d = "float32", KINDS[seed % 3], int(rng.integers(20_000, 150_000))
    return f"problem {seed} ({kind}, t = {t}, {dtype}, {names})", dtype, draw(rng, kind, t, d, names)


def ways() -> Iterator[tuple[str, str, str]]:
    """Yield library, device and backend of each way to solve."""
    torch = importlib.import_module("torch") if find_spec("torch") else None
    libraries = ["numpy"] if torch is None else ["numpy", "torch"]
    yield from product(libraries, ["cpu"], ["portable", *["numba"] * installed()])
    if torch is not None and torch.cuda.is_available():
        yield from product(["torch"], ["cuda"], ["portable", *["triton"] * (not no_kernels("cuda"))])


def check() -> bool:
    """Solve all problems in all `ways`, print a table, and return whether all answers are right."""
    before, wrong, given = backends.wanted, 0, [problem(seed) for seed in range(PROBLEMS)]
    print(f"{PROBLEMS} problems with known projections")
    for library, device, backends.wanted in ways():
        xp, failed = importlib.import_module(library), []
        for k, (name, dtype, (G, g, x, options)) in enumerate(given):
            order: Any = "CF"[k % 2]  # rows or columns are adjacent in memory
            arrays = {"G": G.astype(dtype, order), "g": g.astype(dtype), **options}
            try:
                if library != "numpy":
                    arrays = {key: xp.asarray(a, device=device) for key, a in arrays.items()}
                found = gemproj.project(**arrays)
                error = np.linalg.norm(to_numpy(found) - x) / np.linalg.norm(g)
                failed += [] if error <= WITHIN[dtype] else [f"  {name}: off by {error:.1e}"]  # also NaN
            except Exception as refused:  # counts as a wrong answer; the check continues
                failed.append(f"  {name}: {type(refused).__name__}: {refused}")
        print(f"{library:8s}{device:6s}{backends.wanted:10s}{len(failed)} wrong", *failed[:5], sep="\n")
        wrong += len(failed)
    backends.wanted = before
    print("WRONG" if wrong else "All right.")
    return not wrong
