"""MEGA-I and MEGA-II (Guo et al., NeurIPS 2020), made of `gram` and `combine`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gemproj import combine, gram

Weights = Callable[[Any, Any, Any, float, float], tuple[float, float]]


class MEGA:
    """Weigh the gradient g of a batch against the gradient r on the memory by their losses.

    No projection but a balance, and no part of gemproj: `gram` and `combine` are all that it needs. It has
    the methods of a `GradientProjector` that the loop calls.

    Parameters
    ----------
    parameters : sequence of torch.nn.Parameter
        What is trained.
    weights : callable
        From the Gram matrix of r and g, the loss and the loss on the memory to u and v: x = u g + v r.
    """

    on = "gradient"

    def __init__(self, parameters: Sequence[Tensor], weights: Weights) -> None:
        self.parameters, self.weights = parameters, weights

    def recall(self, model: nn.Module, batches: Iterable[Any], loss: Callable[..., Any]) -> None:
        """Take the gradient on the one batch, without dropout."""
        [batch] = batches
        model.eval()
        self.reference = loss(model, batch)
        self.r = [row[None] for row in torch.autograd.grad(self.reference, self.parameters)]
        model.train()

    def balance_(self, loss: Tensor) -> None:
        """Replace the gradients by u g + v r."""
        g = [p.grad for p in self.parameters]
        u, v = self.weights(*gram(self.r, g), float(loss), float(self.reference))
        for p, x in zip(self.parameters, combine(self.r, [u * part for part in g], [v]), strict=True):
            p.grad = x

    def reset(self) -> None:
        """Nothing is carried from step to step."""


def mega1(K: Any, b: Any, gg: Any, loss: float, reference: float) -> tuple[float, float]:
    """MEGA-I: add r, weighed by the ratio of the losses; r alone where the batch is learned."""
    return (1.0, reference / loss) if loss > 1e-3 else (0.0, 1.0)


def mega2(K: Any, b: Any, gg: Any, loss: float, reference: float) -> tuple[float, float]:
    """MEGA-II: rotate g towards r, as far as the losses say, by a right angle at most."""
    length, size = math.sqrt(K[0, 0]), math.sqrt(gg)
    angle = math.acos(max(-1.0, min(1.0, float(b[0]) / (length * size)))) if length * size > 0 else 0.0
    if math.sin(angle) < 1e-7:
        return 1.0, 0.0
    turn = math.atan2(reference * math.sin(angle), loss + reference * math.cos(angle))
    turn = max(0.0, min(turn, math.pi / 2))
    return math.sin(angle - turn) / math.sin(angle), math.sin(turn) / math.sin(angle) * size / length
