"""Gradient projection inside a PyTorch training loop."""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError("gemproj.torch needs PyTorch: pip install 'gemproj[torch]'.") from error

from gemproj.torch.memory import EpisodicMemory
from gemproj.torch.projector import GradientProjector, Projection

__all__ = ["EpisodicMemory", "GradientProjector", "Projection"]
