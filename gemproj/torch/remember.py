"""Storing examples of a task, with what a promise about them needs to know of the model as it is now."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gemproj.torch.batches import Batch, Loss, Remembered, count_examples, parts
from gemproj.torch.constraint_gradients import call_loss, preserved_state, reshard, unwrapped
from gemproj.torch.memory import EpisodicMemory
from gemproj.torch.zero import vector_of


def remember(
    memory: EpisodicMemory,
    batches: Iterable[Batch],
    task: Hashable,
    model: torch.nn.Module | None,
    loss: Loss,
    *,
    bounded: bool = False,
    microbatch: int | None = None,
    training: bool = False,
    group: Any = None,
) -> None:
    """Store examples of a task; of those kept, also the outputs that `loss` wants.

    With `bounded`, their losses are stored, too. The model may be None where nothing of it is stored.
    Other arguments are those of `gemproj.torch.GEM` and its `end_task`.
    """
    if task is None:
        task = next(k for k in itertools.count(len(memory)) if k not in memory.tasks)
    outputs = getattr(loss, "outputs", None)
    if not (bounded or outputs is not None):
        _add_all(memory, batches, task)
        return
    if model is None:
        raise ValueError("model is needed: outputs or losses of the examples are to be stored.")
    model, _ = unwrapped(model)
    reshard(model)
    vector = vector_of(model.parameters(), group)
    topology, device = vector.topology, vector.device
    with topology.agreement({}):
        if task in memory.tasks:
            memory.record(task)  # drops what is computed anew for all of its examples
        _add_all(memory, batches, task)
    batch = tree_map(lambda leaf: leaf.to(device), memory.batch(task))
    count = count_examples(batch)
    _, (most,) = topology.plan([count])
    found, losses = [], []
    with topology.passes(), preserved_state(model, device, training), torch.no_grad():
        for part, n in parts(batch, count, microbatch, most):
            stored = () if outputs is None else outputs(model, part)
            found.append(tree_map(lambda leaf, n=n: leaf[:n], stored))
            if bounded:
                losses.append(_one_each(call_loss(loss, model, Remembered(part, stored)), part)[:n])
    joined = None if outputs is None else tree_map(lambda *leaves: torch.cat(leaves), *found)
    memory.record(task, outputs=joined, losses=torch.cat(losses) if bounded else None)


def _add_all(memory: EpisodicMemory, batches: Iterable[Batch], task: Hashable) -> None:
    """Offer all examples to the memory; raise where a new task has none, or where these are not batches."""
    one = isinstance(batches, Tensor | Mapping) or (
        isinstance(batches, tuple) and len(batches) > 1 and all(isinstance(part, Tensor) for part in batches)
    )
    if one:
        raise TypeError(
            "batches must be an iterable of batches, such as a loader; found one batch, of type "
            f"{type(batches).__name__}. Pass [batch]."
        )
    for batch in batches:
        memory.add(batch, task)
    if task not in memory.tasks:
        raise ValueError(
            "batches hold no example. An iterator can be read once only: pass the loader itself."
        )


def _one_each(losses: Tensor, batch: Batch) -> Tensor:
    if losses.shape != (count_examples(batch),):
        raise ValueError(
            f"bound needs one loss for each example, shape ({count_examples(batch)},); found "
            f"{tuple(losses.shape)}. Compute it with reduction='none', or use CrossEntropy of "
            "gemproj.torch.losses."
        )
    return losses
