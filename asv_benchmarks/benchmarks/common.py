"""What the benchmarks share: libraries and devices, problems, and how time and memory are taken."""

from __future__ import annotations

import ctypes
import gc
import importlib
import importlib.util
import os
import time
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

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


class Benchmark:
    """Sampling that asv reads: calls are timed one by one, so slow and fast problems take alike long."""

    # To be raised when older numbers stop being comparable; asv would do so with every edit of a benchmark.
    version = "1"
    number = 1
    repeat = (5, 50, 0.5)
    rounds = 2
    warmup_time = 0.05
    timeout = 120


class Problem(NamedTuple):
    """Arrays of one projection, and a function that waits until their device has finished."""

    G: Any
    g: Any
    synchronize: Callable[[], None]


def labelled(pretty_name: str, unit: str | None = None) -> Callable[[Any], Any]:
    """Give a benchmark the name, and values that are tracked the unit, of the published pages."""

    def decorate(function: Any) -> Any:
        function.pretty_name = pretty_name
        if unit is not None:
            function.unit = unit
        return function

    return decorate


def find(method: str) -> Any:
    """Return a method without options of its own; skip it where its solver is not installed."""
    if method in ("quadprog", "osqp") and importlib.util.find_spec(method) is None:
        raise NotImplementedError(f"{method} is not installed")
    return GEM2017(memory_strength=0.0) if method == "gem2017" else method


def load(backend: str) -> ModuleType:
    """Import the array library of a backend; skip it where it or its device is absent."""
    name = backend.partition("-")[0]
    try:
        xp = importlib.import_module(name)
    except ImportError as error:
        raise NotImplementedError(f"{name} is not installed") from error
    if backend in ("torch-cuda", "cupy") and not xp.cuda.is_available():
        raise NotImplementedError("there is no CUDA device")
    return xp


def waiting(backend: str) -> Callable[[], None]:
    """Return the function that waits for the device of a backend."""
    xp = load(backend)
    if backend == "torch-cuda":
        return xp.cuda.synchronize
    if backend == "cupy":
        return lambda: xp.cuda.Device().synchronize()
    return lambda: None


def empty(backend: str, dtype: str, shape: tuple[int, ...]) -> Any:
    """Allocate an array; skip dtypes that the library does not have."""
    xp = load(backend)
    if not hasattr(xp, dtype):
        raise NotImplementedError(f"{backend} has no {dtype}")
    kind = getattr(xp, dtype)
    if xp.__name__ == "torch":
        return xp.empty(shape, dtype=kind, device="cuda" if backend == "torch-cuda" else "cpu")
    return xp.empty(shape, dtype=kind)


def fill(array: Any, values: np.ndarray, backend: str) -> None:
    """Copy NumPy values into an array of any backend."""
    array[...] = values if backend == "numpy" else load(backend).asarray(values)


def to_numpy(array: Any) -> np.ndarray:
    """Copy an array of any backend to NumPy, in float64."""
    if hasattr(array, "detach"):
        return array.double().cpu().numpy()
    return np.asarray(array.get() if hasattr(array, "get") else array, dtype=np.float64)


@lru_cache(maxsize=1)
def problem(backend: str, dtype: str, t: int, d: int) -> Problem:
    """Return t constraints of related tasks and a gradient that violates about half of them.

    It violates their mean and the first of them, too, so that A-GEM of either kind has something to do.
    Rows share a direction and are otherwise rotations of one noise vector, which makes them as nearly
    orthogonal as noise of their own would, in a fraction of the time. Kept for the next call, and made row by
    row, so that setting up needs little more memory than its result.
    """
    warm_up(backend, dtype)
    rng = np.random.default_rng(t)
    shared, noise, vector = rng.standard_normal((3, d), dtype=np.float32)
    shared *= 0.3
    weights = np.linspace(-1.5, 1.5, t)
    weights -= 2.0 / t
    G, g = empty(backend, dtype, (t, d)), empty(backend, dtype, (d,))
    for i in range(t):
        row = np.roll(noise, i * (d // t))
        row += shared
        fill(G[i], row, backend)
        vector += np.float32(weights[i] / np.sqrt(t)) * row
    fill(g, vector, backend)
    return Problem(G, g, waiting(backend))


@lru_cache(maxsize=1)
def batch(backend: str, dtype: str, n: int, t: int, d: int) -> Problem:
    """Return n independent random problems in one array."""
    warm_up(backend, dtype)
    rng = np.random.default_rng(t)
    G, g = empty(backend, dtype, (n, t, d)), empty(backend, dtype, (n, d))
    fill(G, rng.standard_normal((n, t, d), dtype=np.float32), backend)
    fill(g, rng.standard_normal((n, d), dtype=np.float32), backend)
    return Problem(G, g, waiting(backend))


def best_times(calls: dict[str, Callable[[], Any]], wait: Callable[[], None]) -> dict[str, float]:
    """Return the shortest time of each call, taken in turn so that all of them see the same machine."""
    best = dict.fromkeys(calls, float("inf"))
    stop, rounds = time.perf_counter() + 0.3, 0
    while rounds < 4 or (rounds < 100 and time.perf_counter() < stop):
        for name, call in calls.items():
            wait()
            start = time.perf_counter()
            call()
            wait()
            # The first round is there to warm up.
            if rounds:
                best[name] = min(best[name], time.perf_counter() - start)
        rounds += 1
    return best


def floor(G: Any, g: Any, out: Any) -> None:
    """Read G and g twice and write x once, without doing anything with them: the least any method can do."""
    for _ in range(2):
        G.sum()
        g.sum()
    out[...] = 0.0


def agem_published(G: Any, g: Any) -> Any:
    """A-GEM on one reference gradient, here the first row: a product, a norm, a sum."""
    r = G[0]
    dot = g @ r
    return g - dot / (r @ r) * r if dot < 0 else g


def kkt_residual(G: Any, g: Any, x: Any, multipliers: Any) -> float:
    """Return how far x, as it was returned, is from the projection's optimality conditions; free of scale.

    The largest of four, in float64: ``-G x`` over |g_i| |g|; with multipliers times |g_i| over |g|, what is
    negative of them, and what is positive of constraints that are not tight (or how far those are from tight,
    if that is less); and ``|x - g - G' multipliers|`` over |g|.
    """
    vector, lam, here = to_numpy(g), to_numpy(multipliers), to_numpy(x)
    size = np.linalg.norm(vector)
    left, worst = here - vector, 0.0
    for i, value in enumerate(lam):
        row = to_numpy(G[i])
        norm = np.linalg.norm(row)
        slack = row @ here / (norm * size)
        step = value * norm / size
        worst = max(worst, -slack, -step, min(abs(step), abs(slack)))
        left -= value * row
    return rounded(max(worst, np.linalg.norm(left) / size))


def rounded(value: float) -> float:
    """Round to the digits that are worth reading."""
    return float(f"{value:.3g}")


def warm_up(backend: str, dtype: str) -> None:
    """Project something small: what libraries load and start once is neither timed nor counted later."""
    G, g = empty(backend, dtype, (2, 1000)), empty(backend, dtype, (1000,))
    G[...], g[...] = 1.0, -1.0
    project(G, g)


def rest() -> None:
    """Give free memory back and, on Linux, make the peak of this process what it holds now."""
    gc.collect()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def host_memory(name: str) -> int:
    """Return VmRSS or VmHWM, the present and the peak size of this process, in bytes."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(name + ":"):
                return 1024 * int(line.split()[1])
    raise NotImplementedError(f"this system does not report {name}")


def peak_extra(call: Callable[[], Any], backend: str) -> int:
    """Return by how many bytes memory in use rises during a call, its result included.

    That is the peak of the process, not what an allocator counts: tracemalloc does not see torch's arrays.
    """
    if backend == "torch-cuda":
        cuda = load(backend).cuda
        cuda.synchronize()
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        call()
        cuda.synchronize()
        return cuda.max_memory_allocated() - before
    if backend == "cupy":
        pool = load(backend).get_default_memory_pool()
        pool.free_all_blocks()
        before = pool.total_bytes()
        call()
        return pool.total_bytes() - before
    if not os.path.exists("/proc/self/clear_refs"):
        raise NotImplementedError("the peak of a process can be reset on Linux only")
    rest()
    before = host_memory("VmRSS")
    if host_memory("VmHWM") > before + (1 << 20):
        raise NotImplementedError("the peak of this process could not be reset")
    result = call()
    peak = host_memory("VmHWM")
    del result
    return peak - before
