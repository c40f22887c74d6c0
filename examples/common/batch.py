"""Batches of encoded examples: rows, parts, shuffled ones."""

from collections.abc import Iterator

import torch
from torch import Tensor

Batch = dict[str, Tensor]


def rows(batch: Batch, which: slice | Tensor) -> Batch:
    """Select rows of a batch."""
    return {name: values[which] for name, values in batch.items()}


def parts(batch: Batch, size: int) -> Iterator[Batch]:
    """Yield a batch in parts of so many rows, sorted by length if there is more than one."""
    batch = by_length(batch, size)
    for start in range(0, len(batch["labels"]), size):
        yield rows(batch, slice(start, start + size))


def by_length(batch: Batch, size: int) -> Batch:
    """Sort texts by their length if they will be taken in parts of so many, for less padding in each."""
    if len(batch["labels"]) <= size or "attention_mask" not in batch:
        return batch
    return rows(batch, batch["attention_mask"].sum(dim=1).argsort(stable=True))


def batches(examples: Batch, size: int, epochs: int, generator: torch.Generator) -> Iterator[Batch]:
    """Yield shuffled batches, epoch after epoch."""
    for _ in range(epochs):
        for chosen in torch.randperm(len(examples["labels"]), generator=generator).split(size):
            yield rows(examples, chosen)
