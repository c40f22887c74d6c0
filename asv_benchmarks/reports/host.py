"""``make bench-host``: the Python of a projection on a device, with launches replaced by nothing.

It needs no device: tensors on the CPU are taken for those of one.
"""

from __future__ import annotations

import timeit
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Annotated, Any
from unittest.mock import patch

import torch
import typer
from rich.console import Console
from torch import Tensor

from asv_benchmarks.reports.gpu.device import Call, backend, cpu_as_device
from asv_benchmarks.reports.tables import Table, digits
from gemproj import project

NOTE = """Microseconds, the least of {runs} calls. On this host an entry of a list comprehension takes {loop},
and to ask a tensor for its address {address}."""
BLOCKS, ROWS = 150, 4
# Low-rank factors of a model's weights, and its head of four classes.
_FACTORS, _HEAD = [(8, 1024), (1024, 8)], [(4, 1024), (4,)]


class _Kernel:
    """A compiled kernel that does nothing, whatever the grid."""

    def __getitem__(self, grid: Any) -> Call:
        return lambda *arguments: None


class _Kernels:
    """Finds such a kernel for everything that is launched."""

    def __init__(self) -> None:
        self._kernel = _Kernel()

    def get(self, key: Any) -> _Kernel:
        hash(key)  # as a dictionary would
        return self._kernel


@contextmanager
def no_launches() -> Iterator[None]:
    """Take the CPU for a device that does nothing."""
    found = patch("gemproj.backends.triton._launch._compiled", _Kernels())
    with found, cpu_as_device(kernels=True), backend("triton"):
        yield


def blocks() -> tuple[list[Tensor], list[Tensor]]:
    """Return G and g in blocks, as of a model with low-rank adapters."""
    shapes = _FACTORS * ((BLOCKS - len(_HEAD)) // len(_FACTORS)) + _HEAD
    return [torch.ones(ROWS, *shape) for shape in shapes], [-torch.ones(shape) for shape in shapes]


def candidates() -> dict[str, Call]:
    """Return projections by what they are of."""
    calls: dict[str, Call] = {}
    for t in (2, 8, 32):
        G, g = torch.ones(t, 4096), -torch.ones(4096)
        calls[f"t = {t}, arrays"] = partial(project, G, g, out=torch.empty_like(g))
    rows, vector = blocks()
    whole = f"t = {ROWS}, {BLOCKS} blocks"
    calls[f"{whole}, `out=g`"] = partial(project, rows, vector, out=vector)
    calls[f"{whole}, `out=`"] = partial(project, rows, vector, out=[torch.empty_like(v) for v in vector])
    calls[f"{whole}, a new x"] = partial(project, rows, vector)
    return calls


def time(call: Call, runs: int) -> float:
    """Return the least microseconds of single calls: on a busy machine a longer run is always disturbed."""
    call()
    return 1e6 * min(timeit.repeat(call, number=1, repeat=runs))


def main(
    runs: Annotated[int, typer.Option(help="Calls of each, of which the shortest counts.")] = 2000,
) -> None:
    """Print the times, and two that tell how fast this host is."""
    table = Table("Host time of `project` on a device", ["", "microseconds"])
    with no_launches():
        for name, call in candidates().items():
            table.rows.append([name, digits(time(call, runs))])
    many = [torch.empty(1) for _ in range(BLOCKS)]
    loop = time(lambda: [None for _ in many], runs) / BLOCKS
    address = time(lambda: [a.data_ptr() for a in many], runs) / BLOCKS - loop
    console = Console(width=110, highlight=False)
    console.print(NOTE.format(runs=runs, loop=digits(loop, 2), address=digits(address, 2)))
    console.print(table.rich())


if __name__ == "__main__":
    typer.run(main)
