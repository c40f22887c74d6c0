"""Episodic memory: a few examples of every task, chosen as they stream by."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from gemproj.methods._method import check_count
from gemproj.torch.batches import Batch, Field, Remembered, count_examples, flatten, labels_of, remembered
from gemproj.torch.policies import POLICIES
from gemproj.torch.store import Store, plain


class EpisodicMemory:
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

    Examples are copied, stay on the device they came from, and must have the same shape from batch
    to batch: pad sequences to a fixed length first. The memory of a task takes its full size, `per_task`
    examples, with the first one.

    Parameters
    ----------
    per_task : int, default 100
        Capacity of each task, in examples.
    label : key or callable, optional
        Where the labels are: a key of the batch, ``batch[label]``, or a function of the batch that
        returns a tensor of integers, one per example.
    seed : int, default 0
        Seed of the memory's own random numbers; torch's global state is not used.
    policy : {"reservoir", "balanced", "ring"}, default "reservoir"
        Which examples stay; "balanced" needs `label`. Balance costs accuracy where a task is judged on labels
        as skewed as those it was learned from: 9 points for replay and 3 for GEM on AG News
        (docs/replay.md).

    Examples
    --------
    >>> import torch
    >>> from gemproj.torch import EpisodicMemory
    >>> memory = EpisodicMemory(per_task=4, label="y", policy="balanced")
    >>> memory.add({"x": torch.randn(20, 3), "y": torch.tensor([0] * 18 + [1] * 2)}, task=0)
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
    ) -> None:
        check_count(per_task, "per_task", 1)
        if policy not in tuple(POLICIES):
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}; found {policy!r}.")
        if policy == "balanced" and label is None:
            raise ValueError("policy='balanced' needs label: where the labels of a batch are.")
        self.per_task = per_task
        self.label = label
        self.policy = policy
        self._random = torch.Generator().manual_seed(seed)
        self._stores: dict[Hashable, Store] = {}

    def __len__(self) -> int:
        """Return the number of tasks."""
        return len(self._stores)

    def __repr__(self) -> str:
        examples = {task: len(store) for task, store in self._stores.items()}
        return (
            f"EpisodicMemory(per_task={self.per_task}, label={self.label!r}, policy={self.policy!r}, "
            f"examples={examples}, size={_readable(self.nbytes)!r})"
        )

    @property
    def tasks(self) -> list[Hashable]:
        """The tasks with stored examples, in the order in which they were first added."""
        return list(self._stores)

    @property
    def nbytes(self) -> int:
        """Bytes that the memory's tensors take: all `per_task` examples of every task, in use or not."""
        return sum(store.nbytes for store in self._stores.values())

    def add(
        self, batch: Batch, task: Hashable, *, outputs: Any = None, losses: torch.Tensor | None = None
    ) -> None:
        """Offer the examples of a batch to the memory of `task`.

        Parameters
        ----------
        batch : nesting of dicts, lists and tuples of tensors
            Tensors (n, ...), one row per example.
        task : str, int or other hashable, not None
            The name of the task.
        outputs : nesting of tensors (n, ...), optional
            What the model puts out for these examples, in the dtype to be stored, for losses that
            compare with it, such as `gemproj.torch.losses.Distillation`.
        losses : Tensor, shape (n,), optional
            The loss of each example, from which its bound is made, see `gemproj.torch.GEM`.

        Raises
        ------
        TypeError
            For leaves that are not dense tensors, and for a tensor as the name of a task.
        ValueError
            For leaves that differ in their leading dimension, in structure or in shape from what is
            stored, and for labels that are not one integer per example.
        """
        if task is None:
            raise ValueError("task must not be None: exclude=None leaves nothing out.")
        if isinstance(task, torch.Tensor):
            raise TypeError("task is a tensor, which equals no other as a name; use task.item().")
        examples = remembered(batch, outputs, losses)
        rows = count_examples(examples)
        if rows == 0:
            return
        labels = [0] * rows if self.label is None else labels_of(batch, self.label, rows)
        store = self._stores.get(task)
        if store is None:
            store = Store(examples, self.per_task)
        store.check(examples)
        # One kind of example for all tasks: `sample` mixes them.
        next(iter(self._stores.values()), store).check(examples, batch_only=True)
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
        store = self._store(task)
        store.record(remembered(store.all().batch, outputs, losses))

    def batch(self, task: Hashable) -> Batch | Remembered:
        """Return a copy of all examples of one task as one batch, in the order of their slots.

        Where outputs or losses are stored, a named tuple ``Remembered(batch, outputs, losses)``.
        """
        return plain(self._store(task).all())

    def batches(
        self, exclude: Hashable = None, *, n: int | None = None, per: str = "task"
    ) -> Iterator[Batch | Remembered]:
        """Return an iterator over batches like `batch`, task after task in the order of their first examples.

        Parameters
        ----------
        exclude : task, optional
            A task to leave out: the current one, when its examples are stored while it is learned.
        n : int, optional
            Number of examples in each batch, drawn without replacement: none is drawn again before all
            of them were. By default all.
        per : {"task", "label", "example"}, default "task"
            One batch for each task; for each label of each task, in increasing order; or for each of the
            n examples of each task.
        """
        if per not in ("task", "label", "example"):
            raise ValueError(f"per must be 'task', 'label' or 'example'; found {per!r}.")
        if per == "label" and self.label is None:
            raise ValueError("per='label' needs label: where the labels of a batch are.")
        if n is not None:
            check_count(n, "n", 1)
        return self._drawn(exclude, n, per)

    def names(self, exclude: Hashable = None, *, per: str = "task") -> list[tuple[Hashable, Any]]:
        """Return the task, and with ``per="label"`` the label, of what `batches` draws from."""
        stores = self._others(exclude).items()
        return [(task, label) for task, store in stores for label, _ in store.groups(per == "label")]

    def _drawn(self, exclude: Hashable, n: int | None, per: str) -> Iterator[Batch | Remembered]:
        for store in self._others(exclude).values():
            for label, slots in store.groups(per == "label"):
                drawn = slots if n is None else store.draw(label, slots, n, self._random)
                for some in [[slot] for slot in drawn] if per == "example" else [drawn]:
                    yield plain(store.at(some))

    def sample(self, n: int, exclude: Hashable = None) -> Batch:
        """Draw a batch of `n` examples without replacement from all tasks together (all, if fewer).

        Parameters
        ----------
        n : int
            Number of examples.
        exclude : task, optional
            A task to leave out, as in `batches`.

        Raises
        ------
        ValueError
            If there is no example to draw.
        """
        check_count(n, "n", 1)
        stores = list(self._others(exclude).values())
        if not stores:
            raise ValueError(
                "The memory is empty: nothing to draw from."
                if exclude is None
                else f"The memory has nothing to draw from but task {exclude!r}, which is excluded."
            )
        total = sum(len(store) for store in stores)
        drawn = torch.randperm(total, generator=self._random, device="cpu")[:n]
        picks, start = [], 0
        for store in stores:
            own = drawn[(drawn >= start) & (drawn < start + len(store))] - start
            picks.append(flatten(store.at(own.tolist())))
            start += len(store)
        leaves, specs = zip(*picks, strict=True)
        if any(spec != specs[0] for spec in specs):
            raise ValueError(
                "Outputs or losses are stored with some tasks only, so that they cannot be mixed."
            )
        columns = zip(*leaves, strict=True)
        # Tasks may have been stored on different devices, as after loading a checkpoint.
        joined = [torch.cat([part.to(first.device) for part in (first, *rest)]) for first, *rest in columns]
        return plain(tree_unflatten(joined, specs[0]))

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the stored examples, of the state of the policy, and of the random state.

        ``torch.save`` writes it, and ``torch.load(..., weights_only=True)`` reads it if batches are dicts,
        lists and tuples, and names of tasks are numbers or strings.
        """
        tasks = [{"task": task, **store.state_dict()} for task, store in self._stores.items()]
        return {**self._settings(), "random": self._random.get_state(), "tasks": tasks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring back what `state_dict` returned; what is stored now is dropped.

        Adding goes on as it would have, choices included.

        Raises
        ------
        ValueError
            For a state of other settings, or that lacks something. The memory stays as it was.
        """
        try:
            for name, value in self._settings().items():
                if state[name] != value:
                    raise ValueError(f"state has {name}={state[name]!r} but this memory has {value!r}.")
            stores: dict[Hashable, Store] = {}
            for entry in state["tasks"]:
                stores[entry["task"]] = Store.from_state_dict(entry, self.per_task)
            random = torch.Generator()
            random.set_state(state["random"].cpu())
        except KeyError as error:
            raise ValueError(f"state has no {error}: it is not of an EpisodicMemory.") from None
        self._stores, self._random = stores, random

    def _store(self, task: Hashable) -> Store:
        if task not in self._stores:
            raise ValueError(f"No examples of task {task!r}; the memory holds tasks {self.tasks}.")
        return self._stores[task]

    def _settings(self) -> dict[str, Any]:
        """Return what a state must agree in."""
        return {"per_task": self.per_task, "policy": self.policy, "labelled": self.label is not None}

    def _others(self, exclude: Hashable) -> dict[Hashable, Store]:
        return {task: store for task, store in self._stores.items() if exclude is None or task != exclude}


def _readable(nbytes: int) -> str:
    """Return a number of bytes with a unit, in powers of 1024."""
    size, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.4g} {units[0]}"
