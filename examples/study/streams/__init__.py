"""The streams of the study by name; only what a stream needs is imported."""

from collections.abc import Mapping
from importlib import import_module
from inspect import signature
from typing import Any

import torch

from ...common.command import SetupError, check_known
from ..stream import Stream

KINDS = {  # module and function
    "permuted": ("digits", "permuted"),
    "rotated": ("digits", "rotated"),
    "split": ("digits", "split"),
    "mnist1d": ("signals", "mnist1d"),
    "agnews": ("news", "agnews"),
    "files": ("files", "files"),
}


def load(name: str, seed: int, **options: Any) -> Stream:
    """Return the stream of this kind as the seed meets it.

    The model is initialised with torch's generator, which afterwards is what it was before: whoever trains
    with dropout seeds it.

    Examples
    --------
    >>> stream = load("permuted", seed=0, tasks=3, rows=20, hidden=8)
    >>> [task.name for task in stream.tasks]
    ['permutation 1', 'permutation 2', 'permutation 3']
    >>> stream.logits(stream.model, stream.tasks[0].train).shape
    torch.Size([20, 10])
    """
    check_known("stream", [name], KINDS)
    module, function = KINDS[name]
    build = getattr(import_module(f"{__name__}.{module}"), function)
    try:
        signature(build).bind(seed, **options)
    except TypeError as error:
        possible = ", ".join(str(one) for one in list(signature(build).parameters.values())[1:])
        raise SetupError(f"stream {name!r}: {error}; its options are {possible}") from None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build(seed, **options)


def prepare(name: str, **options: Any) -> Mapping[str, str]:
    """Make what this stream keeps in the user's cache, if it is not there yet; return the stream's hashes.

    Called before several processes load the stream, it saves each of them the same work.
    """
    return load(name, 0, **options).hashes
