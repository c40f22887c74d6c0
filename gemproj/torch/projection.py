"""What one step of a projector did."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gemproj._solution import DualSolution


@dataclass(frozen=True, eq=False)
class Projection:
    """What one step of a `GradientProjector` did. On a device, reading a number waits for it.

    Attributes
    ----------
    constraints : int
        Number of constraints.
    solution : DualSolution or None
        Multipliers and certificates of the gradient's projection (with ``on="update"``, of the step's);
        None where there was nothing to project.
    update : DualSolution or None
        Of the projection of the step, with ``on="update"`` and ``on="both"``.
    slopes : Tensor or None
        Cosine between the step that was applied and each constraint, shape (t,), float64, from the parameters
        themselves: negative where the step raises a past task's loss. None before the optimizer has
        stepped, and where the projector is not attached to one.
    seconds : float
        Time spent in the projector for this step, constraints included, as the host sees it.
    """

    constraints: int
    solution: DualSolution | None
    update: DualSolution | None = None
    slopes: Tensor | None = None
    seconds: float = 0.0

    @property
    def violated(self) -> int:
        """Number of constraints that the gradient violated."""
        return 0 if self.solution is None else int(self.solution.violated.sum())

    @property
    def active(self) -> int:
        """Number of constraints whose multiplier is above the margin: those that hold the gradient back."""
        return 0 if self.solution is None else int(self.solution.active.sum())

    @property
    def multipliers(self) -> Tensor:
        """The multipliers, shape (t,), float64."""
        return torch.empty(0, dtype=torch.float64) if self.solution is None else self.solution.multipliers

    @property
    def cosine(self) -> float:
        """Cosine between the gradient before and after; 1 when nothing changed."""
        return 1.0 if self.solution is None else float(self.solution.cosine())

    @property
    def worst_cosine(self) -> float | None:
        """Smallest cosine between the applied step and a constraint: negative where it violates one."""
        return None if self.slopes is None or not len(self.slopes) else float(self.slopes.min())
