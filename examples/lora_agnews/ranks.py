"""Several processes that learn as one, where torchrun has started them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def start(device: str) -> None:
    """Join the processes that torchrun has started, if it has."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("nccl" if device != "cpu" and torch.cuda.is_available() else "gloo")


def stop() -> None:
    """Leave them."""
    if dist.is_initialized():
        dist.destroy_process_group()


def rank() -> int:
    """Return the number of this process; 0 reads and writes for all."""
    return dist.get_rank() if dist.is_initialized() else 0


def count() -> int:
    """Return the number of processes."""
    return dist.get_world_size() if dist.is_initialized() else 1


@contextmanager
def first_goes_ahead() -> Iterator[None]:
    """Let the first process do a block before the others, which then find what it has left."""
    if count() > 1 and rank() > 0:
        dist.barrier()
    yield
    if count() > 1 and rank() == 0:
        dist.barrier()


def as_the_first(value: T) -> T:
    """Return what the first process has."""
    shared: list[Any] = [value]
    if count() > 1:
        dist.broadcast_object_list(shared)
    return shared[0]


def share(batch: dict[str, Tensor]) -> tuple[dict[str, Tensor], float]:
    """Return this process's part of a batch, and the weight of its mean where means are averaged."""
    n = len(batch["labels"])
    mine = {name: values[rank() :: count()] for name, values in batch.items()}
    size = len(mine["labels"])
    if size == 0:  # too few for all: take part with any row, at no weight
        return {name: values[:1] for name, values in batch.items()}, 0.0
    return mine, count() * size / n


def learner(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model to learn with: its gradients are averaged over the processes."""
    return torch.nn.parallel.DistributedDataParallel(model) if count() > 1 else model
