"""Storing examples of a task, with what a promise about them needs to know of the model as it is now."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset, IterableDataset

from gemproj.torch.batches import Batch, Remembered, count_examples, parts
from gemproj.torch.constraint_gradients import preserved_state, reshard, unwrapped
from gemproj.torch.distributed import Replicated
from gemproj.torch.losses import call_loss, explained
from gemproj.torch.memory import EpisodicMemory
from gemproj.torch.parameters import ParameterVector

# Most batches that are read where there is no length: a stream may have no end.
_MOST_BATCHES = 100_000
# The loss is tried on so many examples: of one, some losses squeeze the dimension of the examples away.
_TRIED = 2
# Data sets of Hugging Face, which are not torch's.
_DATASETS = {
    "datasets.arrow_dataset.Dataset",
    "datasets.iterable_dataset.IterableDataset",
    "datasets.dataset_dict.DatasetDict",
    "datasets.dataset_dict.IterableDatasetDict",
}


def remember(memory, batches, task, model, promise, *, collate=None, microbatch=None, process_group=None):
    loss, bound, rows, group = promise.loss, promise.tolerance, promise.examples, process_group
    if task is None:
        task = next(k for k in itertools.count(len(memory)) if k not in memory.tasks)
    outputs, bounded = getattr(loss, "outputs", None), bound is not None
    evaluated = bounded or outputs is not None
    draft = memory.draft(task)
    if model is None:
        if evaluated:
            raise ValueError("model is needed: outputs or losses of the examples are to be stored.")
        _add_all(draft, batches, task)
        memory.adopt(draft, task)
        return task
    model, parallel = unwrapped(model)
    reshard(model)
    vector = ParameterVector.of(_trainable(model), group)
    if parallel is not None and vector.topology.world == 1:
        vector.topology = Replicated(vector.device, parallel.process_group)
    topology = vector.topology
    with topology.agreement({"option bound": bounded, "option microbatch": microbatch}):
        if evaluated and task in draft.tasks:
            draft.record(task)  # drops what is computed anew for all of its examples
        _add_all(draft, batches, task)
    source = draft.source(task)
    home = tree_leaves(source.fetch(slice(0, 1)))[0].device
    _, (most,) = topology.plan([source.size])
    model = model if evaluated else getattr(model, "_orig_mod", model)  # a trial is no reason to compile

    # Shards cannot tell each other of an error, and try again.
    tried = not (evaluated or topology.collective)
    trainable = any(p.requires_grad for p in model.parameters())

    def evaluate(size: int) -> None:
        found, losses = [], []
        some = source._replace(size=min(source.size, size)).to(vector.device)
        with topology.passes(), preserved_state(model, vector.device), torch.no_grad():
            for part, n in parts(some, microbatch, min(most, size)):
                with explained(part):
                    stored = () if outputs is None else outputs(model, part)
                found.append(tree_map(lambda leaf, n=n: leaf[:n].to(home), stored))
                if bounded or len(found) == 1:
                    with torch.set_grad_enabled(tried):
                        value = call_loss(loss, model, Remembered(part, stored) if evaluated else part)
                    if tried and trainable and not value.requires_grad:
                        raise ValueError(
                            "loss(model, batch) has no gradient: it does not depend on trainable parameters "
                            "of the model, or runs under torch.no_grad() or detach()."
                        )
                if bounded:
                    losses.append(_one_each(value, part)[:n])
            if evaluated:
                joined = None if outputs is None else tree_map(lambda *leaves: torch.cat(leaves), *found)
                draft.record(task, outputs=joined, losses=torch.cat(losses).to(home) if bounded else None)

    size = max(source.size, most) if evaluated or rows is None else rows
    if not tried:
        evaluate(size)
    else:
        try:
            evaluate(_TRIED)
        except Exception:  # also of another process
            evaluate(size)
    reshard(model)
    memory.adopt(draft, task)
    return task


def _trainable(model: torch.nn.Module) -> list[Tensor]:
    """Return the trainable parameters; of a frozen model one that stands for all of them."""
    held = [p for p in model.parameters() if p.is_floating_point()]
    return [p for p in held if p.requires_grad] or [p.detach().requires_grad_() for p in held[:1]]


def _add_all(memory: EpisodicMemory, batches: Iterable[Batch], task: Hashable) -> None:
    """Offer all examples to the memory; raise where a new task has none, or where these are not batches."""
    _check_batches(batches)
    for count, batch in enumerate(batches):
        if count == _MOST_BATCHES and not _has_length(batches):
            raise ValueError(
                f"batches have no length, and no end after {_MOST_BATCHES:,} of them. Pass as many as are "
                "wanted: itertools.islice(batches, n)."
            )
        memory.add(batch, task)
    if task not in memory.tasks:
        raise ValueError(
            "batches hold no example. An iterator can be read once only: pass the loader itself."
        )


def _has_length(batches: Any) -> bool:
    try:
        return len(batches) >= 0
    except TypeError:  # also of a loader, whose data set has none
        return False


def _check_batches(batches: Any) -> None:
    """Raise for what is often passed instead of an iterable of batches."""
    name = type(batches).__name__
    tensors = isinstance(batches, tuple | list) and all(isinstance(part, Tensor) for part in batches)
    # Batches that are tensors are alike; so tensors that are not are the parts of one batch.
    kinds = {(part.shape[1:], part.dtype) for part in batches} if tensors else ()
    one = tensors and (len(kinds) > 1 or (isinstance(batches, tuple) and len(batches) > 1))
    hugging_face = any(
        f"{kind.__module__}.{kind.__qualname__}" in _DATASETS for kind in type(batches).__mro__
    )
    if hugging_face or (isinstance(batches, Dataset) and not isinstance(batches, IterableDataset)):
        raise TypeError(
            f"batches must be an iterable of batches; found a data set, {name}, which has single examples. "
            "Pass DataLoader(dataset, batch_size=32), or batch_size=None if it has batches."
        )
    if one or isinstance(batches, Tensor | Mapping):
        raise TypeError(
            f"batches must be an iterable of batches, such as a loader; found one batch, of type {name}. "
            "Pass [batch]."
        )
    if not isinstance(batches, Iterable) and not hasattr(batches, "__getitem__"):
        loader = " Pass trainer.get_train_dataloader()." if hasattr(batches, "get_train_dataloader") else ""
        raise TypeError(f"batches must be an iterable of batches, such as a loader; found {name}.{loader}")


def _one_each(losses: Tensor, batch: Batch) -> Tensor:
    if losses.shape != (count_examples(batch),):
        raise ValueError(
            f"bound needs one loss for each example, shape ({count_examples(batch)},); found "
            f"{tuple(losses.shape)}. Compute it with reduction='none', or use CrossEntropy of "
            "gemproj.torch.losses."
        )
    return losses
