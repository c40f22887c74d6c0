"""Batches of encoded examples: select rows, join, split, shuffle."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

Batch = dict[str, Tensor]  # tensors (n, ...), among them integers "labels" of shape (n,)


def rows(batch: Batch, which: slice | Tensor) -> Batch:
    """Select rows of a batch."""
    return {name: values[which] for name, values in batch.items()}


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Return one batch with the examples of all batches."""
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def parts(batch: Batch, size: int) -> Iterator[Batch]:
    """Yield parts of a batch, at most `size` rows each; texts are sorted by length to save padding."""
    if len(batch["labels"]) > size and "attention_mask" in batch:
        batch = rows(batch, batch["attention_mask"].sum(dim=1).argsort(stable=True))
    for start in range(0, len(batch["labels"]), size):
        yield rows(batch, slice(start, start + size))


def batches(examples: Batch, size: int, epochs: int, generator: torch.Generator) -> Iterator[Batch]:
    """Yield shuffled batches, epoch after epoch."""
    for _ in range(epochs):
        for chosen in torch.randperm(len(examples["labels"]), generator=generator).split(size):
            yield rows(examples, chosen)
