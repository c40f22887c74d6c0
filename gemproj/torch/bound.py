"""Losses that are held at their bounds: what a step has to achieve, from how far they are above them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gemproj._arrays import namespace, to_numpy
from gemproj._checks import check_number
from gemproj._tspace import Gram
from gemproj.torch.constraints import ConstraintMatrix

# A learning rate of zero, as in the first step of a warmup, asks for nothing that is not finite.
_SMALLEST_RATE = 1e-30
# A gradient that is zero but for rounding is at most so many eps of another one.
_NOISE = 16.0


@dataclass(frozen=True)
class LossBound:
    """``G s >= kappa * (loss - bound)`` for the step s: the discrete form of a control barrier condition.

    To first order it gives ``loss' - bound <= (1 - kappa) (loss - bound)``: what is above its bound comes
    back geometrically, and what is below may rise towards it.

    Parameters
    ----------
    tolerance : float
        What a loss may exceed its stored value by.
    kappa : float
    """

    tolerance: float
    kappa: float = 1.0

    def __post_init__(self) -> None:
        check_number(self.tolerance, "bound", 0.0)
        check_number(self.kappa, "kappa", 0.0, strict=True)
        if self.kappa > 1.0:
            raise ValueError(f"kappa must be at most 1; found {self.kappa}.")

    def excess(self, losses: Tensor, stored: Tensor) -> Tensor:
        """Return how far losses are above their bounds, shape (t,)."""
        return losses - stored - self.tolerance

    def demand(
        self, losses: Tensor, stored: Tensor, rate: float, dtype: torch.dtype
    ) -> Callable[[Gram], Any]:
        """Return h for a step, or with a learning rate for a gradient, as a function of the Gram matrix.

        Losses are those of now and when their examples were stored, (t,). Their rounding, in the `dtype`
        in which they are computed, is no excess.
        """
        excess = self.excess(losses, stored)
        excess = torch.where((excess > 0.0) & (excess <= rounding(losses, dtype)), 0.0, excess)
        wanted = self.kappa * excess / max(rate, _SMALLEST_RATE)

        def right(gram: Gram) -> Any:
            xp = namespace(gram.b)
            own = wanted if isinstance(gram.b, Tensor) else to_numpy(wanted)
            # More than |g_k| |s| would take a step longer than the one that is projected. Near a minimum of
            # its loss, where the gradient of a row vanishes, it would be much longer.
            return xp.minimum(own, xp.sqrt(xp.linalg.diagonal(gram.K) * gram.gg))

        return right


def right_hand_side(
    G: ConstraintMatrix, bound: LossBound | None, rate: float | None, unit: float, compared: bool
) -> Callable[[Gram], Any] | None:
    """Return the right-hand side h that a bound asks for, as a function of the Gram matrix; None for zeros.

    Of a gradient, the `rate` is that of its step; of a step it is 1, and `unit` is the learning rate. If the
    losses are `compared` with stored outputs, rows of rounding ask for nothing.
    """
    h = None
    if bound is not None:
        if rate is None:
            raise ValueError(
                "bound is about steps: attach(optimizer), or pass the learning_rate of the step."
            )
        if not G.bounded:
            raise ValueError(
                "bound needs the losses that examples had when they were stored: use GEM.end_task, "
                "memory.record(task, losses=...) or memory.add(..., losses=...)."
            )
        h = bound.demand(G.losses, G.bounds, rate, G.vector.dtype)
    return without_noise(h, G.losses, G.vector.dtype, unit) if compared else h


def without_noise(h: Any, losses: Tensor, dtype: torch.dtype, rate: float) -> Any:
    """Return the right-hand side h as a function of the Gram matrix by which noise asks for nothing, or None.

    A divergence from outputs that were just stored is zero but for rounding, and so is its gradient: a row
    with such a loss that is shorter than the rounding of the gradient, which is the step over the `rate`.
    """
    near = losses.abs() <= rounding(losses, dtype)
    if near.device.type == "cpu" and not bool(near.any()):
        return h
    least = _NOISE * torch.finfo(dtype).eps

    def right(gram: Gram) -> Any:
        xp = namespace(gram.b)
        small = near if isinstance(gram.b, Tensor) else to_numpy(near)
        norms, size = xp.sqrt(xp.linalg.diagonal(gram.K)), xp.sqrt(gram.gg)
        own = xp.zeros_like(norms) if h is None else h(gram)
        return xp.where(small & (rate * norms <= least * size), -norms * size, own)

    return right


def rounding(losses: Tensor, dtype: torch.dtype) -> Tensor:
    """Return by how much losses that are computed in a dtype may differ from the same ones."""
    return 4.0 * torch.finfo(dtype).eps * (1.0 + losses.abs())
