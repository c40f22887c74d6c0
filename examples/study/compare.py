"""The runs of a stream, their differences paired over seeds, and numbers that only streams have."""

from collections.abc import Iterable
from dataclasses import dataclass

from ..common.metrics import Measure, Record, Runs, Spread, in_order, metric, paired, whole_step

average_accuracy = metric("average_accuracy")


def lowest_past_accuracy(record: Record) -> float:
    """Return the lowest accuracy of a task at any time after it was learned, mean over all but the last.

    It shows what a task loses and regains in between, the stability gap. De Lange et al. (2023,
    arXiv 2205.13452) call it min-ACC.
    """
    lowest = [  # the curve of a diverged run ends early, but it has accuracies at the end
        min(
            [point["accuracy"][task] for point in record["curve"] if point["step"] > learned]
            or [record["accuracies"][-1][task]]
        )
        for task, learned in enumerate(record["boundaries"][:-1])
    ]
    return in_order(lowest) / len(lowest)


@dataclass(frozen=True)
class Found:
    """The reported runs of a stream, and the runs that give the step times of the same methods."""

    runs: Runs
    times: Runs

    def only(self, names: Iterable[str]) -> "Found":
        """Return the runs of these methods, in their order."""
        names = [name for name in names if name in self.runs]
        return Found(*({name: runs[name] for name in names} for runs in (self.runs, self.times)))

    def minus(self, name: str, other: str, measure: Measure = average_accuracy) -> Spread:
        """Return the paired difference of a method to another one; see `paired`."""
        return paired(self.runs.get(name, []), self.runs.get(other, []), measure)

    def step(self, name: str) -> float:
        """Return the mean time of a whole step over the runs."""
        return in_order(map(whole_step, self.times[name])) / len(self.times[name])
