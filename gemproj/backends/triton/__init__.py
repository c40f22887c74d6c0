"""Triton kernels for CUDA devices: a launch or two per stage, without waiting for the device.

Chosen by ``GEMPROJ_BACKEND=triton``: they have not been measured on a GPU. Importing this package imports
neither torch nor Triton; its modules do.
"""

from __future__ import annotations

import warnings
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

__all__ = ["available"]


def available(device: Any) -> bool:
    """Return whether the kernels run on a device of torch or CuPy: NVIDIA's since sm_80, where Triton works.

    The first question about a device compiles and launches a kernel. Where that fails, one warning says why.
    """
    if getattr(device, "type", None) == "cuda":
        return _works(device.index)
    return _works(device.id) if type(device).__module__.startswith("cupy") else False


@lru_cache
def _works(index: int | None) -> bool:
    if find_spec("triton") is None or find_spec("torch") is None:
        return False
    import torch

    # AMD's devices, which torch calls CUDA too, are untested.
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
    if torch.cuda.get_device_capability(device) < (8, 0):
        reason = "the kernels need compute capability 8.0"
    else:
        try:
            from gemproj.backends.triton.trial import launch

            launch(device)
            return True
        except Exception as error:  # such as a missing compiler, which Triton needs for its launchers
            reason = str(error)
    warnings.warn(
        f"GEMPROJ_BACKEND=triton cannot be used on {device}, portable operations are: {reason}",
        RuntimeWarning,
        stacklevel=2,
    )
    return False
