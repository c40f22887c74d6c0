"""The examples of one task: how they are held, the policy's bookkeeping, and draws without replacement."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from gemproj.torch.batches import Collate, PerExample, Remembered, count_examples
from gemproj.torch.examples import Dense, Listed, hold, packed, unpacked
from gemproj.torch.policies import Policy, Slots


class Store:
    """At most `capacity` examples of one task, of which the first ``len(store)`` slots are in use.

    It is made from examples of the kind to be stored, and stores the first n of them.

    Attributes
    ----------
    collate : callable or None
        Makes a batch of a list of examples; None for examples that are held in batches of tensors, and after
        loading.
    held : dict
        What holds the examples, their outputs and losses in these slots, by name.
    queues : dict
        The slots that are left to draw, by label; of None for all examples.
    """

    def __init__(
        self, examples: Remembered, capacity: int, collate: Collate | None = None, n: int = 0
    ) -> None:
        self.slots = Slots(capacity)
        self.collate = collate
        self.queues: dict[Hashable, list[int]] = {}
        self.held = {name: hold(getattr(examples, name), capacity, n) for name in examples.fields}

    def __len__(self) -> int:
        return len(self.slots)

    def __deepcopy__(self, memo: dict[int, Any]) -> Store:
        return Store.from_state_dict(self.state_dict(), len(self.slots.labels), self.collate)

    @property
    def nbytes(self) -> int:
        """Bytes of all that is held."""
        return sum(held.nbytes for held in self.held.values())

    @property
    def kind(self) -> Hashable:
        """What stores have in common whose examples can be mixed in one batch."""
        return id(self.collate), *((name, held.kind) for name, held in self.held.items())

    def add(self, examples: Remembered, labels: list[int], policy: Policy, random: torch.Generator) -> None:
        """Offer examples, which have been checked, to the policy."""
        source: dict[int, int] = {}  # slot -> row of the batch
        for row, label in enumerate(labels):
            slot = self.slots.place(label, policy, random)
            if slot is not None:
                source[slot] = row
        for name, held in self.held.items():
            held.write(list(source), getattr(examples, name), list(source.values()))
        self.queues = {}

    def record(self, outputs: Any, losses: Any) -> None:
        """Replace the outputs and losses of all examples; empty tuples stand for none."""
        stored = Remembered(PerExample(range(len(self))), outputs, losses)
        n = count_examples(stored)  # raises unless there is one of each for each example
        found = {name: hold(getattr(stored, name), len(self.slots.labels), n) for name in stored.fields}
        self.held = found | {"batch": self.held["batch"]}

    def draw(
        self, by_label: bool, n: int | None, random: torch.Generator
    ) -> Iterator[tuple[Hashable, list[int]]]:
        """Yield n slots of each label, in the order of the labels, or of all with None as their label.

        None is drawn again before all of them were. Without n these are all slots.
        """
        used = self.slots.labels[: len(self)]
        for label in np.unique(used).tolist() if by_label else [None]:
            slots = np.flatnonzero(used == label).tolist() if by_label else range(len(self))
            yield label, list(slots) if n is None else self._next(label, slots, n, random)

    def _next(self, label: Hashable, slots: Any, n: int, random: torch.Generator) -> list[int]:
        queue = self.queues.setdefault(label, [])
        drawn = queue[:n]
        del queue[:n]
        if len(drawn) < min(n, len(slots)):
            order = [slots[i] for i in torch.randperm(len(slots), generator=random, device="cpu").tolist()]
            fresh = [slot for slot in order if slot not in drawn][: n - len(drawn)]
            drawn, self.queues[label] = drawn + fresh, [slot for slot in order if slot not in fresh]
        return drawn

    def check(self, examples: Remembered) -> None:
        """Raise for examples that are not like those stored."""
        if examples.fields != list(self.held):
            raise ValueError(
                f"The examples of this task are stored with {' and '.join(self.held)}; found "
                f"{' and '.join(examples.fields)}. All examples of a task need the same."
            )
        for name, held in self.held.items():
            found, listed = getattr(examples, name), isinstance(held, Listed)
            if listed != isinstance(found, PerExample):
                form = "as a list, one element for each example" if listed else "in batches of tensors"
                other = "a batch. Pass examples with" if listed else "a list. Pass batches, without"
                raise ValueError(
                    f"The {name} of this task is stored {form}; found {other} collate=, or remove(task) "
                    "first."
                )
            if isinstance(held, Dense):
                held.check(found, name)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the examples, and the state of the policy and of the draws."""
        queues = [[label, list(queue)] for label, queue in self.queues.items()]
        examples = gather([(self, list(range(len(self))))])._asdict()
        listed = [name for name, value in examples.items() if isinstance(value, PerExample)]
        held = {name: packed(value) for name, value in examples.items()}
        return {**held, "listed": listed, **self.slots.state_dict(), "queues": queues}

    @classmethod
    def from_state_dict(
        cls, state: Mapping[str, Any], capacity: int, collate: Collate | None = None
    ) -> Store:
        """Make a store of what `state_dict` returned."""
        listed = state["listed"]
        examples = Remembered(
            *(unpacked(state[name]) if name in listed else state[name] for name in Remembered._fields)
        )
        slots, n = Slots(capacity), count_examples(examples)
        slots.load_state_dict(state, n)
        store = cls(examples, capacity, collate, n)
        store.slots = slots
        store.queues = {label: list(queue) for label, queue in state["queues"]}
        return store


def gather(chosen: list[tuple[Store, list[int]]]) -> Remembered:
    """Return copies of the examples in some slots of several stores as those of one."""
    first = chosen[0][0].held
    for store, _ in chosen[1:]:
        if store.held.keys() != first.keys():
            raise ValueError(
                "Outputs or losses are stored with some tasks only, so that they cannot be mixed."
            )
        if any(store.held[name].kind != held.kind for name, held in first.items()):
            raise ValueError(
                "Examples that differ in structure, shape or dtype, or that are stored in batches here and "
                "in a list there, cannot be mixed in one batch. Draw from each task by itself, as "
                "per='task' does."
            )
    columns: Any = {name: [(store.held[name], slots) for store, slots in chosen] for name in first}
    return Remembered(**{name: first[name].gather(column) for name, column in columns.items()})
