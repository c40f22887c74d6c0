"""A few classes out of many, and their log-probabilities, without a copy of all logits in float32.

With a vocabulary of 50,000 tokens, such a copy may take as much memory as the rest of a pass. Here some
positions are taken at a time. On a CPU their numbers stay in the cache, so it also takes less time than
`torch.log_softmax` with `torch.gather`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

# Number of logits that are taken at a time on a CPU, and on a device, where each operation has its own cost.
_ON_CPU, _ON_DEVICE = 1 << 21, 1 << 25
# Least probability of the rest, all classes that are not among the likeliest: one minus a sum, with rounding.
_REST = 1e-6
# As integers: a probability of one, the distance of two draws, and the golden ratio of that distance, whose
# multiples are spread evenly.
_UNIT, _STEP, _GOLDEN = 1 << 32, 1 << 24, 10_368_889


def widened(logits: Tensor) -> Tensor:
    """Convert logits to at least float32, because sums in half precision are too inaccurate for a bound."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def log_probabilities(logits: Tensor, rows: Any, temperature: float) -> Tensor:
    """Return the log-probabilities of all classes at some positions, ``logits[rows]``; None for all."""
    return torch.log_softmax(_scaled(logits, rows, temperature), dim=-1)


def drawn(logits: Tensor, at: Tensor | None, top: int, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of `top` classes at each position, and the classes, (m, top); see `chosen`.

    The first ``likeliest(top)`` are the most probable ones. The others are drawn from the rest in proportion
    to their probabilities, with replacement, and their values are given the rest; minus infinity if the rest
    is less than rounding.
    """
    found, m = [], len(logits) if at is None else len(at)
    for rows, number in _parts(logits, at, torch.arange(1, m + 1, device=logits.device)):
        values = log_probabilities(logits, rows, temperature)
        first, classes = values.topk(likeliest(top), dim=-1)
        # What is at a position decides, too, where its draws begin, because texts may be stored one by one.
        begins = (number + classes.sum(-1)) * _GOLDEN % _STEP
        some = _systematic(values.exp().scatter_(-1, classes, 0.0), begins, top - likeliest(top))
        rest = with_rest(first)[..., -1:]
        given = torch.where(rest > math.log(2 * _REST), values.gather(-1, some) - rest, -math.inf)
        found.append((torch.cat([first, given], -1), torch.cat([classes, some], -1)))
    values, classes = map(torch.cat, zip(*found, strict=True))
    return values, classes


def _systematic(weights: Tensor, begins: Tensor, n: int) -> Tensor:
    """Draw n classes at each position, (m, n), by systematic sampling: at equal distances of the sums.

    The first is at the share ``begins / _STEP`` of a distance, so no random numbers are needed. Sums are of
    integers, because those of floats are not deterministic on a device. The weights are overwritten.
    """
    sums = weights.mul_(_UNIT).long().cumsum_(-1)
    total, parts = sums[:, -1:], torch.arange(n, device=weights.device)
    at = parts * total // n + begins[:, None] * total // (n * _STEP)
    # If nothing is left, the last class.
    return torch.searchsorted(sums, at, right=True).clamp(max=weights.shape[-1] - 1)


def likeliest(top: int) -> int:
    """Return how many of `top` classes are the most probable ones: half of them."""
    return top - top // 2


def with_rest(values: Tensor) -> Tensor:
    """Append the logarithm of the total probability of all other classes."""
    rest = (1.0 - values.exp().sum(-1, keepdim=True)).clamp(min=_REST)
    return torch.cat([values, rest.log()], dim=-1)


def chosen(logits: Tensor, at: Tensor | None, classes: Tensor, temperature: float) -> Tensor:
    """Return the log-probabilities of classes (m, k), in at least float32.

    Logits have shape (n, classes); ``at`` has the indices (m,) of the positions that are meant, each at most
    once, None for all.
    """
    if _is_usual(logits):
        found: Tensor = _Chosen.apply(logits, at, classes, temperature)  # type: ignore[no-untyped-call]
        return found
    return log_probabilities(logits, at, temperature).gather(-1, classes)


def _is_usual(logits: Tensor) -> bool:
    """Return whether no compiler, transform of torch.func, subclass or forward derivative is involved."""
    if torch.compiler.is_compiling() or type(logits) is not Tensor:
        return False
    try:
        return bool(logits.data_ptr()) and unpack_dual(logits).tangent is None
    except RuntimeError:  # tensors inside of torch.func have no memory
        return False


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
            values = log_probabilities(logits, at, ctx.temperature).gather(-1, classes)
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
    z = widened(logits if rows is None else logits[rows])
    return z if temperature == 1.0 else z / temperature


def _shifted(logits: Tensor, rows: Any, temperature: float) -> Tensor:
    """Return logits with a largest value of zero at each position."""
    z = _scaled(logits, rows, temperature)
    return z - z.amax(-1, keepdim=True)


def _parts(logits: Tensor, at: Tensor | None, *more: Tensor) -> Iterator[tuple[Any, ...]]:
    """Yield the indices of some positions at a time, with their parts of other tensors (m, ...)."""
    size = max(1, (_ON_CPU if logits.device.type == "cpu" else _ON_DEVICE) // logits.shape[-1])
    if at is None:
        rows: Any = [slice(k, k + size) for k in range(0, max(len(logits), 1), size)]
    else:
        rows = at.split(size)
    yield from zip(rows, *(tensor.split(size) for tensor in more), strict=True)
