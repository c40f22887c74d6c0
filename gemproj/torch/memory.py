"""Episodic memory: a few examples of every task, chosen as they stream by."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from gemproj._checks import check_count
from gemproj.torch.batches import (
    Batch,
    Collate,
    Field,
    PerExample,
    Remembered,
    count_examples,
    labels_of,
    remembered,
)
from gemproj.torch.draws import Draws
from gemproj.torch.examples import copied, owned
from gemproj.torch.policies import POLICIES
from gemproj.torch.promise import Promise
from gemproj.torch.store import Store, readable
from gemproj.torch.unprotected import keep


class EpisodicMemory(Draws):
    """Examples of each task, at most `per_task` of them, chosen as they stream by.

    The first `per_task` examples of a task are kept. Which ones make room for later ones is the policy:

    ``"reservoir"``
        Every example of the task has the same chance to be kept (Vitter, 1985), whatever its label is.
    ``"balanced"``
        The kept examples are spread evenly over the labels, however skewed the stream is, and within a
        label every example has the same chance (class-balancing reservoir sampling, Chrysakis and
        Moens, 2020).
    ``"ring"``
        The last examples: the oldest one makes room, as in GEM (Lopez-Paz and Ranzato, 2017). With
        `label` the last examples of each label, evenly many, as in the ring buffers of Chaudhry et al.
        (2019), except that the number of labels need not be known in advance.

    Evenly means: labels differ by one at most, unless the stream had too few examples of one. No choice
    depends on how the stream is cut into batches.

    Examples are copied, and stay on the device they came from. Batches of tensors need the same shape from
    batch to batch of a task, whose memory takes its full size, `per_task` examples, with the first one.
    Examples of different lengths are stored as they are, with the function that makes batches of them; see
    `add`. Tasks may differ in all of this.

    Parameters
    ----------
    per_task : int, default 100
        Capacity of each task, in examples.
    label : key or callable, optional
        Where the labels are: a key of the batch, ``batch[label]``, or a function of the batch that
        returns a tensor of integers, one per example. Of examples that are stored as they are, the batch is
        the one that their `collate` makes.
    seed : int, default 0
        Seed of the memory's own random numbers; torch's global state is not used.
    policy : {"reservoir", "balanced", "ring"}, default "reservoir"
        Which examples stay; "balanced" needs `label`. Balance costs accuracy where a task is judged on labels
        as skewed as those it was learned from: 9 points for replay and 3 for GEM on AG News
        (docs/replay.md).
    collate : callable, optional
        Makes batches of examples of tasks that have no such function of their own: those that were loaded.

    Attributes
    ----------
    promises : dict
        The `Promise` about each task that has one of its own, by the name of the task. `remove` drops it, and
        `state_dict` notes that it was there; it is no part of the state.

    Examples
    --------
    >>> import torch
    >>> from gemproj.torch import EpisodicMemory
    >>> memory = EpisodicMemory(per_task=4, label="y", policy="balanced")
    >>> batch = {"x": torch.randn(20, 3), "y": torch.tensor([0] * 18 + [1] * 2)}
    >>> memory.add(batch, task=0)
    >>> [batch["y"].sort().values.tolist() for batch in memory.batches()]
    [[0, 0, 1, 1]]
    >>> memory
    EpisodicMemory(per_task=4, label='y', policy='balanced', examples={0: 4}, size='80 bytes')
    """

    def __init__(
        self,
        per_task: int = 100,
        label: Field | None = None,
        seed: int = 0,
        *,
        policy: str = "reservoir",
        collate: Collate | None = None,
    ) -> None:
        check_count(per_task, "per_task", 1)
        if policy not in tuple(POLICIES):
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}; found {policy!r}.")
        if policy == "balanced" and label is None:
            raise ValueError("policy='balanced' needs label: where the labels of a batch are.")
        self.per_task = per_task
        self.label = label
        self.policy = policy
        self.collate = collate
        self.promises: dict[Hashable, Promise] = {}
        self._random = torch.Generator().manual_seed(seed)
        self._stores: dict[Hashable, Store] = {}
        self.removals = 0  # how often examples were dropped that a policy would have kept

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has, with which another training may go on."""
        keep(self)
        return self.__dict__

    def __len__(self) -> int:
        """Return the number of tasks."""
        return len(self._stores)

    def __repr__(self) -> str:
        return (
            f"EpisodicMemory(per_task={self.per_task}, label={self.label!r}, policy={self.policy!r}, "
            f"examples={self.counts}, size={readable(self.nbytes)!r})"
        )

    @property
    def tasks(self) -> list[Hashable]:
        """The tasks with stored examples, in the order in which they were first added."""
        return list(self._stores)

    @property
    def counts(self) -> dict[Hashable, int]:
        """The number of stored examples of each task."""
        return {task: len(store) for task, store in self._stores.items()}

    @property
    def nbytes(self) -> int:
        """Bytes that the examples take, with what is stored about them.

        Of batches of tensors these are all `per_task` examples of a task, in use or not. Of examples that are
        stored as they are, bytes of tensors and arrays, and what `sys.getsizeof` says of each other value.
        """
        return sum(store.nbytes for store in self._stores.values())

    def add(
        self,
        batch: Batch,
        task: Hashable,
        *,
        outputs: Any = None,
        losses: torch.Tensor | None = None,
        collate: Collate | None = None,
    ) -> None:
        """Offer the examples of a batch to the memory of `task`.

        Parameters
        ----------
        batch : nesting of dicts, lists and tuples of tensors; or list of examples
            Tensors (n, ...), one row per example. With `collate`, a list of n examples, which are stored as
            they are: nestings of dicts, lists, tuples and dataclasses of tensors, NumPy arrays, numbers,
            strings and None. Other mappings become dicts.
        task : str, int or other hashable, not None
            The name of the task.
        outputs : nesting of tensors (n, ...), or PerExample, optional
            What the model puts out for these examples, in the dtype to be stored, for losses that
            compare with it, such as `gemproj.torch.losses.Distillation`.
        losses : Tensor, shape (n,), optional
            The loss of each example, from which its bound is made, see `gemproj.torch.GEM`.
        collate : callable, optional
            ``collate(examples)`` makes a batch of a list of examples whenever they are drawn; the last one
            given is that of all examples of the task. One that draws at random, as for masked language
            modelling, makes another batch each time: pass batches to keep what it has drawn.

        Raises
        ------
        TypeError
            For leaves that are not dense tensors, for examples that cannot be stored, and for a tensor as the
            name of a task.
        ValueError
            For leaves that differ in their leading dimension, in structure or in shape from what is
            stored, and for labels that are not one integer per example.
        """
        if task is None:
            raise ValueError("task must not be None: exclude=None leaves nothing out.")
        if isinstance(task, torch.Tensor):
            raise TypeError("task is a tensor, which equals no other as a name; use task.item().")
        if collate is not None:
            if not callable(collate):
                raise TypeError(f"collate must be a function of a list; found {type(collate).__name__}.")
            batch = PerExample(batch)
        examples = Remembered(*map(owned, remembered(batch, outputs, losses)))
        rows = count_examples(examples)
        if rows == 0:
            return
        labels = [0] * rows
        if self.label is not None:
            made = batch if collate is None else collate(list(map(copied, batch)))
            labels = labels_of(made, self.label, rows)
        store = self._stores.get(task)
        if store is None:
            store = Store(examples, self.per_task)
        store.check(examples)
        store.collate = collate
        store.add(examples, labels, POLICIES[self.policy], self._random)
        self._stores[task] = store

    def record(self, task: Hashable, *, outputs: Any = None, losses: torch.Tensor | None = None) -> None:
        """Store outputs and losses with all examples of a task, in the order of `batch`; drop older ones.

        This evaluates the kept examples only, where `add` needs them of the whole stream.

        Parameters
        ----------
        task : task
            Later examples of it need outputs and losses, too.
        outputs, losses
            As in `add`.
        """
        _, *given = remembered((), outputs, losses)
        self._store(task).record(*given)

    def remove(self, task: Hashable) -> None:
        """Drop all examples of a task and its promise; nothing is promised about it any more.

        A `gemproj.torch.GEM` computes its constraints anew at the next step.
        """
        self._store(task)
        del self._stores[task]
        self.promises.pop(task, None)
        self.removals += 1

    def batch(self, task: Hashable) -> Batch | Remembered:
        """Return a copy of all examples of one task as one batch, in the order of their slots.

        Where outputs or losses are stored, a named tuple ``Remembered(batch, outputs, losses)``.
        """
        return self.source(task).all()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the stored examples, of the state of the policy, and of the random state.

        ``torch.save`` writes it, and ``torch.load(..., weights_only=True)`` reads it if batches and examples
        are dicts, lists and tuples, and names of tasks are numbers or strings. Promises, and the functions
        that make batches of examples, are not in it.
        """
        keep(self)
        tasks = [
            {"task": task, "promised": task in self.promises, **store.state_dict()}
            for task, store in self._stores.items()
        ]
        return {**self._settings(), "random": self._random.get_state(), "tasks": tasks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring back what `state_dict` returned; what is stored now is dropped.

        Adding goes on as it would have, choices included. Tasks keep their promises, and the functions that
        make batches of their examples, of this memory: store them as before the state was saved, then load.

        Raises
        ------
        ValueError
            For a state of other settings, or that lacks something; and where a task had a promise of its own
            when the state was saved, and has none here. The memory stays as it was.
        """
        try:
            for name, value in self._settings().items():
                if state[name] != value:
                    raise ValueError(f"state has {name}={state[name]!r} but this memory has {value!r}.")
            stores: dict[Hashable, Store] = {}
            for entry in state["tasks"]:
                task = entry["task"]
                if entry["promised"] and task not in self.promises:
                    raise ValueError(
                        f"The examples of {task!r} had a promise of their own, which is not in a state. "
                        f"Before loading call keep(..., name={task!r}) as the saved training did, or set "
                        f"memory.promises[{task!r}] = Promise(...)."
                    )
                stores[task] = Store.from_state_dict(entry, self.per_task)
                if task in self._stores:
                    stores[task].collate = self._stores[task].collate
            random = torch.Generator()
            random.set_state(state["random"].cpu())
        except KeyError as error:
            raise ValueError(f"state has no {error}: it is not of an EpisodicMemory.") from None
        self._stores, self._random = stores, random
        self.removals += 1

    def draft(self, task: Hashable) -> EpisodicMemory:
        """Return a memory to collect examples of a task in, which `adopt` takes over when all went well."""
        draft = object.__new__(type(self))  # no copy that somebody keeps
        draft.__dict__.update(self.__dict__)
        draft._stores = {k: copy.deepcopy(v) if k == task else v for k, v in self._stores.items()}
        draft._random = torch.Generator()
        draft._random.set_state(self._random.get_state())
        return draft

    def adopt(self, draft: EpisodicMemory, task: Hashable) -> None:
        """Take over the examples of a task, and the random state, from a `draft`."""
        self._stores[task], self._random = draft._stores[task], draft._random

    def _settings(self) -> dict[str, Any]:
        """Return what a state must agree in."""
        return {"per_task": self.per_task, "policy": self.policy, "labelled": self.label is not None}
