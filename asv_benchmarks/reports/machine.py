"""The machine and the versions that the numbers depend on."""

import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ["gemproj", "numpy", "torch", "quadprog", "osqp", "array-api-compat", "numba"]


def describe() -> str:
    """Return a sentence about the processor, one about threads and one about versions."""
    import threadpoolctl  # not at the top: GPU machines use this file without threadpoolctl
    import torch

    from examples.common.command import cores

    pools = threadpoolctl.threadpool_info()
    blas = max((pool["num_threads"] for pool in pools if pool["user_api"] == "blas"), default=1)
    return (
        f"{processor()}, {cores()} cores{cache()}, {platform.system()}{load()}. "
        f"Threads: {torch.get_num_threads()} of torch, {blas} of NumPy. "
        f"Python {platform.python_version()}, {versions(PACKAGES)}."
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Have BLAS, OpenMP and our own loops take one thread: in small problems, others would only wait."""
    import threadpoolctl

    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        with threadpoolctl.threadpool_limits(1):
            yield
    finally:
        del os.environ["OMP_NUM_THREADS"]
        if before is not None:
            os.environ["OMP_NUM_THREADS"] = before


def processor() -> str:
    """Return the name of the processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def cache() -> str:
    """Return the size of the last cache, which decides how much of G is read from memory."""
    with suppress(OSError, ValueError):
        size = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text().strip()
        return f", {int(size.removesuffix('K')) // 1024} MB of L3 cache"
    return ""


def load() -> str:
    """Return the load of the machine: if one core is busy, threads that wait for all cores are useless."""
    with suppress(OSError, AttributeError):
        return f", load {os.getloadavg()[0]:.1f} before"
    return ""


def versions(packages: Iterable[str]) -> str:
    """Write packages with their versions; "no" marks missing packages."""
    found = {package: f"no {package}" for package in packages}
    for package in found:
        with suppress(PackageNotFoundError):
            found[package] = f"{package} {version(package)}"
    return ", ".join(found.values())
