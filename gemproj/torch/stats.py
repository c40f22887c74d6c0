"""What a projected step did, and its means for logs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gemproj._solution import DualSolution


@dataclass(frozen=True, eq=False, repr=False)
class Projection:
    """Statistics of one step of a `GradientProjector`. On a device, reading a number waits for it.

    Attributes
    ----------
    constraints : int
        Number of constraints; 0 where nothing is promised, as before the first task is stored.
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
        Steps since the constraint gradients were computed. Losses are followed to first order meanwhile.
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

    def __repr__(self) -> str:
        if not self.constraints:
            return "Projection(no constraints: nothing is promised)"
        found = f"{self.constraints} constraints, nothing was projected"
        if self.solution is not None:
            found = f"{self.num_violated} of {self.solution.violated.numel()} constraints violated"
            found += f", cosine {self.cosine:.2f}"
        worst = "" if self.worst_cosine is None else f", worst cosine of the step {self.worst_cosine:.2g}"
        return f"Projection({found}{worst}, {1e3 * self.seconds:.3g} ms)"

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
        """The multipliers, shape (t,), float64."""
        return torch.empty(0, dtype=torch.float64) if self.solution is None else self.solution.multipliers

    @property
    def cosine(self) -> float | None:
        """Cosine between the gradient before and after; 1 when nothing changed, None without constraints."""
        if not self.constraints:
            return None
        return 1.0 if self.solution is None else float(self.solution.cosine())

    @property
    def worst_cosine(self) -> float | None:
        """Smallest cosine between the applied step and a constraint gradient."""
        return None if self.cosines is None or not len(self.cosines) else float(self.cosines.min())


class LogMeans:
    """The numbers that training loops log: means over steps, and the smallest worst cosine.

    Nothing is read from a device; steps without constraints do not count.
    """

    def __init__(self) -> None:
        self._steps, self._seconds = 0, 0.0
        self._total: list[Tensor] = []  # sums, smallest cosine and, with a bound, largest excess

    def add(self, step: Projection) -> None:
        """Count a step."""
        sol, cosines = step.solution, step.cosines
        if sol is None or cosines is None:
            return
        numbers = [sol.violated.sum(), sol.active.sum(), sol.cosine()]
        found = [torch.stack([number.to(cosines.dtype) for number in numbers]), cosines.min()]
        if step.excess is not None:
            found.append(step.excess.max())
        if self._total:
            sums, worst, *excess = zip(self._total, found, strict=True)
            found = [torch.add(*sums), torch.minimum(*worst), *(torch.maximum(*pair) for pair in excess)]
        self._total = found
        self._steps, self._seconds = self._steps + 1, self._seconds + step.seconds

    def take(self) -> dict[str, Tensor | float]:
        """Return the numbers of the steps since the last call.

        Returns
        -------
        dict
            ``gem/violations``, ``gem/active``, ``gem/cosine``, ``gem/worst_cosine`` (scalar tensors) and
            ``gem/seconds``; with a bound ``gem/excess``, the largest excess of a loss over it. Empty if no
            step counts.
        """
        if not self._steps:
            return {}
        sums, worst, *excess = self._total
        violations, active, cosine = sums / self._steps
        numbers = {
            "gem/violations": violations,
            "gem/active": active,
            "gem/cosine": cosine,
            "gem/worst_cosine": worst,
            "gem/seconds": self._seconds / self._steps,
            **({"gem/excess": excess[0]} if excess else {}),
        }
        self._steps, self._seconds, self._total = 0, 0.0, []
        return numbers
