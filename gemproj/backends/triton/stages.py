"""The triton backend: its kernels on torch tensors, or on CuPy arrays through DLPack."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from gemproj._arrays import Array
from gemproj._constants import MOST_ROWS, WIDE_ROUNDING
from gemproj._problem import Problem
from gemproj._tspace import Gram, Measured, Standard
from gemproj.backends import portable
from gemproj.backends.triton import available
from gemproj.backends.triton import combine as _combine
from gemproj.backends.triton import gram as _gram
from gemproj.backends.triton import solve as _solve
from gemproj.backends.triton._layout import Layout, lay_out, lay_out_batch
from gemproj.methods import Method, Outcome


def bind(problem: Problem) -> Triton | None:
    """Return the backend for a problem on a device; None where the kernels cannot read its arrays."""
    if not available(problem.device) or not 1 <= problem.t <= MOST_ROWS or 0 in problem.batch:
        return None
    if problem.weight is not None or problem.shared:
        return None
    with _stream_of(problem.vector[0]):
        at = _locate(problem)
    return Triton(at) if at is not None and _gram.supports(at) else None


def solve(method: Method, dual: Standard, start: Array | None, *, only_multipliers: bool = False) -> Outcome:
    """Search, enumerate or descend in one launch; other methods and sizes take the portable form."""
    K, b = dual.K, dual.b
    if not _solve.supports(method, b.shape[-1]):
        return portable.solve(method, dual, start, only_multipliers=only_multipliers)
    with _stream_of(b):
        lower, upper, start = (None if a is None else _tensor(a) for a in (dual.lower, dual.upper, start))
        right = _tensor(b)
        with _device_of(right.device):
            found = _solve.solve(
                _tensor(K),
                right,
                method=method,
                lower=lower,
                upper=upper,
                start=start,
                only_multipliers=only_multipliers,
            )
        return Outcome(*(a if a is None or isinstance(a, int) else _back(a, b) for a in found))


class Triton:
    """A launch or two per stage; see `gemproj.backends.Backend`."""

    name = "triton"

    def __init__(self, at: Layout) -> None:
        self._at = at

    def gram(self, problem: Problem) -> Measured:
        """Sum all products."""
        like, batch, n = problem.vector[0], problem.batch, problem.t + 1
        with _stream_of(like), _device_of(self._at.device):
            total = _gram.gram(self._at)
        if batch:
            total = total.reshape(*batch, n, n)
            parts = total[..., :-1, :-1], total[..., :-1, -1], total[..., -1, -1]
        else:  # each in one operation: they take as long as launches
            of = total.as_strided
            parts = of((n - 1, n - 1), (n, 1)), of((n - 1,), (n,), n - 1), of((), (), n * n - 1)
        return Measured(Gram(*(_back(a, like) for a in parts)), WIDE_ROUNDING)

    def combine(self, problem: Problem, lam: Array, x: list[Array]) -> None:
        """Add the active rows in one launch, where the kernel can write x."""
        at = self._at
        with _stream_of(problem.vector[0]):
            out = _tensors(x)
            if problem.batch:
                flat = _viewed(out[0], at.problems, at.columns)
                out = [] if flat is None else [flat]
            if out and _combine.supports(at, out):
                with _device_of(at.device):
                    _combine.combine(
                        at, _tensor(lam) if not problem.batch else _tensor(lam).reshape(-1, at.t), out
                    )
                return
        portable.Portable().combine(problem, lam, x)


def _locate(problem: Problem) -> Layout | None:
    rows, vector = _tensors(problem.rows), _tensors(problem.vector)
    if not problem.batch:
        return lay_out(rows, vector)
    # The batch as one dimension, unless that takes a copy.
    G, g = _viewed(rows[0], -1, *rows[0].shape[-2:]), _viewed(vector[0], -1, vector[0].shape[-1])
    return None if G is None or g is None else lay_out_batch(G, g)


def _viewed(a: torch.Tensor, *shape: int) -> torch.Tensor | None:
    try:
        return a.view(*shape)
    except RuntimeError:
        return None


def _tensors(arrays: list[Array]) -> list[torch.Tensor]:
    return arrays if isinstance(arrays[0], torch.Tensor) else [_tensor(a) for a in arrays]


def _tensor(a: Array) -> torch.Tensor:
    return a if isinstance(a, torch.Tensor) else torch.from_dlpack(a)


def _back(a: torch.Tensor, like: Array) -> Array:
    """Return a tensor in the library of `like`."""
    if isinstance(like, torch.Tensor):
        return a
    import cupy

    return cupy.from_dlpack(a)


def _device_of(device: torch.device) -> AbstractContextManager[Any]:
    """Make a device the current one, which is where Triton launches."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _stream_of(array: Array) -> AbstractContextManager[Any]:
    """Make the stream in which the library of an array works torch's current stream, too."""
    if isinstance(array, torch.Tensor):
        return nullcontext()
    import cupy

    device = torch.device("cuda", array.device.id)
    ptr = cupy.cuda.get_current_stream(array.device.id).ptr
    # 0 and 1 are the default stream.
    stream = torch.cuda.ExternalStream(ptr, device) if ptr > 1 else torch.cuda.default_stream(device)
    return torch.cuda.stream(stream)
