"""A GPU where there is one, else the CPU as a device: for tests of what runs there."""

import os

import pytest

torch = pytest.importorskip("torch")


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def skip_without_kernels():
    pytest.importorskip("triton")
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels run on the CPU in Triton's interpreter only")


def make_device(patch, kernels):
    """Have the package take DEVICE for a device, with or without kernels, as long as the patch lasts.

    Arrays of NumPy, whose device is a string, stay on the CPU.
    """
    if DEVICE != "cpu":
        return
    for module in ("_problem", "_dual", "_checks", "_bounds", "methods.exact", "methods._callable"):
        patch.setattr(f"gemproj.{module}.on_host", lambda device: isinstance(device, str))
    # stages first: it is imported with what `triton` holds then.
    for module in ("triton.stages", "triton") if kernels else ():
        patch.setattr(f"gemproj.backends.{module}.available", lambda device: True)
