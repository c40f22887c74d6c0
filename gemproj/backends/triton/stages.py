"""The triton backend: its kernels on torch tensors, or on CuPy arrays through DLPack."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from gemproj._arrays import Array
from gemproj._constants import MOST_ROWS, WIDE_ROUNDING
from gemproj._problem import Problem
from gemproj._tspace import Gram, Measured
from gemproj.backends.portable import Portable
from gemproj.backends.triton import available
from gemproj.backends.triton import combine as _combine
from gemproj.backends.triton import gram as _gram
from gemproj.backends.triton import solve as _solve
from gemproj.methods import Method, Outcome


def bind(problem: Problem) -> Triton | None:
    """Return the backend for a problem on a device; None where the kernels cannot read its arrays."""
    return Triton() if available(problem.device) and applies(problem) else None


def applies(problem: Problem) -> bool:
    """Return whether the kernels can read the arrays of a problem where they are."""
    if problem.weight is not None or problem.shared or not 1 <= problem.t <= MOST_ROWS or 0 in problem.batch:
        return False
    rows, vector = _tensors(problem.rows), _tensors(problem.vector)
    if not problem.batch:
        return _gram.supports(rows, vector)
    flat = _flat(problem, rows[0], vector[0])
    return flat is not None and _gram.supports_batch(*flat)


class Triton:
    """One launch per stage; see `gemproj.backends.Backend`."""

    name = "triton"

    def gram(self, problem: Problem) -> Measured:
        """Sum all products in one launch."""
        like, batch, t = problem.vector[0], problem.batch, problem.t
        with _stream_of(like):
            rows, vector = _tensors(problem.rows), _tensors(problem.vector)
            if not batch:
                return Measured(Gram(*(_back(a, like) for a in _gram.gram(rows, vector))), WIDE_ROUNDING)
            K, b, gg = _gram.gram_batch(*_flat(problem, rows[0], vector[0]))
            whole = K.reshape(*batch, t, t), b.reshape(*batch, t), gg.reshape(batch)
            return Measured(Gram(*(_back(a, like) for a in whole)), WIDE_ROUNDING)

    def solve(
        self,
        method: Method,
        K: Array,
        b: Array,
        lower: Array | None,
        upper: Array | None,
        start: Array | None,
    ) -> Outcome:
        """Search, enumerate or descend in one launch; other methods and sizes take the portable form."""
        if not _solve.supports(method, b.shape[-1]):
            return method.solve(K, b, lower, upper, start)
        with _stream_of(b):
            lower, upper, start = (None if a is None else _tensor(a) for a in (lower, upper, start))
            K = _tensor(K).expand(*b.shape, b.shape[-1])
            found = _solve.solve(K, _tensor(b), method=method, lower=lower, upper=upper, start=start)
            return Outcome(*(a if a is None or isinstance(a, int) else _back(a, b) for a in found))

    def combine(self, problem: Problem, lam: Array, x: list[Array]) -> None:
        """Add the active rows in one launch, where the kernel can write x."""
        with _stream_of(problem.vector[0]):
            rows, vector, out = _tensors(problem.rows), _tensors(problem.vector), _tensors(x)
            if not problem.batch:
                if _combine.supports(rows, vector, out):
                    _combine.combine(rows, vector, _tensor(lam), out)
                    return
            else:
                G, g = _flat(problem, rows[0], vector[0])
                to = _viewed(out[0], -1, *g.shape[1:])
                if to is not None and _combine.supports_batch(G, g, to):
                    _combine.combine_batch(G, g, _tensor(lam).reshape(-1, problem.t), to)
                    return
        Portable().combine(problem, lam, x)


def _flat(problem: Problem, rows: torch.Tensor, vector: torch.Tensor) -> Any:
    """Return the batch as one dimension, or None where that takes a copy."""
    G, g = _viewed(rows, -1, *rows.shape[-2:]), _viewed(vector, -1, vector.shape[-1])
    return None if G is None or g is None else (G, g)


def _viewed(a: torch.Tensor, *shape: int) -> torch.Tensor | None:
    try:
        return a.view(*shape)
    except RuntimeError:
        return None


def _tensors(arrays: list[Array]) -> list[torch.Tensor]:
    return [_tensor(a) for a in arrays]


def _tensor(a: Array) -> torch.Tensor:
    return a if isinstance(a, torch.Tensor) else torch.from_dlpack(a)


def _back(a: torch.Tensor, like: Array) -> Array:
    """Return a tensor in the library of `like`."""
    if isinstance(like, torch.Tensor):
        return a
    import cupy

    return cupy.from_dlpack(a)


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
