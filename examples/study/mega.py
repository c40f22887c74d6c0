"""MEGA-I and MEGA-II (Guo et al., NeurIPS 2020), by `gram` and `combine`."""

import math
from collections.abc import Callable

from torch import Tensor

from gemproj import combine, gram

from .learners import Reference, Setup

Weights = Callable[[float, float, float, float, float], tuple[float, float]]


class Balanced(Reference):
    """Replaces the gradient g of a batch by a weighted sum with r, the gradient on the memory.

    With the weights ``(|r|^2, r.g, |g|^2, loss, loss on the memory) -> (u, v)`` the sum is u g + v r.
    """

    def __init__(self, setup: Setup, weights: Weights) -> None:
        super().__init__(setup)
        self.weights = weights

    def change(self, past: list[Tensor], gradient: list[Tensor], losses: tuple[float, float]) -> None:
        """Replace the gradient by the sum."""
        K, b, gg = gram(past, gradient)
        u, v = self.weights(float(K), float(b), float(gg), *losses)
        found = combine(past, [u * part for part in gradient], b.new_tensor([v]))
        for part, new in zip(gradient, found, strict=True):
            part.copy_(new)


def mega1(rr: float, rg: float, gg: float, loss: float, reference: float) -> tuple[float, float]:
    """Add r times the ratio of the losses to g; return r alone once the batch is learned."""
    return (1.0, reference / loss) if loss > 1e-3 else (0.0, 1.0)


def mega2(rr: float, rg: float, gg: float, loss: float, reference: float) -> tuple[float, float]:
    """Rotate g towards r, by an angle that depends on the losses, at most a right angle."""
    cosine = rg / math.sqrt(rr * gg) if rr * gg > 0 else 1.0
    angle = math.acos(max(-1.0, min(cosine, 1.0)))
    if math.sin(angle) < 1e-7:  # no plane to rotate in
        return 1.0, 0.0
    turn = math.atan2(reference * math.sin(angle), loss + reference * math.cos(angle))
    turn = max(0.0, min(turn, math.pi / 2))
    return math.sin(angle - turn) / math.sin(angle), math.sin(turn) / math.sin(angle) * math.sqrt(gg / rr)
