"""Log-probabilities of a few classes out of many, without another copy of the logits.

With a vocabulary of 50,000 tokens, a copy of the logits in float32 may take as much memory as the rest of a
pass. Here some positions are taken at a time. On a CPU their numbers stay in the cache, which takes half of
the time of `torch.log_softmax` with `torch.gather`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_NUMBERS = 1 << 21  # of the logits that are taken at a time


def widened(logits: Tensor) -> Tensor:
    """Convert logits to at least float32, because sums in half precision are too inaccurate for a bound."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def likeliest(logits: Tensor, at: Tensor | None, top: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the `top` largest log-probabilities and their classes, (m, top); see `chosen`."""
    found = []
    for (rows,) in _parts(logits, at):
        z = widened(logits[rows]) / temperature
        values, classes = z.topk(top, dim=-1)
        found.append((values - z.logsumexp(-1, keepdim=True), classes))
    values, classes = map(torch.cat, zip(*found, strict=True))
    return values, classes


def chosen(logits: Tensor, at: Tensor | None, classes: Tensor, temperature: float) -> Tensor:
    """Return the log-probabilities of classes (m, k), in at least float32, with a first derivative.

    Logits have shape (n, classes); ``at`` has the indices (m,) of the positions that are meant, each at most
    once, None for all.
    """
    found: Tensor = _Chosen.apply(logits, at, classes, temperature)[0]  # type: ignore[no-untyped-call]
    return found


class _Chosen(torch.autograd.Function):
    """Keeps one number per position for the derivative: the logarithm of the sum of exponentials."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        logits: Tensor, at: Tensor | None, classes: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        found = []
        for rows, some in _parts(logits, at, classes):
            z = widened(logits[rows]) / temperature
            total = z.logsumexp(-1, keepdim=True)
            found.append((z.gather(-1, some) - total, total))
        values, totals = map(torch.cat, zip(*found, strict=True))
        return values, totals

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        logits, at, classes, ctx.temperature = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(logits, at, classes, output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_values: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        logits, at, classes, totals = ctx.saved_tensors
        gradient = torch.zeros_like(logits)
        for rows, some, total, part in _parts(logits, at, classes, totals, of_values / ctx.temperature):
            z = (widened(logits[rows]) / ctx.temperature - total).exp_()  # probabilities
            z.mul_(-part.sum(-1, keepdim=True)).scatter_add_(-1, some, part)
            gradient[rows] = z.to(gradient.dtype)
        return gradient, None, None, None


def _parts(logits: Tensor, at: Tensor | None, *more: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield the indices of some positions at a time, with their parts of other tensors (m, ...)."""
    size = max(1, _NUMBERS // logits.shape[-1])
    if at is None:
        n = len(logits)
        rows: Any = [slice(k, min(k + size, n)) for k in range(0, max(n, 1), size)]
    else:
        rows = at.split(size)
    yield from zip(rows, *(tensor.split(size) for tensor in more), strict=True)
