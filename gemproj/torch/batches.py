"""Batches, their stored outputs and losses, and the sources from which batches are fetched."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path, tree_map

Batch = Any  # a nesting of tensors (n, ...), or the result of a collate function
Collate = Callable[[list[Any]], Batch]
Field = Hashable | Callable[[Batch], torch.Tensor]  # a key of a batch, or a function of it
# Called as (model, batch) or (model, batch, outputs); returns the mean loss, or one loss per example.
Loss = Callable[..., torch.Tensor]

_LEAVES = (torch.Tensor, str, int, float)  # frequent types of leaves, which need no further checks


class PerExample(list[Any]):
    """A list with one element per example; elements may differ in shape and structure.

    If the outputs that a loss stores differ in shape between examples, ``loss.outputs(model, batch)`` returns
    a `PerExample`, and the loss receives a `PerExample`.
    """


class Remembered(NamedTuple):
    """A batch, with the stored outputs and losses of its examples; an empty tuple if nothing is stored.

    Attributes
    ----------
    batch : nesting of dicts, lists and tuples of tensors, or result of a collate function
    outputs : nesting of tensors (n, ...), or PerExample
        Outputs of the model at the time of storage.
    losses : Tensor, shape (n,)
        The loss of each example at the time of storage.
    """

    batch: Batch
    outputs: Any = ()
    losses: Any = ()

    @property
    def fields(self) -> list[str]:
        """Names of the fields that are not empty."""
        pairs = zip(self._fields, self, strict=True)
        return [name for name, value in pairs if not (isinstance(value, tuple) and not value)]


@dataclasses.dataclass
class Source:
    """The examples of one row of G; batches of them are made when they are needed.

    Attributes
    ----------
    examples : sequence
        One reference per example, such as a store and a slot.
    make : callable
        ``make(some)`` returns a batch of some of the `examples`.
    name : tuple
        The name of the set, and the label or None; with one row per example, also the position of the example
        in the stream. If several sets share a row, the first entry is the tuple of their names, or None for
        all sets without their own promise. Empty for a batch that is not from a memory.
    kind : hashable, optional
        Sources of equal kind can be `joined`, unless the kind is None.
    device : torch.device, optional
        Device to which batches are moved.
    k, weight, promise : int, float, Promise or None
        Index of the row, weight of the mean loss of these examples in the row, and promise about the row.
    """

    examples: Sequence[Any]
    make: Callable[[Any], Batch]
    name: tuple[Hashable, ...] = ()
    promise: Any = None
    kind: Hashable = None
    device: Any = None
    k: int = 0
    weight: float = 1.0

    @property
    def size(self) -> int:
        """Number of examples."""
        return len(self.examples)

    def fetch(self, part: slice) -> Batch:
        """Return a slice of the examples as a batch."""
        batch = self.make(self.examples[part])
        return batch if self.device is None else moved(batch, self.device)

    def all(self) -> Batch:
        """Return all examples as one batch."""
        return self.fetch(slice(None))

    def joined(self, others: Iterable[Source]) -> Source:
        """Return one source with the examples of this source and of `others`."""
        sources = (self, *others)
        return dataclasses.replace(self, examples=[one for source in sources for one in source.examples])


class Batches(Iterator[Batch]):
    """An iterator over batches, which are fetched from `sources` one at a time."""

    def __init__(self, sources: Iterator[Source]) -> None:
        self.sources = sources

    def __next__(self) -> Batch:
        return next(self.sources).all()


def source_of(batch: Batch) -> Source:
    """Return the source of an existing batch."""
    count = range(count_examples(batch))
    return Source(count, lambda some: batch if some == count else take(batch, slice(some.start, some.stop)))


def parts(source: Source, size: int | None, most: int) -> Iterator[tuple[Batch, int, int]]:
    """Yield the examples of a source, `size` at a time, as (batch, number of examples, weight).

    The weight is the number of examples. All processes make as many passes as the process with `most`
    examples; a process with fewer examples repeats its first examples with weight zero.
    """
    if size is None or most <= size:
        if source.size:
            yield source.all(), source.size, source.size
        return
    for start in range(0, most, size):
        first = start if start < source.size else 0
        stop = min(first + size, source.size)
        yield source.fetch(slice(first, stop)), stop - first, stop - first if start < source.size else 0


def map_nested(
    function: Callable[[Any], Any], value: Any, is_leaf: Callable[[Any], bool] = lambda value: False
) -> Any:
    """Apply a function to the leaves of nested mappings, lists, tuples and dataclasses; return the nesting.

    Mappings become dicts.
    """
    if is_leaf(value) or isinstance(value, _LEAVES):
        return function(value)

    def again(part: Any) -> Any:  # a self-calling closure is a reference cycle, which keeps tensors alive
        return map_nested(function, part, is_leaf)

    if isinstance(value, Mapping):
        return {key: again(value[key]) for key in value}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(again, value))
    if isinstance(value, list | tuple):
        return type(value)(map(again, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fresh = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(fresh, field.name, again(getattr(value, field.name)))
        return fresh
    return function(value)


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of a nesting; see `map_nested`."""
    found: list[Any] = []
    map_nested(found.append, value)
    return found


def moved(batch: Batch, device: Any) -> Batch:
    """Move a batch to a device: call the method `to` of objects that have it, and keep other objects."""

    def movable(value: Any) -> bool:
        return callable(getattr(value, "to", None)) and not isinstance(value, type)

    return map_nested(lambda leaf: leaf.to(device) if movable(leaf) else leaf, batch, movable)


def flatten(batch: Batch) -> tuple[list[torch.Tensor], TreeSpec]:
    """Return the tensors of a batch and their nesting; raise if the batch is not valid."""
    leaves, spec = tree_flatten(_ordered(batch))
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            where = place(batch, i)
            raise TypeError(
                "A batch must hold tensors only, in dicts, lists and tuples; found "
                f"{type(leaf).__name__} in {where}.{_remedy(where)} Leave out or convert other values."
            )
        if leaf.layout != torch.strided:
            raise TypeError(f"A batch must hold dense tensors; found {leaf.layout}: call to_dense() first.")
    sizes = {leaf.shape[:1] for leaf in leaves}
    if len(sizes) != 1 or torch.Size() in sizes:
        shapes = [f"{tuple(leaf.shape)} in {place(batch, i)}" for i, leaf in enumerate(leaves)]
        found = ", ".join(shapes) or "no tensor"
        raise ValueError(
            "All tensors of a batch need the same leading dimension, that of the examples; found "
            f"{found}.{_remedy(found, element=torch.Size() in sizes)}"
        )
    return leaves, spec


def place(batch: Batch, i: int) -> str:
    """Return the path of leaf i of a batch, such as ``batch['input_ids']``."""
    path, _ = tree_flatten_with_path(_ordered(batch))[0][i]
    return "batch" + keystr(path)


def _remedy(found: str, element: bool = True) -> str:
    if any(name in found for name in ("max_length", "cu_seq", "seq_idx")):
        return (
            " A packed or padding-free batch is not divided into examples: pass the loader itself, whose "
            "data set has examples, or the data set with collate=."
        )
    if not element:
        return ""
    return " Elements of a data set are not batches: pass the data set, a DataLoader of it, or collate=."


def _ordered(batch: Batch) -> Batch:
    """Return mappings, including a tokenizer's BatchEncoding, as dicts with sorted keys."""
    if isinstance(batch, Mapping):
        return {key: _ordered(batch[key]) for key in sorted(batch, key=str)}
    return type(batch)(map(_ordered, batch)) if type(batch) in (list, tuple) else batch


def bare(batch: Batch | Remembered) -> Batch:
    """Return a batch without the outputs and losses stored with it."""
    return batch.batch if isinstance(batch, Remembered) else batch


def count_examples(batch: Batch | Remembered) -> int:
    """Return the number of examples in a batch of tensors, a `PerExample` or a `Remembered`."""
    if isinstance(batch, PerExample):
        return len(batch)
    if not isinstance(batch, Remembered):
        return len(flatten(batch)[0][0])
    counts = {name: count_examples(getattr(batch, name)) for name in batch.fields}
    if len(set(counts.values())) != 1:
        raise ValueError(
            "Examples, outputs and losses need the same leading dimension, or length; found "
            f"{', '.join(f'{n} in {name}' for name, n in counts.items())}."
        )
    return counts["batch"]


def take(batch: Batch | Remembered, part: slice) -> Batch:
    """Return a slice of the examples of a batch of tensors, a `PerExample` or a `Remembered`."""

    def of(leaf: Any) -> Any:
        return PerExample(leaf[part]) if isinstance(leaf, PerExample) else leaf[part]

    return map_nested(of, batch, lambda value: isinstance(value, PerExample))


def join(parts: Sequence[Any]) -> Any:
    """Concatenate batches of tensors, or lists of examples."""
    if isinstance(parts[0], PerExample):
        return PerExample(chain(*parts))
    return tree_map(lambda *leaves: torch.cat(leaves), *parts)


def output_of(model: Any, batch: Batch, name: str) -> Any:
    """Return the output `name` of a transformers model; errors suggest a function for the argument `name`."""
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"Without {name}, batches must be mappings, for model(**batch).{name}; found "
            f"{type(batch).__name__}. Pass {name}, a function of model and batch."
        )
    returned = model(**batch)
    found = getattr(returned, name, None)
    if found is None and not hasattr(returned, name):
        raise ValueError(
            f"model(**batch) has no {name}; found {type(returned).__name__}. Pass {name}, a function of "
            "model and batch."
        )
    if found is None:
        raise ValueError(
            f"model(**batch).{name} is None; found a batch with {', '.join(map(str, batch))}. Models of "
            f"transformers compute a loss if the batch has labels; or pass {name}, a function of model "
            "and batch."
        )
    return found


def field_of(batch: Batch, field: Field, name: str) -> Any:
    """Return a field of a batch; `name` is the name of the argument in errors."""
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
    try:
        labels = labels if isinstance(labels, torch.Tensor) else torch.as_tensor(labels, device="cpu")
    except (TypeError, ValueError) as error:
        raise ValueError(f"labels must be integers, one per example: {error}") from error
    if labels.shape != (n,) or labels.is_floating_point() or labels.is_complex():
        raise ValueError(
            f"labels must be integers of shape ({n},), one per example; "
            f"found {labels.dtype} of shape {tuple(labels.shape)}."
        )
    return labels.tolist()
