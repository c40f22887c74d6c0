"""Problems on the device, and their errors against the CPU in float64."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

import gemproj
from asv_benchmarks.reports.gpu.device import DEVICE

# Largest error of an entry over the largest entry, in units of the dtype: half a unit, rounded once.
ROUNDED = 0.51


def draw(
    t: int, d: int, dtype: torch.dtype = torch.float32, batch: tuple[int, ...] = ()
) -> tuple[Tensor, Tensor]:
    """Draw rows that agree a little, and a gradient against them; violations grow with the columns."""
    G = torch.randn(*batch, t, d, device=DEVICE, dtype=dtype).add_(0.2)
    return G, torch.randn(*batch, d, device=DEVICE, dtype=dtype).sub_(0.2)


def error(x: Any, G: Any, g: Any, **options: Any) -> float:
    """Return the largest error of an entry of x, over the largest entry of x or g of its problem.

    The error is taken against the answer of the CPU for the same numbers in float64.
    """
    G, g, options = tree_map(_to_numpy, (G, g, options))
    right = flat(gemproj.project(G, g, **options))
    size = np.maximum(np.abs(right).max(-1), np.abs(flat(g)).max(-1))
    return float((np.abs(flat(x) - right).max(-1) / size).max())


def bound(dtype: torch.dtype) -> float:
    """Return the largest right error of x: its rounding, and that of the multipliers."""
    return ROUNDED * torch.finfo(dtype).eps + 1e-11


def flat(x: Any) -> np.ndarray:
    """Return an array, or blocks as one vector, on the CPU in float64."""
    return np.concatenate([_to_numpy(a).ravel() for a in x]) if isinstance(x, list) else _to_numpy(x)


def _to_numpy(leaf: Any) -> Any:
    return leaf.cpu().double().numpy() if isinstance(leaf, Tensor) else leaf
