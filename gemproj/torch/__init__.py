"""Gradient projection inside a PyTorch training loop."""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        "gemproj.torch needs PyTorch: pip install '.[torch]' in a checkout of gemproj."
    ) from error

from gemproj.torch import losses
from gemproj.torch.batches import PerExample, Remembered
from gemproj.torch.gem import GEM
from gemproj.torch.hooks import detach
from gemproj.torch.memory import EpisodicMemory
from gemproj.torch.projector import GradientProjector
from gemproj.torch.promise import Promise
from gemproj.torch.report import Projection

__all__ = [
    "GEM",
    "EpisodicMemory",
    "GradientProjector",
    "PerExample",
    "Projection",
    "Promise",
    "Remembered",
    "detach",
    "losses",
]
