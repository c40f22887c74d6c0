"""Episodic memory, which stores a few examples of each task from a stream and draws batches of them."""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Hashable, Iterator, Mapping
from itertools import accumulate, groupby, repeat
from operator import itemgetter
from typing import Any

import torch
from torch.utils.data import get_worker_info

from gemproj._checks import check_count
from gemproj.torch.batches import (
    Batch,
    Batches,
    Collate,
    Field,
    PerExample,
    Remembered,
    Source,
    count_examples,
    labels_of,
)
from gemproj.torch.policies import POLICIES
from gemproj.torch.promise import Per, Promise
from gemproj.torch.store import Store, gather, owned
from gemproj.torch.unprotected import keep

_Chosen = list[tuple[Store, int]]  # the store and slot of each example


class EpisodicMemory:
    """A memory of at most `per_task` examples of each task, chosen from a stream of batches.

    The first `per_task` examples of a task are stored. Then the policy decides which examples are kept:

    ``"reservoir"``
        Every example of the task is kept with the same probability (Vitter, 1985), whatever its label.
    ``"balanced"``
        The kept examples are spread evenly over the labels, however skewed the stream is. Within a label,
        every example is kept with the same probability (class-balancing reservoir sampling, Chrysakis and
        Moens, 2020).
    ``"ring"``
        The last examples are kept: a new example replaces the oldest, as in GEM (Lopez-Paz and Ranzato,
        2017). With `label`, the last examples of each label are kept, spread evenly over the labels, as in
        the ring buffers of Chaudhry et al. (2019), but the number of labels need not be known in advance.

    Evenly means that the numbers of examples of two labels differ by at most one, unless the stream had too
    few examples of a label. The choice does not depend on how the stream is divided into batches.

    Examples are copied. If a task is stored in batches of tensors, the first batch determines shape, dtype
    and device, and memory for `per_task` examples is allocated. Examples of different lengths are stored
    unchanged, on their device, together with their collate function; see `add`.

    Parameters
    ----------
    per_task : int, default 100
        Capacity of each task, in examples.
    label : key or callable, optional
        The labels of a batch are ``batch[label]`` or ``label(batch)``, one integer per example.
    seed : int, default 0
        Seed of the memory's random generator; torch's global random state is not used.
    policy : {"reservoir", "balanced", "ring"}, default "reservoir"
        The rule that selects examples; "balanced" needs `label`. Balance lowers the accuracy if the test
        labels of a task are as skewed as its training labels: by 9 points for replay and by 3 points for GEM
        on AG News (docs/replay.md).
    collate : callable, optional
        Collate function for tasks whose own function is unknown, because they were loaded from a state.

    Attributes
    ----------
    promises : dict
        Maps the name of each task that has its own `Promise` to this promise; not part of the state.

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
    EpisodicMemory(per_task=4, label='y', policy='balanced',
                   examples={0: 4}, size='80 bytes')
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
        check_count(seed, "seed", 0)
        _check_collate(collate)
        if policy not in tuple(POLICIES):
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}; found {policy!r}.")
        if policy == "balanced" and label is None:
            raise ValueError("policy='balanced' needs label: a key or function for the labels of a batch.")
        self.per_task = per_task
        self.label = label
        self.policy = policy
        self.collate = collate
        self.promises: dict[Hashable, Promise] = {}
        self._random = torch.Generator().manual_seed(seed)
        self._stores: dict[Hashable, Store] = {}
        self.removals = 0  # number of calls of `remove` and `load_state_dict`
        self._worker: int | None = None  # seed of the DataLoader worker that holds this copy

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copying and pickling; another training may continue with the copy."""
        keep(self)
        # A spawned DataLoader worker can receive neither a generator nor a tensor freed before it runs.
        return self.__dict__ | {"_random": self._random.get_state().numpy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state of a copy."""
        self.__dict__.update(state)
        kept = state["_random"]
        if not isinstance(kept, torch.Generator):  # older copies hold a generator
            self._random = torch.Generator()
            self._random.set_state(torch.from_numpy(kept))

    def __len__(self) -> int:
        """Return the number of tasks."""
        return len(self._stores)

    def __repr__(self) -> str:
        return (
            f"EpisodicMemory(per_task={self.per_task}, label={self.label!r}, policy={self.policy!r}, "
            f"examples={self.counts}, size={_readable(self.nbytes)!r})"
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
        """Bytes of the stored examples, outputs and losses.

        A task in tensors counts as `per_task` examples, used or not; numbers and strings by `sys.getsizeof`.
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
            Tensors (n, ...), with the examples along the first dimension. With `collate`, a list of n
            examples, which are stored unchanged. An example can nest dicts, lists, tuples and dataclasses of
            tensors, NumPy arrays, numbers, strings and None. Other mappings are stored as dicts.
        task : str, int or other hashable, not None
            The name of the task.
        outputs : nesting of tensors (n, ...), or PerExample, optional
            Outputs of the model for these examples, in the dtype in which to store them. Losses such as
            `gemproj.torch.losses.Distillation` compare later outputs with them.
        losses : Tensor, shape (n,), optional
            The loss of each example. The bound is this loss plus the tolerance; see `gemproj.torch.Promise`.
        collate : callable, optional
            ``collate(examples)`` makes a batch from a list of examples each time they are drawn. The function
            of the last call applies to all examples of the task. A random function, as for masked language
            modelling, makes a different batch each time; to keep one random choice, pass batches.
        """
        if task is None:
            raise ValueError("task must not be None, because exclude=None excludes no task.")
        if isinstance(task, torch.Tensor):
            raise TypeError("task is a tensor, which cannot serve as a name; use task.item().")
        _check_collate(collate)
        if collate is not None:
            batch = PerExample(batch)
        examples = Remembered(owned(batch), *_about(outputs, losses))
        rows, store = count_examples(examples), self._stores.get(task)
        if rows == 0:
            if store is not None and collate is not None:
                store.check(examples)
                store.collate = collate
            return
        labels = [0] * rows
        if self.label is not None:
            made = batch if collate is None else collate(list(owned(batch)))
            labels = labels_of(made, self.label, rows)
        if store is None:
            store = Store(examples, self.per_task)
        store.check(examples)
        store.collate = collate
        store.add(examples, labels, POLICIES[self.policy], self._random)
        self._stores[task] = store

    def record(self, task: Hashable, *, outputs: Any = None, losses: torch.Tensor | None = None) -> None:
        """Store outputs and losses of all examples of a task, in the order of `batch`; see `add`.

        `record` needs outputs and losses only for the stored examples, `add` for the whole stream. Earlier
        outputs and losses are dropped. Later calls of `add` for this task need the same keywords.
        """
        self._store(task).record(*_about(outputs, losses))

    def remove(self, task: Hashable) -> None:
        """Remove all examples of a task and its promise; `gemproj.torch.GEM` no longer protects the task."""
        self._store(task)
        del self._stores[task]
        self.promises.pop(task, None)
        self.removals += 1

    def batch(self, task: Hashable) -> Batch | Remembered:
        """Copy all examples of a task to one batch; return a `Remembered` if outputs or losses are stored."""
        return self.source(task).all()

    def batches(self, exclude: Hashable = None, *, n: int | None = None, per: Per = "task") -> Batches:
        """Return an iterator over the batches of each task, in the form of `batch` and the order of `tasks`.

        The examples of a batch are copied when the batch is fetched. `GradientProjector.recall` holds one
        batch of this iterator at a time, or one part of a batch with `microbatch`.

        Parameters
        ----------
        exclude : task, optional
            A task to leave out, such as the current task if its examples are stored during its training.
        n : int, optional
            Number of examples in each batch, drawn without replacement: no example is drawn again before all
            have been drawn (with ``per="all"``, only within a batch). By default all examples.
        per : {"task", "label", "example", "all"}, default "task"
            One batch per task; one batch per label of each task, in increasing order of labels; one batch
            per example, for n examples of each task; or one batch for all tasks, a `sample` of n examples.
        """
        if n is not None:
            check_count(n, "n", 1)
        alike = Promise(per=per, examples=n)
        self.check_label(alike)
        return Batches(self._drawn(dict.fromkeys(self._others(exclude), alike), told=False))

    def promised(self, default: Promise, exclude: Hashable = None) -> Batches:
        """Return an iterator over the batches of one step, one batch per row of G, with their `sources`.

        Examples of each task except `exclude` are drawn as by `batches`, with the options of the task's
        promise in `promises`, or of the default promise. Tasks with equal promises and ``per="all"`` share
        one row, at the position of the first such task.
        """
        plan = {task: self.promises.get(task, default) for task in self._others(exclude)}
        for promise in plan.values():
            self.check_label(promise)
        return Batches(self._drawn(plan))

    def sample(self, n: int, exclude: Hashable = None) -> Batch:
        """Draw a batch of `n` examples without replacement from the union of all tasks except `exclude`.

        If fewer examples are stored, the batch has all of them. Tasks stored in batches need equal structure.
        """
        check_count(n, "n", 1)
        source = next(self.batches(exclude, n=n, per="all").sources, None)
        if source is None:
            raise ValueError(
                "The memory is empty: nothing to draw from."
                if exclude is None
                else f"The memory has nothing to draw from but task {exclude!r}, which is excluded."
            )
        return source.all()

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the stored examples, the state of the policy, and the random state.

        ``torch.load(..., weights_only=True)`` can read the state from a file if batches and examples are
        dicts, lists and tuples, and names of tasks are numbers or strings. The state includes no promises and
        no collate functions.
        """
        keep(self)
        tasks = [
            {"task": task, "promised": task in self.promises, **store.state_dict()}
            for task, store in self._stores.items()
        ]
        return {**self._settings(), "random": self._random.get_state(), "tasks": tasks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the stored examples by a state that `state_dict` returned; an error changes nothing.

        Later calls of `add` choose the same examples as the saved memory would. This memory keeps its own
        promises and collate functions, so first store the tasks as in the saved training, then load.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state must be what state_dict returned; found {type(state).__name__}.")
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
                collate = self._stores[task].collate if task in self._stores else None
                stores[task] = Store.from_state_dict(entry, self.per_task, collate)
            random = torch.Generator()
            random.set_state(state["random"].cpu())
        except KeyError as error:
            raise ValueError(f"state has no {error}: it is not the state of an EpisodicMemory.") from None
        self._stores, self._random = stores, random
        self.removals += 1

    def draft(self, task: Hashable = None) -> EpisodicMemory:
        """Return a copy for storing examples of a task or loading a state; `adopt` accepts the changes."""
        draft = object.__new__(type(self))  # copy.copy would mark the memory as saved
        draft.__dict__.update(self.__dict__)
        draft._stores = {k: copy.deepcopy(v) if k == task else v for k, v in self._stores.items()}
        draft._random = torch.Generator()
        draft._random.set_state(self._random.get_state())
        return draft

    def adopt(self, draft: EpisodicMemory) -> None:
        """Replace the examples and the random state by those of a `draft`."""
        self._stores, self._random, self.removals = draft._stores, draft._random, draft.removals

    def check_label(self, promise: Promise) -> None:
        """Raise if a promise has ``per="label"`` but this memory has no `label`."""
        if promise.per == "label" and self.label is None:
            raise ValueError("per='label' needs labels: pass memory=EpisodicMemory(label=...).")

    def source(self, task: Hashable) -> Source:
        """Return the source of all examples of a task, in the order of `batch`."""
        store = self._store(task)
        return self._source([(store, slot) for slot in range(len(store))], (task, None))

    def _drawn(self, plan: Mapping[Hashable, Promise], told: bool = True) -> Iterator[Source]:
        """Yield the source of each row; `plan` maps tasks to promises, which `told` adds to the sources."""
        random, together = self._own_random(), []
        for task, promise in plan.items():
            store, per, n = self._stores[task], promise.per, promise.examples
            given = promise if told else None
            if per == "all":
                if promise not in together:
                    together.append(promise)
                    sets = tuple(other for other, own in plan.items() if own == promise)
                    stores = [self._stores[other] for other in sets]
                    chosen = self._sampled(stores, n or sum(map(len, stores)))
                    own = all(one in self.promises for one in sets)
                    name = None if not own else sets[0] if len(sets) == 1 else sets
                    yield self._source(chosen, (name, None), given)
                continue
            for label, slots in store.draw(per == "label", n, random):
                drawn = list(zip(repeat(store), slots))
                if per != "example":
                    yield self._source(drawn, (task, label), given)
                    continue
                for one, place in zip(drawn, store.slots.arrivals[slots].tolist(), strict=True):
                    yield self._source([one], (task, None, place), given)

    def _sampled(self, stores: list[Store], n: int) -> _Chosen:
        """Draw n examples without replacement from the union of the stores; return them ordered by store."""
        starts = [0, *accumulate(map(len, stores))]
        drawn = torch.randperm(starts[-1], generator=self._own_random(), device="cpu")[:n].tolist()
        placed = sorted(((bisect_right(starts, i) - 1, i) for i in drawn), key=itemgetter(0))
        return [(stores[k], i - starts[k]) for k, i in placed]

    def _source(self, chosen: _Chosen, name: tuple[Hashable, ...], promise: Promise | None = None) -> Source:
        store = chosen[0][0]
        return Source(chosen, self._fetch, name, promise, (id(store.collate), store.form))

    def _fetch(self, chosen: _Chosen) -> Batch:
        """Return copies of the chosen examples as a batch; collate a list of examples."""
        groups = [(store, [slot for _, slot in some]) for store, some in groupby(chosen, itemgetter(0))]
        found = gather(groups)
        if isinstance(found.batch, PerExample):
            found = found._replace(batch=self._collate_of(*(store for store, _ in groups))(list(found.batch)))
        return found.batch if found.fields == ["batch"] else found

    def _collate_of(self, store: Store, *others: Store) -> Collate:
        """Return the common collate function of the stores; raise if there is none."""
        collate = self.collate if store.collate is None else store.collate
        if collate is None:
            task = next((task for task, one in self._stores.items() if one is store), None)
            raise ValueError(
                f"The examples of task {task!r} were loaded without their collate function. Set "
                "memory.collate, for example to loader.collate_fn; or store the task before loading, "
                "from the loader or with collate=."
            )
        if not all(_alike(collate, self._collate_of(other)) for other in others):
            raise ValueError(
                "per='all' and sample draw one batch from sets whose collate functions differ. "
                "Store them with one collate function, or give each set its own promise."
            )
        return collate

    def _own_random(self) -> torch.Generator:
        """Return the random generator for draws; each DataLoader worker has its own generator."""
        worker = get_worker_info()
        if worker is not None and worker.seed != self._worker:
            self._worker = worker.seed
            mine = int(torch.randint(2**62, (), generator=self._random, device="cpu"))
            self._random = torch.Generator().manual_seed(worker.seed ^ mine)
            for store in self._stores.values():
                store.queues.clear()
        return self._random

    def _store(self, task: Hashable) -> Store:
        if task not in self._stores:
            raise ValueError(f"No examples of task {task!r}; the memory holds tasks {list(self._stores)}.")
        return self._stores[task]

    def _others(self, exclude: Hashable) -> dict[Hashable, Store]:
        return {task: store for task, store in self._stores.items() if exclude is None or task != exclude}

    def _settings(self) -> dict[str, Any]:
        """Return the settings that must be equal in this memory and in a state to load."""
        return {"per_task": self.per_task, "policy": self.policy, "labelled": self.label is not None}


def _check_collate(collate: Any) -> None:
    if not (collate is None or callable(collate)):
        raise TypeError(f"collate must be a function of a list of examples; found {type(collate).__name__}.")


def _alike(one: Any, other: Any) -> bool:
    """Return whether two collate functions make the same batches, judging by their code or type."""
    code = getattr(one, "__code__", None)
    if code is not None:  # functions made in a loop, or methods of several data sets
        return code is getattr(other, "__code__", None)
    return one == other or (type(one) is type(other) and "__eq__" not in vars(type(one)))


def _about(outputs: Any, losses: Any) -> tuple[Any, Any]:
    """Return the outputs and losses to store, with empty tuples in place of None."""
    if losses is not None and (not isinstance(losses, torch.Tensor) or losses.ndim != 1):
        found = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
        raise ValueError(f"losses must be a tensor of shape (n,), one loss per example; found {found}.")
    return () if outputs is None else owned(outputs), () if losses is None else losses


def _readable(nbytes: int) -> str:
    """Return a number of bytes with a unit, in powers of 1024."""
    size, units = float(nbytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.4g} {units[0]}"
