"""The examples of one task: how they are held, the policy's bookkeeping, and draws without replacement."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from gemproj.torch.batches import Batch, Collate, PerExample, Remembered, count_examples, join
from gemproj.torch.examples import Dense, hold, owned, packed, unpacked
from gemproj.torch.policies import Policy, Slots


class Store:
    """At most `capacity` examples of one task, of which the first ``len(store)`` slots are in use.

    It is made from examples of the kind to be stored, and stores none of them. What is stored about them is
    held in the same slots.

    Attributes
    ----------
    collate : callable or None
        Makes a batch of a list of examples; None for examples that are held in batches of tensors, and after
        loading.
    """

    def __init__(self, examples: Remembered, capacity: int, collate: Collate | None = None) -> None:
        self.slots = Slots(capacity)
        self.collate = collate
        self._queues: dict[Any, list[int]] = {}  # what is left to draw, by label; None for all examples
        self._held = {name: hold(getattr(examples, name), capacity) for name in examples.fields}

    def __len__(self) -> int:
        return len(self.slots)

    def __deepcopy__(self, memo: dict[int, Any]) -> Store:
        copy = Store.from_state_dict(self.state_dict(), len(self.slots.labels))
        copy.collate = self.collate
        return copy

    @property
    def nbytes(self) -> int:
        """Bytes of all that is held."""
        return sum(held.nbytes for held in self._held.values())

    @property
    def kind(self) -> Hashable:
        """What stores have in common whose examples can be mixed."""
        return tuple((name, held.kind) for name, held in self._held.items())

    def add(self, examples: Remembered, labels: list[int], policy: Policy, random: torch.Generator) -> None:
        """Offer examples, which have been checked, to the policy."""
        source: dict[int, int] = {}  # slot -> row of the batch
        for row, label in enumerate(labels):
            slot = self.slots.place(label, policy, random)
            if slot is not None:
                source[slot] = row
        for name, held in self._held.items():
            held.write(list(source), getattr(examples, name), list(source.values()))
        self._queues = {}

    def record(self, outputs: Any, losses: Any) -> None:
        """Replace the outputs and losses of all examples; empty tuples stand for none."""
        rows = list(range(len(self)))
        stored = Remembered(PerExample(rows), owned(outputs), owned(losses))
        count_examples(stored)  # raises unless there is one of each for each example
        fresh = {"batch": self._held["batch"]}
        for name in stored.fields[1:]:
            fresh[name] = hold(getattr(stored, name), len(self.slots.labels))
            fresh[name].write(rows, getattr(stored, name), rows)
        self._held = fresh

    def at(self, slots: list[int]) -> Remembered:
        """Return copies of some examples, in a list where they are not held in batches."""
        return Remembered(**{name: held.at(slots) for name, held in self._held.items()})

    def places(self) -> list[int]:
        """Return the place of each example in the stream of the task."""
        return self.slots.arrivals[: len(self)].tolist()

    def shuffle(self) -> None:
        """Have the next draws begin anew."""
        self._queues = {}

    def groups(self, by_label: bool) -> Iterator[tuple[Hashable, list[int]]]:
        """Yield the slots of each label, in the order of the labels; or None and all slots."""
        used = self.slots.labels[: len(self)]
        if not by_label:
            yield None, list(range(len(self)))
            return
        for label in np.unique(used).tolist():
            yield label, np.flatnonzero(used == label).tolist()

    def draw(self, key: Hashable, slots: list[int], n: int, random: torch.Generator) -> list[int]:
        """Draw n of `slots`; none is drawn again before all of them were."""
        queue = self._queues.get(key, [])
        drawn, queue = queue[:n], queue[n:]
        if len(drawn) < min(n, len(slots)):
            order = [slots[i] for i in torch.randperm(len(slots), generator=random, device="cpu").tolist()]
            fresh = [slot for slot in order if slot not in drawn][: n - len(drawn)]
            drawn, queue = drawn + fresh, [slot for slot in order if slot not in fresh]
        self._queues[key] = queue
        return drawn

    def check(self, examples: Remembered) -> None:
        """Raise for examples that are not like those stored."""
        if examples.fields != list(self._held):
            raise ValueError(
                f"The examples of this task are stored with {' and '.join(self._held)}; found "
                f"{' and '.join(examples.fields)}. All examples of a task need the same."
            )
        for name, held in self._held.items():
            held.check(getattr(examples, name), name)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the examples, and the state of the policy and of the draws."""
        queues = [[key, list(queue)] for key, queue in self._queues.items()]
        examples = self.at(list(range(len(self))))._asdict()
        listed = [name for name, value in examples.items() if isinstance(value, PerExample)]
        held = {name: packed(value) for name, value in examples.items()}
        return {**held, "listed": listed, **self.slots.state_dict(), "queues": queues}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], capacity: int) -> Store:
        """Make a store of what `state_dict` returned."""
        listed = state["listed"]
        stored = {name: state[name] for name in Remembered._fields}
        examples = Remembered(**{k: unpacked(value) if k in listed else value for k, value in stored.items()})
        store = cls(examples, capacity)
        store.slots.load_state_dict(state)
        used = list(range(len(store)))
        for name, held in store._held.items():
            found = count_examples(getattr(examples, name))
            if found != len(used):
                raise ValueError(f"state has {found} examples of a task but {len(used)} labels.")
            held.write(used, getattr(examples, name), used)
        store._queues = {key: list(queue) for key, queue in state["queues"]}
        return store


def examples_of(chosen: list[tuple[Store, list[int]]]) -> Remembered:
    """Return copies of some examples of several stores as those of one."""
    (first, slots), *others = chosen
    if not others:
        return first.at(slots)
    if any(list(store._held) != list(first._held) for store, _ in others):
        raise ValueError("Outputs or losses are stored with some tasks only, so that they cannot be mixed.")
    found: dict[str, Any] = {}
    for name, held in first._held.items():
        rest: list[Any] = [(store._held[name], some) for store, some in others]
        if isinstance(held, Dense) and all(one.kind == held.kind for one, _ in rest):
            found[name] = held.at(slots, *rest)
        else:
            found[name] = join([held.at(slots), *(one.at(some) for one, some in rest)])
    return Remembered(**found)


def readable(nbytes: int) -> str:
    """Return a number of bytes with a unit, in powers of 1024."""
    size, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.4g} {units[0]}"


def plain(examples: Remembered) -> Batch:
    """Return the batch alone, where nothing is stored with it."""
    return examples.batch if examples.fields == ["batch"] else examples
