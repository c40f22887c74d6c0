"""One run: one method learns the stream under one seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gemproj.torch import EpisodicMemory, GradientProjector

from . import backbone, stream
from .backbone import batch_loss, logits
from .batch import Batch, batches, by_length, parts
from .config import Config
from .mega import MEGA
from .methods import METHODS, Method, all_tasks
from .record import Recorder, Schedule


def learn(
    config: Config, method: Method, seed: int, model: nn.Module, tasks: Sequence[Batch], record: Recorder
) -> None:
    """Learn one task after the other: the loop to copy. Whatever `record` does, learning is the same."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=config.lr)
    memory = EpisodicMemory(config.per_task, "labels", seed, policy=method.policy)
    shuffler = torch.Generator().manual_seed(seed)
    projector: Any = GradientProjector(trainable, **method.options(config))
    how = {"microbatch": config.microbatch}
    if method.balance:  # takes its sample whole
        projector, how = MEGA(trainable, method.balance), {}
    attached = projector.on != "gradient"
    if attached:  # from now on, the steps of the optimizer are projected
        projector.attach(optimizer)
    record.start(trainable, memory, projector, own=method.batches is all_tasks)

    step = 0
    for k, task in enumerate(tasks):
        projector.reset()  # other constraints, no warm start
        for batch in batches(task, config.batch_size, config.epochs, shuffler):
            step += 1
            record.begin_step(step)
            with record.time("batch"):
                optimizer.zero_grad()
                loss = backward(model, batch, config.microbatch)
                for stored in method.replayed(memory, config) if method.replayed and len(memory) else ():
                    backward(model, stored, config.microbatch, method.weight(config))

            if method.batches and len(memory) and step % config.projection_interval == 0:
                with record.time("constraints"):
                    references = method.batches(memory, config)
                    references = [by_length(part, config.microbatch) for part in references]
                    projector.recall(model, references, batch_loss, **how)
                if method.balance:
                    with record.time("projection"):
                        projector.balance_(loss)
                elif not attached:
                    with record.time("projection"):
                        projector.project_()
            elif attached:
                projector.reset()  # a step without constraints

            record.before_update()
            with record.time("optimizer"):
                optimizer.step()
            record.after_update()
        memory.add(task, k)
        record.end_task()


def backward(model: nn.Module, batch: Batch, microbatch: int, weight: float = 1.0) -> Tensor:
    """Add the gradient of the mean loss times a weight to ``.grad``; return the loss. One graph at a time."""
    loss = torch.zeros((), device=batch["labels"].device)
    for part in parts(batch, microbatch):
        share = batch_loss(model, part) * (len(part["labels"]) / len(batch["labels"]))
        (weight * share).backward()
        loss += share.detach()
    return loss


def run(
    config: Config,
    name: str,
    seed: int,
    experiences: Sequence[stream.Experience],
    folder: Path,
    on_step: Callable[[int, int, str], None] = lambda done, total, note: None,
) -> dict[str, Any]:
    """Learn the stream in an order of the seed's, from the backbone in the folder; return what was measured.

    `on_step` is told steps done, steps in total, and a word on where the run is.
    """
    model, tokenizer = backbone.load(folder, seed, config.dropout)
    model.to(config.device)
    tasks = [experiences[k] for k in stream.order(config.experiences, seed)]
    train, test = (
        [backbone.encode(getattr(task, part), tokenizer, config) for task in tasks]
        for part in ("train", "test")
    )
    record = Recorder(Schedule.of(config), model, train, test, on_step, batch_loss, logits)
    learn(config, METHODS[name], seed, model, train, record)
    return {"method": name, "seed": seed, "order": [task.name for task in tasks], **record.result()}
