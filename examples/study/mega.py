"""MEGA-I and MEGA-II (Guo et al., NeurIPS 2020), by `gram` and `combine`."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gemproj import combine, gram

Weights = Callable[[float, float, float, float, float], tuple[float, float]]


class MEGA:
    """Weigh the gradient g of a batch against the gradient r on the memory by their losses.

    This is no projection, but the class replaces a `GradientProjector`. With the weights
    ``(|r|^2, r.g, |g|^2, loss, loss on the memory) -> (u, v)`` the result is x = u g + v r.
    """

    def __init__(self, parameters: Sequence[Tensor], weights: Weights) -> None:
        self.parameters, self.weights = parameters, weights

    def recall(self, model: nn.Module, batches: Iterable[Any], loss: Callable[..., Tensor]) -> None:
        """Compute the gradient on the only batch, without dropout."""
        [batch] = batches
        model.eval()
        reference = loss(model, batch).mean()
        self.r = [row[None] for row in torch.autograd.grad(reference, self.parameters)]
        self.reference = float(reference.detach())
        model.train()

    def balance_(self, loss: Tensor) -> None:
        """Replace the gradients."""
        g = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.parameters]
        K, b, gg = gram(self.r, g)
        u, v = self.weights(float(K), float(b), float(gg), float(loss.detach()), self.reference)
        x = combine(self.r, [u * part for part in g], b.new_tensor([v]))
        for p, part in zip(self.parameters, x, strict=True):
            p.grad = part


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
