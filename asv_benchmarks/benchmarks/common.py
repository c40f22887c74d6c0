"""Shared by benchmarks and reports: libraries, devices, and problems."""

import importlib
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from gemproj import GEM2017, project

# Benchmarks run in forks of a process that has imported this module, so that large libraries are loaded once.
# Nothing may use a device before `setup`, because CUDA does not survive a fork.
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

# G and g, and a function that synchronises their device.
Problem = tuple[Any, Any, Callable[[], None]]


class Benchmark:
    """The sampling settings of asv: single calls are timed, so slow and fast problems take equally long."""

    # Raise it when older numbers are no longer comparable; asv would raise it with every edit of a benchmark.
    version = "2"
    number = 1
    repeat = (5, 50, 0.5)
    rounds = 2
    warmup_time = 0.05
    timeout = 120


def labelled(pretty_name: str, unit: str = "unit") -> Callable[[Any], Any]:
    """Set the name of a benchmark on the published pages, and the unit of tracked values."""

    def decorate(function: Any) -> Any:
        function.pretty_name, function.unit = pretty_name, unit
        return function

    return decorate


def find(method: str) -> Any:
    """Return a method with default options; skip the benchmark if its solver is not installed."""
    if method in ("quadprog", "osqp"):
        load(method)
    return GEM2017(memory_strength=0.0) if method == "gem2017" else method


def load(backend: str) -> ModuleType:
    """Import the library of a backend or solver; skip the benchmark if it or its device is missing."""
    name = backend.partition("-")[0]
    try:
        xp = importlib.import_module(name)
    except ImportError as error:
        raise NotImplementedError(f"{name} is not installed") from error
    if backend in ("torch-cuda", "cupy") and not xp.cuda.is_available():
        raise NotImplementedError("there is no CUDA device")
    return xp


def array(backend: str, dtype: str, values: np.ndarray) -> Any:
    """Copy NumPy values into an array; skip the benchmark if the library lacks the dtype."""
    xp = load(backend)
    if not hasattr(xp, dtype):
        raise NotImplementedError(f"{backend} has no {dtype}")
    kind = getattr(xp, dtype)
    if xp.__name__ == "torch":
        return xp.tensor(values, dtype=kind, device="cuda" if backend == "torch-cuda" else "cpu")
    return xp.array(values, dtype=kind)


@lru_cache(maxsize=1)
def problem(backend: str, dtype: str, t: int, d: int, layout: str = "rows") -> Problem:
    """Return t constraints of related tasks and a gradient that violates all of them: no method saves work.

    Rows share a direction; the rest are rotations of one noise vector. These are as nearly orthogonal as
    independent noise, in a fraction of the time. The result is cached for the next call. The layout "columns"
    stores G by columns, strides (1, t), as the code of GEM, Avalanche and Mammoth does.
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
    """Project a part of a problem, so that what libraries load and start once is not measured later."""
    project(G[..., :2, :1000], g[..., :1000])
    xp = load(backend)
    waits = {"torch-cuda": lambda: xp.cuda.synchronize(), "cupy": lambda: xp.cuda.Device().synchronize()}
    return G, g, waits.get(backend, lambda: None)
