"""Promises about kept examples inside a PyTorch training loop."""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        "gemproj.torch needs PyTorch: pip install '.[torch]' in a checkout of gemproj."
    ) from error

from gemproj.torch import losses
from gemproj.torch.data import PerExample
from gemproj.torch.history import Projection
from gemproj.torch.keeper import Keeper
from gemproj.torch.promise import Promise
from gemproj.torch.references import write_references
from gemproj.torch.rows import rows
from gemproj.torch.step import detach

__all__ = ["Keeper", "PerExample", "Projection", "Promise", "detach", "losses", "rows", "write_references"]
