"""A GPU where there is one, else the CPU as a device: for tests of what runs there."""

import os
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")
from asv_benchmarks.reports.gpu.device import cpu_as_device  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def skip_without_kernels():
    pytest.importorskip("triton")
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels run on the CPU in Triton's interpreter only")


def make_device(kernels):
    """Return a context in which the package takes DEVICE for a device, with or without kernels."""
    return nullcontext() if DEVICE != "cpu" else cpu_as_device(kernels)
