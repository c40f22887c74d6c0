"""Batches: any nesting of dicts, lists and tuples of tensors whose leading dimension is their examples."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_map,
    tree_unflatten,
)

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


class Source(NamedTuple):
    """The examples of one constraint, which are fetched in parts when they are needed.

    Attributes
    ----------
    size : int
        Number of examples.
    fetch : callable
        ``fetch(slice(start, stop))`` returns some of them as a batch.
    task : task
        Whose examples they are; None where nothing is known of it.
    """

    size: int
    fetch: Callable[[slice], Batch]
    name: Any = ()
    promise: Any = None

    def all(self) -> Batch:
        """Return all examples as one batch."""
        return self.fetch(slice(0, self.size))

    def to(self, device: Any) -> Source:
        """Return the source of the same examples on a device, to which each part is moved by itself."""
        return self._replace(fetch=lambda part: tree_map(lambda leaf: leaf.to(device), self.fetch(part)))


class Batches(Iterator[Batch]):
    """An iterator over batches that are fetched one by one, from `sources`."""

    def __init__(self, sources: Iterator[Source]) -> None:
        self.sources = sources

    def __next__(self) -> Batch:
        return next(self.sources).all()


def source_of(batch: Batch) -> Source:
    """Return the source of a batch that is there already."""
    leaves, spec = flatten(batch)
    count = int(leaves[0].shape[0])

    def fetch(part: slice) -> Batch:
        if part == slice(0, count):
            return batch
        return tree_unflatten([leaf[part] for leaf in leaves], spec)

    return Source(count, fetch)


def flatten(batch: Batch) -> tuple[list[torch.Tensor], TreeSpec]:
    """Return the tensors of a batch, and how they were nested; raise for what is not a batch."""
    batch = _ordered(batch)
    leaves, spec = tree_flatten(batch)
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            where = place(batch, i)
            raise TypeError(
                "A batch must hold tensors only, in dicts, lists and tuples; found "
                f"{type(leaf).__name__} in {where}.{_remedy(where)} Leave out or convert what is no tensor."
            )
        if leaf.layout != torch.strided:
            raise TypeError(f"A batch must hold dense tensors; found {leaf.layout}: call to_dense() first.")
    sizes = {leaf.shape[0] if leaf.ndim else None for leaf in leaves}
    if len(sizes) != 1 or None in sizes:
        shapes = [f"{tuple(leaf.shape)} in {place(batch, i)}" for i, leaf in enumerate(leaves)]
        found = ", ".join(shapes) or "no tensor"
        raise ValueError(
            "All tensors of a batch need the same leading dimension, that of the examples; found "
            f"{found}.{_remedy(found, element=None in sizes)}"
        )
    return leaves, spec


def place(batch: Batch, i: int) -> str:
    """Return where leaf i of a batch is, such as ``batch['input_ids']``."""
    path, _ = tree_flatten_with_path(batch)[0][i]
    return "batch" + keystr(path).removeprefix(".batch")


def _remedy(found: str, element: bool = True) -> str:
    if any(name in found for name in ("max_length", "cu_seq", "seq_idx")):
        return " A packed or padding-free batch has no examples to choose from: store from a padded loader."
    return " Elements of a data set are no batches: pass a DataLoader, which collates." if element else ""


def _ordered(batch: Batch) -> Batch:
    """Return mappings as dicts with sorted keys: also a tokenizer's BatchEncoding, in whatever order."""
    if isinstance(batch, Mapping):
        return {key: _ordered(batch[key]) for key in sorted(batch, key=str)}
    if isinstance(batch, Remembered):
        return Remembered(*map(_ordered, batch))
    return type(batch)(map(_ordered, batch)) if type(batch) in (list, tuple) else batch


def count_examples(batch: Batch) -> int:
    """Return the number of examples in a batch."""
    return int(flatten(batch)[0][0].shape[0])


def parts(source: Source, size: int | None, most: int) -> Iterator[tuple[Batch, int]]:
    """Yield the examples of a source, `size` at a time, each part with its weight in examples.

    All processes make as many passes as the one with `most` examples: the others repeat their first
    examples with weight zero.
    """
    if size is None or most <= size:
        if source.size:
            yield source.all(), source.size
        return
    for start in range(0, most, size):
        first = start if start < source.size else 0
        stop = min(first + size, source.size)
        yield source.fetch(slice(first, stop)), stop - first if start < source.size else 0


def output_of(model: Any, batch: Batch, name: str) -> Any:
    """Return an output of a model of transformers; an argument of that name can compute it instead."""
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"Without {name}, batches must be mappings, for model(**batch).{name}; found "
            f"{type(batch).__name__}. Pass {name}, a function of model and batch."
        )
    found = getattr(model(**batch), name)
    if found is None:
        raise ValueError(
            f"model(**batch).{name} is None; found a batch with {', '.join(map(str, batch))}. Models of "
            f"transformers compute a loss where the batch has labels; or pass {name}, a function of model "
            "and batch."
        )
    return found


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
