"""Triton kernels for torch tensors on NVIDIA GPUs: one launch instead of a dozen operations."""

from __future__ import annotations

import sys
import warnings
from importlib.util import find_spec
from typing import Any

from gemproj._arrays import is_recording

# For each device, the reason why kernels are not available; empty if they are available.
_found: dict[Any, str] = {}


def available(a: Any) -> bool:
    """Return whether kernels can read a torch tensor: it must be on an NVIDIA GPU on which Triton works."""
    torch = sys.modules["torch"]
    if a.device.type != "cuda" or type(a) not in (torch.Tensor, torch.nn.Parameter):
        return False  # not on a GPU, or a subclass, which may have no memory
    return not is_recording() and not missing(a.device)  # make_fx records operations, but no launches


def missing(device: Any) -> str:
    """Return why kernels are not available on a CUDA device; empty if they are available.

    The first call compiles and launches a kernel. If that fails, one warning says why.
    """
    torch = sys.modules["torch"]
    if device not in _found:
        if torch.cuda.is_current_stream_capturing():
            return "the first kernel cannot be loaded while a CUDA graph is captured."
        try:
            _found[device] = _try(torch, device)
        except torch.OutOfMemoryError:  # the next call may succeed
            return "the device is out of memory."
    return _found[device]


def _try(torch: Any, device: Any) -> str:
    if torch.version.hip is not None:  # torch also calls AMD's devices CUDA
        return "only NVIDIA's GPUs are supported."
    if find_spec("triton") is None:
        return "triton is not installed."
    try:
        from gemproj.backends.triton.backend import solve_few

        one = torch.ones(1, dtype=torch.float64, device=device)
        solve_few(one[None], one)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # for example, Triton needs a C compiler for its launchers
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}."
        warnings.warn(
            f"Triton does not work on {device}: {reason} Projections on this device use slower "
            "array operations. GEMPROJ_BACKEND=portable silences this.",
            RuntimeWarning,
            stacklevel=2,
        )
        return reason
    return ""
