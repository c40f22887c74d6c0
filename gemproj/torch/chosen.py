"""Log-probabilities of a few classes out of many, without a copy of all logits in float32.

With a vocabulary of 50,000 tokens, such a copy may take as much memory as the rest of a pass. Here some
positions are taken at a time. On a CPU their numbers stay in the cache, so it also takes less time than
`torch.log_softmax` with `torch.gather`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

# Number of logits that are taken at a time on a CPU, and on a device, where each operation has its own cost.
_ON_CPU, _ON_DEVICE = 1 << 21, 1 << 25


def widened(logits: Tensor) -> Tensor:
    """Convert logits to at least float32, because sums in half precision are too inaccurate for a bound."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def log_probabilities(logits: Tensor, rows: Any, temperature: float) -> Tensor:
    """Return the log-probabilities of all classes at some positions, ``logits[rows]``."""
    return torch.log_softmax(_scaled(logits, rows, temperature), dim=-1)


def likeliest(logits: Tensor, at: Tensor | None, top: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return the `top` largest log-probabilities and their classes, (m, top); see `chosen`."""
    found = []
    for (rows,) in _parts(logits, at):
        found.append(log_probabilities(logits, rows, temperature).topk(top, dim=-1))
    values, classes = map(torch.cat, zip(*found, strict=True))
    return values, classes


def chosen(logits: Tensor, at: Tensor | None, classes: Tensor, temperature: float) -> Tensor:
    """Return the log-probabilities of classes (m, k), in at least float32.

    Logits have shape (n, classes); ``at`` has the indices (m,) of the positions that are meant, each at most
    once, None for all.
    """
    if _is_usual(logits):
        found: Tensor = _Chosen.apply(logits, at, classes, temperature)  # type: ignore[no-untyped-call]
        return found
    return _at_once(logits, at, classes, temperature)


def _is_usual(logits: Tensor) -> bool:
    """Return whether no compiler, transform of torch.func, subclass or forward derivative is involved."""
    if torch.compiler.is_compiling() or type(logits) is not Tensor:
        return False
    try:
        return bool(logits.data_ptr()) and unpack_dual(logits).tangent is None
    except RuntimeError:  # tensors inside of torch.func have no memory
        return False


def _at_once(logits: Tensor, at: Tensor | None, classes: Tensor, temperature: float) -> Tensor:
    return log_probabilities(logits, ... if at is None else at, temperature).gather(-1, classes)


class _Chosen(torch.autograd.Function):
    """Keeps one number per position for the derivative: the logarithm of the sum of exponentials."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, at: Tensor | None, classes: Tensor, temperature: float) -> Tensor:
        values, sums = [], []
        for rows, some in _parts(logits, at, classes):
            z = _shifted(logits, rows, temperature)
            total = z.exp().sum(-1, keepdim=True).log_()
            values.append(z.gather(-1, some) - total)
            sums.append(total)
        ctx.save_for_backward(logits, at, classes, torch.cat(sums))
        ctx.temperature = temperature
        return torch.cat(values)

    @staticmethod
    def backward(ctx: Any, of_values: Tensor) -> tuple[Tensor | None, ...]:
        logits, at, classes, totals = ctx.saved_tensors
        if torch.is_grad_enabled():  # for a second derivative
            values = _at_once(logits, at, classes, ctx.temperature)
            (gradient,) = torch.autograd.grad(values, logits, of_values, create_graph=True)
            return gradient, None, None, None
        # With `is_grads_batched` this has the batch of `of_values`, so that it can be written to.
        gradient = torch.zeros_like(of_values.sum(), dtype=logits.dtype).expand(logits.shape).clone()
        for rows, some, total, part in _parts(logits, at, classes, totals, of_values / ctx.temperature):
            z = _shifted(logits, rows, ctx.temperature).sub_(total).exp_()  # probabilities
            z = (z * -part.sum(-1, keepdim=True)).scatter_add_(-1, some, part)
            gradient[rows] = z.to(gradient.dtype)
        return gradient, None, None, None


def _scaled(logits: Tensor, rows: Any, temperature: float) -> Tensor:
    z = widened(logits[rows])
    return z if temperature == 1.0 else z / temperature


def _shifted(logits: Tensor, rows: Any, temperature: float) -> Tensor:
    """Return logits with a largest value of zero at each position."""
    z = _scaled(logits, rows, temperature)
    return z - z.amax(-1, keepdim=True)


def _parts(logits: Tensor, at: Tensor | None, *more: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield the indices of some positions at a time, with their parts of other tensors (m, ...)."""
    size = max(1, (_ON_CPU if logits.device.type == "cpu" else _ON_DEVICE) // logits.shape[-1])
    if at is None:
        n = len(logits)
        rows: Any = [slice(k, min(k + size, n)) for k in range(0, max(n, 1), size)]
    else:
        rows = at.split(size)
    yield from zip(rows, *(tensor.split(size) for tensor in more), strict=True)
