"""Storage of the examples of one task, the state of the policy, and draws without replacement.

Batches of tensors are copied to preallocated tensors. Other examples are stored unchanged in a list.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_unflatten

from gemproj.torch.batches import (
    Batch,
    Collate,
    PerExample,
    Remembered,
    count_examples,
    flatten,
    leaves_of,
    map_nested,
    place,
)
from gemproj.torch.policies import Policy, Slots

_PLAIN = frozenset({bool, int, float, complex, str, type(None)})  # immutable
_NUMPY = "__numpy__"  # a state represents an array by a dict; this key holds the bytes


class Store:
    """Slots for at most `capacity` examples of one task; the first ``len(store)`` slots are in use.

    The given examples determine the structure. The first n examples are written to the first n slots.

    Attributes
    ----------
    collate : callable or None
        The collate function; None if the examples are stored in batches of tensors, or were loaded without
        their function.
    held : dict
        The storage of the examples, outputs and losses, by field name.
    form : tuple
        Structure, shapes and dtypes of `held`; examples of equal form can be mixed in one batch.
    queues : dict
        The slots that have not been drawn yet, by label; the key None is for draws from all labels.
    """

    def __init__(
        self, examples: Remembered, capacity: int, collate: Collate | None = None, n: int = 0
    ) -> None:
        self.slots = Slots(capacity)
        self.collate = collate
        self.queues: dict[Hashable, list[int]] = {}
        self._hold({name: hold(getattr(examples, name), capacity, n) for name in examples.fields})

    def __len__(self) -> int:
        return self.slots.used

    def __deepcopy__(self, memo: dict[int, Any]) -> Store:
        other = copy.copy(self)  # with the same collate function
        other.slots, other.queues, other.held = copy.deepcopy((self.slots, self.queues, self.held), memo)
        return other

    @property
    def nbytes(self) -> int:
        """Bytes of all stored examples, outputs and losses."""
        return sum(held.nbytes for held in self.held.values())

    def _hold(self, held: dict[str, Dense | Listed]) -> None:
        self.held, self.form = held, tuple((name, one.kind) for name, one in held.items())

    def add(self, examples: Remembered, labels: list[int], policy: Policy, random: torch.Generator) -> None:
        """Offer examples that passed `check` to the policy, and store the examples that the policy keeps."""
        source: dict[int, int] = {}  # slot -> index in the batch
        for row, label in enumerate(labels):
            slot = self.slots.place(label, policy, random)
            if slot is not None:
                source[slot] = row
        for name, held in self.held.items():
            held.write(list(source), getattr(examples, name), list(source.values()))
        self.queues = {}

    def record(self, outputs: Any, losses: Any) -> None:
        """Replace the outputs and losses of all examples; an empty tuple stores nothing."""
        stored = Remembered(PerExample(range(len(self))), outputs, losses)
        n = count_examples(stored)  # raises unless all fields have equal lengths
        found = {name: hold(getattr(stored, name), len(self.slots.labels), n) for name in stored.fields}
        self._hold(found | {"batch": self.held["batch"]})

    def draw(
        self, by_label: bool, n: int | None, random: torch.Generator
    ) -> list[tuple[Hashable, list[int]]]:
        """Return (label, n drawn slots) for each label in increasing order; label None if not `by_label`.

        No slot is drawn again before all slots of its label have been drawn. Without n, return all slots.
        """
        slots: dict[Hashable, Any] = {None: range(len(self))}
        if by_label:
            used = self.slots.labels[: len(self)]
            slots = {label: np.flatnonzero(used == label).tolist() for label in np.unique(used).tolist()}
        if n is None:
            return [(label, list(some)) for label, some in slots.items()]
        return [(label, self._next(label, some, n, random)) for label, some in slots.items()]

    def _next(self, label: Hashable, slots: Any, n: int, random: torch.Generator) -> list[int]:
        queue = self.queues.setdefault(label, [])
        drawn = queue[:n]
        del queue[:n]
        if len(drawn) < min(n, len(slots)):
            order = [slots[i] for i in torch.randperm(len(slots), generator=random, device="cpu").tolist()]
            taken = set(drawn)
            fresh = [slot for slot in order if slot not in taken][: n - len(drawn)]
            taken = set(fresh)
            drawn, self.queues[label] = drawn + fresh, [slot for slot in order if slot not in taken]
        return drawn

    def check(self, examples: Remembered) -> None:
        """Raise if fields, form (batch or list) or structure differ from those of the stored examples."""
        if examples.fields != list(self.held):
            raise ValueError(
                f"The examples of this task are stored with {' and '.join(self.held)}; found "
                f"{' and '.join(examples.fields)}. All examples of a task need the same fields."
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
        """Return copies of the examples, the state of the policy, and the queues of slots."""
        queues = [[label, list(queue)] for label, queue in self.queues.items()]
        examples = gather([(self, list(range(len(self))))])._asdict()
        listed = [name for name, value in examples.items() if isinstance(value, PerExample)]
        held = {name: packed(value) for name, value in examples.items()}
        return {**held, "listed": listed, **self.slots.state_dict(), "queues": queues}

    @classmethod
    def from_state_dict(
        cls, state: Mapping[str, Any], capacity: int, collate: Collate | None = None
    ) -> Store:
        """Create a store from a state returned by `state_dict`."""
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
    """Return copies of the examples in the chosen slots of several stores, as one `Remembered`."""
    first, form = chosen[0][0].held, chosen[0][0].form
    for store, _ in chosen:
        if store.held.keys() != first.keys():
            raise ValueError(
                "Only some tasks have stored outputs or losses; these cannot be mixed with others in a batch."
            )
        if store.form != form:
            raise ValueError(
                "Examples that differ in structure, shape or dtype, or that are stored partly in batches "
                "and partly in a list, cannot be mixed in one batch. Draw from each task separately, as "
                "per='task' does."
            )
    columns: Any = {name: [(store.held[name], slots) for store, slots in chosen] for name in first}
    return Remembered(**{name: first[name].gather(column) for name, column in columns.items()})


class Dense:
    """Storage of examples of equal shape: preallocated tensors whose first dimension is the slot."""

    def __init__(self, like: Batch, capacity: int) -> None:
        leaves, self._spec = flatten(like)
        # Tensors allocated in inference mode cannot be written to outside of it.
        with torch.inference_mode(False):
            self._leaves = [leaf.new_empty((capacity, *leaf.shape[1:])) for leaf in leaves]
        self.kind = str(self._spec), *((leaf.shape[1:], leaf.dtype) for leaf in leaves)

    def __deepcopy__(self, memo: dict[int, Any]) -> Dense:
        other = copy.copy(self)
        other._leaves = [leaf.clone() for leaf in self._leaves]
        return other

    @property
    def nbytes(self) -> int:
        """Bytes of all slots, including unused slots."""
        return sum(leaf.nbytes for leaf in self._leaves)

    def write(self, slots: list[int], examples: Batch, rows: list[int]) -> None:
        """Copy the examples of a batch with indices `rows` into slots."""
        to, of = (torch.tensor(places, dtype=torch.int64, device="cpu") for places in (slots, rows))
        for kept, leaf in zip(self._leaves, flatten(examples)[0], strict=True):
            kept[to.to(kept.device)] = leaf.detach()[of.to(leaf.device)].to(kept.device)

    @staticmethod
    def gather(chosen: list[tuple[Dense, list[int]]]) -> Batch:
        """Return copies of the examples in the chosen slots, as one batch on the devices of the first store.

        Loaded examples and examples stored later may be on different devices.
        """
        sizes, joined = [len(slots) for _, slots in chosen], []
        places = np.array([slot for _, slots in chosen for slot in slots], dtype=np.int64)
        rows, home = torch.from_numpy(places), chosen[0][0]._leaves[0].device  # faster than torch.tensor
        there, here = rows.split_with_sizes(sizes), rows.to(home).split_with_sizes(sizes)
        for leaves in zip(*(held._leaves for held, _ in chosen), strict=True):
            out = leaves[0].new_empty((len(places), *leaves[0].shape[1:]))
            parts = out.split_with_sizes(sizes)
            for leaf, at, at_home, part in zip(leaves, there, here, parts, strict=True):
                if leaf.device == home == out.device:
                    torch.index_select(leaf, 0, at_home, out=part)
                else:
                    part.copy_(leaf.index_select(0, at.to(leaf.device)))
            joined.append(out)
        return tree_unflatten(joined, chosen[0][0]._spec)

    def check(self, examples: Batch, field: str) -> None:
        """Raise if examples differ from the stored examples in structure, shape or dtype."""
        leaves, spec = flatten(examples)
        if spec != self._spec:
            raise ValueError(
                f"The batch is nested differently from the stored examples: {spec}, not {self._spec}."
            )
        for i, (leaf, like) in enumerate(zip(leaves, self._leaves, strict=True)):
            if (leaf.shape[1:], leaf.dtype) != (like.shape[1:], like.dtype):
                where = field + place(examples, i).removeprefix("batch")
                raise ValueError(
                    f"Stored examples have shape {tuple(like.shape[1:])} and {like.dtype} in {where}; found "
                    f"{tuple(leaf.shape[1:])} and {leaf.dtype}. For examples that differ in length pass the "
                    "loader itself, whose collate_fn pads them, or a data set or list of examples with "
                    "collate=: they are then stored unchanged."
                )


class Listed:
    """List of unchanged examples, with one element for each slot in use."""

    kind = ()

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> Listed:
        other = Listed()
        other._kept = list(self._kept)  # examples are replaced, never modified in place
        return other

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors and arrays, plus `sys.getsizeof` of every other value."""
        return sum(getattr(leaf, "nbytes", sys.getsizeof(leaf)) for leaf in leaves_of(self._kept))

    def write(self, slots: list[int], examples: PerExample, rows: list[int]) -> None:
        """Write copied examples to slots; new slots come after the slots in use."""
        self._kept += [None] * (max(slots, default=-1) + 1 - len(self._kept))
        for slot, row in zip(slots, rows, strict=True):
            self._kept[slot] = examples[row]

    @staticmethod
    def gather(chosen: list[tuple[Listed, list[int]]]) -> PerExample:
        """Return copies of the examples in the chosen slots; a collate function may modify its input."""
        return owned(PerExample(held._kept[slot] for held, slots in chosen for slot in slots))


def hold(examples: Any, capacity: int, n: int = 0) -> Dense | Listed:
    """Return storage for examples like these, with the first n examples in the first n slots."""
    held: Any = Listed() if isinstance(examples, PerExample) else Dense(examples, capacity)
    held.write(list(range(n)), examples, list(range(n)))
    return held


def packed(examples: Any) -> Any:
    """Convert a list of examples for ``torch.load(..., weights_only=True)``; return a batch unchanged."""

    def of(leaf: Any) -> Any:
        if not isinstance(leaf, np.ndarray | np.generic):
            return leaf
        flat, scalar = np.ascontiguousarray(leaf).reshape(-1), not isinstance(leaf, np.ndarray)
        of_bytes = torch.from_numpy(flat.view(np.uint8))
        return {_NUMPY: of_bytes, "dtype": leaf.dtype.str, "shape": leaf.shape, "scalar": scalar}

    return map_nested(of, list(examples)) if isinstance(examples, PerExample) else examples


def unpacked(state: list[Any]) -> PerExample:
    """Return copies of the examples in a list returned by `packed`."""

    def is_array(value: Any) -> bool:
        return isinstance(value, dict) and _NUMPY in value

    def of(leaf: Any) -> Any:
        if not is_array(leaf):
            return leaf
        array = leaf[_NUMPY].cpu().numpy().view(leaf["dtype"]).reshape(leaf["shape"])
        return array[()] if leaf["scalar"] else array

    return owned(PerExample(map_nested(of, one, is_array) for one in state))


def owned(examples: Any) -> Any:
    """Copy a list of examples, or raise for types that cannot be stored; return a batch unchanged."""
    if not isinstance(examples, PerExample):
        return examples
    with torch.inference_mode(False):  # inference tensors cannot be used in training
        return PerExample(map_nested(_copied, one, _is_plain_list) for one in examples)


def _is_plain_list(value: Any) -> bool:
    """Return whether a value is a list of numbers or strings, such as tokens; it is copied as a whole."""
    return type(value) is list and _PLAIN.issuperset(map(type, value))


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    if isinstance(leaf, np.ndarray | np.generic) and not (leaf.dtype.hasobject or leaf.dtype.names):
        return leaf.copy()
    if type(leaf) is list:
        return list(leaf)
    if type(leaf) in _PLAIN:
        return leaf
    raise TypeError(
        "Stored examples may hold tensors, NumPy arrays, numbers, strings and None, in dicts, lists, tuples "
        f"and dataclasses; found {type(leaf).__module__}.{type(leaf).__qualname__}"
        f"{f' of dtype {leaf.dtype}' if isinstance(leaf, np.ndarray) else ''}. Convert it in the data "
        "set, or pass batches of tensors: (batch for batch in loader)."
    )
