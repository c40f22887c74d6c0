"""Batches: any nesting of dicts, lists and tuples of tensors whose leading dimension is their examples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

Batch = Any
Loss = Callable[[Any, Batch], torch.Tensor]  # the mean over the examples, or one for each


def flatten(batch: Batch) -> tuple[list[torch.Tensor], TreeSpec]:
    """Return the tensors of a batch, and how they were nested; raise for what is not a batch."""
    if isinstance(batch, Mapping):
        # Also for a tokenizer's BatchEncoding, and whatever the order of the keys is.
        batch = {key: batch[key] for key in sorted(batch, key=str)}
    leaves, spec = tree_flatten(batch)
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"A batch must hold tensors only; found {type(leaf).__name__}.")
        if leaf.layout != torch.strided:
            raise TypeError(f"A batch must hold dense tensors; found {leaf.layout}: call to_dense() first.")
    sizes = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    if len(sizes) != 1 or None in sizes:
        raise ValueError(
            f"All tensors of a batch need the same leading dimension; found {sizes or 'no tensor'}."
        )
    return leaves, spec


def count_examples(batch: Batch) -> int:
    """Return the number of examples in a batch."""
    return int(flatten(batch)[0][0].shape[0])


def parts(batch: Batch, count: int, size: int | None, most: int) -> Iterator[tuple[Batch, int]]:
    """Yield parts of a batch of `count` examples, `size` at a time, each with its weight in examples.

    All processes make as many passes as the one with `most` examples: the others repeat their first
    examples with weight zero.
    """
    if size is None or most <= size:
        if count:
            yield batch, count
        return
    leaves, spec = flatten(batch)
    for start in range(0, most, size):
        first = start if start < count else 0
        some = [leaf[first : first + size] for leaf in leaves]
        yield tree_unflatten(some, spec), len(some[0]) if start < count else 0
