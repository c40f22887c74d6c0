"""What projected steps did: of one step, of all steps for each promise, and means for logs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

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
        How far each loss was above its bound when the step began, shape (t,), float64, NaN for a promise
        without a tolerance; None where no promise has one.
    age : int
        Steps since the constraint gradients were computed. Losses are followed to first order meanwhile.
    seconds : float
        Time spent in the projector for this step, constraint gradients included, as the host sees it.
    names : list of tuple
        What each constraint is about, starting with the name of its set; empty where that is not known.
    losses, stored : Tensor, shape (t,), float64, or None
        The loss of each constraint when the step began, and when its examples were stored, NaN where that is
        not known.
    costs : list of float
        Seconds that each constraint gradient took, as the host sees it.
    """

    constraints: int
    solution: DualSolution | None
    step: DualSolution | None = None
    cosines: Tensor | None = None
    excess: Tensor | None = None
    age: int = 0
    seconds: float = 0.0
    names: Sequence[tuple[Any, ...]] = ()
    losses: Tensor | None = None
    stored: Tensor | None = None
    costs: Sequence[float] = ()

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
        self._total: list[Tensor] = []  # sums, smallest cosine and, with a tolerance, largest excess

    def add(self, step: Projection) -> None:
        """Count a step."""
        sol, cosines = step.solution, step.cosines
        if sol is None or cosines is None:
            return
        numbers = [sol.violated.sum(), sol.active.sum(), sol.cosine()]
        found = [torch.stack([number.to(cosines.dtype) for number in numbers]), cosines.min()]
        if step.excess is not None:
            found.append(step.excess.nan_to_num(-math.inf).max())
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
            ``gem/seconds``; with a tolerance ``gem/excess``, the largest excess over a bound. Empty
            if no step counts.
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


# Points of a history; where it is full every second one is dropped, and every second step is left out.
_MOST_POINTS = 1000
# Steps that are counted at once, which saves the time of many small operations.
_MOST_PENDING = 50


class History:
    """What the steps under promises did, set by set, in memory that does not grow with their number.

    Nothing is read from a device before somebody reads this. What is promised of all sets together has the
    name "all sets".
    """

    def __init__(self) -> None:
        self._steps, self._names, self._every = 0, list[Any](), 1
        self._totals = torch.zeros(9, 0, dtype=torch.float64)
        self._points: list[tuple[int, Tensor]] = []  # steps, and (2, sets): losses and bounds
        self._pending: list[Tensor] = []  # (7, rows) of each step that has not been counted yet
        self._sets: list[Any] = []  # which sets the rows of these steps are about

    def add(self, step: Projection) -> None:
        """Note a step."""
        sol, losses, cosines = step.solution, step.losses, step.cosines
        if sol is None or losses is None or cosines is None or not len(step.names):
            return
        sets = [_ALL if name[0] is None else name[0] for name in step.names]
        if sets != self._sets or len(self._pending) == _MOST_PENDING:
            self._count()
            self._sets = sets
        before = losses if step.stored is None else torch.where(step.stored.isnan(), losses, step.stored)
        excess = losses.new_full(losses.shape, math.nan) if step.excess is None else step.excess
        costs = torch.tensor(step.costs or [0.0] * len(sets), dtype=losses.dtype, device=losses.device)
        numbers = [before, losses, excess, costs, sol.multipliers, sol.violated, cosines]
        self._pending.append(torch.stack([n.to(losses) for n in numbers]))

    def points(self) -> dict[Any, list[tuple[int, float, float]]]:
        """Return for each set the losses over the steps: (step, loss, bound), NaN where there is no bound."""
        self._count()
        found: dict[Any, list[tuple[int, float, float]]] = {name: [] for name in self._names}
        for step, values in self._points:
            for name, (loss, bound) in zip(self._names, values.T.tolist(), strict=False):
                if not math.isnan(loss):
                    found[name].append((step, loss, bound))
        return found

    def totals(self) -> dict[Any, list[float]]:
        """Return for each set its first, last and worst loss and last bound, steps, and sums over them.

        These are of steps that violated, that broke the promise, of multipliers and of seconds.
        """
        self._count()
        return dict(zip(self._names, self._totals.T.tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return all of it, as numbers, names and tensors."""
        self._count()
        points = [[step, values.cpu()] for step, values in self._points]
        known = {"names": list(self._names), "every": self._every, "totals": self._totals.cpu()}
        return {"steps": self._steps, "points": points} | known

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring back what `state_dict` returned."""
        self._steps, self._names, self._every = state["steps"], list(state["names"]), state["every"]
        self._totals, self._pending, self._sets = state["totals"], [], []
        self._points = [(step, values) for step, values in state["points"]]

    def _count(self) -> None:
        """Count the pending steps, whose rows are about the same sets."""
        if not self._pending:
            return
        numbers = torch.stack(self._pending)
        self._pending = []
        self._names += [name for name in dict.fromkeys(self._sets) if name not in self._names]
        steps, n = len(numbers), len(self._names)
        at = torch.tensor([self._names.index(name) for name in self._sets], device=numbers.device)
        count = numbers.new_zeros(n).index_add_(0, at, numbers.new_ones(len(at)))
        sums = numbers.new_zeros(steps, 5, n).index_add_(2, at, numbers[:, :5])
        before, loss, excess, _, multiplier = (sums / torch.where(count > 0, count, math.nan)).unbind(1)
        losses, above, violated, cosines = numbers[:, [1, 2, 5, 6]].unbind(1)
        broken = torch.where(above.isnan(), cosines < -_ROUNDING, above > _ROUNDING * (1.0 + losses.abs()))
        flags = torch.stack([violated, broken.to(violated)], 1)
        happened = numbers.new_zeros(steps, 2, n).scatter_reduce_(2, at.expand(steps, 2, -1), flags, "amax")
        bound, nothing = loss - excess, numbers.new_zeros(9, n)
        nothing[:4] = math.nan
        nothing[:, : self._totals.shape[1]] = self._totals.to(nothing)
        first, last, worst, limit, *counted = nothing
        seen = count > 0
        self._totals = torch.stack(
            [
                torch.where(first.isnan(), before[0], first),
                torch.where(seen, loss[-1], last),
                torch.fmax(worst, loss.amax(0)),
                torch.where(seen, bound[-1], limit),
                counted[0] + steps * seen,
                *(total + more for total, more in zip(counted[1:3], happened.sum(0), strict=True)),
                counted[3] + multiplier.sum(0).nan_to_num(0.0),
                counted[4] + sums[:, 3].sum(0),
            ]
        )
        for k in range(steps):
            if (self._steps + k) % self._every == 0:
                self._points.append((self._steps + k, torch.stack([loss[k], bound[k]])))
            if len(self._points) > _MOST_POINTS:
                self._points, self._every = self._points[::2], 2 * self._every
        self._steps += steps


@dataclass(frozen=True)
class Line:
    """What became of one promise; losses are means over its rows.

    Attributes
    ----------
    name : object
        Of the set.
    examples : int
        Stored examples.
    stored : float
        The loss when the examples were stored, or, where a promise does not need that, at the first step.
    now, worst : float
        The loss at the last step under the promise, and at the worst.
    bound : float
        What the loss may be at most; NaN for a promise without a tolerance.
    steps : int
        Steps under the promise.
    would_break, broke : float
        Share of the steps that without a projection would have broken the promise, and that did: to first
        order, or, with a tolerance, with a loss above its bound when the step began.
    multiplier : float
        Mean multiplier, in units of gradients (of steps with ``on="step"``).
    seconds : float
        Spent on its constraint gradients, as the host sees it.
    """

    name: Any
    examples: int
    stored: float
    now: float
    worst: float
    bound: float
    steps: int
    would_break: float
    broke: float
    multiplier: float
    seconds: float


class Report(Sequence[Line]):
    """What became of each promise: a sequence of `Line`, which prints as a table and can be drawn."""

    def __init__(
        self, lines: Sequence[Line], points: Mapping[Any, Sequence[tuple[int, float, float]]]
    ) -> None:
        self._lines, self._points = list(lines), points

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, key: Any) -> Any:
        """Return a line by its place, or by the name of its set."""
        if isinstance(key, int | slice) and not any(line.name == key for line in self._lines):
            return self._lines[key]
        found = [line for line in self._lines if line.name == key]
        if not found:
            raise KeyError(f"no promise is about {key!r}; found {[line.name for line in self._lines]}")
        return found[0]

    def __iter__(self) -> Iterator[Line]:
        return iter(self._lines)

    def __repr__(self) -> str:
        if not self._lines:
            return "No examples are stored: nothing is promised."
        heads = [field.name.replace("_", " ") for field in fields(Line)]
        cells = [[_cell(getattr(line, field.name), field.name) for field in fields(Line)] for line in self]
        widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if j == 0 else cell.rjust(width)
                for j, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in [heads, *cells]
        )

    def plot(self, ax: Any = None) -> Any:
        """Draw losses, and dashed their bounds, over the steps under promises; needs matplotlib.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            By default of a new figure.

        Returns
        -------
        matplotlib.axes.Axes
        """
        try:
            import matplotlib.pyplot as plt
        except ImportError as error:
            raise ImportError("plot needs matplotlib: pip install matplotlib.") from error
        if ax is None:
            _, ax = plt.subplots(layout="constrained")
        for name, points in self._points.items():
            if points:
                steps, losses, bounds = zip(*points, strict=True)
                (line,) = ax.plot(steps, losses, label=str(name))
                ax.plot(steps, bounds, "--", color=line.get_color())
        ax.set(xlabel="step under promises", ylabel="loss on stored examples (dashed: bound)")
        if len(self._lines):
            ax.legend()
        return ax


_ALL = "all sets"
# Cosines and relative excesses below it are rounding.
_ROUNDING = 1e-6


def make_report(history: History, examples: Mapping[Any, int]) -> Report:
    """Return the report on sets of so many `examples`, by name, and on what is promised of all together."""
    known, lines = history.totals(), []
    for name in [*examples, *(name for name in known if name not in examples)]:
        nan = math.nan
        first, now, worst, bound, steps, would, broke, multiplier, cost = known.get(
            name, (nan,) * 4 + (0.0,) * 5
        )
        share = max(steps, 1.0)
        count = examples.get(name, sum(examples.values()))
        shares = would / share, broke / share, multiplier / share
        lines.append(Line(name, count, first, now, worst, bound, int(steps), *shares, cost))
    return Report(lines, history.points())


def _cell(value: Any, name: str) -> str:
    if isinstance(value, float):
        if math.isnan(value):
            return "-"
        return f"{100 * value:.1f} %" if name in ("would_break", "broke") else f"{value:.4g}"
    return str(value)
