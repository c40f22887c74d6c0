"""Launches of kernels, which Triton looks up once: later ones cost a tenth of the host time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_compiled: dict[Any, Any] = {}


def launch(
    kernel: Any,
    programs: int,
    arguments: Sequence[Any],
    constants: tuple[Any, ...],
    *,
    device: torch.device,
    num_warps: int,
    enable_fp_fusion: bool,
) -> None:
    """Run a kernel on that many programs of the current device.

    Triton takes 10 to 20 microseconds per launch to find out which compiled kernel goes with its arguments;
    here the key is known.

    Parameters
    ----------
    arguments : sequence
        Numbers, tensors of one dtype for each place, and None; those that are not `tl.constexpr` come first.
    constants : tuple
        The others, in order.
    """
    key = (id(kernel), device, constants, num_warps)  # hashing a kernel takes longer, and it lives for ever
    found = _compiled.get(key)
    if found is not None:
        found[programs, 1, 1](*arguments, *constants)
        return
    _compiled[key] = kernel[programs,](
        *arguments, *constants, num_warps=num_warps, enable_fp_fusion=enable_fp_fusion
    )
