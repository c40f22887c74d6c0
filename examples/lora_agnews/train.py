"""The training loop: one method learns the stream."""

from collections.abc import Sequence

import torch
from torch import nn

from gemproj.torch import GEM, EpisodicMemory

from ..common.batch import Batch, batches, parts
from .backbone import batch_loss
from .config import Config
from .methods import Method
from .record import Recorder


def learn(
    config: Config, method: Method, seed: int, model: nn.Module, tasks: Sequence[Batch], record: Recorder
) -> None:
    """Learn one task after the other. To copy the loop, leave out `record`, which watches the optimizer."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=config.lr)
    memory = EpisodicMemory(config.per_task, "labels", seed, policy=method.policy)
    shuffler = torch.Generator().manual_seed(seed)
    record.watch(optimizer, memory)
    gem = None
    if method.options:
        options = method.options(config)
        gem = GEM(model, optimizer, batch_loss, memory=memory, microbatch=config.microbatch, **options)
    record.watch_gem(optimizer, gem)

    for k, task in enumerate(tasks):
        for batch in batches(task, config.batch_size, config.epochs, shuffler):
            optimizer.zero_grad()
            backward(model, batch, config.microbatch)
            for stored in method.replayed(memory, config):
                backward(model, stored, config.microbatch, method.weight(config))
            optimizer.step()  # projected, if there is a GEM
        if gem:
            gem.end_task([task], k)
        else:
            memory.add(task, k)


def backward(model: nn.Module, batch: Batch, microbatch: int, weight: float = 1.0) -> None:
    """Add the gradient of `weight` times the mean loss to ``.grad``, with the graph of one part at a time."""
    for part in parts(batch, microbatch):
        share = len(part["labels"]) / len(batch["labels"])
        (weight * (batch_loss(model, part) * share)).backward()
