"""What a projected step did, and its means for logs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from gemproj._solution import DualSolution


@dataclass(frozen=True, eq=False)
class Projection:
    """Statistics of one step of a `GradientProjector`. On a device, reading a number waits for it.

    Attributes
    ----------
    constraints : int
        Number of constraints.
    solution : DualSolution or None
        Multipliers and certificates of the projection of the gradient (with ``on="step"``, of the step);
        None where nothing was projected.
    step : DualSolution or None
        Those of the projection of the step, with ``on="step"`` and ``on="both"``.
    cosines : Tensor or None
        Cosine between the applied step and each constraint gradient, shape (t,), float64, measured on the
        parameters: negative where the step raises a past task's loss, to first order. None before the
        optimizer has stepped, and without `attach`.
    excess : Tensor or None
        With a bound, how far each loss was above it when the step began, shape (t,), float64.
    age : int
        Steps since the oldest of the constraint gradients was computed. Losses are followed to first order
        meanwhile.
    seconds : float
        Time spent in the projector for this step, constraint gradients included, as the host sees it.
    """

    constraints: int
    solution: DualSolution | None
    step: DualSolution | None = None
    cosines: Tensor | None = None
    excess: Tensor | None = None
    age: int = 0
    seconds: float = 0.0

    @property
    def num_violated(self) -> int:
        """Number of constraints that the gradient violated."""
        return 0 if self.solution is None else int(self.solution.violated.sum())

    @property
    def num_active(self) -> int:
        """Number of active constraints: those whose multiplier is not at its lower bound."""
        return 0 if self.solution is None else int(self.solution.active.sum())

    @property
    def multipliers(self) -> Tensor:
        """The multipliers, shape (t,), or (groups, t), float64."""
        return torch.empty(0, dtype=torch.float64) if self.solution is None else self.solution.multipliers

    @property
    def cosine(self) -> float:
        """Cosine between the gradient before and after; 1 when nothing changed."""
        return 1.0 if self.solution is None else float(_cosine(self.solution))

    @property
    def worst_cosine(self) -> float | None:
        """Smallest cosine between the applied step and a constraint gradient."""
        return None if self.cosines is None or not len(self.cosines) else float(self.cosines.min())


def log_means(steps: Iterable[Projection]) -> dict[str, Tensor | float]:
    """Return the numbers that training loops log: means over steps, and the smallest worst cosine.

    Nothing is read from a device; steps without constraints do not count.

    Returns
    -------
    dict
        ``gem/violations``, ``gem/active``, ``gem/cosine``, ``gem/worst_cosine`` (scalar tensors) and
        ``gem/seconds``; with a bound ``gem/excess``, the largest excess of a loss over it. Empty if no step
        counts.
    """
    rows, excess, seconds = [], [], 0.0
    for step in steps:
        if step.solution is None or step.cosines is None:
            continue
        sol, wide = step.solution, step.cosines.dtype
        numbers = [sol.violated.sum(), sol.active.sum(), _cosine(sol), step.cosines.min()]
        rows.append(torch.stack([number.to(wide) for number in numbers]))
        if step.excess is not None:
            excess.append(step.excess.max())
        seconds += step.seconds
    if not rows:
        return {}
    table = torch.stack(rows)
    means = table.mean(0)
    return {
        "gem/violations": means[0],
        "gem/active": means[1],
        "gem/cosine": means[2],
        "gem/worst_cosine": table[:, 3].min(),
        "gem/seconds": seconds / len(rows),
        **({"gem/excess": torch.stack(excess).max()} if excess else {}),
    }


def _cosine(sol: DualSolution) -> Tensor:
    """Return the cosine between the whole gradient before and after, summed over groups."""
    if sol.multipliers.ndim == 1:
        return sol.cosine()
    (K, b, gg), lam = sol.gram, sol.multipliers
    along = (b * lam).sum()
    after = gg.sum() + 2 * along + (lam * (K @ lam[..., None]).squeeze(-1)).sum()
    size = (gg.sum() * after.clamp(min=0.0)).sqrt()
    return torch.where(size > 0.0, (gg.sum() + along) / size, 1.0)
