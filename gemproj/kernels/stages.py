"""The kernels on problems as the package knows them: torch tensors, or CuPy arrays through DLPack."""

from __future__ import annotations

from typing import Any

import torch

from gemproj._array import Array, Problem
from gemproj.kernels import combine as _combine
from gemproj.kernels import gram as _gram
from gemproj.kernels import solve as _solve
from gemproj.methods._constants import MOST_ROWS
from gemproj.methods._method import Method, Outcome


def applies(problem: Problem) -> bool:
    """Tell whether the kernels can read the arrays of a problem where they are."""
    if problem.weight is not None or not 1 <= problem.t <= MOST_ROWS or 0 in problem.batch:
        return False
    rows, vector = _tensors(problem.rows), _tensors(problem.vector)
    if not problem.batch:
        return _gram.supports(rows, vector)
    flat = _flat(problem, rows[0], vector[0])
    return flat is not None and _gram.supports_batch(*flat)


def gram(problem: Problem) -> tuple[Array, Array, Array]:
    """Stage 1, in one launch: K, b and |g|^2."""
    rows, vector = _tensors(problem.rows), _tensors(problem.vector)
    if not problem.batch:
        K, b, gg = _gram.gram(rows, vector)
        return _back(K, problem.vector[0]), _back(b, problem.vector[0]), _back(gg, problem.vector[0])
    K, b, gg = _gram.gram_batch(*_flat(problem, rows[0], vector[0]))
    t, like = problem.t, problem.vector[0]
    return (
        _back(K.reshape(*problem.batch, t, t), like),
        _back(b.reshape(*problem.batch, t), like),
        _back(gg.reshape(problem.batch), like),
    )


def solves(method: Any, t: int) -> bool:
    """Tell whether stage 2 has a kernel for a method."""
    return _solve.supports(method, t)


def solve(
    method: Method,
    K: Array,
    b: Array,
    start: Array | None,
    upper: Array | float | None,
    lower: Array | None = None,
) -> Outcome:
    """Stage 2, in one launch; rows that are not finite count as zero."""
    found = _solve.solve(
        _tensor(K),
        _tensor(b),
        method=method,
        lower=None if lower is None else _tensor(lower),
        start=None if start is None else _tensor(start),
        upper=upper if upper is None or isinstance(upper, float) else _tensor(upper),
    )
    return Outcome(*(a if a is None or isinstance(a, int) else _back(a, b) for a in found))


def combine(problem: Problem, lam: Array, x: list[Array]) -> bool:
    """Stage 3, in one launch; False, and nothing written, if the kernel cannot write x where it is."""
    rows, vector, out = _tensors(problem.rows), _tensors(problem.vector), _tensors(x)
    if not problem.batch:
        if not _combine.supports(rows, vector, out):
            return False
        _combine.combine(rows, vector, _tensor(lam), out)
        return True
    G, g = _flat(problem, rows[0], vector[0])
    to = _viewed(out[0], -1, *g.shape[1:])
    if to is None or not _combine.supports_batch(G, g, to):
        return False
    _combine.combine_batch(G, g, _tensor(lam).reshape(-1, problem.t), to)
    return True


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
