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
    parser.add_argument(
        "--check", action="store_true", help="also solve known problems; exit 1 if one is wrong"
    )
    given = parser.parse_args(arguments)
    backends.check_name(backends.wanted)
    wanted = ["numpy", "array-api-compat", "numba", "torch", "triton", "cupy", "quadprog", "osqp", "scipy"]
    there = {one.name.replace("_", "-"): one.version for one in distributions() if one.name}
    found = {f"{name} {number}" for name, number in there.items() if name.split("-cuda")[0] in wanted}
    print(f"gemproj {gemproj.__version__}, Python {platform.python_version()}, {platform.platform()}")
    print(*sorted(found), f"compiled loops: {missing() or 'yes'}", sep=", ")
    if find_spec("torch"):
        torch = importlib.import_module("torch")
        devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        print(torch.backends.cpu.get_cpu_capability(), f"{torch.get_num_threads()} threads", *devices)
    return int(given.check and not check())


if __name__ == "__main__":
    sys.exit(main())
