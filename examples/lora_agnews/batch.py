"""Batches of encoded examples: rows, parts, shuffled ones; and the accuracy on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]


def rows(batch: Batch, which: slice | Tensor) -> Batch:
    """Select rows of a batch."""
    return {name: values[which] for name, values in batch.items()}


def parts(batch: Batch, size: int) -> Iterator[Batch]:
    """Yield a batch in parts of so many rows."""
    batch = by_length(batch, size)
    for start in range(0, len(batch["labels"]), size):
        yield rows(batch, slice(start, start + size))


def by_length(batch: Batch, size: int) -> Batch:
    """Sort texts by their length where there are parts of so many, for less padding in each."""
    if len(batch["labels"]) <= size or "attention_mask" not in batch:
        return batch
    return rows(batch, batch["attention_mask"].sum(dim=1).argsort(stable=True))


def batches(examples: Batch, size: int, epochs: int, generator: torch.Generator) -> Iterator[Batch]:
    """Yield shuffled batches, epoch after epoch."""
    for _ in range(epochs):
        for chosen in torch.randperm(len(examples["labels"]), generator=generator).split(size):
            yield rows(examples, chosen)


@torch.no_grad()
def accuracy(
    model: nn.Module,
    examples: Batch,
    size: int,
    logits: Callable[[nn.Module, Batch], Tensor],
) -> float:
    """Return the share of examples that the model classifies correctly, in parts of so many."""
    model.eval()
    right = 0
    for part in parts(examples, size):
        right += int((logits(model, part).argmax(dim=1) == part["labels"]).sum())
    model.train()
    return right / len(examples["labels"])
