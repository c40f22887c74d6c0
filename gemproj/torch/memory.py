"""Kept sets: examples with what was stored about them, and draws of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gemproj.torch.data import Batch, Collate, PerExample, concatenated, count, join, moved, owned, take
from gemproj.torch.promise import Loss, Promise


@dataclass(repr=False)
class KeptSet:
    """The examples of one `keep`, each with the output and the loss of the model when it was kept.

    Attributes
    ----------
    name, promise
        Its name, and the promise about it.
    examples : batch or PerExample
        The examples, in one of the two forms of `gemproj.torch.data`.
    collate : callable or None
        Function that makes a batch of a list of examples; None if they are a batch.
    outputs : batch or PerExample, or None
        Outputs of the model, if the loss has a method `outputs`.
    losses : Tensor, shape (n,), float64
        The loss of each example; for a loss that is a mean, the mean of the batch in which it was computed.
    adapter : str
        The adapters of peft that were active.
    own : bool
        Whether the promise is the set's own, not the keeper's.
    queue : list of int
        Indices of the examples that have not been drawn since all were.
    held : KeptSet or None
        The held-out examples, which are only scored.
    """

    name: Hashable
    promise: Promise
    examples: Any
    collate: Collate | None
    outputs: Any
    losses: Tensor
    adapter: str = ""
    own: bool = False
    queue: list[int] = field(default_factory=list)
    held: KeptSet | None = None

    def __len__(self) -> int:
        return len(self.losses)

    def __repr__(self) -> str:
        return f"KeptSet({self.name!r}, {len(self)} examples, {self.promise!r})"

    def joined(self, more: KeptSet) -> KeptSet:
        """Return the set with more examples; those at hand keep their outputs and losses."""
        if self.adapter != more.adapter:
            raise ValueError(
                f"The examples of {self.name!r} were kept with adapter {self.adapter!r}, and "
                f"{more.adapter!r} is active. Use another name."
            )
        if (self.outputs is None) != (more.outputs is None):
            had = "without" if self.outputs is None else "with"
            raise ValueError(
                f"The examples of {self.name!r} were kept {had} outputs of the model, and the loss of this "
                "promise is another one. Use another name."
            )
        return replace(
            more,
            examples=join([self.examples, more.examples]),
            outputs=None if self.outputs is None else join([self.outputs, more.outputs]),
            losses=torch.cat([self.losses, more.losses]),
            held=self.held.joined(more.held) if self.held and more.held else self.held or more.held,
        )

    def part(self, at: list[int]) -> KeptSet:
        """Return a set of some of the examples."""
        outputs = None if self.outputs is None else take(self.outputs, at)
        return replace(
            self, examples=take(self.examples, at), outputs=outputs, losses=self.losses[at], queue=[]
        )

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
        """Return the examples and what was stored about them; not the promise and the collate function."""
        held = {name: getattr(self, name) for name in ("name", "examples", "outputs", "losses", "adapter")}
        listed = [name for name in ("examples", "outputs") if isinstance(held[name], PerExample)]
        held |= {name: list(held[name]) for name in listed}  # torch.load reads no classes of ours
        apart = None if self.held is None else self.held.state_dict()
        return held | {"listed": listed, "own": self.own, "queue": list(self.queue), "held": apart}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], promise: Promise, collate: Collate | None) -> KeptSet:
        """Return a set from a state, a promise and a collate function."""
        held = {name: state[name] for name in ("name", "examples", "outputs", "losses", "adapter", "own")}
        held |= {name: PerExample(held[name]) for name in state["listed"]}
        if len(held["losses"]) != count(held["examples"]):
            raise ValueError(
                f"state has {len(held['losses'])} losses for {count(held['examples'])} examples."
            )
        apart = None if state["held"] is None else cls.from_state_dict(state["held"], promise, collate)
        return cls(promise=promise, collate=collate, queue=list(state["queue"]), held=apart, **held)


def fetched(some: Sequence[tuple[KeptSet, list[int]]], device: Any) -> tuple[Batch, Any]:
    """Return examples of sets that are kept alike as one batch on a device, and their outputs or None."""
    first, outputs = some[0][0], None
    batch = concatenated([take(kept.examples, at) for kept, at in some])
    if first.collate is not None:
        batch = first.collate(list(owned(batch)))  # a collate function may modify its input
    if first.outputs is not None:
        outputs = moved(concatenated([take(kept.outputs, at) for kept, at in some]), device)
    return moved(batch, device), outputs


@dataclass
class Draw:
    """The examples of one row of G.

    Attributes
    ----------
    kept : KeptSet
    at : list of int
        Indices of the drawn examples.
    loss : callable
        The loss, as it is computed in training.
    k : int
        Index of the row.
    total, most : int
        Number of examples of the row on all processes, and number that the passes of this process cover.
    weight : float
        Weight of the mean loss of these examples in the row.
    """

    kept: KeptSet
    at: list[int]
    loss: Loss
    k: int = 0
    total: int = 0
    most: int = 0
    weight: float = 1.0

    def stored(self) -> float:
        """Return the weighted mean loss of the examples when they were kept."""
        return float(self.kept.losses.numpy()[self.at].mean()) * self.weight if self.at else 0.0
