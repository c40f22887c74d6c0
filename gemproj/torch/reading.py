"""Readers of loaders, data sets, and iterables of batches or of examples."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from gemproj.torch.batches import Collate, flatten

# Maximum number of batches to read from data without a length, because a stream may have no end.
_MOST_BATCHES = 100_000
# Number of examples offered to the memory at a time.
_SOME = 64
# Hugging Face data sets, which are not subclasses of torch's data sets.
_SETS = {"datasets.arrow_dataset.Dataset", "datasets.iterable_dataset.IterableDataset"}
_DICTS = {"datasets.dataset_dict.DatasetDict", "datasets.dataset_dict.IterableDatasetDict"}
# Loaders that make batches of examples in the same way as torch's `DataLoader`.
_ITERATED = ("DataLoader.__iter__", "DataLoaderShard.__iter__")


def read(data: Any, collate: Collate | None) -> tuple[Iterator[Any], Collate | None]:
    """Return an iterator over batches of tensors and None, or over lists of examples and a collate function.

    `data` and `collate` are those of `gemproj.torch.GEM.keep`.
    """
    _check(data, collate)
    if isinstance(data, DataLoader):
        chunks, collate = _from_loader(data, collate)
    elif collate is not None:
        chunks = _lists(data)
    elif _is_indexed(data) or _is_kind(data, _SETS):
        chunks, collate = _from_set(data)
    else:
        chunks = iter(data)
    return _ending(chunks, data), collate


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
    if not given and (own is default_collate or not as_torch or _hands_on(own)):
        return iter(loader), None
    streamed = isinstance(loader.dataset, IterableDataset)
    how = ["batch_size", "drop_last"] if streamed else ["batch_sampler"]
    how += ["num_workers", "worker_init_fn", "multiprocessing_context", "timeout", "generator"]
    options: dict[str, Any] = {name: getattr(loader, name) for name in how}
    kinds = getattr(loader, "rng_types", None)
    if kinds is not None:  # an Accelerate loader: all processes draw the same order, and each takes a part
        from accelerate.utils import synchronize_rng_states

        synchronize_rng_states(kinds, loader.synchronized_generator)  # type: ignore[attr-defined]
    return iter(DataLoader(loader.dataset, collate_fn=list, **options)), collate if given else own


def _apart(loader: Any) -> Any:
    """Copy a loader with persistent workers, because iterating over the loader would end a running epoch."""
    other = object.__new__(type(loader))  # copy.copy of an Accelerate loader returns a torch loader
    other.__dict__.update(loader.__dict__, _iterator=None)
    if hasattr(loader, "base_dataloader"):
        other.__dict__["base_dataloader"] = _apart(loader.base_dataloader)
    return other


def _hands_on(collate: Collate) -> bool:
    """Return whether a collate function returns its first element; if so, the elements are batches."""
    probe = object()
    try:
        return collate([probe]) is probe
    except Exception:
        return False


def _from_set(data: Any) -> tuple[Iterator[Any], Collate | None]:
    """Read a data set with torch's `default_collate`: collate now if tensors result, otherwise at draws."""
    lists = _lists(data)
    first = next(lists, [])
    if not first:
        return lists, None
    lists = itertools.chain([first], lists)
    try:
        flatten(_collated(first))
    except TypeError:  # raised for text, for example
        return lists, default_collate
    return map(_collated, lists), None


def _collated(examples: list[Any]) -> Any:
    try:
        return default_collate(examples)
    except (RuntimeError, TypeError, KeyError) as error:
        raise ValueError(
            "torch's default_collate cannot make a batch of the examples of the data set. Pass collate=, a "
            "function of a list of examples, such as the data collator of training; or a DataLoader "
            "with such a function."
        ) from error


def _ending(chunks: Iterator[Any], data: Any) -> Iterator[Any]:
    """Yield chunks; raise if data without a length exceed the maximum number of batches."""
    for count, chunk in enumerate(chunks):
        if count == _MOST_BATCHES and not _has_length(data):
            raise ValueError(
                f"data has no length, and no end after {_MOST_BATCHES:,} batches. Pass a limited "
                "number: itertools.islice(batches, n)."
            )
        yield chunk


def _lists(data: Any) -> Iterator[list[Any]]:
    """Return an iterator over lists of at most `_SOME` elements of a data set or of an iterable."""
    elements = (data[i] for i in range(len(data))) if _is_indexed(data) else iter(data)
    return iter(lambda: list(itertools.islice(elements, _SOME)), [])


def _has_length(data: Any) -> bool:
    try:
        return len(data) >= 0
    except TypeError:  # raised also by a loader whose data set has no length
        return False


def _is_indexed(data: Any) -> bool:
    """Return whether data are a map-style data set of torch, whose elements are examples."""
    return isinstance(data, Dataset) and not isinstance(data, IterableDataset)


def _is_kind(data: Any, names: set[str]) -> bool:
    return any(f"{kind.__module__}.{kind.__qualname__}" in names for kind in type(data).__mro__)


def _check(data: Any, collate: Collate | None) -> None:
    """Raise for objects that are often passed by mistake."""
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
    if not isinstance(data, Iterable) and not hasattr(data, "__getitem__"):
        loader = " Pass trainer.get_train_dataloader()." if hasattr(data, "get_train_dataloader") else ""
        raise TypeError(f"{wanted}; found {name}.{loader}")
