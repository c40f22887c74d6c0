"""Triton kernels for torch tensors on NVIDIA GPUs: one launch instead of a dozen operations."""

from __future__ import annotations

import warnings
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

__all__ = ["available"]


@lru_cache(maxsize=16)
def available(device: Any) -> bool:
    """Return whether the kernels run on a device of torch: on NVIDIA's, where Triton is installed and works.

    The first question about a device compiles and launches a kernel. Where that fails, one warning says why.
    """
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    import torch

    if torch.version.hip is not None:  # torch calls AMD's devices CUDA, too; they are untested
        return False
    try:
        from gemproj.backends.triton.backend import drop_not_finite

        one = torch.ones(1, dtype=torch.float64, device=device)
        drop_not_finite(one[None], one)
    except Exception as error:  # Triton needs a C compiler for its launchers, for example
        warnings.warn(
            f"Triton does not work on {device} ({str(error).strip().splitlines()[-1:]}): projections there "
            "take array operations, which is slower. GEMPROJ_BACKEND=portable silences this.",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    return True
