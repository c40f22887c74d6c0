"""Episodic memory: a few examples of every task, balanced per label."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from gemproj.methods._method import check_count

Batch = Any  # any nesting of dicts, lists and tuples of tensors with the same leading dimension


class EpisodicMemory:
    """Examples of each task, at most `per_task` of them, chosen as they stream by.

    Every example of a task has the same chance to be kept (reservoir sampling); with `label`, the
    kept examples are spread evenly over the labels instead, however skewed the stream is: a full
    memory makes room by dropping an example of its most frequent label, and within a label every
    example has the same chance (class-balancing reservoir sampling, Chrysakis and Moens, 2020).

    Examples are copied, stay on the device they came from, and must have the same shape from batch
    to batch: pad sequences to a fixed length first.

    Parameters
    ----------
    per_task : int, default 100
        Capacity of each task, in examples.
    label : key or callable, optional
        Where the labels are: a key of the batch, ``batch[label]``, or a function of the batch that
        returns a tensor of integers, one per example.
    seed : int, default 0
        Seed of the memory's own random numbers; torch's global state is not used.

    Examples
    --------
    >>> import torch
    >>> from gemproj.torch import EpisodicMemory
    >>> memory = EpisodicMemory(per_task=4, label="y")
    >>> memory.add({"x": torch.randn(20, 3), "y": torch.tensor([0] * 18 + [1] * 2)}, task=0)
    >>> [batch["y"].sort().values.tolist() for batch in memory.batches()]
    [[0, 0, 1, 1]]
    """

    def __init__(
        self,
        per_task: int = 100,
        label: Hashable | Callable[[Batch], torch.Tensor] | None = None,
        seed: int = 0,
    ) -> None:
        check_count(per_task, "per_task", 1)
        self.per_task = per_task
        self.label = label
        self._random = torch.Generator().manual_seed(seed)
        self._stores: dict[Hashable, _Store] = {}

    def __len__(self) -> int:
        """Return the number of tasks."""
        return len(self._stores)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{task!r}: {len(store)}" for task, store in self._stores.items())
        return f"EpisodicMemory(per_task={self.per_task}, label={self.label!r}, examples={{{sizes}}})"

    @property
    def tasks(self) -> list[Hashable]:
        """The tasks with stored examples, in the order in which they were first added."""
        return list(self._stores)

    @property
    def nbytes(self) -> int:
        """Bytes that the stored tensors hold, at full capacity."""
        return sum(leaf.nbytes for store in self._stores.values() for leaf in store.leaves)

    def add(self, batch: Batch, task: Hashable) -> None:
        """Offer the examples of a batch to the memory of `task`.

        Raises
        ------
        TypeError
            For leaves that are not tensors.
        ValueError
            For leaves that differ in their leading dimension, in structure or in shape from what is
            stored, and for labels that are not one integer per example.
        """
        labels = self._labels(batch)
        leaves, spec = _flatten(batch)
        rows = leaves[0].shape[0]
        if rows == 0:
            return
        if labels is None:
            labels = torch.zeros(rows, dtype=torch.int64)
        if tuple(labels.shape) != (rows,) or labels.is_floating_point() or labels.is_complex():
            raise ValueError(
                f"labels must be integers of shape ({rows},), one per example; "
                f"found {labels.dtype} of shape {tuple(labels.shape)}."
            )
        store = self._stores.get(task) or _Store(leaves, spec, self.per_task)
        # One kind of example for all tasks: `sample` mixes them.
        next(iter(self._stores.values()), store).check(leaves, spec)
        store.add(leaves, labels.tolist(), self._random)
        self._stores[task] = store

    def batches(self, exclude: Hashable = None) -> Iterator[Batch]:
        """Yield a copy of all examples of one task after the other, in order of arrival, as one batch each.

        Parameters
        ----------
        exclude : task, optional
            A task to leave out: the current one, when its examples are stored while it is learned.
        """
        for task, store in self._stores.items():
            if exclude is None or task != exclude:
                yield store.batch()

    def sample(self, n: int) -> Batch:
        """Draw a batch of `n` examples without replacement from all tasks together (all, if fewer)."""
        check_count(n, "n", 1)
        if not self._stores:
            raise ValueError("The memory is empty: nothing to sample from.")
        stores = list(self._stores.values())
        owner = torch.cat([torch.full((len(s),), k) for k, s in enumerate(stores)])
        index = torch.cat([torch.arange(len(s)) for s in stores])
        drawn = torch.randperm(len(owner), generator=self._random)[:n]
        leaves = []
        for parts in zip(*(s.leaves for s in stores), strict=True):
            picks = [part[index[drawn[owner[drawn] == k]].to(part.device)] for k, part in enumerate(parts)]
            leaves.append(torch.cat(picks))
        return tree_unflatten(leaves, stores[0].spec)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the stored examples, and the random state.

        Made of dicts, lists, tuples and tensors if batches and names of tasks are: then
        ``torch.load(..., weights_only=True)`` takes it.
        """
        tasks = [
            {"task": task, "batch": store.batch(), "labels": list(store.labels), "seen": dict(store.seen)}
            for task, store in self._stores.items()
        ]
        return {"per_task": self.per_task, "random": self._random.get_state(), "tasks": tasks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring back what `state_dict` returned; what is stored now is dropped."""
        if state["per_task"] != self.per_task:
            raise ValueError(f"state has per_task={state['per_task']} but this memory has {self.per_task}.")
        stores: dict[Hashable, _Store] = {}
        for entry in state["tasks"]:
            leaves, spec = _flatten(entry["batch"])
            store = stores[entry["task"]] = _Store(leaves, spec, self.per_task)
            for kept, leaf in zip(store.leaves, leaves, strict=True):
                kept[: leaf.shape[0]] = leaf
            store.labels, store.seen = list(entry["labels"]), dict(entry["seen"])
        self._stores = stores
        self._random.set_state(state["random"])

    def _labels(self, batch: Batch) -> torch.Tensor | None:
        if self.label is None:
            return None
        if callable(self.label):
            return torch.as_tensor(self.label(batch))
        try:
            return torch.as_tensor(batch[self.label])
        except (KeyError, IndexError, TypeError):
            found = f"keys {list(batch)}" if isinstance(batch, Mapping) else type(batch).__name__
            raise ValueError(f"label {self.label!r} is not in the batch; found {found}.") from None


class _Store:
    """The examples of one task: preallocated leaves, of which the first ``len(labels)`` rows are in use."""

    def __init__(self, leaves: list[torch.Tensor], spec: TreeSpec, capacity: int) -> None:
        self.spec = spec
        self.capacity = capacity
        self.leaves = [leaf.new_empty((capacity, *leaf.shape[1:])) for leaf in leaves]
        self.labels: list[int] = []
        self.seen: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self) -> Batch:
        return tree_unflatten([leaf[: len(self)].clone() for leaf in self.leaves], self.spec)

    def check(self, leaves: list[torch.Tensor], spec: TreeSpec) -> None:
        if spec != self.spec:
            raise ValueError(f"The batch is nested differently from what is stored: {spec}, not {self.spec}.")
        for leaf, kept in zip(leaves, self.leaves, strict=True):
            if leaf.shape[1:] != kept.shape[1:] or leaf.dtype != kept.dtype:
                raise ValueError(
                    f"Stored examples have shape {tuple(kept.shape[1:])} and {kept.dtype}; found "
                    f"{tuple(leaf.shape[1:])} and {leaf.dtype}. Pad sequences to a fixed length."
                )

    def add(self, leaves: list[torch.Tensor], labels: list[int], random: torch.Generator) -> None:
        source: dict[int, int] = {}  # slot -> row of the batch
        for row, label in enumerate(labels):
            self.seen[label] = self.seen.get(label, 0) + 1
            slot = self._slot(label, random)
            if slot is not None:
                source[slot] = row
        if source:
            slots, rows = torch.tensor(list(source)), torch.tensor(list(source.values()))
            for kept, leaf in zip(self.leaves, leaves, strict=True):
                kept[slots.to(kept.device)] = leaf.detach()[rows.to(leaf.device)].to(kept.device)

    def _slot(self, label: int, random: torch.Generator) -> int | None:
        """Return where an example of `label` goes, or None if it is not kept."""
        if len(self) < self.capacity:
            self.labels.append(label)
            return len(self) - 1
        counts = {y: self.labels.count(y) for y in set(self.labels)}
        most = max(counts.values())
        if counts.get(label, 0) < most:
            victims = [k for k, y in enumerate(self.labels) if counts[y] == most]
        else:
            if int(torch.randint(self.seen[label], (), generator=random)) >= most:
                return None
            victims = [k for k, y in enumerate(self.labels) if y == label]
        slot = victims[int(torch.randint(len(victims), (), generator=random))]
        self.labels[slot] = label
        return slot


def _flatten(batch: Batch) -> tuple[list[torch.Tensor], TreeSpec]:
    if isinstance(batch, Mapping):
        # Also for a tokenizer's BatchEncoding, and whatever the order of the keys is.
        batch = {key: batch[key] for key in sorted(batch, key=str)}
    leaves, spec = tree_flatten(batch)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"A batch must hold tensors only; found {type(leaf).__name__}.")
    sizes = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    if len(sizes) != 1 or None in sizes:
        raise ValueError(
            f"All tensors of a batch need the same leading dimension; found {sizes or 'no tensor'}."
        )
    return leaves, spec
