"""Drawing from an episodic memory: batches that are fetched one by one, and samples of all tasks."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import torch
from torch.utils._pytree import tree_unflatten
from torch.utils.data import get_worker_info

from gemproj._checks import check_count
from gemproj.torch.batches import Batch, Batches, Field, Source, flatten, source_of
from gemproj.torch.store import Store, plain

PER = ("task", "label", "example", "all")


class Draws:
    """What an `EpisodicMemory`, which explains it, gives back."""

    label: Field | None
    _random: torch.Generator
    _stores: dict[Hashable, Store]
    _worker: int | None = None  # the seed of the loader's worker in which this copy lies

    def batches(self, exclude: Hashable = None, *, n: int | None = None, per: str = "task") -> Batches:
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
        self.check_per(per, "per")
        if n is not None:
            check_count(n, "n", 1)
        return Batches(self._drawn(exclude, n, per))

    def check_per(self, per: str, name: str) -> None:
        """Raise for an argument of that name which is none of "task", "label", "example" and "all"."""
        if per not in PER:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, PER))}; found {per!r}.")
        if per == "label" and self.label is None:
            raise ValueError(f"{name}='label' needs label: where the labels of a batch are.")

    def names(self, exclude: Hashable = None, *, per: str = "task") -> list[tuple[Hashable, ...]]:
        """Return what `batches` draws from: pairs of the task and, with ``per="label"``, the label.

        With ``per="example"`` there is a triple for each example, which ends with its place in the stream;
        with ``per="all"`` one pair, of None.
        """
        stores = self._others(exclude).items()
        if per == "all":
            return [(None, None)] if stores else []
        if per == "example":
            return [(task, None, place) for task, store in stores for place in store.places()]
        return [(task, label) for task, store in stores for label, _ in store.groups(per == "label")]

    def promised(self, default, exclude=None):
        def each():
            stores, done = self._others(exclude), []
            for task, store in stores.items():
                p = self.promises.get(task, default)
                if p.per == "all":
                    if p in done:
                        continue
                    done.append(p)
                    total = sum(len(s) for t, s in stores.items() if self.promises.get(t, default) == p)
                    yield source_of(self.sample(p.examples or total, exclude))._replace(
                        promise=p, name=(None, None)
                    )
                    continue
                random = self._own_random()
                for label, slots in store.groups(p.per == "label"):
                    drawn = slots if p.examples is None else store.draw(label, slots, p.examples, random)
                    for some in [[slot] for slot in drawn] if p.per == "example" else [drawn]:
                        name = (task, label) if p.per != "example" else (task, None, store.places()[some[0]])
                        yield store.source(task, some)._replace(promise=p, name=name)

        return Batches(each())

    def _drawn(self, exclude: Hashable, n: int | None, per: str) -> Iterator[Source]:
        random, stores = self._own_random(), self._others(exclude)
        if per == "all":
            if stores:
                yield source_of(self.sample(n or sum(map(len, stores.values())), exclude))
            return
        for task, store in stores.items():
            for label, slots in store.groups(per == "label"):
                drawn = slots if n is None else store.draw(label, slots, n, random)
                for some in [[slot] for slot in drawn] if per == "example" else [drawn]:
                    yield store.source(task, some)

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
        drawn = torch.randperm(total, generator=self._own_random(), device="cpu")[:n]
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

    def source(self, task: Hashable) -> Source:
        """Return the source of all examples of a task, in the order of `batch`."""
        store = self._store(task)
        return store.source(task, list(range(len(store))))

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
