"""Statistics of one projected step, and of all steps for each promise and on average."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor

from gemproj._arrays import from_numpy, namespace
from gemproj._bounds import Bounds
from gemproj._solution import DualSolution
from gemproj._tspace import Gram


@dataclass(frozen=True, eq=False, repr=False)
class Projection:
    """Statistics of one step of a `GradientProjector`. On a device, reading a number synchronises.

    Attributes
    ----------
    constraints : int
        Number of constraints; 0 if nothing is promised, as before the first task is stored.
    cosines : Tensor or None
        Cosine between the applied step and each constraint gradient, shape (t,), float64, measured on the
        parameters. A negative cosine means that the step raises the loss of this constraint, to first order.
        None before the optimizer has stepped, and without `attach`.
    excess : Tensor or None
        Excess of each loss over its bound at the beginning of the step, shape (t,), float64; NaN for a
        promise without a tolerance. None if no promise has a tolerance.
    age : int
        Steps since the constraint gradients were computed. In between, losses are updated to first order.
    seconds : float
        Host time spent in the projector for this step, including constraint gradients.
    names : list of tuple
        The name of each constraint, which starts with the name of its set; empty if unknown.
    losses, stored : Tensor, shape (t,), float64, or None
        The loss of each constraint at the beginning of the step, and when its examples were stored; NaN if
        unknown.
    costs : list of float
        Host time for each constraint gradient, in seconds.
    """

    constraints: int
    # These are in t-space, where NumPy is faster than torch; `solution` and `step` convert them to tensors.
    _solution: DualSolution | None
    _step: DualSolution | None = None
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
        if self._solution is not None:
            found = f"{self.num_violated} of {self.constraints} constraints violated"
            found += f", cosine {self.cosine:.2f}"
        worst = "" if self.worst_cosine is None else f", worst cosine of the step {self.worst_cosine:.2g}"
        return f"Projection({found}{worst}, {1e3 * self.seconds:.3g} ms)"

    @cached_property
    def solution(self) -> DualSolution | None:
        """Multipliers and certificates of the projected gradient, or of the projected step if ``on="step"``.

        None if nothing was projected.
        """
        return None if self._solution is None else self._solution.to(_as_tensor)

    @cached_property
    def step(self) -> DualSolution | None:
        """Multipliers and certificates of the projected step, with ``on="step"`` and ``on="both"``."""
        if self._step is self._solution:
            return self.solution
        return None if self._step is None else self._step.to(_as_tensor)

    @property
    def num_violated(self) -> int:
        """Number of constraints that the gradient violated."""
        return 0 if self._solution is None else int(self._solution.violated.sum())

    @property
    def num_active(self) -> int:
        """Number of active constraints: those whose multiplier is not at its lower bound."""
        return 0 if self._solution is None else int(self._solution.active.sum())

    @property
    def multipliers(self) -> Tensor:
        """The multipliers, shape (t,), float64."""
        if self._solution is None:
            return torch.empty(0, dtype=torch.float64)
        return _as_tensor(self._solution.multipliers)

    @property
    def cosine(self) -> float | None:
        """Cosine of gradients before and after projection; 1 without solution, None without constraints."""
        if not self.constraints:
            return None
        return 1.0 if self._solution is None else float(self._solution.cosine())

    @property
    def worst_cosine(self) -> float | None:
        """Smallest cosine between the applied step and a constraint gradient."""
        return None if self.cosines is None or not len(self.cosines) else float(self.cosines.min())


# Maximum number of points of a history. A full history drops every second point, then records half as often.
_MOST_POINTS = 1000
# Maximum number of steps that are counted together to avoid many small operations, and maximum number of
# entries of their Gram matrices.
_MOST_PENDING, _MOST_ENTRIES = 50, 1 << 17

_as_tensor = partial(from_numpy, xp=torch, device=torch.device("cpu"))  # device results already are tensors


class History:
    """Statistics of the steps under promises, for each set and on average, in bounded memory.

    A device is synchronised only when statistics are read. The name of a promise about several sets is the
    tuple of their names, or None for all sets without their own promise.
    """

    def __init__(self) -> None:
        self._steps, self._names, self._every = 0, list[Any](), 1
        self._totals = torch.zeros(9, 0, dtype=torch.float64)
        self._points: list[tuple[int, Tensor]] = []  # (step, losses and bounds of shape (2, sets))
        self._pending: list[Projection] = []  # steps that have not been counted yet
        self._kind: Any = None  # equal for all pending steps: the sets of rows, and which values are None
        self._forget_means()

    def add(self, step: Projection) -> None:
        """Add the statistics of a step."""
        sol = step._solution
        if sol is None or step.cosines is None or not step.names:
            return
        kind = [name[0] for name in step.names], [a is None for a in (*sol.bounds, step.excess)]
        full = len(self._pending) >= min(_MOST_PENDING, _MOST_ENTRIES // step.constraints**2)
        if full or kind != self._kind:
            self._count()
            self._kind = kind
        self._pending.append(step)

    def means(self) -> dict[str, Tensor | float]:
        """Return numbers to log for the steps since the last call: means, and the smallest worst cosine.

        Returns
        -------
        dict
            ``gem/violations``, ``gem/active``, ``gem/cosine``, ``gem/worst_cosine`` (scalar tensors) and
            ``gem/seconds``; with a tolerance ``gem/excess``, the largest excess over a bound. Steps without
            constraints do not count; empty if no step counts.
        """
        self._count()
        if not self._logged:
            return {}
        violations, active, cosine = self._sums / self._logged
        numbers = {
            "gem/violations": violations,
            "gem/active": active,
            "gem/cosine": cosine,
            "gem/worst_cosine": self._worst,
            "gem/seconds": self._seconds / self._logged,
            **({} if self._excess is None else {"gem/excess": self._excess}),
        }
        self._forget_means()
        return numbers

    def close(self, name: Any) -> None:
        """Rename the statistics of a set, because its name now means other examples or another promise."""
        self._count()
        if name in self._names:
            old = f"{name} (earlier)"
            while old in self._names:
                old += "'"
            self._names[self._names.index(name)] = old

    def points(self) -> dict[Any, list[tuple[int, float, float]]]:
        """Return a list of (step, loss, bound) for each set; the bound is NaN without a tolerance."""
        self._count()
        found: dict[Any, list[tuple[int, float, float]]] = {name: [] for name in self._names}
        for step, values in self._points:
            for name, (loss, bound) in zip(self._names, values.T.tolist(), strict=False):
                if not math.isnan(loss):
                    found[name].append((step, loss, bound))
        return found

    def totals(self) -> dict[Any, list[float]]:
        """Return nine numbers for each set: first, last and worst loss, last bound, steps, and four sums.

        The sums are the steps that violated and that broke the promise, the multipliers, and the seconds.
        """
        self._count()
        return dict(zip(self._names, self._totals.T.tolist(), strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Return the history as numbers, names and tensors."""
        self._count()
        points = [[step, values.cpu()] for step, values in self._points]
        known = {"names": list(self._names), "every": self._every, "totals": self._totals.cpu()}
        return {"steps": self._steps, "points": points} | known

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state returned by `state_dict`."""
        self._steps, self._names, self._every = state["steps"], list(state["names"]), state["every"]
        self._totals, self._pending, self._kind = state["totals"], [], None
        self._points = [(step, values) for step, values in state["points"]]

    def _forget_means(self) -> None:
        self._logged, self._seconds, self._sums = 0, 0.0, torch.zeros(3, dtype=torch.float64)
        self._worst: Tensor = torch.tensor(math.inf, dtype=torch.float64)
        self._excess: Tensor | None = None

    def _count(self) -> None:
        """Add the pending steps to the statistics; their rows belong to the same sets."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        sol = _batch([cast(DualSolution, step._solution) for step in pending]).to(_as_tensor)
        losses, stored, cosines = (torch.stack([getattr(one, name) for one in pending]) for name in _OF_ROWS)
        excess = torch.full_like(losses, math.nan)
        if pending[0].excess is not None:
            excess = torch.stack([cast(Tensor, step.excess) for step in pending])
            largest = excess.nan_to_num(-math.inf).max()
            self._excess = largest if self._excess is None else torch.maximum(self._excess, largest)
        self._logged += len(pending)
        self._seconds += sum(step.seconds for step in pending)
        sums = [sol.violated.sum(), sol.active.sum(), sol.cosine().sum()]
        self._sums = self._sums.to(losses) + torch.stack([one.to(losses) for one in sums])
        self._worst = torch.minimum(self._worst.to(losses), cosines.min())
        none = [0.0] * len(self._kind[0])
        costs = torch.tensor([step.costs or none for step in pending], dtype=torch.float64)
        values = [stored, losses, excess, costs, sol.multipliers, sol.violated, cosines]
        self._count_sets(torch.stack([one.to(losses) for one in values], 1))

    def _count_sets(self, numbers: Tensor) -> None:
        """Add steps to the totals of each set; `numbers`, shape (steps, 7, rows), has 7 numbers per row."""
        sets = self._kind[0]
        self._names += [name for name in dict.fromkeys(sets) if name not in self._names]
        steps, n = len(numbers), len(self._names)
        at = torch.tensor([self._names.index(name) for name in sets], device=numbers.device)
        count = numbers.new_zeros(n).index_add_(0, at, numbers.new_ones(len(at)))
        sums = numbers.new_zeros(steps, 5, n).index_add_(2, at, numbers[:, :5])
        stored, loss, excess, _, multiplier = (sums / torch.where(count > 0, count, math.nan)).unbind(1)
        losses, above, violated, cosines = numbers[:, [1, 2, 5, 6]].unbind(1)
        broken = torch.where(above.isnan(), cosines < -_ANGLE, above > _ROUNDING * (1.0 + losses.abs()))
        flags = torch.stack([violated, broken.to(violated)], 1)
        happened = numbers.new_zeros(steps, 2, n).scatter_reduce_(2, at.expand(steps, 2, -1), flags, "amax")
        bound, nothing = loss - excess, numbers.new_zeros(9, n)
        nothing[:4] = math.nan
        nothing[:, : self._totals.shape[1]] = self._totals.to(nothing)
        first, last, worst, limit, *counted = nothing
        seen = count > 0
        self._totals = torch.stack(
            [
                torch.where(stored[-1].isnan(), torch.where(first.isnan(), loss[0], first), stored[-1]),
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


# Fields of a `Projection` with one number per row.
_OF_ROWS = ("losses", "stored", "cosines")


def _batch(solutions: Sequence[DualSolution]) -> DualSolution:
    """Stack solutions of equal form into one batch of solutions."""
    xp, first = namespace(solutions[0].multipliers), solutions[0]

    def stacked(parts: Iterable[Any]) -> Any:
        found = list(parts)
        return None if found[0] is None else xp.stack(found)

    gram = Gram(*map(stacked, zip(*[sol.gram for sol in solutions], strict=True)))
    bounds = Bounds(*map(stacked, zip(*[sol.bounds for sol in solutions], strict=True)))
    return replace(
        first, multipliers=stacked(sol.multipliers for sol in solutions), gram=gram, bounds=bounds,
        iterations=0, _status=0, _rows=None,
    )  # fmt: skip


@dataclass(frozen=True)
class Line:
    """The outcome of one promise; losses are means over the rows of the promise.

    Attributes
    ----------
    name : object
        Name of the set. For sets that share one row, a tuple of names, or "all sets" for all sets without
        their own promise.
    examples : int
        Number of stored examples.
    stored : float
        Stored loss of the examples of the last step; if no losses are stored, the loss at the first step.
    now, worst : float
        Loss at the last step under the promise, and the largest loss of all steps.
    bound : float
        Largest loss that the promise allows; NaN for a promise without a tolerance.
    steps : int
        Number of steps under the promise.
    would_break, broke : float
        Share of steps that, to first order, would have broken the promise without a projection, and share of
        steps that broke the promise. A step counts in `broke` if the step raises the loss to first order;
        with a tolerance, if the loss exceeds the bound at the beginning of the step.
    multiplier : float
        Mean multiplier, in units of gradients (of steps with ``on="step"``).
    seconds : float
        Host time spent on the constraint gradients of the promise.
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
    """The outcome of each promise: a sequence of `Line`, which prints as a table and can be plotted."""

    def __init__(
        self, lines: Sequence[Line], points: Mapping[Any, Sequence[tuple[int, float, float]]]
    ) -> None:
        self._lines, self._points = list(lines), points

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, key: Any) -> Any:
        """Return a line by its index, or by the name of its set."""
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
        """Plot losses, and their bounds as dashed lines, over the steps under promises; needs matplotlib.

        Parameters
        ----------
        ax : matplotlib.axes.Axes, optional
            By default the axes of a new figure.

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


# Rounding of float32 weights lowers cosines of a projected step to about -_ANGLE. Relative excesses of losses
# below _ROUNDING are rounding errors.
_ANGLE, _ROUNDING = 1e-5, 1e-6


def make_report(history: History, examples: Mapping[Any, int], together: Iterable[Any] = ()) -> Report:
    """Return the report; `examples` maps sets to counts, `together` has the sets that None stands for."""
    known, lines = history.totals(), []
    rows = {name: _sets(name, examples, together) for name in known}
    joint = {one for name, sets in rows.items() if name not in examples for one in sets}
    # Sets that have always shared a row are reported in the line of this row.
    alone = [name for name in examples if name in known or name not in joint]
    for name in [*alone, *(name for name in known if name not in examples)]:
        nan = math.nan
        first, now, worst, bound, steps, would, broke, multiplier, cost = known.get(
            name, (nan,) * 4 + (0.0,) * 5
        )
        share = max(steps, 1.0)
        count = sum(examples.get(one, 0) for one in rows.get(name, [name]))  # 0 if the set was removed
        shares = would / share, broke / share, multiplier / share
        lines.append(Line(shown(name), count, first, now, worst, bound, int(steps), *shares, cost))
    return Report(lines, {shown(name): points for name, points in history.points().items()})


def _sets(name: Any, examples: Mapping[Any, int], together: Iterable[Any]) -> Iterable[Any]:
    """Return the sets whose examples are in the rows with this name."""
    if name is None:
        return together
    return (name,) if name in examples or type(name) is not tuple else name


def shown(name: Any) -> Any:
    """Return the name of a set for messages and reports; None stands for all sets together."""
    return "all sets" if name is None else name


def _cell(value: Any, name: str) -> str:
    if isinstance(value, float):
        if math.isnan(value):
            return "-"
        return f"{100 * value:.1f} %" if name in ("would_break", "broke") else f"{value:.4g}"
    return str(value)
