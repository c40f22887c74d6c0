"""``python -m gemproj`` prints installed versions and devices, and solves a small problem with every method.

``python -m gemproj --check`` solves 200 problems with known answers, and exits with 1 if an answer is wrong.

``python -m gemproj --compile`` compiles the loops of the numba backend for this machine, ahead of time.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import sys
import time
import timeit
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib.util import find_spec

import numpy as np

import gemproj
from gemproj import GEM2017, backends, combine, gram, project, solve_dual
from gemproj.backends.numba import missing
from gemproj.methods import METHODS

OPTIONAL = {
    "fast": ["numba"],
    "torch": ["torch"],
    "cupy": ["cupy"],
    "qp": ["quadprog", "osqp", "scipy"],
    "transformers": ["transformers", "accelerate"],
    "lightning": ["lightning"],
    "avalanche": ["avalanche-lib"],
    "torchjd": ["torchjd"],
    "examples": ["peft", "datasets", "matplotlib"],
}
VARIABLES = ["GEMPROJ_BACKEND", "OMP_NUM_THREADS"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line with `arguments`, by default ``sys.argv[1:]``, and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m gemproj", description=__doc__)
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--compile", action="store_true", help="compile the loops ahead of time, and exit")
    one.add_argument(
        "--check", action="store_true", help="solve problems with known answers; exit with 1 if one is wrong"
    )
    given = parser.parse_args(arguments)
    try:
        backends.check_name(backends.wanted)
    except ValueError as error:
        parser.error(str(error))
    if given.compile:
        return int(not compile_loops())
    report_versions()
    if given.check:
        from gemproj._selfcheck import check

        return int(not check())
    report_methods()
    return 0


def compile_loops() -> bool:
    """Compile the loops for float32, float64 and bfloat16 by calling each once; numba caches them on disk.

    Return False if the compiled loops could not be cached on disk.
    """
    if backends.wanted == "portable" or missing():
        print(f"There is nothing to compile: {missing() or 'GEMPROJ_BACKEND=portable is set'}.")
        return True
    from gemproj.backends.numba import jit, loops

    print("Compiling loops for float32, float64 and bfloat16; this takes about a minute, once.")
    jit.announcement.waiting = False  # the message above replaces the announcement
    start, libraries = time.perf_counter(), {"float32": "numpy", "float64": "numpy"}
    if find_spec("torch") is not None:
        libraries["bfloat16"] = "torch"
    for dtype, library in libraries.items():
        xp = importlib.import_module(library)
        for t, d in ((2, 64), (9, 64)):
            gs, columns = (xp.ones(n, dtype=getattr(xp, dtype)) for n in ((2, d), (d, t)))
            for G in (columns.T, columns.reshape(t, d)):
                gram(G, gs)
                project(G, -gs[0])
                combine(G, gs[0], xp.ones(t, dtype=xp.float64))
    folder = loops.sum_products.stats.cache_path
    told = f"Kept in {folder}." if folder else f"They are compiled again {jit.NOT_KEPT}"
    print(f"Done in {time.perf_counter() - start:.0f} seconds. {told}")
    return bool(folder)


def report_versions() -> None:
    """Print versions, extras, devices, and what decides the rounding on this machine."""
    print(f"gemproj {gemproj.__version__} on Python {platform.python_version()}, {platform.platform()}\n")
    built = np.show_config(mode="dicts")
    blas = built.get("Build Dependencies", {}).get("blas", {})
    vectors = ", ".join(built.get("SIMD Extensions", {}).get("found", []))
    variables = [f"{name}={os.environ[name]}" for name in VARIABLES if name in os.environ]
    lines = {"core": ", ".join(map(_version, ("numpy", "array-api-compat")))}
    for extra, packages in OPTIONAL.items():
        found = ", ".join(map(_version, packages))
        hint = f"   <- in a checkout: pip install '.[{extra}]'" if "missing" in found else ""
        lines[extra] = found + hint
    lines["processor"] = ", ".join([platform.machine(), f"{os.cpu_count()} cores", *variables])
    lines["arithmetic"] = f"BLAS {blas.get('name', 'unknown')} {blas.get('version', '')}; {vectors}"
    devices = ["CPU"]
    with suppress(ImportError):
        torch = importlib.import_module("torch")
        mkl = "MKL" if torch.backends.mkl.is_available() else "no MKL"
        threads = f"{torch.get_num_threads()} threads"
        lines["arithmetic"] += f"; torch {mkl}, {torch.backends.cpu.get_cpu_capability()}, {threads}"
        devices += [f"cuda:{i} {torch.cuda.get_device_name(i)}" for i in range(torch.cuda.device_count())]
        devices += ["mps"] if torch.backends.mps.is_available() else []
    lines["devices"] = ", ".join(devices)
    print(*(f"{name:14s}{value}" for name, value in lines.items()), "", sep="\n")


def report_methods() -> None:
    """Print time, KKT residual, gap and error bound of every method on one problem."""
    rng = np.random.default_rng(0)
    t, d = 6, 10_000
    G, g = rng.standard_normal((t, d)) + 0.3, rng.standard_normal(d) - 0.3
    # With its default memory strength, GEM2017 would solve a different problem from the other methods.
    methods = METHODS | {"gem2017": GEM2017(memory_strength=0.0)}
    print(f"One projection, t = {t} constraints, d = {d:,} parameters, NumPy float64")
    print(f"{'method':12s}{'time (us)':>10s}{'KKT residual':>15s}{'duality gap':>14s}{'error bound':>14s}")
    for name, method in methods.items():
        try:
            sol = solve_dual(G, g, method=method)
        except ImportError as error:
            print(f"{name:12s}{str(error).split(':')[0]}")
            continue
        seconds = min(timeit.repeat(partial(solve_dual, G, g, method=method), number=1, repeat=5))
        print(f"{name:12s}{seconds * 1e6:10.0f}", end="")
        print(f"{sol.kkt_residual():15.1e}{sol.duality_gap():14.1e}{sol.error_bound():14.1e}")


def _version(package: str) -> str:
    # The wheels of CuPy are named after the CUDA version.
    for name in [package, *(f"cupy-cuda{n}x" for n in (13, 12, 11) if package == "cupy")]:
        with suppress(importlib.metadata.PackageNotFoundError):
            return f"{package} {importlib.metadata.version(name)}"
    return f"{package} missing"


if __name__ == "__main__":
    sys.exit(main())
