"""A GPU where there is one, else the CPU as a device: for tests of what runs there."""

from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")
from asv_benchmarks.reports.gpu.device import cpu_as_device  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def make_device():
    """Return a context in which the package takes DEVICE for a device."""
    return nullcontext() if DEVICE != "cpu" else cpu_as_device()
