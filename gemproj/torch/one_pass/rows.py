"""Sums over the examples of each task, written straight into the rows of the constraint matrix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor


class TaskRows:
    r"""Where the gradients of all tasks add up; examples lie task after task along dimension 0.

    Parameters
    ----------
    out : sequence of Tensor
        For each parameter p, a writable tensor of shape (t, \*p.shape), usually a view with a long
        first stride. What is in it before does not matter.
    counts : sequence of int
        Number of examples of each task.
    scale : sequence of float
        Factor of each task's gradient.
    """

    def __init__(self, out: Sequence[Tensor], counts: Sequence[int], scale: Sequence[float]) -> None:
        self.out = out
        self.counts = counts
        self.scale = scale
        self.total = sum(counts)
        self._even = len(set(counts)) == len(set(scale)) == 1
        self._fresh = [True] * len(out)

    def add_products(self, j: int, left: Tensor, right: Tensor) -> None:
        """Add ``left' right`` of each task's examples: (N, ..., a) and (N, ..., b) give (a, b)."""
        old = not self._claim(j)
        for out, scale, a, b in self._groups(j, left, right):
            if a.dtype == out.dtype:
                out.baddbmm_(a.mT, b, beta=int(old), alpha=scale)
            else:
                _put(out, torch.bmm(a.mT, b), scale, old)

    def add_sums(self, j: int, values: Tensor) -> None:
        """Add the sum over each task's examples: (N, ..., a) gives (a,)."""
        old = not self._claim(j)
        for out, scale, part in self._groups(j, values):
            _put(out, part.sum(1, dtype=out.dtype), scale, old)

    def add_lookups(self, j: int, index: Tensor, values: Tensor) -> None:
        """Add ``values[i]`` to entry ``index[i]``, for each task's examples: (N, ...) and (N, ..., a)."""
        if self._claim(j):
            self.out[j].zero_()
        values = values.to(self.out[j].dtype)
        for k, part in enumerate(self.slices()):
            chosen = index[part].reshape(-1)
            self.out[j][k].index_add_(0, chosen, values[part].reshape(len(chosen), -1), alpha=self.scale[k])

    def add(self, j: int, k: int, gradient: Tensor) -> None:
        """Add a gradient of one task; the tasks come in order, all of them."""
        _put(self.out[j][k], gradient, self.scale[k], old=not self._fresh[j])
        if k == len(self.counts) - 1:
            self._fresh[j] = False

    def finish(self) -> None:
        """Zero what nothing was added to."""
        for out, fresh in zip(self.out, self._fresh, strict=True):
            if fresh:
                out.zero_()

    def slices(self) -> Iterator[slice]:
        """Yield each task's examples."""
        start = 0
        for count in self.counts:
            yield slice(start, start + count)
            start += count

    def _claim(self, j: int) -> bool:
        """Return whether this is the first time for a parameter."""
        fresh, self._fresh[j] = self._fresh[j], False
        return fresh

    def _groups(self, j: int, *tensors: Tensor) -> Iterator[tuple]:
        """Yield output, factor and examples (tasks, rows, a): of all tasks at once if they are alike."""
        if self._even:
            t = len(self.counts)
            yield self.out[j], self.scale[0], *(x.reshape(t, -1, x.shape[-1]) for x in tensors)
            return
        for k, part in enumerate(self.slices()):
            yield (
                self.out[j][k : k + 1],
                self.scale[k],
                *(x[part].reshape(1, -1, x.shape[-1]) for x in tensors),
            )


def _put(out: Tensor, value: Tensor, scale: float, old: bool) -> None:
    """Let out be ``scale * value``, plus what it is if that is `old`."""
    if old:
        out.add_(value, alpha=scale)
        return
    out.copy_(value)
    if scale != 1:
        out.mul_(scale)
