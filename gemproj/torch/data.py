"""Data as users have it (loaders, data sets, batches), read as examples that can be taken and joined.

Examples are held in one of two forms: as a nesting of tensors (n, ...), a *batch*; or as a `PerExample`, a
list with one element per example, of which a collate function makes a batch.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path, tree_map
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from gemproj._warn import warn

Batch = Any  # a nesting of tensors (n, ...), or the result of a collate function
Collate = Callable[[list[Any]], Batch]
Field = Hashable | Callable[[Batch], Tensor]  # a key of a batch, or a function of it

# Data without a length may have no end: the time after which that is said, the maximum number of batches that
# are kept, and with a limit the maximum number of examples for each one that is kept.
_PATIENCE, _MOST_BATCHES, _MOST_FOR_ONE = 5.0, 100_000, 1_000
# Number of examples that are read at a time from a data set.
_SOME = 64
# Hugging Face data sets, which are not subclasses of torch's data sets.
_SETS = {"datasets.arrow_dataset.Dataset", "datasets.iterable_dataset.IterableDataset"}
_DICTS = {"datasets.dataset_dict.DatasetDict", "datasets.dataset_dict.IterableDatasetDict"}
# Loaders that make batches of examples in the same way as torch's `DataLoader`.
_ITERATED = ("DataLoader.__iter__", "DataLoaderShard.__iter__")
_LEAVES = (Tensor, str, int, float)  # frequent types of leaves, which need no further checks
_PLAIN = frozenset({bool, int, float, complex, str, type(None)})  # immutable


class PerExample(list[Any]):
    """A list with one element per example; elements may differ in shape and structure.

    If the outputs that a loss stores differ in shape between examples, ``loss.outputs(model, batch)`` returns
    a `PerExample`, and the loss receives a `PerExample`.
    """


def read(
    data: Any, collate: Collate | None, limit: int | None, random: torch.Generator
) -> tuple[Batch, Collate | None]:
    """Return the examples of `data` in one of the two forms, and the collate function of a `PerExample`.

    With a limit, a uniform sample of so many examples is returned (reservoir sampling, Vitter, 1985; from a
    data set with a length, only the chosen examples are read).
    """
    _check(data, collate)
    if limit is not None and _is_indexed(data) and len(data) > limit:
        chosen = torch.randperm(len(data), generator=random, device="cpu")[:limit].tolist()
        data = torch.utils.data.Subset(data, chosen)
    chunks, collate = _chunks(data, collate)
    chunks = _ending(chunks, data, limit)
    if limit is None:
        found = [owned(chunk) for chunk in chunks if count(chunk)]
    else:
        found = _sampled(chunks, limit, random)
    if not found:
        raise ValueError("data holds no example. An iterator can be read only once: pass the loader itself.")
    return join(found), collate


def _sampled(chunks: Iterable[Any], limit: int, random: torch.Generator) -> list[Any]:
    """Return `limit` examples, one by one, each with the same probability."""

    def draw(n: int) -> int:
        return int(torch.randint(n, (), generator=random, device="cpu"))

    kept: list[Any] = []
    for seen, (chunk, k) in enumerate((some, k) for some in map(owned, chunks) for k in range(count(some))):
        if seen < limit:
            kept.append(take(chunk, [k]))
        elif draw(seen + 1) < limit:
            kept[draw(limit)] = take(chunk, [k])
    return kept


def _chunks(data: Any, collate: Collate | None) -> tuple[Iterator[Any], Collate | None]:
    """Return an iterator over batches and None, or over lists of examples and a collate function."""
    if isinstance(data, DataLoader):
        return _from_loader(data, collate)
    if collate is not None:
        return _lists(data), collate
    if _is_indexed(data) or _is_kind(data, _SETS):
        return _from_set(data)
    return iter(data), None


def _from_loader(loader: DataLoader[Any], collate: Collate | None) -> tuple[Iterator[Any], Collate | None]:
    """Read examples if `collate` is given or the loader has its own collate function, otherwise batches."""
    if getattr(loader, "persistent_workers", False):
        loader = _apart(loader)
    given, own = collate is not None, loader.collate_fn
    if loader.batch_sampler is None:
        return (_lists(loader), collate) if given else (iter(loader), None)
    kind = type(loader).__iter__.__qualname__
    as_torch = kind in _ITERATED
    if kind == "DataLoaderDispatcher.__iter__":  # for streams; process 0 reads for all processes
        as_torch = loader.state.num_processes == 1  # type: ignore[attr-defined]
    if not given and (own is default_collate or not as_torch):
        return iter(loader), None
    streamed = isinstance(loader.dataset, IterableDataset)
    how = ["batch_size", "drop_last"] if streamed else ["batch_sampler"]
    how += ["num_workers", "worker_init_fn", "multiprocessing_context", "timeout", "generator"]
    options: dict[str, Any] = {name: getattr(loader, name) for name in how}
    kinds = getattr(loader, "rng_types", None)
    if kinds is not None:  # an Accelerate loader: all processes draw the same order, and each takes a part
        from accelerate.utils import synchronize_rng_states

        synchronize_rng_states(kinds, loader.synchronized_generator)  # type: ignore[attr-defined]
    lists = map(PerExample, DataLoader(loader.dataset, collate_fn=list, **options))
    first = next(lists, None)
    if first is None:
        return iter(()), None
    probe = [] if given else list(owned(PerExample(first[:1])))  # a collate function may modify its input
    if probe and own(probe[:]) is probe[0]:  # the elements of the data set are batches
        return itertools.chain(first, *lists), None
    return itertools.chain([first], lists), collate if given else own


def _apart(loader: Any) -> Any:
    """Copy a loader with persistent workers, because iterating over the loader would end a running epoch."""
    other = object.__new__(type(loader))  # copy.copy of an Accelerate loader returns a torch loader
    other.__dict__.update(loader.__dict__, _iterator=None)
    if hasattr(loader, "base_dataloader"):
        other.__dict__["base_dataloader"] = _apart(loader.base_dataloader)
    return other


def _from_set(data: Any) -> tuple[Iterator[Any], Collate | None]:
    """Read a data set with torch's `default_collate`: collate now if tensors result, otherwise at draws."""
    first = next(lists := _lists(data), None)
    if first is None:
        return lists, None
    lists = itertools.chain([first], lists)
    try:
        tensors_of(default_collate(first))
    except (RuntimeError, KeyError) as error:
        raise ValueError(
            "torch's default_collate cannot make a batch of the examples of the data set. Pass collate=, a "
            "function of a list of examples, such as the data collator of training; or a DataLoader "
            "with such a function."
        ) from error
    except TypeError:  # raised for text, for example
        return lists, default_collate
    return map(default_collate, lists), None


def _lists(data: Any) -> Iterator[PerExample]:
    """Return an iterator over lists of at most `_SOME` elements of a data set or of an iterable."""
    elements = (data[i] for i in range(len(data))) if _is_indexed(data) else iter(data)
    return iter(lambda: PerExample(itertools.islice(elements, _SOME)), [])


def _ending(chunks: Iterator[Any], data: Any, limit: int | None) -> Iterator[Any]:
    """Yield chunks; of those beyond the length of data, if any, which may have no end, at most a maximum."""
    told = "has no length"
    if _has_length(data):
        yield from itertools.islice(chunks, len(data))
        told = "goes on after its length"
    start, read = time.monotonic(), 0
    for number, chunk in enumerate(chunks):
        if limit is None and number == _MOST_BATCHES:
            raise ValueError(
                f"data {told}, and no end after {_MOST_BATCHES:,} batches. Pass limit=, or a limited "
                "number: itertools.islice(batches, n)."
            )
        yield chunk
        read += count(chunk)
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


def _has_length(data: Any) -> bool:
    try:
        return len(data) >= 0
    except TypeError:  # raised also by a loader whose data set has no length
        return False


def _is_indexed(data: Any) -> bool:
    """Return whether data are a data set with a length, whose elements are examples."""
    torchs = isinstance(data, Dataset) and not isinstance(data, IterableDataset)
    return torchs or _is_kind(data, {"datasets.arrow_dataset.Dataset"})


def _is_kind(data: Any, names: set[str]) -> bool:
    return any(f"{kind.__module__}.{kind.__qualname__}" in names for kind in type(data).__mro__)


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
    if _is_kind(data, _DICTS):
        raise TypeError(f"{wanted}; found {name}, which has several sets. Pass one of them: data['train'].")
    if one or isinstance(data, Tensor | Mapping):
        raise TypeError(f"{wanted}; found one batch, of type {name}. Pass [batch].")
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

    def move(leaf: Any) -> Any:
        return leaf.to(device) if isinstance(leaf, Tensor) or movable(leaf) else leaf

    return map_nested(move, batch, movable)


def tensors_of(batch: Batch) -> list[Tensor]:
    """Return the tensors of a batch; raise unless all leaves are tensors with the same first dimension."""
    leaves = tree_flatten(_ordered(batch))[0]
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            where = _place(batch, i)
            raise TypeError(
                "A batch must hold tensors only, in dicts, lists and tuples; found "
                f"{type(leaf).__name__} in {where}.{_remedy(where)} Leave out or convert other values."
            )
        if leaf.layout != torch.strided:
            raise TypeError(f"A batch must hold dense tensors; found {leaf.layout}: call to_dense() first.")
    sizes = {leaf.shape[:1] for leaf in leaves}
    if len(sizes) != 1 or torch.Size() in sizes:
        shapes = [f"{tuple(leaf.shape)} in {_place(batch, i)}" for i, leaf in enumerate(leaves)]
        found = ", ".join(shapes) or "no tensor"
        raise ValueError(
            "All tensors of a batch need the same leading dimension, that of the examples; found "
            f"{found}.{_remedy(found, element=torch.Size() in sizes)}"
        )
    return leaves


def _place(batch: Batch, i: int) -> str:
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


def count(examples: Any) -> int:
    """Return the number of examples in either form."""
    return len(examples) if isinstance(examples, PerExample) else len(tensors_of(examples)[0])


def take(examples: Any, at: Sequence[int]) -> Any:
    """Return copies of the examples with indices `at`, in the same form."""
    if isinstance(examples, PerExample):
        return PerExample(examples[i] for i in at)
    where = torch.from_numpy(np.array(at, dtype=np.int64))  # faster than torch.tensor
    return tree_map(lambda leaf: leaf.index_select(0, where.to(leaf.device)), examples)


def join(parts: Sequence[Any]) -> Any:
    """Concatenate examples in one form; raise if they differ in form, structure, shape or dtype."""
    if all(isinstance(part, PerExample) for part in parts):
        return concatenated(parts)
    kinds = [None if isinstance(part, PerExample) else _kind(part) for part in parts]
    other = next((k for k, kind in enumerate(kinds) if kind != kinds[0]), None)
    if other is not None:
        if None in (kinds[0], kinds[other]):
            raise ValueError(
                "The examples of a set are kept in batches of tensors, or one by one with a collate "
                "function; found both. Pass collate= in every call, or in none, or use another name."
            )
        raise ValueError(
            f"Examples of a set must be alike. One batch has {kinds[0]}, another one {kinds[other]}. For "
            "examples that differ in length pass the loader itself, whose collate_fn pads them, or a data "
            "set or list of examples with collate=: they are then kept unchanged."
        )
    return concatenated(parts)


def concatenated(parts: Sequence[Any]) -> Any:
    """Concatenate examples in one form, which are alike up to their shapes."""
    if len(parts) == 1:
        return parts[0]
    if isinstance(parts[0], PerExample):
        return PerExample(itertools.chain(*parts))

    def joined(*leaves: Tensor) -> Tensor:
        if any(leaf.dtype != leaves[0].dtype for leaf in leaves):
            raise ValueError("examples differ in dtype")
        return torch.cat([leaf.to(leaves[0].device) for leaf in leaves])

    return tree_map(joined, *parts)


def _kind(batch: Batch) -> str:
    """Return the structure of a batch, with the shapes and dtypes of its examples."""
    return str(map_nested(lambda leaf: (tuple(leaf.shape[1:]), str(leaf.dtype)), _ordered(batch)))


def owned(examples: Any) -> Any:
    """Return a copy of examples that later changes do not reach; raise for types that cannot be stored."""
    with torch.inference_mode(False):  # inference tensors cannot be used in training
        if isinstance(examples, PerExample):
            return PerExample(map_nested(_copied, one, _is_plain_list) for one in examples)
        tensors_of(examples)  # raises unless it is a batch
        return map_nested(lambda leaf: leaf.detach().clone(), examples)


def _is_plain_list(value: Any) -> bool:
    """Return whether a value is a list of numbers or strings, such as tokens; it is copied as a whole."""
    return type(value) is list and _PLAIN.issuperset(map(type, value))


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.detach().clone()
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
