"""The streams of the study by name; only the module of the requested stream is imported."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from ...common.batch import Batch
from ...common.command import SetupError, check_known

KINDS = dict.fromkeys(("permuted", "rotated", "split", "mnist1d"), "images")  # the module of each
KINDS |= {"agnews": "text", "files": "files"}


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
    check_known("stream", [name], KINDS)
    build = getattr(import_module(f"{__name__}.{KINDS[name]}"), name)
    try:
        signature(build).bind(seed, **options)
    except TypeError as error:
        possible = ", ".join(str(one) for one in list(signature(build).parameters.values())[1:])
        raise SetupError(f"stream {name!r}: {error}; its options are {possible}") from None
    for option in ("tasks", "rows", "hidden"):
        if options.get(option, 1) < 1:
            raise SetupError(f"{option} must be at least 1, got {options[option]}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(seed, **options)
