"""Policies, which use labels and counts to decide which examples of a task a full memory keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch


class Slots:
    """Labels, arrival numbers and counts of the examples of one task, for use by policies.

    Attributes
    ----------
    labels, arrivals : ndarray, shape (capacity,), int64
        Label of the example in each slot (0 without labels), and its position in the stream of the task.
    counts, seen : Counter
        Number of stored examples and of offered examples of each label; `seen` includes the current example.
    used : int
        Number of slots in use; these are the first slots.
    """

    def __init__(self, capacity: int) -> None:
        self.labels = np.zeros(capacity, dtype=np.int64)
        self.arrivals = np.zeros(capacity, dtype=np.int64)
        self.counts: Counter[int] = Counter()
        self.seen: Counter[int] = Counter()
        self.used = 0

    @property
    def most(self) -> int:
        """The number of stored examples of a most frequent label."""
        return max(self.counts.values())

    def rivals(self, label: int) -> np.ndarray:
        """Return the slots of `label` if it is a most frequent label, else of all most frequent labels."""
        most = self.most
        if self.counts[label] == most:
            return np.flatnonzero(self.labels == label)
        return np.flatnonzero(np.isin(self.labels, [y for y, n in self.counts.items() if n == most]))

    def place(self, label: int, policy: Policy, random: torch.Generator) -> int | None:
        """Occupy and return a slot for the next example of the stream; None if the example is not kept."""
        self.seen[label] += 1
        slot: int | None = self.used
        if slot == len(self.labels):
            slot = policy(self, label, random)
            if slot is None:
                return None
            self.counts[int(self.labels[slot])] -= 1
        else:
            self.used += 1
        self.labels[slot], self.arrivals[slot] = label, self.seen.total() - 1
        self.counts[label] += 1
        return slot

    def state_dict(self) -> dict[str, Any]:
        """Return labels and arrivals as tensors, and the numbers of offered examples as a dict."""
        pairs = {"labels": self.labels, "arrivals": self.arrivals}
        used = {name: torch.tensor(of[: self.used], device="cpu") for name, of in pairs.items()}
        return {**used, "seen": dict(self.seen)}

    def load_state_dict(self, state: Mapping[str, Any], n: int) -> None:
        """Load a state returned by `state_dict`, for n stored examples."""
        labels, arrivals = (state[name].cpu().numpy() for name in ("labels", "arrivals"))
        if not n == len(labels) == len(arrivals) <= len(self.labels):
            raise ValueError(
                f"state has {n} examples of a task but {len(labels)} labels and {len(arrivals)} arrivals for "
                f"{len(self.labels)} slots."
            )
        self.labels[:n], self.arrivals[:n] = labels, arrivals
        self.counts, self.seen, self.used = Counter(labels.tolist()), Counter(state["seen"]), n


Policy = Callable[[Slots, int, torch.Generator], "int | None"]  # called only when all slots are in use


def reservoir(slots: Slots, label: int, random: torch.Generator) -> int | None:
    """Keep every example of the stream with the same probability (Vitter, 1985), whatever its label."""
    if draw(slots.seen.total(), random) >= slots.used:
        return None
    return draw(slots.used, random)  # a second draw, so choices equal those of `balanced` with one label


def balanced(slots: Slots, label: int, random: torch.Generator) -> int | None:
    """Class-balancing reservoir sampling (Chrysakis and Moens, 2020).

    A label is full once it has been among the most frequent labels or has lost an example. Until then, its
    examples replace random examples of the most frequent labels. The n-th example of a full label with m
    stored examples is kept with probability m / n, and replaces a random example of this label.
    """
    own, before = slots.counts[label], slots.seen[label] - 1
    if own == before and own < slots.most:
        candidates = slots.rivals(label)
    elif draw(slots.seen[label], random) < own:
        candidates = np.flatnonzero(slots.labels == label)
    else:
        return None
    return int(candidates[draw(len(candidates), random)])


def ring(slots: Slots, label: int, random: torch.Generator) -> int | None:
    """Keep the last examples (Lopez-Paz and Ranzato, 2017), evenly per label (Chaudhry et al., 2019)."""
    rivals = slots.rivals(label)
    return int(rivals[slots.arrivals[rivals].argmin()])


POLICIES: dict[str, Policy] = {"reservoir": reservoir, "balanced": balanced, "ring": ring}


def draw(n: int, random: torch.Generator) -> int:
    """Draw an integer from 0 to n - 1."""
    return int(torch.randint(n, (), generator=random, device="cpu"))
