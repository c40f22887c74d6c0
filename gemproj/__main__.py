"""``python -m gemproj``: what is installed, and whether it computes right on this machine."""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
from importlib.metadata import distributions
from importlib.util import find_spec

import gemproj
from gemproj import backends
from gemproj._selfcheck import check
from gemproj.backends.numba import missing


def main(arguments: list[str] | None = None) -> int:
    """Run the command line with `arguments`, by default ``sys.argv[1:]``, and return its exit status."""
    parser = argparse.ArgumentParser("python -m gemproj", description="Print versions and devices.")
    one = parser.add_mutually_exclusive_group()
    one.add_argument("--check", action="store_true", help="also solve known problems; exit 1 if one is wrong")
    one.add_argument("--compile", action="store_true", help="compile the loops for this machine, and exit")
    given = parser.parse_args(arguments)
    backends.check_name(backends.wanted)
    if given.compile:
        return compile_loops()
    wanted = ["numpy", "array-api-compat", "numba", "torch", "triton", "cupy", "quadprog", "osqp", "scipy"]
    found = {f"{one.name} {one.version}" for one in distributions() if one.name.split("-cuda")[0] in wanted}
    print(f"gemproj {gemproj.__version__}, Python {platform.python_version()}, {platform.platform()}")
    print(*sorted(found), f"compiled loops: {missing() or 'yes'}", sep=", ")
    if find_spec("torch"):
        torch = importlib.import_module("torch")
        devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        print(torch.backends.cpu.get_cpu_capability(), f"{torch.get_num_threads()} threads", *devices)
    return int(given.check and not check())


def compile_loops() -> int:
    """Compile the loops by calling them for each dtype; numba caches them on disk."""
    if backends.wanted == "portable" or missing():
        print(f"There is nothing to compile: {missing() or 'GEMPROJ_BACKEND=portable is set'}.")
        return 0
    print("Compiling loops for float32, float64 and bfloat16; this takes about a minute, once.")
    for dtype in ("float32", "float64", "bfloat16")[: 3 if find_spec("torch") else 2]:
        xp = importlib.import_module("torch" if dtype == "bfloat16" else "numpy")
        for t, d in ((2, 64), (9, 140_000)):  # in one thread, and in several
            gs, columns = (xp.ones(shape, dtype=getattr(xp, dtype)) for shape in ((2, d), (d, t)))
            for G in (columns.T, columns.reshape(t, d)):
                gemproj.project(G, gs)
                gemproj.project(G, -gs[0])
    return 0


if __name__ == "__main__":
    sys.exit(main())
