"""A GPU where there is one, else the CPU as a device: for tests of what runs there."""

import os
from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch")
from asv_benchmarks.reports.gpu.device import cpu_as_device  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def skip_without_kernels():
    pytest.importorskip("triton")
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels run on the CPU in Triton's interpreter only")
    interpret_faster()


def interpret_faster():
    """Have Triton's interpreter prepare a module once, not at each call of one of its functions.

    A call takes a millisecond for it, and a launch makes hundreds.
    """
    from triton.runtime import interpreter

    prepare = getattr(interpreter, "_patch_lang", None)
    if prepare is None or DEVICE != "cpu":
        return
    prepared = set()

    def call(function, *args, **kwargs):
        if id(function.fn.__globals__) not in prepared:
            prepared.add(id(function.fn.__globals__))
            prepare(function.fn)
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


def make_device(kernels):
    """Return a context in which the package takes DEVICE for a device, with or without kernels."""
    return nullcontext() if DEVICE != "cpu" else cpu_as_device(kernels)
