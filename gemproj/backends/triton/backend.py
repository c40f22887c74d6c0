"""The triton backend: choice of the problems that the kernels support, and launches of the kernels."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gemproj._arrays import Array
from gemproj._problem import Problem
from gemproj._tspace import Gram
from gemproj.backends import portable
from gemproj.backends.triton import kernels

# Maximum number of rows for which the entries of K are held in registers.
_FEW = 8
# Programs per multiprocessor in stage 1 and stage 3, and minimum number of columns per program in stage 1.
_MEASURING, _COMBINING, _LEAST = 4, 16, 1024
# Number of columns that a program of stage 3 computes at a time.
_COLUMNS = 512


class Block(NamedTuple):
    """The arrays of a block, with contiguous columns, and the properties that the kernels need."""

    arrays: tuple[Tensor, Tensor, Tensor]  # G (problems, t, n), g (problems, n), and the metric or g
    columns: int
    strides: tuple[int, int, int, int]  # between rows; between problems of G, of g and of the metric
    constants: tuple[bool, bool]  # are addresses, strides and columns multiples of 16; is there a metric
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, G: Tensor, g: Tensor, w: Tensor | None, batch: tuple[int, ...], t: int) -> Block | None:
        """Return the block of these arrays; None if columns are not contiguous."""
        if batch or g.ndim != 1:
            many = math.prod(batch)
            G, g = G.view(many, t, -1), g.view(many, -1)
            w = None if w is None else w.view(many, -1)
        n, arrays, apart = g.shape[-1], (G, g, g if w is None else w), [0, 0, 0]
        if any(a.stride(-1) != 1 or a.is_neg() for a in arrays):
            return None
        if len(g) > 1 and g.ndim == 2:
            apart = [a.stride(0) for a in arrays]
        strides = G.stride(-2), apart[0], apart[1], 0 if w is None else apart[2]
        odd = any(number % 16 for number in (n, *strides)) or any(a.data_ptr() % 16 for a in arrays)
        return cls(arrays, n, strides, (not odd, w is not None), (G.dtype, g.dtype, arrays[2].dtype))


def bind(problem: Problem) -> Triton | None:
    """Return the backend for a problem; None if the kernels cannot read its arrays without a copy."""
    t, batch = problem.t, problem.batch
    if t == 0 or problem.shared or 0 in batch:
        return None
    weights = problem.weight or [None] * len(problem.rows)
    arrays = zip(problem.rows, problem.vector, weights, strict=True)
    try:
        blocks = [Block.of(G, g, w, batch, t) for G, g, w in arrays if g.numel()]
    except RuntimeError:  # the arrays cannot be reshaped without a copy
        return None
    return Triton(blocks, problem) if blocks and None not in blocks else None


class Triton:
    """Stages 1 and 3 with one launch per block; see `gemproj.backends.select`."""

    name = "triton"

    def __init__(self, blocks: list[Any], problem: Problem) -> None:
        self._blocks, self._many = blocks, math.prod(problem.batch)
        self._programs = max(1, _processors(problem.device) // self._many)

    def gram(self, problem: Problem) -> Gram:
        """Return K, b and |g|^2 as views of one tensor."""
        t, n, many, batch = problem.t, problem.t + 1, self._many, problem.batch
        if t > _FEW:
            return portable.gram(problem)
        # More rows take more registers, so fewer programs run at once.
        programs = self._programs * (_MEASURING if t <= _FEW // 2 else _MEASURING // 2)
        width = 2 if any(torch.float64 in block.dtypes for block in self._blocks) else 4
        cuts = [_cut(block.columns, 128 * width, programs, _LEAST) for block in self._blocks]
        parts, first = sum(own for _, own in cuts), 0
        partial = torch.empty((many, parts, n, n), dtype=torch.float64, device=problem.device)
        for block, (share, own) in zip(self._blocks, cuts, strict=True):
            small = block.columns <= 256  # a batch of small problems: one warp per program
            numbers = (block.columns, share, first, parts, *block.strides)
            constants = (t, 32 if small else 128, width, *block.constants)
            arguments = (*block.arrays, partial, *numbers)
            launch(kernels.products, (many, own, 1), arguments, constants, block.dtypes, 1 if small else 4)
            first += own
        total = partial.sum(dim=1).view(*batch, n, n)
        return Gram(total[..., :t, :t], total[..., t, :t], total[..., t, t])

    def combine(self, problem: Problem, lam: Array, x: list[Array]) -> None:
        """Write x with one launch per block."""
        t, many, out = problem.t, self._many, [a for a in x if a.numel()]
        if not all(a.is_contiguous() and not a.is_neg() for a in out):
            return portable.combine(problem, lam, x)
        lam = lam.contiguous()
        for block, to in zip(self._blocks, out, strict=True):
            n, (aligned, weighted) = block.columns, block.constants
            columns = 128 if n <= 128 else _COLUMNS
            share, parts = _cut(n, columns, self._programs * _COMBINING, columns)
            numbers = (t, n, share, *block.strides, n)
            constants = (columns, aligned and to.data_ptr() % 16 == 0, weighted)
            arguments = (*block.arrays, lam, to, *numbers)
            launch(kernels.add_rows, (many, parts, 1), arguments, constants, block.dtypes, columns // 128)
        return None


def solve_few(K: Tensor, b: Tensor, margin: Tensor | None = None) -> Tensor:
    """Return the result of `portable.solve_few`; up to 8 rows in float64 take one launch."""
    t = b.shape[-1]
    readable = K.dtype == b.dtype == torch.float64 and not (K.is_neg() or b.is_neg())
    if not (readable and 0 < t <= _FEW and b.numel()):
        return portable.solve_few(K, b, margin)
    lam = b.new_empty(b.shape)
    least = lam if margin is None else margin.expand(b.shape).contiguous()
    K, b = K.expand(*b.shape, t).reshape(-1, t, t), b.reshape(-1, t)
    if K.stride(-1) != 1:
        K = K.contiguous()
    strides = K.stride(0), K.stride(1), b.stride(0), b.stride(1)
    constants = t, margin is not None
    launch(kernels.search, (len(b), 1, 1), (K, b, least, lam, *strides), constants, (), max(1, 2**t // 32))
    return lam


def launch(
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: tuple[Any, ...],
    constants: tuple[Any, ...],
    dtypes: tuple[torch.dtype, ...],
    warps: int,
) -> None:
    """Launch a kernel on the device of its first argument.

    Triton takes 10 to 20 microseconds to find the compiled kernel for its arguments. A dict finds it faster:
    the kernel depends neither on the values of numbers nor on the alignment of tensors.

    Parameters
    ----------
    arguments, constants : tuple
        Tensors and numbers, followed by the compile-time constants.
    dtypes : tuple
        Dtypes of the tensors whose dtypes vary.
    """
    device = arguments[0].device
    key = (id(kernel), device, warps, constants, dtypes)
    found = _compiled.get(key)
    with _current(device):
        if found is not None:
            found[grid](*arguments, *constants)
        else:
            # The default for the fusion of products and sums differs between versions of Triton.
            options = {"num_warps": warps, "enable_fp_fusion": True}
            _compiled[key] = kernel[grid](*arguments, *constants, **options)


_compiled: dict[Any, Any] = {}
_HERE = nullcontext()


def _current(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context that makes a device the current device, on which Triton launches."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


def _cut(columns: int, unit: int, most: int, least: int) -> tuple[int, int]:
    """Return the columns per program, a multiple of `unit` (at least `least`), and the number of programs."""
    share = -(-max(least, -(-columns // most)) // unit) * unit
    return share, -(-columns // share)


@lru_cache(maxsize=16)
def _processors(device: torch.device) -> int:
    """Return the number of multiprocessors; 3 on the CPU, where Triton's interpreter runs kernels."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
