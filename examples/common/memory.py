"""Stored examples: which ones are kept of each task, and draws from them."""

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from .batch import Batch, concatenate, rows


class Memory:
    """At most `size` examples of each task, chosen by a policy, for methods that replay them themselves.

    Attributes
    ----------
    tasks : dict
        The stored examples, a batch for each task.
    """

    def __init__(self, size: int, seed: int, policy: str = "reservoir") -> None:
        self.size, self.policy = size, policy
        self.tasks: dict[Hashable, Batch] = {}
        self._random = torch.Generator().manual_seed(seed)
        self._queues: dict[Hashable, list[int]] = {}

    def add(self, batch: Batch, task: Hashable) -> None:
        """Choose examples of a task, and store them."""
        chosen = choose(batch["labels"].tolist(), self.size, self.policy, self._random)
        self.tasks[task], self._queues[task] = rows(batch, torch.tensor(chosen)), []

    def draw(self, n: int) -> list[Batch]:
        """Draw n examples of each task; none is drawn again before all have been drawn."""
        return [rows(batch, torch.tensor(self._next(task, n))) for task, batch in self.tasks.items()]

    def sample(self, n: int) -> Batch:
        """Draw n examples of all tasks together, ordered by task."""
        sizes = torch.tensor([len(batch["labels"]) for batch in self.tasks.values()])
        at = torch.randperm(int(sizes.sum()), generator=self._random)[:n]
        task = torch.arange(len(sizes)).repeat_interleave(sizes)[at]
        return rows(concatenate([*self.tasks.values()]), at[task.argsort(stable=True)])

    def _next(self, task: Hashable, n: int) -> list[int]:
        have, queue = len(self.tasks[task]["labels"]), self._queues[task]
        drawn, queue = queue[:n], queue[n:]
        if len(drawn) < min(n, have):
            order = torch.randperm(have, generator=self._random).tolist()
            fresh = [i for i in order if i not in drawn][: n - len(drawn)]
            drawn, queue = drawn + fresh, [i for i in order if i not in fresh]
        self._queues[task] = queue
        return drawn


def choose(labels: Sequence[int], size: int, policy: str, random: torch.Generator) -> list[int]:
    """Return the indices of at most `size` examples that a policy keeps of a stream with these labels.

    ``"reservoir"`` keeps every example with the same probability (Vitter, 1985). ``"balanced"`` spreads the
    kept examples evenly over the labels; within a label, all have the same probability (Chrysakis and Moens,
    2020). ``"ring"`` keeps the last ones, evenly over the labels (Chaudhry et al., 2019).
    """
    kept = list(range(min(size, len(labels))))

    def draw(n: int) -> int:
        return int(torch.randint(n, (), generator=random))

    for i, label in enumerate(labels[size:], size):
        if policy == "reservoir":
            if draw(i + 1) < size:
                kept[draw(size)] = i
            continue
        counts = Counter(labels[k] for k in kept)
        own, most, seen = counts[label], max(counts.values()), labels[: i + 1].count(label)
        fullest = [label] if own == most else [one for one, n in counts.items() if n == most]
        if policy == "ring":
            kept[kept.index(min(k for k in kept if labels[k] in fullest))] = i
            continue
        # A label that has lost no example, and is not among the fullest, takes a place of these.
        if own == most or own < seen - 1:
            if draw(seen) >= own:
                continue
            fullest = [label]
        places = [place for place, k in enumerate(kept) if labels[k] in fullest]
        kept[places[draw(len(places))]] = i
    return kept


def seed_draws(keeper: Any, seed: int) -> None:
    """Let the draws of a keeper depend on the seed of the run."""
    state = torch.Generator().manual_seed(seed).get_state()
    keeper.load_state_dict(keeper.state_dict() | {"random": state})
