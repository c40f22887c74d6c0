"""The streams of the study by name; only the module of the requested stream is imported."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from ...common.batch import Batch

KINDS = dict.fromkeys(("permuted", "rotated", "split", "mnist1d"), "images")  # the module of each
KINDS["agnews"] = "text"


@dataclass(frozen=True)
class Task:
    """The examples of one task."""

    name: str
    train: Batch
    test: Batch


@dataclass(frozen=True)
class Stream:
    """Tasks in the order of a seed, with a model that the seed has initialised."""

    tasks: Sequence[Task]  # examples of all tasks have the same shapes: memories mix them
    model: nn.Module  # only parameters that require a gradient are learned
    logits: Callable[[nn.Module, Batch], Tensor]  # of shape (n, classes)
    hashes: Mapping[str, str]  # of the data, and of the backbone if there is one


def load(name: str, seed: int, **options: Any) -> Stream:
    """Return the stream of this kind for a seed.

    The model is initialised with torch's generator, whose state is then restored. Seed the generator before
    training with dropout.

    Examples
    --------
    >>> stream = load("permuted", seed=0, tasks=3, rows=20, hidden=8)
    >>> [task.name for task in stream.tasks]
    ['permutation 1', 'permutation 2', 'permutation 3']
    >>> stream.logits(stream.model, stream.tasks[0].train).shape
    torch.Size([20, 10])
    """
    build = getattr(import_module(f"{__name__}.{KINDS[name]}"), name)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(seed, **options)
