"""Batches: any nesting of dicts, lists and tuples of tensors whose leading dimension is their examples."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

Batch = Any
Field = Hashable | Callable[[Batch], torch.Tensor]  # a key of a batch, or a function of it
# (model, batch), or (model, batch, outputs): returns the mean over the examples, or one number for each.
Loss = Callable[..., torch.Tensor]


class Remembered(NamedTuple):
    """A batch, with what was stored about its examples; an empty tuple stands for nothing.

    Attributes
    ----------
    batch : nesting of dicts, lists and tuples of tensors
    outputs : the same
        What the model had put out, one row per example.
    losses : Tensor, shape (n,)
        The loss of each example when it was stored.
    """

    batch: Batch
    outputs: Any = ()
    losses: Any = ()

    @property
    def fields(self) -> list[str]:
        """Names of what is there."""
        return [
            name
            for name, value in zip(self._fields, self, strict=True)
            if not (isinstance(value, tuple) and not value)
        ]


def remembered(batch: Batch, outputs: Any, losses: Any) -> Remembered:
    """Return a batch with what is to be stored about its examples; None stands for nothing."""
    if losses is not None and (not isinstance(losses, torch.Tensor) or losses.ndim != 1):
        found = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
        raise ValueError(f"losses must be a tensor of shape (n,), one loss per example; found {found}.")
    return Remembered(batch, () if outputs is None else outputs, () if losses is None else losses)


def flatten(batch: Batch) -> tuple[list[torch.Tensor], TreeSpec]:
    """Return the tensors of a batch, and how they were nested; raise for what is not a batch."""
    if isinstance(batch, Remembered):
        batch = Remembered(*map(_ordered, batch))
    leaves, spec = tree_flatten(_ordered(batch))
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


def _ordered(batch: Batch) -> Batch:
    """Return a mapping with sorted keys: also a tokenizer's BatchEncoding, whatever their order is."""
    if not isinstance(batch, Mapping):
        return batch
    return {key: batch[key] for key in sorted(batch, key=str)}


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


def output_of(model: Any, batch: Batch, name: str) -> Any:
    """Return an output of a model of transformers; an argument of that name can compute it instead."""
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"Without {name}, batches must be mappings, for model(**batch).{name}; found "
            f"{type(batch).__name__}. Pass {name}, a function of model and batch."
        )
    return getattr(model(**batch), name)


def field_of(batch: Batch, field: Field, name: str) -> Any:
    """Return a field of a batch; `name` is the argument that says where it is."""
    if callable(field):
        return field(batch)
    try:
        return batch[field]
    except (KeyError, IndexError, TypeError):
        found = f"keys {list(batch)}" if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(f"{name} {field!r} is not in the batch; found {found}.") from None


def labels_of(batch: Batch, field: Field, n: int) -> list[int]:
    """Return the labels of the n examples of a batch."""
    labels = field_of(batch, field, "label")
    labels = labels if isinstance(labels, torch.Tensor) else torch.as_tensor(labels, device="cpu")
    if tuple(labels.shape) != (n,) or labels.is_floating_point() or labels.is_complex():
        raise ValueError(
            f"labels must be integers of shape ({n},), one per example; "
            f"found {labels.dtype} of shape {tuple(labels.shape)}."
        )
    return labels.tolist()
