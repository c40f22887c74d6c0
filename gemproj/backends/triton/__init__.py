"""Triton kernels for CUDA devices: each stage in one launch, without waiting for the device.

Chosen by ``GEMPROJ_BACKEND=triton``: they have not been measured on a GPU. Importing this package imports
neither torch nor Triton; its modules do.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

from gemproj._problem import Problem

__all__ = ["available", "bind"]


def available(device: Any) -> bool:
    """Return whether the kernels run on a device of torch or CuPy: NVIDIA's, with Triton installed."""
    is_cuda = getattr(device, "type", None) == "cuda" or type(device).__module__.startswith("cupy")
    return is_cuda and _installed()


@lru_cache(maxsize=1)
def _installed() -> bool:
    if find_spec("triton") is None or find_spec("torch") is None:
        return False
    import torch

    # AMD's devices, which torch calls CUDA too, are untested.
    return torch.cuda.is_available() and torch.version.hip is None


def bind(problem: Problem) -> Any:
    """Return the backend for a problem on a device; None where the kernels cannot read its arrays."""
    if not available(problem.device):
        return None
    from gemproj.backends.triton.stages import Triton, applies

    return Triton() if applies(problem) else None
