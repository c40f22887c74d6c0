"""Numbers of runs: metrics of the paper, other measures, and means over the seeds.

The metrics are of a matrix R of accuracies with shape (T + 1, T); other libraries define some of them
differently. ``R[j, i]`` is the accuracy on task i + 1 after learning j tasks; j = 0 is before training.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import t as student

VIOLATED = -1e-3  # a cosine below this is a violated constraint; above it, rounding

Record = dict[str, Any]  # one run
Runs = dict[str, list[Record]]  # by method, one for each seed
Measure = Callable[[Record], "float | None"]  # None if a run has no such number


def average_accuracy(R: ArrayLike) -> float:
    """Return the mean accuracy over all tasks at the end: ``mean_i R[T, i]``."""
    return float(np.asarray(R, dtype=float)[-1].mean())


def backward_transfer(R: ArrayLike) -> float:
    """Return the mean of ``R[T, i] - R[i, i]`` over all tasks but the last; negative means forgetting."""
    R = np.asarray(R, dtype=float)
    return float(np.mean(R[-1, :-1] - np.diagonal(R[1:])[:-1]))


def forward_transfer(R: ArrayLike) -> float:
    """Return the mean of ``R[i - 1, i] - R[0, i]`` over all tasks but the first: gains from earlier tasks."""
    R = np.asarray(R, dtype=float)
    return float(np.mean(np.diagonal(R)[1:] - R[0, 1:]))


def forgetting(R: ArrayLike) -> float:
    """Return the mean of ``max_{1 <= l <= T - 1} R[l, i] - R[T, i]`` over all tasks but the last."""
    R = np.asarray(R, dtype=float)
    return float(np.mean(R[1:-1, :-1].max(axis=0) - R[-1, :-1]))


METRICS = {f.__name__: f for f in (average_accuracy, backward_transfer, forward_transfer, forgetting)}


def guarantee(cosines: Sequence[float]) -> dict[str, float] | None:
    """Return the share of violations and the worst cosine; `cosines` has one for each measured step."""
    if not cosines:
        return None
    values = np.asarray(cosines, dtype=float)
    return {"violated": float(np.mean(values < VIOLATED)), "worst_cosine": float(values.min())}


@dataclass(frozen=True)
class Spread:
    """The mean of `n` values, and their sample standard deviation (n - 1); false if there are none."""

    mean: float
    std: float  # nan for one value
    n: int

    def __bool__(self) -> bool:
        return self.n > 0

    @property
    def half(self) -> float:
        """Half of the 95 % interval of Student's t around the mean; nan for one value."""
        return float(student.ppf(0.975, self.n - 1) * self.std / self.n**0.5)

    @property
    def excludes_zero(self) -> bool:
        """Whether zero lies outside of the interval."""
        return abs(self.mean) > self.half


def spread(values: Iterable[float | None]) -> Spread:
    """Return mean and deviation of the values that are not None."""
    sample = np.array([value for value in values if value is not None], dtype=float)
    n = len(sample)
    return Spread(float(sample.mean()) if n else np.nan, float(sample.std(ddof=1)) if n > 1 else np.nan, n)


def metric(name: str) -> Callable[[Record], float]:
    """Return the measure that reads one of the `METRICS`."""
    return lambda record: record["metrics"][name]


def spent(part: str) -> Measure:
    """Return the measure of the time of a part of a step; None if a method has no such part."""
    return lambda record: record["seconds"]["per_step"][part] or None


def whole_step(record: Record) -> float:
    """Return the time of a whole step, the sum of its parts."""
    return in_order(record["seconds"]["per_step"].values())


def checked(what: str, number: str) -> Measure:
    """Return the measure of a number of the guarantee; None if no step was probed."""
    return lambda record: (record["guarantee"][what] or {}).get(number)


def in_order(values: Iterable[float]) -> float:
    """Return the sum with rounding after each term; `sum` has compensated for rounding since Python 3.12.

    Accuracies are multiples of 0.05 %, so the last bit decides which of two digits a table shows.
    """
    return float(np.cumsum([*values])[-1])


def grouped(
    key: str | Callable[[Record], Any], records: Iterable[Record], order: Iterable[Any] = ()
) -> dict[Any, list[Record]]:
    """Group records by a key or a function, in the given order or else in that of the records."""
    groups: dict[Any, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record) if callable(key) else record[key], []).append(record)
    return {value: groups[value] for value in order or groups if value in groups}


def paired(runs: Iterable[Record], baseline: Iterable[Record], measure: Measure) -> Spread:
    """Return the paired difference of runs to a baseline over their common seeds."""
    there = {record["seed"]: measure(record) for record in baseline}
    both = [(measure(record), there.get(record["seed"])) for record in runs]
    return spread(None if a is None or b is None else a - b for a, b in both)
