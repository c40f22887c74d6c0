"""Drawing from an episodic memory: batches that are fetched one by one, and samples of all tasks."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from itertools import groupby

import torch
from torch.utils.data import get_worker_info

from gemproj._checks import check_count
from gemproj.torch.batches import Batch, Batches, Collate, Field, PerExample, Source
from gemproj.torch.promise import Per, Promise
from gemproj.torch.store import Store, examples_of, plain

_Chosen = list[tuple[Store, int]]  # stores and slots of examples


class Draws:
    """What an `EpisodicMemory`, which explains it, gives back."""

    label: Field | None
    collate: Collate | None
    promises: dict[Hashable, Promise]
    _random: torch.Generator
    _stores: dict[Hashable, Store]
    _worker: int | None = None  # the seed of the loader's worker in which this copy lies

    def batches(self, exclude: Hashable = None, *, n: int | None = None, per: Per = "task") -> Batches:
        """Return an iterator over batches like `batch`, task after task in the order of their first examples.

        Examples are copied when it comes to their batch. Where `GradientProjector.recall` is given this
        iterator, it holds one batch at a time, or one part of it with `microbatch`.

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
        self._check_label(alike)
        drawn = self._drawn(dict.fromkeys(self._others(exclude), alike))
        return Batches(replace(source, promise=None) for source in drawn)

    def promised(self, default: Promise, exclude: Hashable = None) -> Batches:
        """Return an iterator over the batches of one step, one for each row of G, with their `sources`.

        Each task is drawn from as its promise says, the one in `promises` or the default, in the order of
        the tasks and as by `batches`. Tasks with equal promises that are ``per="all"`` have one row
        together, in the place of the first.

        Parameters
        ----------
        default : Promise
            About the tasks that have none of their own.
        exclude : task, optional
            A task to leave out, as in `batches`.
        """
        plan = {task: self.promises.get(task, default) for task in self._others(exclude)}
        for promise in plan.values():
            self._check_label(promise)
        return Batches(self._drawn(plan))

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
            If there is no example to draw, or if tasks are stored in batches that differ in structure.
        """
        check_count(n, "n", 1)
        tasks = self._others(exclude)
        if not tasks:
            raise ValueError(
                "The memory is empty: nothing to draw from."
                if exclude is None
                else f"The memory has nothing to draw from but task {exclude!r}, which is excluded."
            )
        return self._fetch(self._sampled(list(tasks.values()), n))

    def source(self, task: Hashable) -> Source:
        """Return the source of all examples of a task, in the order of `batch`."""
        store = self._store(task)
        return self._source([(store, slot) for slot in range(len(store))], (task, None), None)

    def _drawn(self, plan: Mapping[Hashable, Promise]) -> Iterator[Source]:
        """Yield the sources of each row, for the promises about these tasks."""
        random, together = self._own_random(), []
        for task, promise in plan.items():
            store, per, n = self._stores[task], promise.per, promise.examples
            if per == "all":
                if promise not in together:
                    together.append(promise)
                    stores = [self._stores[other] for other, own in plan.items() if own == promise]
                    chosen = self._sampled(stores, n or sum(map(len, stores)))
                    yield self._source(chosen, (None, None), promise)
                continue
            for label, slots in store.groups(per == "label"):
                drawn = slots if n is None else store.draw(label, slots, n, random)
                if per != "example":
                    yield self._source([(store, slot) for slot in drawn], (task, label), promise)
                    continue
                places = store.places()
                for slot in drawn:
                    yield self._source([(store, slot)], (task, None, places[slot]), promise)

    def _check_label(self, promise: Promise) -> None:
        if promise.per == "label" and self.label is None:
            raise ValueError("per='label' needs label: where the labels of a batch are.")

    def _sampled(self, stores: list[Store], n: int) -> _Chosen:
        """Draw n examples of these stores together, without replacement."""
        total = sum(map(len, stores))
        drawn = torch.randperm(total, generator=self._own_random(), device="cpu")[:n]
        chosen, start = [], 0
        for store in stores:
            own = drawn[(drawn >= start) & (drawn < start + len(store))] - start
            chosen += [(store, slot) for slot in own.tolist()]
            start += len(store)
        return chosen

    def _source(self, chosen: _Chosen, name: tuple[Hashable, ...], promise: Promise | None) -> Source:
        store = chosen[0][0]
        kind = store.kind, id(store.collate)
        return Source(chosen, self._fetch, name, promise, kind)

    def _fetch(self, chosen: _Chosen) -> Batch:
        """Return a batch of copies of these examples; the last one's `collate` makes it of a list."""
        groups = [(store, [slot for _, slot in some]) for store, some in groupby(chosen, lambda one: one[0])]
        found = examples_of(groups)
        if isinstance(found.batch, PerExample):
            found = found._replace(batch=self._collate_of(groups[-1][0])(list(found.batch)))
        return plain(found)

    def _collate_of(self, store: Store) -> Collate:
        """Return what makes batches of the examples of a store."""
        collate = self.collate if store.collate is None else store.collate
        if collate is None:
            task = next((task for task, one in self._stores.items() if one is store), None)
            raise ValueError(
                f"The examples of task {task!r} were loaded without the function that makes batches of "
                "them. Set memory.collate, such as to loader.collate_fn; or store the task before loading, "
                "from the loader or with collate=."
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
                store.shuffle()
        return self._random

    def _store(self, task: Hashable) -> Store:
        if task not in self._stores:
            raise ValueError(f"No examples of task {task!r}; the memory holds tasks {list(self._stores)}.")
        return self._stores[task]

    def _others(self, exclude: Hashable) -> dict[Hashable, Store]:
        return {task: store for task, store in self._stores.items() if exclude is None or task != exclude}
