"""The examples of one task: preallocated tensors, the policy's bookkeeping, and draws without replacement."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from gemproj.torch.batches import Batch, Remembered, Source, flatten, place
from gemproj.torch.policies import Policy, Slots


class Store:
    """At most `capacity` examples of one task, of which the first ``len(store)`` rows are in use.

    It is made from examples of the kind to be stored, and stores none of them.
    """

    def __init__(self, examples: Remembered, capacity: int) -> None:
        self.slots = Slots(capacity)
        self._queues: dict[Any, list[int]] = {}  # what is left to draw, by label; None for all examples
        self._allocate(examples)

    def __len__(self) -> int:
        return len(self.slots)

    def __deepcopy__(self, memo: dict[int, Any]) -> Store:
        return Store.from_state_dict(self.state_dict(), len(self.slots.labels))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, in use or not."""
        return sum(leaf.nbytes for leaf in self._leaves)

    def add(self, examples: Remembered, labels: list[int], policy: Policy, random: torch.Generator) -> None:
        """Offer examples, which have been checked, to the policy."""
        source: dict[int, int] = {}  # slot -> row of the batch
        for row, label in enumerate(labels):
            slot = self.slots.place(label, policy, random)
            if slot is not None:
                source[slot] = row
        self._write(flatten(examples)[0], list(source), list(source.values()))
        self._queues = {}

    def record(self, examples: Remembered) -> None:
        """Replace all examples by the same ones with other outputs and losses."""
        leaves, _ = flatten(examples)  # raises unless there is one row for each example
        self._allocate(examples)
        rows = list(range(len(self)))
        self._write(leaves, rows, rows)

    def all(self) -> Remembered:
        """Return copies of all examples, in the order of their slots."""
        return self._of([leaf[: len(self)].clone() for leaf in self._leaves])

    def at(self, slots: list[int]) -> Remembered:
        """Return copies of some examples."""
        index = torch.tensor(slots, dtype=torch.int64, device="cpu")
        return self._of([leaf[index.to(leaf.device)] for leaf in self._leaves])

    def places(self) -> list[int]:
        """Return the place of each example in the stream of the task."""
        return self.slots.arrivals[: len(self)].tolist()

    def shuffle(self) -> None:
        """Have the next draws begin anew."""
        self._queues = {}

    def source(self, task: Hashable, slots: list[int]) -> Source:
        """Return the source of some examples, to be fetched when they are needed."""
        return Source(len(slots), lambda part: plain(self.at(slots[part])), (task, None))

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

    def check(self, examples: Remembered, *, batch_only: bool = False) -> None:
        """Raise for examples that are not like those stored, or whose batch is not like theirs."""
        kept = self._of([leaf[:0] for leaf in self._leaves])
        if batch_only:
            examples, kept = Remembered(examples.batch), Remembered(kept.batch)
        if examples.fields != kept.fields:
            raise ValueError(
                f"The examples of this task are stored with {' and '.join(kept.fields)}; found "
                f"{' and '.join(examples.fields)}. All examples of a task need the same."
            )
        (leaves, spec), (stored, stored_spec) = flatten(examples), flatten(kept)
        if spec != stored_spec:
            raise ValueError(
                f"The batch is nested differently from what is stored: {spec}, not {stored_spec}."
            )
        for i, (leaf, like) in enumerate(zip(leaves, stored, strict=True)):
            if leaf.shape[1:] != like.shape[1:] or leaf.dtype != like.dtype:
                raise ValueError(
                    f"Stored examples have shape {tuple(like.shape[1:])} and {like.dtype} in "
                    f"{place(kept, i)}; found {tuple(leaf.shape[1:])} and {leaf.dtype}. Pad sequences to a "
                    "fixed length: DataCollatorWithPadding(tokenizer, padding='max_length', max_length=n), "
                    "or for causal language models DataCollatorForLanguageModeling(tokenizer, mlm=False, "
                    "pad_to_multiple_of=n), with n no less than the longest text."
                )

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the examples, and the state of the policy and of the draws."""
        queues = [[key, list(queue)] for key, queue in self._queues.items()]
        return {**self.all()._asdict(), **self.slots.state_dict(), "queues": queues}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], capacity: int) -> Store:
        """Make a store of what `state_dict` returned."""
        examples = Remembered(*(state[name] for name in Remembered._fields))
        leaves, _ = flatten(examples)
        store = cls(examples, capacity)
        store.slots.load_state_dict(state)
        used = list(range(len(store)))
        if leaves[0].shape[0] != len(used):
            raise ValueError(f"state has {leaves[0].shape[0]} examples of a task but {len(used)} labels.")
        store._write(leaves, used, used)
        store._queues = {key: list(queue) for key, queue in state["queues"]}
        return store

    def _allocate(self, examples: Remembered) -> None:
        leaves, self._spec = flatten(examples)
        capacity = len(self.slots.labels)
        # What inference mode allocates could not be written to outside of it.
        with torch.inference_mode(False):
            self._leaves = [leaf.new_empty((capacity, *leaf.shape[1:])) for leaf in leaves]

    def _of(self, leaves: list[Tensor]) -> Remembered:
        return tree_unflatten(leaves, self._spec)

    def _write(self, leaves: list[Tensor], slots: list[int], rows: list[int]) -> None:
        to, of = (torch.tensor(index, dtype=torch.int64, device="cpu") for index in (slots, rows))
        for kept, leaf in zip(self._leaves, leaves, strict=True):
            kept[to.to(kept.device)] = leaf.detach()[of.to(leaf.device)].to(kept.device)


def readable(nbytes: int) -> str:
    """Return a number of bytes with a unit, in powers of 1024."""
    size, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.4g} {units[0]}"


def plain(examples: Remembered) -> Batch:
    """Return the batch alone, where nothing is stored with it."""
    return examples.batch if examples.fields == ["batch"] else examples
