"""The paper's metrics of the matrix of accuracies; other libraries define some of them differently.

``R`` has shape (T + 1, T): ``R[j, i]`` is the accuracy on task i + 1 after learning j tasks. The first row
holds the accuracies before training.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import t as student

VIOLATED = -1e-3  # a cosine below this is a violated constraint; above it, rounding

Record = dict[str, Any]  # one run
Runs = dict[str, list[Record]]  # by method, one for each seed
Measure = Callable[[Record], "float | None"]  # None if a run has no such number


def average_accuracy(R: ArrayLike) -> float:
    """Return the mean accuracy over all tasks at the end: ``mean_i R[T, i]``."""
    return float(_matrix(R)[-1].mean())


def backward_transfer(R: ArrayLike) -> float:
    """Return the mean of ``R[T, i] - R[i, i]`` over all tasks but the last; negative means forgetting."""
    R = _matrix(R)
    return float(np.mean(R[-1, :-1] - np.diagonal(R[1:])[:-1]))


def forward_transfer(R: ArrayLike) -> float:
    """Return the mean of ``R[i - 1, i] - R[0, i]`` over all tasks but the first: gains from earlier tasks."""
    R = _matrix(R)
    return float(np.mean(np.diagonal(R)[1:] - R[0, 1:]))


def forgetting(R: ArrayLike) -> float:
    """Return the mean of ``max_{1 <= l <= T - 1} R[l, i] - R[T, i]`` over all tasks but the last."""
    R = _matrix(R)
    return float(np.mean(R[1:-1, :-1].max(axis=0) - R[-1, :-1]))


METRICS = {f.__name__: f for f in (average_accuracy, backward_transfer, forward_transfer, forgetting)}


def guarantee(cosines: Sequence[float]) -> dict[str, float] | None:
    """Return the share of violations and the worst cosine; `cosines` has one for each measured step."""
    if not cosines:
        return None
    values = np.asarray(cosines, dtype=float)
    return {"violated": float(np.mean(values < VIOLATED)), "worst_cosine": float(values.min())}


def mean_std(values: Iterable[float]) -> dict[str, float | None]:
    """Return mean and sample standard deviation (n - 1 in the denominator); None if it is undefined."""
    array = np.fromiter(values, dtype=float)
    return {
        "mean": float(array.mean()) if len(array) else None,
        "std": float(array.std(ddof=1)) if len(array) > 1 else None,
    }


@dataclass(frozen=True)
class Interval:
    """A mean over `n` seeds with its 95 % interval of Student's t: mean ± half, infinite for one seed."""

    mean: float
    half: float
    n: int

    @property
    def bar(self) -> float:
        """Length of an error bar; 0 for one seed."""
        return self.half if np.isfinite(self.half) else 0.0

    @property
    def excludes_zero(self) -> bool:
        """Whether zero lies outside."""
        return abs(self.mean) > self.half


def interval(values: Iterable[float]) -> Interval:
    """Return mean and interval of a sample that is not empty."""
    sample = list(values)
    found = mean_std(sample)
    if found["mean"] is None:
        raise ValueError("values must not be empty: there is no mean of none")
    n, std = len(sample), found["std"]
    half = np.inf if std is None else student.ppf(0.975, n - 1) * std / n**0.5
    return Interval(found["mean"], float(half), n)


def metric(name: str) -> Callable[[Record], float]:
    """Return the measure that reads one of the `METRICS`."""
    return lambda record: record["metrics"][name]


def grouped(
    key: str | Callable[[Record], Any], records: Iterable[Record], order: Iterable[Any] = ()
) -> dict[Any, list[Record]]:
    """Group records by a key or a function, in the given order or else in that of the records."""
    groups: dict[Any, list[Record]] = {}
    for record in records:
        groups.setdefault(key(record) if callable(key) else record[key], []).append(record)
    return {value: groups[value] for value in order or groups if value in groups}


def paired(runs: Iterable[Record], baseline: Iterable[Record], measure: Measure) -> Interval | None:
    """Return the paired difference of runs to a baseline over their common seeds; None without any."""
    there = {record["seed"]: measure(record) for record in baseline}
    both = [(measure(record), there[record["seed"]]) for record in runs if record["seed"] in there]
    differences = [a - b for a, b in both if a is not None and b is not None]
    return interval(differences) if differences else None


def _matrix(R: ArrayLike) -> NDArray[np.float64]:
    matrix = np.asarray(R, dtype=float)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] + 1 or matrix.shape[1] < 2:
        raise ValueError(f"R must have shape (T + 1, T) with T at least 2, found {matrix.shape}")
    return matrix
