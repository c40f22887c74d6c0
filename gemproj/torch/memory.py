"""Episodic memory: a few examples of every task, chosen as they stream by, and what a step draws of them."""

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

_Chosen = list[tuple[Store, int]]  # stores and slots of examples


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

    Examples are copied, and stay on the device they came from. Batches of tensors have one shape within a
    task, whose memory takes its full size, `per_task` examples, with the first one. Examples of different
    lengths are stored as they are, with the function that makes batches of them; see `add`.

    Parameters
    ----------
    per_task : int, default 100
        Capacity of each task, in examples.
    label : key or callable, optional
        Where the labels of a batch are, one integer per example: ``batch[label]``, or ``label(batch)``.
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
        The `Promise` about each task that has one of its own, by the name of the task; no part of the state.

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
            raise ValueError("policy='balanced' needs label: where the labels of a batch are.")
        self.per_task = per_task
        self.label = label
        self.policy = policy
        self.collate = collate
        self.promises: dict[Hashable, Promise] = {}
        self._random = torch.Generator().manual_seed(seed)
        self._stores: dict[Hashable, Store] = {}
        self.removals = 0  # how often examples were dropped that a policy would have kept
        self._worker: int | None = None  # the seed of the loader's worker in which this copy lies

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has, with which another training may go on."""
        keep(self)
        # Spawned workers of a loader get neither a generator nor a tensor that is gone before they run.
        return self.__dict__ | {"_random": self._random.get_state().numpy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over what a copy has."""
        self.__dict__.update(state)
        kept = state["_random"]
        if not isinstance(kept, torch.Generator):  # as older ones have it
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
        """Bytes that the examples take, in batches of tensors for `per_task` of them, in use or not.

        What is stored about them counts, too; values that are no tensor or array as `sys.getsizeof` says.
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
        """
        if task is None:
            raise ValueError("task must not be None: exclude=None leaves nothing out.")
        if isinstance(task, torch.Tensor):
            raise TypeError("task is a tensor, which equals no other as a name; use task.item().")
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
        """Store outputs and losses, as in `add`, with all examples of a task, in the order of `batch`.

        This evaluates the kept examples only, where `add` needs them of the whole stream. Older ones are
        dropped, and later examples of the task need both, too.
        """
        self._store(task).record(*_about(outputs, losses))

    def remove(self, task: Hashable) -> None:
        """Drop all examples of a task and its promise: a `gemproj.torch.GEM` keeps it no more."""
        self._store(task)
        del self._stores[task]
        self.promises.pop(task, None)
        self.removals += 1

    def batch(self, task: Hashable) -> Batch | Remembered:
        """Return a copy of all examples of a task as one batch; a `Remembered` where more is stored."""
        return self.source(task).all()

    def batches(self, exclude: Hashable = None, *, n: int | None = None, per: Per = "task") -> Batches:
        """Return an iterator over batches like `batch`, task after task in the order of their first examples.

        Examples are copied when it comes to their batch: `GradientProjector.recall` holds one batch of this
        iterator at a time, or one part of it with `microbatch`.

        Parameters
        ----------
        exclude : task, optional
            A task to leave out: the current one, when its examples are stored while it is learned.
        n : int, optional
            Number of examples in each batch, drawn without replacement: none is drawn again before all
            of them were. By default all.
        per : {"task", "label", "example", "all"}, default "task"
            One batch for each task; for each label of each task, in increasing order; for each of the
            n examples of each task; or for all tasks together, a `sample` of n examples.
        """
        if n is not None:
            check_count(n, "n", 1)
        alike = Promise(per=per, examples=n)
        self.check_label(alike)
        return Batches(self._drawn(dict.fromkeys(self._others(exclude), alike), told=False))

    def promised(self, default: Promise, exclude: Hashable = None) -> Batches:
        """Return an iterator over the batches of one step, one for each row of G, with their `sources`.

        Each task but `exclude` is drawn from as its promise says, the one in `promises` or the default, as by
        `batches`. Tasks with equal promises that are ``per="all"`` have one row together, in the place of the
        first.
        """
        plan = {task: self.promises.get(task, default) for task in self._others(exclude)}
        for promise in plan.values():
            self.check_label(promise)
        return Batches(self._drawn(plan))

    def sample(self, n: int, exclude: Hashable = None) -> Batch:
        """Draw a batch of `n` examples without replacement from all tasks but `exclude` together.

        It has all examples if there are fewer. Tasks that are stored in batches must not differ in structure.
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
        """Return copies of the stored examples, of the state of the policy, and of the random state.

        ``torch.load(..., weights_only=True)`` reads it from a file if batches and examples are dicts, lists
        and tuples, and names of tasks are numbers or strings. It has neither promises nor the functions that
        make batches of examples.
        """
        keep(self)
        tasks = [
            {"task": task, "promised": task in self.promises, **store.state_dict()}
            for task, store in self._stores.items()
        ]
        return {**self._settings(), "random": self._random.get_state(), "tasks": tasks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring back what `state_dict` returned, or raise and change nothing; what is stored now is dropped.

        Adding goes on as it would have, choices included. Tasks keep their promises, and the functions that
        make batches of their examples, of this memory: store them as before the state was saved, then load.
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
            raise ValueError(f"state has no {error}: it is not of an EpisodicMemory.") from None
        self._stores, self._random = stores, random
        self.removals += 1

    def draft(self, task: Hashable = None) -> EpisodicMemory:
        """Return a memory to store examples of a task in, or to load, which `adopt` takes over at the end."""
        draft = object.__new__(type(self))  # no copy that somebody keeps
        draft.__dict__.update(self.__dict__)
        draft._stores = {k: copy.deepcopy(v) if k == task else v for k, v in self._stores.items()}
        draft._random = torch.Generator()
        draft._random.set_state(self._random.get_state())
        return draft

    def adopt(self, draft: EpisodicMemory) -> None:
        """Take over the examples and the random state of a `draft`."""
        self._stores, self._random, self.removals = draft._stores, draft._random, draft.removals

    def check_label(self, promise: Promise) -> None:
        """Raise for a promise about labels that this memory does not know."""
        if promise.per == "label" and self.label is None:
            raise ValueError(
                "per='label' needs labels: memory=EpisodicMemory(label=...), where a batch has them."
            )

    def source(self, task: Hashable) -> Source:
        """Return the source of all examples of a task, in the order of `batch`."""
        store = self._store(task)
        return self._source([(store, slot) for slot in range(len(store))], (task, None))

    def _drawn(self, plan: Mapping[Hashable, Promise], told: bool = True) -> Iterator[Source]:
        """Yield the sources of each row, for the promises about these tasks, which are `told` to them."""
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
        """Draw n examples of these stores together, without replacement; return them store by store."""
        starts = [0, *accumulate(map(len, stores))]
        drawn = torch.randperm(starts[-1], generator=self._own_random(), device="cpu")[:n].tolist()
        placed = sorted(((bisect_right(starts, i) - 1, i) for i in drawn), key=itemgetter(0))
        return [(stores[k], i - starts[k]) for k, i in placed]

    def _source(self, chosen: _Chosen, name: tuple[Hashable, ...], promise: Promise | None = None) -> Source:
        store = chosen[0][0]
        return Source(chosen, self._fetch, name, promise, (id(store.collate), store.form))

    def _fetch(self, chosen: _Chosen) -> Batch:
        """Return a batch of copies of these examples; the last one's `collate` makes it of a list."""
        groups = [(store, [slot for _, slot in some]) for store, some in groupby(chosen, itemgetter(0))]
        found = gather(groups)
        if isinstance(found.batch, PerExample):
            found = found._replace(batch=self._collate_of(*(store for store, _ in groups))(list(found.batch)))
        return found.batch if found.fields == ["batch"] else found

    def _collate_of(self, store: Store, *others: Store) -> Collate:
        """Return what makes batches of the examples of stores; raise where they have different functions."""
        collate = self.collate if store.collate is None else store.collate
        if collate is None:
            task = next((task for task, one in self._stores.items() if one is store), None)
            raise ValueError(
                f"The examples of task {task!r} were loaded without the function that makes batches of "
                "them. Set memory.collate, such as to loader.collate_fn; or store the task before loading, "
                "from the loader or with collate=."
            )
        if not all(_alike(collate, self._collate_of(other)) for other in others):
            raise ValueError(
                "One batch is drawn of sets whose collate functions differ, as per='all' and sample do. "
                "Store them with one collate function, or give them promises of their own."
            )
        return collate

    def _own_random(self) -> torch.Generator:
        """Return the random numbers of draws: each worker of a loader has a copy, and draws on its own."""
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
        """Return what a state must agree in."""
        return {"per_task": self.per_task, "policy": self.policy, "labelled": self.label is not None}


def _check_collate(collate: Any) -> None:
    if not (collate is None or callable(collate)):
        raise TypeError(f"collate must be a function of a list of examples; found {type(collate).__name__}.")


def _alike(one: Any, other: Any) -> bool:
    """Return whether collate functions make the same batches, as far as can be told."""
    code = getattr(one, "__code__", None)
    if code is not None:  # functions that a loop has made, or methods of several data sets
        return code is getattr(other, "__code__", None)
    return one == other or (type(one) is type(other) and "__eq__" not in vars(type(one)))


def _about(outputs: Any, losses: Any) -> tuple[Any, Any]:
    """Return what is to be stored about examples, where an empty tuple stands for nothing."""
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
