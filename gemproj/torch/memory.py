"""Kept sets: examples with what was stored about them, and draws of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from gemproj.torch.data import Batch, Collate, PerExample, check_alike, divided, moved, owned, packed
from gemproj.torch.losses import has_teacher
from gemproj.torch.promise import Loss, Promise

# What a state has of a set.
_STORED = ("name", "examples", "outputs", "losses", "adapter", "own", "batches", "listed", "queue")


@dataclass(repr=False, eq=False)
class KeptSet:
    """The examples of one `keep`, each with the output and the loss of the model when it was kept.

    Attributes
    ----------
    name, promise
        Its name, and the promise about it.
    examples : list
        The examples.
    collate : callable
        Function that makes a batch of a list of examples.
    outputs : list
        Output of the model for each example, if the loss has a method `outputs`; else empty.
    losses : Tensor, shape (n,), float64
        The loss of each example; for a loss that is a mean, the mean of the batch in which it was computed.
    adapter : str
        The adapters of peft that were active.
    own : bool
        Whether the promise is the set's own, not the keeper's.
    batches : list of (list of int, int)
        For a loss that is a mean over the examples of a batch, the batches in which it was computed, each
        with the number of its examples that count, because other batches have other means; else empty. A
        report evaluates these, whatever `microbatch` is then.
    listed : bool
        Whether the loss takes a list of outputs, not a batch of them.
    queue : list of int
        Indices of the examples that have not been drawn since all were.
    held : KeptSet or None
        The held-out examples, which are only scored.
    """

    name: Hashable
    promise: Promise
    examples: list[Any]
    collate: Collate
    outputs: list[Any]
    losses: Tensor
    adapter: str = ""
    own: bool = False
    batches: list[tuple[list[int], int]] = field(default_factory=list)
    listed: bool = False
    queue: list[int] = field(default_factory=list)
    held: KeptSet | None = None

    def __len__(self) -> int:
        return len(self.losses)

    @property
    def title(self) -> str:
        """Its name in messages."""
        return repr(self.name) if isinstance(self.name, str) else f"set {self.name!r}"

    def is_of(self, adapter: str) -> bool:
        """Return whether it can be evaluated with this adapter; a teacher is the same for all of them."""
        return self.adapter == adapter or (has_teacher(self.promise.loss) and adapter != "")

    def __repr__(self) -> str:
        return f"KeptSet({self.name!r}, {len(self)} examples, {self.promise!r})"

    def joined(self, more: KeptSet) -> KeptSet:
        """Return the set with more examples; those at hand keep their outputs and losses."""
        how = None
        if not self.is_of(more.adapter):
            how = f"with adapter {self.adapter!r}, and {more.adapter!r} is active"
        elif (not self.outputs, self.listed) != (not more.outputs, more.listed):
            how = "without outputs of the model, or with outputs in another form than that of this loss"
        if how is not None:
            raise ValueError(f"The examples of {self.title} were kept {how}. Use another name.")
        apart = self.held.joined(more.held) if self.held and more.held else self.held or more.held
        # A single example has a loss of its own.
        old, new = (one.batches or [([k], 1) for k in range(len(one))] for one in (self, more))
        batches = old + [([len(self) + k for k in at], weight) for at, weight in new]
        whole = replace(
            more,
            examples=self.examples + more.examples,
            outputs=self.outputs + more.outputs,
            losses=torch.cat([self.losses, more.losses]),
            batches=batches if self.batches or more.batches else [],
            held=apart and replace(apart, promise=more.promise),
        )
        whole.check_outputs()
        whole.check()
        return whole

    def check(self) -> None:
        """Raise unless a batch can be made of any examples, as far as that can be seen."""
        if self.collate is default_collate:
            check_alike(self.examples)
        else:  # of a set that has grown, old and new examples; a collate function may draw numbers
            self.fetch([0, len(self) - 1], None)

    def check_outputs(self) -> None:
        """Raise unless a batch can be made of the outputs, if the loss takes one."""
        if self.outputs and not self.listed:
            check_alike(self.outputs, "Of outputs that differ, loss.outputs must return a PerExample.")

    def part(self, at: list[int]) -> KeptSet:
        """Return a set of some of the examples."""
        examples, outputs = ([one[i] for i in at] if one else [] for one in (self.examples, self.outputs))
        return replace(self, examples=examples, outputs=outputs, losses=self.losses[at], queue=[])

    def draw(self, random: torch.Generator) -> list[int]:
        """Draw the examples of one step: none is drawn again before all have been drawn."""
        n, have = self.promise.examples, len(self)
        if n is None:
            return list(range(have))
        drawn, self.queue = self.queue[:n], self.queue[n:]
        if len(drawn) < min(n, have):
            taken, order = set(drawn), torch.randperm(have, generator=random, device="cpu").tolist()
            fresh = [i for i in order if i not in taken][: n - len(drawn)]
            taken = set(fresh)
            drawn, self.queue = drawn + fresh, [i for i in order if i not in taken]
        return drawn

    def fetch(self, at: list[int], device: Any) -> tuple[Batch, Any]:
        """Return some examples as a batch on a device, and their stored outputs or None."""
        return fetched([(self, at)], device)

    def state_dict(self) -> dict[str, Any]:
        """Return the examples and what was stored about them; not the loss and the collate function."""
        held, numbers = {name: getattr(self, name) for name in _STORED}, {}
        plain, apart = self.collate is default_collate, None if self.held is None else self.held.state_dict()
        for name, whole in (("examples", plain), ("outputs", bool(self.outputs) and not self.listed)):
            if whole and (found := packed(held[name])) is not None:
                held[name], numbers[name] = found
        held |= {"promise": self.promise.numbers(), "packed": numbers}
        return held | {"collated": not plain, "held": apart}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], promise: Promise, collate: Collate) -> KeptSet:
        """Return a set from a state, a promise and a collate function."""
        held = {name: state[name] for name in _STORED}
        # Copied, because views of one tensor would each be pickled as a whole.
        held |= {name: owned(divided(held[name], numbers=at)) for name, at in state["packed"].items()}
        held["losses"] = held["losses"].cpu()  # wherever the state was loaded
        if len(held["losses"]) != len(held["examples"]):
            raise ValueError(f"state has {len(held['losses'])} losses for {len(held['examples'])} examples.")
        apart = None if state["held"] is None else cls.from_state_dict(state["held"], promise, collate)
        return cls(promise=promise, collate=collate, held=apart, **held)


def fetched(some: Sequence[tuple[KeptSet, list[int]]], device: Any) -> tuple[Batch, Any]:
    """Return examples of sets that are kept alike as one batch on a device, and their outputs or None."""
    first, outputs = some[0][0], None
    examples = [kept.examples[i] for kept, at in some for i in at]
    if first.collate is not default_collate:  # another function may modify its input
        examples = owned(examples)
    batch = moved(first.collate(examples), device)
    if first.outputs:
        stored = [kept.outputs[i] for kept, at in some for i in at]
        outputs = moved(PerExample(stored) if first.listed else default_collate(stored), device)
    return batch, outputs


@dataclass
class Draw:
    """The examples of one row of G."""

    kept: KeptSet
    at: list[int]  # indices of the drawn examples
    loss: Loss  # as it is computed in training
    k: int = 0  # index of the row
    total: int = 0  # number of examples of the row on all processes
    most: int = 0  # number that the passes of this process cover
    weight: float = 1.0  # of the mean loss of these examples in the row

    def stored(self) -> float:
        """Return the weighted mean loss of the examples when they were kept."""
        return float(self.kept.losses.numpy()[self.at].mean()) * self.weight if self.at else 0.0
