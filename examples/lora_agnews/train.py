"""The loop: one method learns the stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from gemproj.torch import EpisodicMemory, GradientProjector

from ..common.batch import Batch, batches, by_length, parts
from .backbone import batch_loss
from .config import Config
from .methods import Method, all_tasks
from .record import Recorder


def learn(
    config: Config, method: Method, seed: int, model: nn.Module, tasks: Sequence[Batch], record: Recorder
) -> None:
    """Learn one task after the other: the loop to copy. What `record` does only measures."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=config.lr)
    memory = EpisodicMemory(config.per_task, "labels", seed, policy=method.policy)
    shuffler = torch.Generator().manual_seed(seed)
    projector = GradientProjector(trainable, **method.options(config))
    if projector.on != "gradient":  # from now on, the steps of the optimizer are projected
        projector.attach(optimizer)
    record.start(trainable, memory, projector, holds_all_tasks=method.constrained is all_tasks)

    for k, task in enumerate(tasks):
        projector.reset()  # other constraints, no warm start
        for batch in batches(task, config.batch_size, config.epochs, shuffler):
            record.begin_step()
            with record.time("batch"):
                optimizer.zero_grad()
                backward(model, batch, config.microbatch)
                if method.replayed and len(memory):
                    for stored in method.replayed(memory, config):
                        backward(model, stored, config.microbatch, method.weight(config))

            if method.constrained and len(memory):
                with record.time("constraints"):
                    past = [by_length(part, config.microbatch) for part in method.constrained(memory, config)]
                    projector.recall(model, past, batch_loss, microbatch=config.microbatch)
                if projector.on == "gradient":
                    with record.time("projection"):
                        projector.project_()

            record.before_update()
            with record.time("optimizer"):
                optimizer.step()
            record.after_update()
        memory.add(task, k)
        record.end_task()


def backward(model: nn.Module, batch: Batch, microbatch: int, weight: float = 1.0) -> None:
    """Add the gradient of the mean loss times a weight to ``.grad``, with the graph of one part at a time."""
    for part in parts(batch, microbatch):
        share = len(part["labels"]) / len(batch["labels"])
        (weight * (batch_loss(model, part) * share)).backward()
