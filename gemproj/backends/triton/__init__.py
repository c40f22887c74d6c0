"""Triton kernels for CUDA devices: each stage of a projection in one launch, without waiting for the device.

The same three stages as everywhere in the package: `gemproj.kernels.gram`, `gemproj.kernels.solve` and
`gemproj.kernels.combine` on torch tensors, and `gemproj.kernels.stages` on what `project` is called with.
Importing this package imports neither torch nor Triton; its modules do.
"""

from __future__ import annotations

from functools import lru_cache
from importlib.util import find_spec
from typing import Any


def available(device: Any) -> bool:
    """Tell whether the kernels run on a device of torch or CuPy: NVIDIA's, with Triton installed."""
    return _is_cuda(device) and _installed()


def stages_of(problem: Any) -> Any:
    """Return `gemproj.kernels.stages` where they apply to a `Problem`, else None; looked up once."""
    if "kernels" not in problem.found:
        problem.found["kernels"] = None
        if not problem.host and available(problem.device):
            from gemproj.kernels import stages

            problem.found["kernels"] = stages if stages.applies(problem) else None
    return problem.found["kernels"]


def _is_cuda(device: Any) -> bool:
    return getattr(device, "type", None) == "cuda" or type(device).__module__.startswith("cupy")


@lru_cache(maxsize=1)
def _installed() -> bool:
    if find_spec("triton") is None or find_spec("torch") is None:
        return False
    import torch

    # On AMD's devices, which torch calls CUDA too, nobody has tried them.
    return torch.cuda.is_available() and torch.version.hip is None
