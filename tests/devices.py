"""A GPU where there is one, else the CPU as a device: for tests of what runs there."""

import sys
from contextlib import ExitStack, contextmanager, nullcontext
from unittest.mock import patch

import torch

from gemproj._arrays import on_host

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(*shape, dtype=torch.float64, seed=0):
    """Draw G and g, of which some rows conflict."""
    generator = torch.Generator().manual_seed(seed)
    G = torch.randn(*shape, generator=generator, dtype=torch.float64) - 0.2
    g = torch.randn(*shape[:-2], shape[-1], generator=generator, dtype=torch.float64) + 0.2
    return G.to(DEVICE, dtype), g.to(DEVICE, dtype)


@contextmanager
def cpu_as_device():
    """Have the package take tensors on the CPU for those of a device; arrays of NumPy stay on the CPU."""
    with ExitStack() as stack:
        for module in [m for name, m in sys.modules.items() if name.startswith("gemproj")]:
            if getattr(module, "on_host", None) is on_host:
                stack.enter_context(patch.object(module, "on_host", lambda device: isinstance(device, str)))
        yield


def make_device():
    """Return a context in which the package takes DEVICE for a device."""
    return nullcontext() if DEVICE != "cpu" else cpu_as_device()
