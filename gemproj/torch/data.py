"""Data as users have it (loaders, data sets, batches), read as examples.

Kept examples are a list with one element per example. A collate function makes batches of them: the
caller's, the loader's, or torch's `default_collate`.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_unflatten
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from gemproj._warn import warn

Batch = Any  # a nesting of tensors (n, ...), or the result of a collate function
Collate = Callable[[list[Any]], Batch]
Field = Hashable | Callable[[Batch], Tensor]  # a key of a batch, or a function of it

# Data without a length may have no end: the time after which that is said, the maximum number of batches that
# are kept, and with a limit the maximum number of examples for each one that is kept.
_PATIENCE, _MOST_BATCHES, _MOST_FOR_ONE = 5.0, 100_000, 1_000
_COLLATE = (
    "Pass collate=, a function of a list of examples, such as the data collator of training; or the loader "
    "itself, whose collate_fn pads them."
)
_DIVIDED = (
    "Leave out or convert other values. Elements of a data set and packed texts are no batches: pass the "
    "data set, the loader itself, or collate=."
)
# Hugging Face data sets, which are not subclasses of torch's data sets.
_SET, STREAM = "datasets.arrow_dataset.Dataset", "datasets.iterable_dataset.IterableDataset"
_DICTS = "datasets.dataset_dict.DatasetDict", "datasets.dataset_dict.IterableDatasetDict"
# Types of leaves that are frequent and need no further checks, and a tuple that cannot be made of its parts.
_LEAVES = (Tensor, str, int, float, PackedSequence)
_PLAIN = frozenset({bool, int, float, complex, str, type(None)})  # immutable


class PerExample(list[Any]):
    """A list with one element per example; elements may differ in shape and structure.

    If the outputs that a loss stores differ in shape between examples, ``loss.outputs(model, batch)`` returns
    a `PerExample`, and the loss receives a `PerExample`.
    """


def read(
    data: Any, collate: Collate | None, limit: int | None, random: torch.Generator
) -> tuple[list[Any], Collate]:
    """Return copies of the examples of `data`, and the function that makes a batch of some of them.

    With a limit, a uniform sample of so many examples is returned (reservoir sampling, Vitter, 1985; from a
    data set with a length, only the chosen examples are read).
    """
    _check(data, collate)
    if limit is not None and _is_indexed(data) and len(data) > limit:
        chosen = torch.randperm(len(data), generator=random, device="cpu")[:limit].tolist()
        data = torch.utils.data.Subset(data, chosen)
    lists, collate = _lists(data, collate)
    lists = _ending(lists, data, limit)
    found = _sampled(itertools.chain.from_iterable(lists), limit or 2**62, random)
    if not found:
        raise ValueError("data holds no example. An iterator can be read only once: pass the loader itself.")
    return found, collate


def _sampled(examples: Iterable[Any], limit: int, random: torch.Generator) -> list[Any]:
    """Return copies of at most `limit` examples, each with the same probability."""
    kept: list[Any] = []
    for seen, one in enumerate(examples):
        if seen < limit:
            kept += owned([one])
        elif (at := int(torch.randint(seen + 1, (), generator=random, device="cpu"))) < limit:
            kept[at] = owned([one])[0]
    return kept


def _lists(data: Any, collate: Collate | None) -> tuple[Iterator[list[Any]], Collate]:
    """Return an iterator over lists of examples, and a collate function."""
    elements = data
    if isinstance(data, DataLoader):
        # A copy, because iterating over a loader with persistent workers would end a running epoch.
        elements = loader = _copied_loader(data)
        if loader.batch_sampler is not None and (collate is not None or _iterates_as_torch(loader)):
            return _of_loader(loader, collate)
    if collate is None and not (_is_indexed(data) or is_kind(data, _SET, STREAM)):
        return map(divided, elements), default_collate
    elements = (data[i] for i in range(len(data))) if _is_indexed(data) else iter(elements)
    return iter(lambda: list(itertools.islice(elements, 64)), []), collate or default_collate


def _iterates_as_torch(loader: Any) -> bool:
    """Return whether the batches of a loader are those of its data set, order and collate function."""
    kind = type(loader).__iter__.__qualname__
    if kind == "DataLoaderDispatcher.__iter__":  # for streams; process 0 reads for all processes
        return bool(loader.state.num_processes == 1)
    return kind in ("DataLoader.__iter__", "DataLoaderShard.__iter__")


def _of_loader(loader: Any, collate: Collate | None) -> tuple[Iterator[list[Any]], Collate]:
    """Read the examples of a copied loader in its order, with its workers."""
    kinds = getattr(loader, "rng_types", None)
    if kinds is not None:  # an Accelerate loader: all processes draw the same order, and each takes a part
        from accelerate.utils import synchronize_rng_states

        synchronize_rng_states(kinds, loader.synchronized_generator)
    plain, own = getattr(loader, "base_dataloader", loader), loader.collate_fn
    plain.collate_fn, plain.pin_memory = list, False
    lists: Iterator[list[Any]] = DataLoader.__iter__(plain)
    if collate is not None or own is default_collate:
        return lists, collate or own
    first: list[Any] = next(lists, [])
    probe = owned(first[:1])  # a collate function may modify its input
    lists = itertools.chain([first], lists)
    if probe and own(list(probe)) is probe[0]:  # the elements of the data set are batches
        return map(divided, itertools.chain.from_iterable(lists)), default_collate
    return lists, own


def _copied_loader(loader: Any) -> Any:
    other = object.__new__(type(loader))  # copy.copy of an Accelerate loader returns a torch loader
    other.__dict__.update(loader.__dict__, _iterator=None)
    if hasattr(loader, "base_dataloader"):
        other.__dict__["base_dataloader"] = _copied_loader(loader.base_dataloader)
    return other


def _ending(lists: Iterator[list[Any]], data: Any, limit: int | None) -> Iterator[list[Any]]:
    """Yield lists; of those beyond the length of data, if any, which may have no end, at most a maximum."""
    known = length_hint(data)  # zero also for a loader whose data set has no length
    yield from itertools.islice(lists, known)
    told = "goes on after its length" if known else "has no length"
    start, read = time.monotonic(), 0
    for number, some in enumerate(lists):
        if limit is None and number == _MOST_BATCHES:
            raise ValueError(
                f"data {told}, and no end after {_MOST_BATCHES:,} batches. Pass limit=, or a limited "
                "number: itertools.islice(batches, n)."
            )
        yield some
        read += len(some)
        if limit is not None and read >= _MOST_FOR_ONE * limit:
            return
        if time.monotonic() - start > _PATIENCE:
            start = float("inf")  # said once
            end = (
                f"ends after {_MOST_FOR_ONE * limit:,} of them" if limit else "without limit= keeps them all"
            )
            warn(
                f"keep is still reading: data {told}, and {read:,} examples were read so far. This "
                f"{end}. Pass itertools.islice(data, n) for a shorter part."
            )


def _is_indexed(data: Any) -> bool:
    """Return whether data are a data set with a length, whose elements are examples."""
    torchs = isinstance(data, Dataset) and not isinstance(data, IterableDataset)
    return torchs or is_kind(data, _SET)


def is_kind(thing: Any, *names: str) -> bool:
    """Return whether a class of an object has one of these full names; nothing is imported for that."""
    return any(f"{kind.__module__}.{kind.__qualname__}" in names for kind in type(thing).__mro__)


def _check(data: Any, collate: Any) -> None:
    """Raise for objects that are often passed by mistake."""
    if not (collate is None or callable(collate)):
        raise TypeError(f"collate must be a function of a list of examples; found {type(collate).__name__}.")
    name = type(data).__name__
    wanted = "data must be a loader, a data set or an iterable of batches"
    tensors = isinstance(data, tuple | list) and all(isinstance(part, Tensor) for part in data)
    # Tensors that differ in shape or dtype, and several tensors in a tuple, are the parts of one batch.
    kinds = {(part.shape[1:], part.dtype) for part in data} if tensors else ()
    one = tensors and collate is None and (len(kinds) > 1 or (isinstance(data, tuple) and len(data) > 1))
    if is_kind(data, *_DICTS):
        raise TypeError(f"{wanted}; found {name}, which has several sets. Pass one of them: data['train'].")
    if one or isinstance(data, Tensor | Mapping):
        raise TypeError(f"{wanted}; found one batch, of type {name}. Pass [batch].")
    if isinstance(data, IterableDataset) and collate is None and not is_kind(data, STREAM):
        raise TypeError(
            f"{wanted}; found {name}, whose elements may be examples or batches. Pass "
            "DataLoader(data, batch_size=n) if they are examples, and batch_size=None if they are batches."
        )
    if isinstance(data, list) and collate is None and any(type(one) is str for one in data[:1]):
        raise TypeError(f"{wanted}; found a list of texts. Pass collate=, which makes a batch of some texts.")
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        loader = " Pass trainer.get_train_dataloader()." if hasattr(data, "get_train_dataloader") else ""
        raise TypeError(f"{wanted}; found {name}.{loader}")


def map_nested(
    function: Callable[[Any], Any], value: Any, is_leaf: Callable[[Any], bool] = lambda value: False
) -> Any:
    """Apply a function to the leaves of nested mappings, lists, tuples and dataclasses; return the nesting.

    Mappings become dicts.
    """
    if isinstance(value, _LEAVES) or is_leaf(value):
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


def leaves_of(value: Any, kind: type = object) -> list[Any]:
    """Return the leaves of a nesting that are of a kind; see `map_nested`."""
    found: list[Any] = []
    map_nested(found.append, value)
    return [leaf for leaf in found if isinstance(leaf, kind)]


def moved(batch: Batch, device: Any) -> Batch:
    """Move a batch to a device: call the method `to` of objects that have it, and keep other objects."""
    if device is None:
        return batch

    def movable(value: Any) -> bool:
        return callable(getattr(value, "to", None)) and not isinstance(value, type)

    return map_nested(lambda leaf: leaf.to(device) if movable(leaf) else leaf, batch, movable)


def divided(batch: Batch, remedy: str = _DIVIDED, numbers: Sequence[bool] = ()) -> list[Any]:
    """Return the examples of a batch, as views; raise unless it is a nesting of tensors (n, ...).

    `numbers` says which tensors become numbers of Python; none, if it is empty.
    """
    batch = map_nested(lambda leaf: leaf, batch)  # mappings become dicts
    leaves, nesting = tree_flatten(batch)
    if not _is_batch(leaves):
        raise ValueError(
            "A batch must hold dense tensors, in dicts, lists and tuples, with the same first dimension, "
            f"that of the examples; found {kind_of(batch)}. {remedy}"
        )
    pairs = itertools.zip_longest(leaves, numbers)
    columns = [leaf.tolist() if number else leaf.unbind() for leaf, number in pairs]
    return [tree_unflatten(one, nesting) for one in zip(*columns, strict=True)]


def packed(examples: list[Any]) -> tuple[Any, list[bool]] | None:
    """Return examples as one batch, which is saved in a fraction of the time, and which leaves are numbers.

    None if that is impossible.
    """
    batch = default_collate(examples)
    numbers = [isinstance(leaf, int | float) for leaf in leaves_of(examples[0])]
    return (batch, numbers) if _is_batch(tree_flatten(batch)[0]) else None


def _is_batch(leaves: list[Any]) -> bool:
    """Return whether leaves are dense tensors with the same first dimension."""
    dense = all(isinstance(leaf, Tensor) and leaf.layout == torch.strided and leaf.ndim for leaf in leaves)
    return dense and len({len(leaf) for leaf in leaves}) == 1


def check_alike(examples: list[Any], remedy: str = _COLLATE) -> None:
    """Raise unless torch's `default_collate` makes a batch of any of the examples."""
    kinds = list(dict.fromkeys(map(kind_of, examples)))
    with suppress(TypeError):
        if len(kinds) == 1:
            default_collate(examples[:1])
            return
    raise ValueError(
        "torch's default_collate makes batches of examples that are alike, and hold tensors, numbers and "
        f"strings; found {', and another one with '.join(kinds[:2])}. {remedy}"
    )


def kind_of(example: Any) -> str:
    """Return the structure of an example, with shapes and dtypes."""

    def kind(leaf: Any) -> str:
        if not isinstance(leaf, Tensor):
            return f"list of {len(leaf)}" if isinstance(leaf, list) else type(leaf).__name__
        layout = "" if leaf.layout == torch.strided else f" {leaf.layout}"
        return f"Tensor {tuple(leaf.shape)} {leaf.dtype}{layout}"

    if dataclasses.is_dataclass(example) and not isinstance(example, type):
        example = {field.name: getattr(example, field.name) for field in dataclasses.fields(example)}
    leaves, _ = tree_flatten_with_path(example, is_leaf=_is_plain_list)
    return ", ".join(sorted(f"{keystr(path)} {kind(leaf)}".strip() for path, leaf in leaves))


def owned(examples: Iterable[Any]) -> list[Any]:
    """Return copies of examples that later changes do not reach; raise for types that cannot be stored."""
    return [map_nested(_copied, one, _is_plain_list) for one in examples]


def _is_plain_list(value: Any) -> bool:
    """Return whether a value is a list of numbers or strings, such as tokens; it is copied as a whole."""
    return type(value) is list and _PLAIN.issuperset(map(type, value))


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
    if isinstance(leaf, np.integer | np.bool_):  # a label, where another example may have Python's
        return leaf.item()
    if isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "biufc":
        # As a tensor, because a state must be readable by ``torch.load(..., weights_only=True)``.
        return torch.from_numpy(np.array(leaf))
    if isinstance(leaf, np.str_):
        return str(leaf)
    if type(leaf) is list:
        return list(leaf)
    if type(leaf) in _PLAIN:
        return leaf
    raise TypeError(
        "Kept examples may hold tensors, NumPy arrays, numbers, strings and None, in dicts, lists, tuples "
        f"and dataclasses; found {type(leaf).__module__}.{type(leaf).__qualname__}"
        f"{f' of dtype {leaf.dtype}' if isinstance(leaf, np.ndarray) else ''}. Convert it in the data "
        "set, or pass batches of tensors: (batch for batch in loader)."
    )
