"""A kernel that only shows whether Triton can compile and launch one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def launch(device: torch.device) -> None:
    """Compile and run a kernel on a device; raise where that is not possible."""
    number = torch.empty(1, dtype=torch.float64, device=device)
    with torch.cuda.device_of(number):
        _one[(1,)](number)


@triton.jit
def _one(number):
    tl.store(number, 1.0)
