"""``python -m gemproj --check``: problems with known answers, on this machine's NumPy, BLAS, numba and torch.

The families of problems are the same as in the tests. The answer is drawn first, then a problem with this
answer. For small problems, the answer is computed by enumerating the active sets with NumPy's pseudoinverse
of rows of G. The enumeration shares no code with the library and forms no Gram matrix.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import product
from typing import Any, NamedTuple

import numpy as np

import gemproj
from gemproj import backends
from gemproj.backends.numba import installed
from gemproj.backends.triton import missing as no_kernels

PROBLEMS = 200
WITHIN = {"float64": 1e-9, "float32": 1e-6}  # tolerances for |x - x*| / |g|
KINDS = ["generic", "parallel", "repeated", "opposite", "more rows than columns", "mixed norms", "zero row"]
# In the other families, rounding to float32 tilts dependent rows, which changes the answer.
FLOAT32_KINDS = ["generic", "parallel", "mixed norms"]


class Known(NamedTuple):
    """Constraints, gradient, projection, one choice of optimal multipliers, and the family as `kind`."""

    G: np.ndarray
    g: np.ndarray
    x: np.ndarray
    multipliers: np.ndarray
    kind: str


def draw(rng: np.random.Generator, kind: str, t: int, d: int) -> Known:
    """Draw x*, active rows (orthogonal to x*), other rows, and multipliers; then ``g = x* - G'lam*``."""
    if kind == "more rows than columns":
        d = max(2, t // 2)
    x = rng.standard_normal(d)
    G = rng.standard_normal((t, d))
    if kind == "parallel":
        G = rng.standard_normal(d) + 0.03 * G
    active = rng.random(t) < 0.6
    x_unit = x / np.linalg.norm(x)
    for _ in range(2):  # twice, because the first pass loses digits of rows nearly parallel to x
        G[active] -= np.outer(G[active] @ x_unit, x_unit)
    G[~active] *= np.where(G[~active] @ x < 0, -1.0, 1.0)[:, None]
    if kind == "repeated" and t > 1:
        G[t // 2 :], active[t // 2 :] = G[: t - t // 2], active[: t - t // 2]
    if kind == "opposite" and t > 1:
        G[0] -= G[0] @ x_unit * x_unit
        G[-1], active[0], active[-1] = -G[0], True, True
    if kind == "mixed norms":
        G *= 10.0 ** rng.uniform(-6, 6, (t, 1))
    if kind == "zero row":
        G[rng.integers(t)] = 0.0
    norms = np.linalg.norm(G, axis=1)
    lam = np.where(active, rng.random(t), 0.0) / np.where(norms > 0, norms, 1.0)
    return Known(G, x - G.T @ lam, x, lam, kind)


def draw_options(rng: np.random.Generator, G: np.ndarray) -> dict[str, np.ndarray]:
    """Draw a random choice of options: a feasible h, equalities, margins, penalties and a metric."""
    t, d = G.shape
    n = np.linalg.norm(G, axis=1)
    per_norm = 1.0 / np.where(n > 0, n, 1.0)
    equality = rng.random(t) < 0.3
    room = np.where(equality | (rng.random(t) < 0.3), 0.0, n * rng.random(t))
    options = {
        "h": G @ rng.standard_normal(d) - room,
        "equality": equality,
        "margin": 0.3 * rng.random(t) * per_norm,
        "penalty": np.where(rng.random(t) < 0.5, np.inf, (0.3 + rng.random(t)) * per_norm),
        "metric": 10.0 ** rng.uniform(-1, 1, d),
    }
    return {name: value for name, value in options.items() if rng.random() < 0.5}


def enumerate_projection(
    G: np.ndarray,
    g: np.ndarray,
    *,
    h: Any = 0.0,
    equality: Any = False,
    margin: Any = 0.0,
    penalty: Any = np.inf,
    metric: Any = 1.0,
) -> np.ndarray:
    """Return the projection, from the active set with the smallest violation of the optimality conditions."""
    root, t = np.sqrt(metric), len(G)
    A, a = G / root, g * root
    n = np.linalg.norm(A, axis=1)
    n[n == 0] = 1.0
    A, h, upper = A / n[:, None], h / n, np.broadcast_to(penalty, t) * n
    lower = np.where(equality, -upper, margin * n)
    at_bounds = [[v for v in {*bounds} if np.isfinite(v)] for bounds in zip(lower, upper, strict=True)]
    least, answer = np.inf, a
    for values in product(*[[*bounds, np.nan] for bounds in at_bounds]):  # NaN marks free multipliers
        lam = np.array(values)
        free = np.isnan(lam)
        x, inverse = a + A[~free].T @ lam[~free], np.linalg.pinv(A[free])
        step = inverse @ (h[free] - A[free] @ x)
        x, lam[free] = x + step, inverse.T @ step
        s = A @ x - h
        off = [lower - lam, lam - upper, np.where(lam < upper, -s, 0.0), np.where(lam > lower, s, 0.0)]
        if (missed := np.max(off)) < least:
            least, answer = missed, x
    return answer / root


def problems() -> Iterator[tuple[str, str, np.ndarray, np.ndarray, dict[str, Any], np.ndarray]]:
    """Yield name, dtype, G, g, options and the projection of each problem."""
    for seed in range(PROBLEMS):
        rng, kind, form = np.random.default_rng(seed), KINDS[seed % len(KINDS)], seed // len(KINDS) % 4
        dtype, options = "float64", {}
        if form == 3:  # large problems; some use threads or float32 sums
            dtype, kind = "float32", FLOAT32_KINDS[seed % len(FLOAT32_KINDS)]
            G, g, x, *_ = draw(rng, kind, int(rng.integers(2, 10)), int(rng.integers(20_000, 150_000)))
        elif form == 2:
            t = int(rng.integers(9, 60))
            G, g, x, *_ = draw(rng, kind, t, 2 * t)
        else:
            G, g, *_ = draw(rng, kind, int(rng.integers(1, 6 - form)), int(rng.integers(2, 9)))
            options = draw_options(rng, G) if form else {}
            x = enumerate_projection(G, g, **options)
        yield f"problem {seed} ({kind}, t = {len(G)}, {dtype}, {[*options]})", dtype, G, g, options, x


def ways() -> Iterator[tuple[str, str, str]]:
    """Yield library, device and backend of each way to solve."""
    torch = importlib.import_module("torch") if find_spec("torch") is not None else None
    compiled = ["numba"] if installed() else []
    for library in ["numpy"] if torch is None else ["numpy", "torch"]:
        yield from ((library, "cpu", backend) for backend in ("portable", *compiled))
    if torch is not None and torch.cuda.is_available():
        kernels = [] if no_kernels(torch.device("cuda")) else ["triton"]
        yield from (("torch", "cuda", backend) for backend in ("portable", *kernels))


def check() -> bool:
    """Solve all problems in all `ways`, print a table, and return whether all answers are right."""
    start, before, wrong = time.perf_counter(), backends.wanted, 0
    given = list(problems())
    print(f"{PROBLEMS} problems with known projections: largest error of x, over the norm of g")
    print(f"{'library':10s}{'device':8s}{'backend':10s}{'float64':>10s}{'float32':>10s}{'wrong':>8s}")
    for library, device, backends.wanted in ways():
        worst, failures = {"float64": 0.0, "float32": 0.0}, []
        for name, dtype, G, g, options, x in given:
            try:
                found = _solve(library, device, dtype, G, g, options)
            except Exception as refused:  # counts as a wrong answer; the check continues
                failures.append(f"  {name}: {type(refused).__name__}: {refused}")
                continue
            error = float(np.linalg.norm(found - x) / np.linalg.norm(g))
            worst[dtype] = max(worst[dtype], error)
            if not error <= WITHIN[dtype]:  # true for NaN
                failures.append(f"  {name}: off by {error:.1e}")
        errors = f"{worst['float64']:10.0e}{worst['float32']:10.0e}"
        print(f"{library:10s}{device:8s}{backends.wanted:10s}{errors}{len(failures):8d}")
        print("".join(f"{line}\n" for line in failures[:5]), end="")
        wrong += len(failures)
    backends.wanted = before
    print(f"{'WRONG' if wrong else 'All right'}, in {time.perf_counter() - start:.0f} seconds.")
    return not wrong


def _solve(
    library: str, device: str, dtype: str, G: np.ndarray, g: np.ndarray, options: dict[str, Any]
) -> np.ndarray:
    """Project with arrays of a library on a device, and return x in float64."""
    G, g = G.astype(dtype), g.astype(dtype)
    if library == "numpy":
        return gemproj.project(G, g, **options).astype(np.float64)
    torch = importlib.import_module(library)
    options = {name: torch.as_tensor(a, device=device) for name, a in options.items()}
    x = gemproj.project(torch.as_tensor(G, device=device), torch.as_tensor(g, device=device), **options)
    return x.to("cpu", torch.float64).numpy()
