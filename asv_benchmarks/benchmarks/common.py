"""What benchmarks and reports share: libraries and devices, and problems."""

import importlib
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from gemproj import GEM2017, project

# Benchmarks run in forks of a process that has imported this, so that what takes long to load is loaded once.
# Nothing may ask for a device before `setup`, since CUDA does not survive a fork.
for name in ("array_api_compat.numpy", "torch", "array_api_compat.torch", "quadprog", "osqp"):
    with suppress(ImportError):
        importlib.import_module(name)

METHODS = ["exact", "pgd", "fista", "agem", "gem2017", "quadprog", "osqp"]
BACKENDS = ["numpy", "torch", "torch-cuda", "cupy"]
DTYPES = ["float32", "float64", "bfloat16"]
CONSTRAINTS = [1, 2, 9, 19, 49]
# The last: GPT-2 medium's LoRA gradient, r = 8 on c_attn, c_proj and mlp.c_proj, and a head of four classes.
COLUMNS = [1_000, 100_000, 2_166_784]
LORA = COLUMNS[-1]

# G and g, and a function that waits until their device has finished.
Problem = tuple[Any, Any, Callable[[], None]]


class Benchmark:
    """Sampling that asv reads: calls are timed one by one, so slow and fast problems take alike long."""

    # To be raised when older numbers stop being comparable; asv would do so with every edit of a benchmark.
    version = "2"
    number = 1
    repeat = (5, 50, 0.5)
    rounds = 2
    warmup_time = 0.05
    timeout = 120


def labelled(pretty_name: str, unit: str = "unit") -> Callable[[Any], Any]:
    """Give a benchmark the name, and values that are tracked the unit, of the published pages."""

    def decorate(function: Any) -> Any:
        function.pretty_name, function.unit = pretty_name, unit
        return function

    return decorate


def find(method: str) -> Any:
    """Return a method without options of its own; skip it where its solver is not installed."""
    if method in ("quadprog", "osqp"):
        load(method)
    return GEM2017(memory_strength=0.0) if method == "gem2017" else method


def load(backend: str) -> ModuleType:
    """Import the library of a backend or solver; skip it where it or its device is absent."""
    name = backend.partition("-")[0]
    try:
        xp = importlib.import_module(name)
    except ImportError as error:
        raise NotImplementedError(f"{name} is not installed") from error
    if backend in ("torch-cuda", "cupy") and not xp.cuda.is_available():
        raise NotImplementedError("there is no CUDA device")
    return xp


def array(backend: str, dtype: str, values: np.ndarray) -> Any:
    """Copy NumPy values into an array; skip dtypes that the library does not have."""
    xp = load(backend)
    if not hasattr(xp, dtype):
        raise NotImplementedError(f"{backend} has no {dtype}")
    kind = getattr(xp, dtype)
    if xp.__name__ == "torch":
        return xp.tensor(values, dtype=kind, device="cuda" if backend == "torch-cuda" else "cpu")
    return xp.array(values, dtype=kind)


@lru_cache(maxsize=1)
def problem(backend: str, dtype: str, t: int, d: int, layout: str = "rows") -> Problem:
    """Return t constraints of related tasks and a gradient that violates them all: no method is spared work.

    Rows share a direction and are otherwise rotations of one noise vector, which makes them as nearly
    orthogonal as noise of their own would, in a fraction of the time. Kept for the next call. The layout
    "columns" stores a column of G in one piece, strides (1, t), as GEM's own code, Avalanche and Mammoth do.
    """
    rng = np.random.default_rng(t)
    shared, noise, vector = rng.standard_normal((3, d), dtype=np.float32)
    shared *= 0.3
    rows = np.stack([np.roll(noise, i * (d // t)) + shared for i in range(t)])
    for weight, row in zip(np.linspace(-2.5, -0.5, t), rows, strict=True):
        vector += np.float32(weight / np.sqrt(t)) * row
    G = array(backend, dtype, rows.T.copy()).T if layout == "columns" else array(backend, dtype, rows)
    return warm(backend, G, array(backend, dtype, vector))


@lru_cache(maxsize=1)
def batch(backend: str, dtype: str, n: int, t: int, d: int) -> Problem:
    """Return n independent random problems in one array."""
    rng = np.random.default_rng(t)
    G, g = (array(backend, dtype, rng.standard_normal(s, dtype=np.float32)) for s in ((n, t, d), (n, d)))
    return warm(backend, G, g)


def warm(backend: str, G: Any, g: Any) -> Problem:
    """Project a part of a problem: what libraries load and start once is neither timed nor counted later."""
    project(G[..., :2, :1000], g[..., :1000])
    xp = load(backend)
    waits = {"torch-cuda": lambda: xp.cuda.synchronize(), "cupy": lambda: xp.cuda.Device().synchronize()}
    return G, g, waits.get(backend, lambda: None)
