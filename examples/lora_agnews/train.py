"""The training loop: one method learns the stream."""

from collections.abc import Sequence

import torch
from torch import nn
from torch.utils.data import default_collate

from gemproj.torch import Keeper, Promise

from ..common.batch import Batch, batches, parts
from ..common.memory import Memory, seed_draws
from .backbone import batch_loss
from .config import Config
from .methods import Method
from .record import Recorder


def learn(
    config: Config, method: Method, seed: int, model: nn.Module, tasks: Sequence[Batch], record: Recorder
) -> None:
    """Learn one task after the other. To copy the loop, leave out `record`, which watches the optimizer."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=config.lr)
    memory = Memory(config.per_task, seed, method.policy)
    shuffler = torch.Generator().manual_seed(seed)
    record.watch(optimizer, memory.tasks)
    keeper = None
    if method.promise:
        promise = Promise(batch_loss, **method.promise(config))
        options = {"on": method.on, "method": method.method(config), "microbatch": config.microbatch}
        keeper = Keeper(model, optimizer, promise, **options)
        seed_draws(keeper, seed)
    record.watch_keeper(optimizer, keeper)

    for k, task in enumerate(tasks):
        for batch in batches(task, config.batch_size, config.epochs, shuffler):
            optimizer.zero_grad()
            backward(model, batch, config.microbatch)
            for stored in method.replayed(memory, config):
                backward(model, stored, config.microbatch, method.weight(config))
            optimizer.step()  # projected, if there is a keeper
        if keeper and method.policy == "reservoir":  # the keeper itself takes a uniform sample
            keeper.keep([task], name=k, limit=config.per_task)
            memory.tasks[k] = default_collate(keeper.sets[k].examples)
            continue
        memory.add(task, k)
        if keeper:
            keeper.keep([memory.tasks[k]], name="past" if method.together else k)


def backward(model: nn.Module, batch: Batch, microbatch: int, weight: float = 1.0) -> None:
    """Add the gradient of `weight` times the mean loss to ``.grad``, with the graph of one part at a time."""
    for part in parts(batch, microbatch):
        share = len(part["labels"]) / len(batch["labels"])
        (weight * (batch_loss(model, part) * share)).backward()
