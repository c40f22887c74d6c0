"""One run: one method learns the stream under one seed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from gemproj import project
from gemproj.torch import EpisodicMemory, GradientProjector

from . import backbone, metrics, ranks
from .config import Config
from .measure import Clock, Gauge
from .methods import METHODS
from .stream import Experience, Split, order

Batch = dict[str, Tensor]
PHASES = ("batch", "constraints", "projection", "optimizer")


def run(
    config: Config,
    method_name: str,
    seed: int,
    stream: Sequence[Experience],
    folder: Path,
    on_step: Callable[[int, int, str], None] = lambda done, total, note: None,
) -> dict[str, Any]:
    """Learn the stream and measure everything on the way.

    Parameters
    ----------
    config, method_name, seed
        What to run.
    stream
        The experiences, in their own order; the seed shuffles it.
    folder
        The backbone.
    on_step
        Called with steps done, steps in total, and a word on where the run is.

    Returns
    -------
    dict
        Plain numbers only: ``accuracies`` (the matrix R), ``metrics``, ``curve``, ``guarantee``, ``seconds``.
    """
    method = METHODS[method_name]
    device = torch.device(config.device)
    model, tokenizer = backbone.load(folder, seed, config.dropout)
    model.to(device)
    learner = ranks.learner(model)
    tasks = [stream[k] for k in order(config.experiences, seed)]
    train = [encode(task.train, tokenizer, config.max_length, device) for task in tasks]
    test = [encode(task.test, tokenizer, config.max_length, device) for task in tasks]
    glimpse = [rows(part, slice(config.eval_rows)) for part in test]

    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=config.lr)
    memory = EpisodicMemory(per_task=config.per_task, label="labels", seed=seed)
    projector = GradientProjector(trainable, **method.projector(config))
    attached = projector.on != "gradient"
    if attached:
        projector.attach(optimizer)
    witness = projector if method.constraints == "tasks" else GradientProjector(trainable)
    gauge = Gauge(trainable, witness)
    d = sum(p.numel() for p in trainable)
    project(torch.ones(2, d, device=device), -torch.ones(d, device=device))  # what it compiles is not timed
    shuffler = torch.Generator().manual_seed(seed)
    clock = Clock(device)

    def accuracies(parts: Sequence[Batch]) -> list[float]:
        return [accuracy(model, part, config.eval_batch_size) for part in parts]

    lengths = task_steps(config, tasks)
    R = [accuracies(test)]
    curve = [{"step": 0, "accuracy": accuracies(glimpse)}]
    step = 0
    for k, examples in enumerate(train):
        for batch in batches(examples, config.batch_size, config.epochs, shuffler):
            step += 1
            task_ends = step == sum(lengths[: k + 1])
            remembered = len(memory) > 0
            projecting = (
                remembered and method.constraints != "none" and step % config.projection_interval == 0
            )
            probing = remembered and (step % config.probe_interval == 0 or task_ends)

            with clock("batch"):
                loss = shared_loss(learner, batch)
                if method.replay and remembered:
                    loss = loss + shared_loss(learner, memory.sample(config.sample_size))
                optimizer.zero_grad()
                loss.backward()

            if projecting:
                with clock("constraints"):
                    projector.recall(
                        learner, stored(memory, method.constraints, config.sample_size), batch_loss
                    )
                if not attached:
                    with clock("projection"):
                        projector.project_(loss)
            elif attached:
                projector.reset()

            if probing:  # outside every timer: fine-tuning, A-GEM and replay do not need these gradients
                if not (projecting and witness is projector):
                    witness.recall(learner, stored(memory, "tasks", 0), batch_loss)
                gauge.before_step()

            with clock("optimizer"):
                optimizer.step()
            if attached and projecting and projector.last is not None:
                seconds = projector.last.seconds - clock.seconds["constraints"][-1]
                clock.move(seconds, "optimizer", "projection")

            if probing:
                gauge.after_step(step)
            if step % config.eval_interval == 0 or task_ends:
                curve.append({"step": step, "accuracy": accuracies(glimpse)})
            on_step(step, sum(lengths), f"task {k + 1}/{len(tasks)}")

        R.append(accuracies(test))
        memory.add(examples, task=k)
        projector.reset()
        if k == 0:
            clock.reset()  # until here every method is plain fine-tuning

    later_steps = sum(lengths[1:])
    projections = clock.seconds["projection"]
    return {
        "method": method_name,
        "seed": seed,
        "order": [task.name for task in tasks],
        "parameters": d,
        "accuracies": R,
        "metrics": {
            "average_accuracy": metrics.average_accuracy(R),
            "backward_transfer": metrics.backward_transfer(R),
            "forward_transfer": metrics.forward_transfer(R),
            "forgetting": metrics.forgetting(R),
        },
        "boundaries": [sum(lengths[: k + 1]) for k in range(len(lengths))],
        "curve": curve,
        "guarantee": {
            "probed_steps": len(gauge.probes),
            "gradient": metrics.guarantee([probe["gradient"] for probe in gauge.probes]),
            "update": metrics.guarantee([probe["update"] for probe in gauge.probes]),
            "probes": gauge.probes,
        },
        "seconds": {
            "per_step": {phase: sum(clock.seconds[phase]) / later_steps for phase in PHASES},
            "mean_projection": sum(projections) / len(projections) if projections else None,
            "median_projection": sorted(projections)[len(projections) // 2] if projections else None,
            "projections": len(projections),
        },
    }


def task_steps(config: Config, tasks: Sequence[Experience]) -> list[int]:
    """Return the number of training steps of each task."""
    return [config.epochs * -(-len(task.train.labels) // config.batch_size) for task in tasks]


def encode(split: Split, tokenizer: PreTrainedTokenizerBase, max_length: int, device: torch.device) -> Batch:
    """Return a split as one batch of tensors, padded to one length everywhere: memories can mix."""
    tokens = tokenizer(
        list(split.texts), truncation=True, max_length=max_length, padding="max_length", return_tensors="pt"
    )
    return {
        "input_ids": tokens["input_ids"].to(device),
        "attention_mask": tokens["attention_mask"].to(device),
        "labels": torch.tensor(split.labels, device=device),
    }


def rows(batch: Batch, which: slice | Tensor) -> Batch:
    """Select rows of a batch."""
    return {name: values[which] for name, values in batch.items()}


def batches(examples: Batch, size: int, epochs: int, generator: torch.Generator) -> Iterator[Batch]:
    """Yield shuffled batches, epoch after epoch."""
    for _ in range(epochs):
        for chosen in torch.randperm(len(examples["labels"]), generator=generator).split(size):
            yield rows(examples, chosen.to(examples["labels"].device))


def trim(batch: Batch) -> Batch:
    """Drop the columns in which every row is padding."""
    width = int(batch["attention_mask"].sum(dim=1).max())
    return {name: values if name == "labels" else values[:, :width] for name, values in batch.items()}


def batch_loss(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy on a batch."""
    return model(**trim(batch)).loss


def shared_loss(learner: torch.nn.Module, batch: Batch) -> Tensor:
    """Return the loss on this process's part of a batch, weighed so that processes average to the whole."""
    part, weight = ranks.share(batch)
    return weight * batch_loss(learner, part)


def stored(memory: EpisodicMemory, which: str, size: int) -> Iterator[Batch]:
    """Yield this process's part of what constrains a step; the same rows are stored on all."""
    if which == "sample":
        chosen = [memory.sample(size)]
    elif which == "task":
        chosen = [memory.batch(memory.draw_task())]
    else:
        chosen = list(memory.batches())
    for batch in chosen:
        yield rows(batch, slice(ranks.rank(), None, ranks.count()))


@torch.no_grad()
def accuracy(model: torch.nn.Module, examples: Batch, size: int) -> float:
    """Return the share of examples that the model classifies correctly."""
    model.eval()
    right = 0
    for chosen in torch.arange(len(examples["labels"])).split(size):
        batch = trim(rows(examples, chosen.to(examples["labels"].device)))
        labels = batch.pop("labels")
        right += int((model(**batch).logits.argmax(dim=1) == labels).sum())
    model.train()
    return right / len(examples["labels"])
