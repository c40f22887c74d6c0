"""Statistics of one projected step, and of all steps for each promise and on average."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gemproj._arrays import from_numpy, namespace, to_numpy
from gemproj._bounds import Bounds
from gemproj._solution import DualSolution
from gemproj._tspace import Gram
from gemproj.torch.keep import Score
from gemproj.torch.memory import KeptSet
from gemproj.torch.promise import Promise, unit_of

# Maximum number of points of a plot. When it is reached, one is left in twice as many steps.
_MOST_POINTS = 1000
# Maximum number of steps that are counted together to avoid many small operations, and maximum number of
# entries of their Gram matrices.
_MOST_PENDING, _MOST_ENTRIES = 50, 1 << 17

# Sums over the steps since the last log, and the worst values.
_WORST = {"keep/worst_cosine": math.inf, "keep/excess": -math.inf}
_NOTHING = _WORST | dict.fromkeys(
    ("steps", "keep/violations", "keep/active", "keep/cosine", "keep/seconds"), 0.0
)


@dataclass(frozen=True, eq=False, repr=False)
class Projection:
    """Statistics of one step. On a device, reading a number synchronises.

    Attributes
    ----------
    names : list
        The set of each row.
    losses, stored : Tensor, shape (t,), float64
        The loss of each row at the beginning of the step, and when its examples were kept.
    excess : Tensor or None
        Excess of each loss over its bound at the beginning of the step, shape (t,), float64; NaN for a
        promise without a tolerance. None if no promise has a tolerance.
    unit : array, shape (t,)
        The size of the losses for their rounding: 1, or less with a very small tolerance.
    square, products, norms : Tensor
        Squared norm of the applied step, measured on the parameters, its products with the rows, and the
        norms of the rows.
    rounding, eps : Tensor, float
        Norm of the rounding errors of the parameters, and relative rounding error of the rows.
    ages : list of int
        Steps since each row was computed. In between, losses are modelled.
    seconds : float
        Host time of the projection of this step, including rows.
    """

    names: Sequence[Any]
    losses: Tensor
    stored: Tensor
    excess: Tensor | None
    unit: Any
    square: Tensor
    products: Tensor
    norms: Tensor
    rounding: Tensor
    eps: float
    ages: Sequence[int]
    seconds: float
    # In NumPy, or on a device that was not read; `solution` and `step` convert them to tensors.
    _solution: DualSolution | None
    _step: DualSolution | None

    def __repr__(self) -> str:
        found = f"{len(self.names)} rows, nothing was projected"
        if self._solution is not None:
            found = f"{self.num_violated} of {len(self.names)} rows violated, cosine {self.cosine:.2f}"
        found += f", worst cosine of the step {self.worst_cosine:.2g}"
        return f"Projection({found}, {1e3 * self.seconds:.3g} ms)"

    @cached_property
    def solution(self) -> DualSolution | None:
        """The solution for the projected gradient; for the projected step if ``on="step"``."""
        return self._in_torch(self._solution)

    @cached_property
    def step(self) -> DualSolution | None:
        """The solution for the projected step; None with ``on="gradient"``."""
        return self._in_torch(self._step)

    def _in_torch(self, sol: DualSolution | None) -> DualSolution | None:
        if sol is None:
            return None
        read = sol._read() if sol.status is None else sol
        return read.to(partial(from_numpy, xp=torch, device=self.losses.device))

    def with_part(self, part: Projection) -> Projection:
        """Return these statistics with those of another optimizer's part of the same step."""
        return replace(
            part,
            losses=self.losses,
            excess=self.excess,
            square=self.square + part.square,
            products=self.products + part.products,
            ages=self.ages,
            seconds=self.seconds + part.seconds,
        )

    @cached_property
    def cosines(self) -> Tensor:
        """Cosine between the applied step and each row, shape (t,).

        A negative cosine means that the step raises the loss of this row, to first order.
        """
        sizes = self.norms * self.square.sqrt()
        return torch.where(sizes > 0, self.products / sizes, 0.0)

    @property
    def noise(self) -> Tensor:
        """Rounding of the parameters as a cosine."""
        return 16 * self.eps + self.rounding / self.square.sqrt().clamp(min=1e-30)

    @property
    def age(self) -> int:
        """Steps since the oldest row was computed."""
        return max(self.ages, default=0)

    @property
    def num_violated(self) -> int:
        """Number of rows that the gradient violated."""
        return 0 if self.solution is None else int(self.solution.violated.sum())

    @property
    def num_active(self) -> int:
        """Number of active rows: those whose multiplier is not at its lower bound."""
        return 0 if self.solution is None else int(self.solution.active.sum())

    @property
    def multipliers(self) -> Tensor:
        """The multipliers, shape (t,), float64."""
        if self.solution is None:
            return torch.zeros(len(self.names), dtype=torch.float64)
        return self.solution.multipliers

    @property
    def cosine(self) -> float:
        """Cosine of the gradient (of the step with ``on="step"``) before and after its projection."""
        return 1.0 if self.solution is None else float(self.solution.cosine())

    @property
    def worst_cosine(self) -> float:
        """Smallest cosine between the applied step and a row."""
        return float(self.cosines.min())


@dataclass
class Line:
    """The outcome of one promise.

    Attributes
    ----------
    name : object
        Name of the set.
    examples : int
        Number of kept examples.
    stored, now : float
        Loss of all examples when they were kept, and now. If some are held out, or if the examples cannot be
        evaluated, `now` is the loss of those drawn at the last step.
    worst : float
        The largest loss of the drawn examples at all steps, modelled between looks, and `now`.
    bound : float
        Largest loss that the promise allows the examples of `now`; NaN without a tolerance.
    steps : int
        Number of steps under the promise.
    would_break, broke : float
        Share of steps that, to first order, would have broken the promise without a projection, and share of
        steps that broke it. A step breaks a promise if it raises the loss, to first order and by more than
        the rounding of the weights, or lowers it if it is held equal; a promise with a tolerance is broken
        while the loss is above its bound. Of several optimizers, the last one's part would break it. Steps
        that ``look="auto"`` leaves alone break none.
    excess : float
        Largest excess of the loss over its bound, in the unit of the loss; NaN without a tolerance.
    multiplier : float
        Mean multiplier, in units of gradients (of steps with ``on="step"``).
    looks : int
        Number of steps in which the row of the promise was computed.
    held : int
        Number of held-out examples.
    held_out : tuple of three floats, or None
        Loss of the held-out examples now, with the ends of its 95 % interval over examples. With fewer than
        about 50 examples the interval of a skewed divergence covers less, 83 % with 12.
    held_bound : float
        Largest loss of the held-out examples that the promise allows.
    kept : bool or None
        Whether the promise is kept now by the held-out examples, if there are any, else by all that are kept.
        A ten-thousandth of a tolerance is not counted. Without a tolerance, the mean loss of at least ten
        held-out examples may differ from its stored value by less than its 95 % interval; any other rise
        (with `equal`, any other change) counts. None if this is not known: another adapter is active, or a
        copy of the keeper has no model.
    """

    name: Any
    examples: int = 0
    stored: float = math.nan
    now: float = math.nan
    worst: float = math.nan
    bound: float = math.nan
    steps: int = 0
    looks: int = 0
    would_break: float = 0.0
    broke: float = 0.0
    excess: float = math.nan
    multiplier: float = 0.0
    held: int = 0
    held_out: tuple[float, float, float] | None = None
    held_bound: float = math.nan
    kept: bool | None = None


class History:
    """Statistics of the steps under promises, for each set and on average, in bounded memory.

    A device is synchronised once in fifty steps, and when statistics are read.
    """

    def __init__(self) -> None:
        self.lines: dict[Any, Line] = {}
        self._points: dict[Any, list[tuple[int, float, float]]] = {}  # step, loss and bound, by set
        self.steps, self._every = 0, 1
        self._pending: list[tuple[int, Projection]] = []  # numbers and steps that have not been counted yet
        self._kind: list[Any] = []
        self._since = dict(_NOTHING)

    def add(self, step: Projection, part: Projection | None = None) -> None:
        """Add the statistics of a step, in place of those of a part of it if they were the last ones."""
        if (sol := step._solution) is None:
            return
        if part is not None and part._solution is not None:
            # If numbers were read in between, the part is counted already.
            if self._pending and self._pending[-1][1] is part:
                self._pending[-1] = self._pending[-1][0], step
            return
        most = min(_MOST_PENDING, _MOST_ENTRIES // len(step.names) ** 2)
        # Steps that are counted together share the sets, where they are, and which values are None.
        kind = [*step.names, type(sol.multipliers), *(a is None for a in (*sol.bounds, step.excess))]
        if len(self._pending) >= most or kind != self._kind:
            self.count()
        self._kind = kind
        self._pending.append((self.steps, step))
        self.steps += 1

    def wait(self, names: Iterable[Any]) -> None:
        """Count a step under these promises in which nothing was computed."""
        self.steps += 1
        for name in names:
            self.lines.setdefault(name, Line(name)).steps += 1

    def means(self) -> dict[str, float]:
        """Return means and worst values, to log, of the steps since the last call that were not left alone.

        Returns
        -------
        dict
            ``keep/violations``, ``keep/active``, ``keep/cosine``, ``keep/worst_cosine``, ``keep/seconds``;
            with a tolerance ``keep/excess``, the largest excess over a bound. Empty if no step counts.
        """
        self.count()
        since, self._since = self._since, dict(_NOTHING)
        n = since.pop("steps")
        worst = {name: value for name in _WORST if math.isfinite(value := since.pop(name))}
        return {name: value / n for name, value in since.items()} | worst if n else {}

    def forget(self, name: Any) -> None:
        """Drop the statistics of a set, because its name now means other examples or another promise."""
        self.count()
        self.lines.pop(name, None)
        self._points.pop(name, None)

    def points(self) -> dict[Any, list[tuple[int, float, float]]]:
        """Return a list of (step, loss, bound) for each set; the bound is NaN without a tolerance."""
        self.count()
        return {name: list(self._points.get(name, ())) for name in self.lines}

    def state_dict(self) -> dict[str, Any]:
        """Return the totals of all sets; the points of plots are not included."""
        self.count()
        return {"steps": self.steps, "lines": [asdict(line) for line in self.lines.values()]}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> History:
        """Return the history of a state."""
        found = cls()
        found.steps = state["steps"]
        found.lines = {line["name"]: Line(**line) for line in state["lines"]}
        return found

    def count(self) -> None:
        """Add the pending steps to the totals; they are about the same rows."""
        if not self._pending:
            return
        numbers, pending = zip(*self._pending, strict=True)
        self._pending = []
        sol = _batch([step._solution for step in pending])
        violated, active, lam = sol.violated, sol.active, sol.multipliers
        cosines, losses = (
            np.stack([to_numpy(getattr(step, name)) for step in pending]) for name in ("cosines", "losses")
        )
        noise = np.array([float(step.noise) for step in pending])[:, None]
        excess, unit = np.full_like(losses, math.nan), np.array(1.0)
        if pending[0].excess is not None:
            excess, unit = np.stack([to_numpy(step.excess) for step in pending]), to_numpy(pending[0].unit)
        raised = np.where(sol.lower < 0.0, np.abs(cosines), -cosines)  # of an equality, moved
        fine = np.where(np.isnan(excess), raised <= noise, excess <= _LOSSES * (unit + np.abs(losses)))
        since = self._since
        since["steps"] += len(pending)
        since["keep/violations"] += float(violated.sum())
        since["keep/active"] += float(active.sum())
        since["keep/cosine"] += float(sol.cosine().sum())
        since["keep/seconds"] += sum(step.seconds for step in pending)
        since["keep/worst_cosine"] = min(since["keep/worst_cosine"], float(cosines.min()))
        since["keep/excess"] = max(since["keep/excess"], float(np.nanmax(excess, initial=-math.inf)))
        for k, name in enumerate(pending[0].names):
            line = self.lines.setdefault(name, Line(name))
            line.now, line.bound = float(losses[-1, k]), float(losses[-1, k] - excess[-1, k])
            line.worst = float(np.fmax(line.worst, losses[:, k].max()))
            line.excess = float(np.fmax(line.excess, excess[:, k].max()))
            line.steps += len(pending)
            line.would_break += float(violated[:, k].sum())
            line.broke += float((~fine[:, k]).sum())
            line.multiplier += float(np.nan_to_num(lam[:, k]).sum())
            line.looks += sum(step.ages[k] == 0 for step in pending)
            found = zip(numbers, losses[:, k].tolist(), (losses - excess)[:, k].tolist(), strict=True)
            points = self._points.setdefault(name, [])
            for point in found:  # the first one of so many steps; a set may have points in few of them
                if not points or points[-1][0] // self._every < point[0] // self._every:
                    points.append(point)
        while any(len(points) > _MOST_POINTS for points in self._points.values()):
            self._every *= 2
            for points in self._points.values():
                points[:] = [*{one[0] // self._every: one for one in points[::-1]}.values()][::-1]


# Relative excess of a loss that is a rounding error, and share of a tolerance that is not counted.
_LOSSES, _UNCOUNTED = 1e-6, 1e-4
# With fewer examples, the interval of a mean says little.
_FEW = 10


def _batch(solutions: Sequence[DualSolution]) -> DualSolution:
    """Stack solutions of equal form into one batch of solutions, in NumPy: a device is read once."""
    first, xp = solutions[0], namespace(solutions[0].multipliers)
    parts = zip(*[(sol.multipliers, *sol.gram, *sol.bounds) for sol in solutions], strict=True)
    lam, K, b, gg, *bounds = (None if part[0] is None else xp.stack(list(part)) for part in parts)
    return DualSolution(lam, Gram(K, b, gg), Bounds(*bounds), _eps=first._eps)._read()


class Report(dict[Any, Line]):
    """The outcome of each promise, a `Line` for the name of each set; prints as a table and can be plotted.

    Attributes
    ----------
    kept : bool
        Whether there are promises, and all are known to be kept, see `Line`.
    """

    @property
    def kept(self) -> bool:  # noqa: D102
        return bool(self) and all(line.kept for line in self.values())

    def __init__(
        self, lines: Iterable[Line], points: Mapping[Any, Sequence[tuple[int, float, float]]]
    ) -> None:
        super().__init__((line.name, line) for line in lines)
        self._points = points

    def __missing__(self, name: Any) -> Line:
        raise KeyError(f"no promise is about {name!r}; found {list(self)}")

    def __repr__(self) -> str:
        if not self:
            return "No examples are kept: nothing is promised."
        hidden = {"held", "held_out", "held_bound"}
        if all(line.looks == line.steps for line in self.values()):
            hidden.add("looks")
        names = [field.name for field in fields(Line) if field.name not in hidden]
        heads = [name.replace("_", " ") for name in names]
        cells = [[_cell(getattr(line, name), name) for name in names] for line in self.values()]
        first, *widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
        table = ["  ".join([a.ljust(first), *map(str.rjust, more, widths)]) for a, *more in [heads, *cells]]
        said = [_said(line) for line in self.values() if line.held or line.kept is None]
        bounded = any(line.bound == line.bound for line in self.values())
        if bounded and not any(line.held for line in self.values()):
            said += ["No verdict on unseen examples: hold_out=0.2, where they are kept, holds out a fifth."]
        return "\n".join(table + said)

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
        import matplotlib.pyplot as plt

        if ax is None:
            _, ax = plt.subplots(layout="constrained")
        for name, points in self._points.items():
            if points:
                steps, losses, bounds = zip(*points, strict=True)
                (line,) = ax.plot(steps, losses, label=str(name))
                ax.plot(steps, bounds, "--", color=line.get_color())
        ax.set(xlabel="step under promises", ylabel="loss on kept examples (dashed: bound)")
        if any(self._points.values()):
            ax.legend()
        return ax


def make_report(
    history: History, sets: Mapping[Hashable, KeptSet], scores: Mapping[Hashable, Score]
) -> Report:
    """Return the report on kept sets, with scores of those that can be evaluated."""
    points, lines = history.points(), []
    for name, kept in sets.items():
        line = replace(history.lines.get(name, Line(name)))
        for field in "would_break", "broke", "multiplier":  # sums in `History`, means in a `Report`
            setattr(line, field, getattr(line, field) / max(line.steps, 1))
        lines.append(line)
        line.examples, line.stored = len(kept), float(kept.losses.mean())
        line.held = len(kept.held or ())
        if name in scores:
            _judge(line, kept.promise, scores[name])
    return Report(lines, points)


def _judge(line: Line, promise: Promise, score: Score) -> None:
    """Set the verdict on a promise by the loss of the held-out examples, else of all."""
    allowed, low, high, most = promise.allowed, score.low, score.high, score.bound
    if line.held:
        line.held_out, line.held_bound = score[:3], most
    else:
        line.stored, line.now, line.worst = score.stored, score.mean, float(np.fmax(line.worst, score.mean))
        if allowed is not None:
            line.bound, line.excess = most, float(np.fmax(line.excess, score.mean - most))
    # A tolerance is that of the mean, and examples that are not held out are no sample of others.
    if allowed is not None or not line.held or score.n < _FEW:
        low = high = score.mean
    slack = _LOSSES * (unit_of(allowed) + abs(most)) + _UNCOUNTED * (allowed or 0.0)
    # False for NaN.
    line.kept = low <= most + slack and (not promise.equal or high >= most - slack)


def _said(line: Line) -> str:
    name = f"set {line.name}" if isinstance(line.name, int) else line.name
    name = f"{name}, {line.held} held out" if line.held else name
    if line.kept is None:
        return f"{name}: not known, as another adapter is active, or the keeper has no model"
    assert line.held_out is not None
    mean, low, high = line.held_out
    found = f"{mean:.4g} [{low:.4g}, {high:.4g}] of {line.held_bound:.4g}"
    return f"{name}: {found}: {'kept' if line.kept else 'not kept'}"


def _cell(value: Any, name: str) -> str:
    if name == "kept":
        return {True: "yes", False: "no", None: "?"}[value]
    if isinstance(value, float):
        if math.isnan(value):
            return "-"
        return f"{100 * value:.1f} %" if name in ("would_break", "broke") else f"{value:.4g}"
    return str(value)
