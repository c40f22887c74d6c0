"""Gradients of past tasks on what is remembered of them, in passing: the model is left as it was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gemproj.methods._method import check_count
from gemproj.torch.batches import Batch, Loss, count_examples, parts
from gemproj.torch.constraints import ConstraintRows, check_loss
from gemproj.torch.distributed import agree, gather_counts
from gemproj.torch.layout import Layout
from gemproj.torch.one_pass import Choice, Pass, kind_of, one_pass


def model_loss(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Return the loss that a model of transformers computes itself: ``model(**batch).loss``."""
    if not isinstance(batch, Mapping):
        raise TypeError(
            "Without a loss, batches must be mappings, for model(**batch).loss; found "
            f"{type(batch).__name__}. Pass loss, a function of model and batch."
        )
    return model(**batch).loss


def recall(
    rows: ConstraintRows,
    model: torch.nn.Module,
    batches: Iterable[Batch],
    loss: Loss,
    *,
    microbatch: int | None,
    training: bool,
    choice: Choice,
) -> None:
    """Fill the rows with the gradients of the mean losses on `batches`; see `GradientProjector.recall`.

    Of several processes, each has its own examples of the same tasks. What goes wrong on one of them is an
    error on all, and leaves no rows.
    """
    layout = rows.layout
    group, several = layout.group, layout.several
    rows.clear()
    tasks: list[Batch] = []
    counts: list[int] = []
    failed: Exception | None = None
    try:
        if microbatch is not None:
            check_count(microbatch, "microbatch", 1)
        _check_belongs(model, layout)
        if not callable(loss):
            raise TypeError(f"loss must be a function of model and batch; found {type(loss).__name__}.")
        if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
            raise TypeError(
                "batches must be an iterable of batches, one per past task, such as memory.batches() or "
                f"[memory.sample(n)]; found {type(batches).__name__}."
            )
        tasks = list(batches)
        counts = [_count(batch, k) for k, batch in enumerate(tasks)]
    except Exception as error:
        if not several:
            raise
        failed = error
    everyone = [counts]
    if several:
        agree({"past tasks": len(tasks)} | layout.signature(), layout.device, group, failed)
        everyone = gather_counts(counts, layout.device, group)
    totals = [sum(column) for column in zip(*everyone, strict=True)]
    if 0 in totals or (layout.sharded and any(0 in row for row in everyone)):
        raise ValueError(f"batches must have examples of every past task; found {counts}.")
    # FSDP averages over processes what data parallelism adds up.
    scale = len(everyone) if layout.sharded else 1

    def task_by_task() -> list[bool]:
        rows.open(len(tasks))
        for k, batch in enumerate(tasks):
            # Where parameters are sharded, no process can compute without all the others.
            most = max(row[k] for row in everyone) if layout.sharded else counts[k]
            for part, n in parts(batch, counts[k], microbatch, most):
                rows.add(k, _mean(loss(model, part)), scale * n / totals[k])
            if not counts[k]:
                rows.skip(k)
        return rows.reaching

    def together() -> Pass:
        matrix = rows.open(len(tasks))
        views = zip(matrix.split(layout.sizes, 1), layout.parameters, strict=True)
        found = one_pass(model, loss, tasks, layout.parameters, [v.unflatten(1, p.shape) for v, p in views])
        for row, count, whole in zip(matrix, counts, totals, strict=True):
            if count != whole:
                row.mul_(count / whole)
        return found

    large = microbatch is not None and sum(counts) > microbatch
    alone = not choice.one_pass or layout.sharded or 0 in counts or large
    reached: list[bool] = []
    try:
        if layout.sharded:
            _reshard(model)
        with in_passing(model, layout.device, training):
            if alone:
                reached = task_by_task()
            else:
                matrix = rows.open(len(tasks))
                reached = choice.fill(kind_of(model, tasks), matrix, task_by_task, together)
    except Exception as error:
        if layout.sharded or not several:
            raise
        failed = error
    if several and not layout.sharded:
        agree({}, layout.device, group, failed)
    rows.close(len(tasks), reached)
    if layout.sharded:
        rows.sum_losses(group, 1 / scale)
    elif several:
        rows.sum_over(group)


def constrain(rows: ConstraintRows, losses: Iterable[Tensor]) -> None:
    """Fill the rows with the gradients of losses that are given; see `GradientProjector.constrain`."""
    layout, count = rows.layout, 0
    failed: Exception | None = None
    if not layout.several:
        rows.fill(losses)
        return
    rows.clear()
    if layout.sharded and not isinstance(losses, Sequence):
        raise TypeError(
            "losses must be a list where parameters are sharded: processes that disagree on its length would "
            f"wait for each other; found {type(losses).__name__}. Or use recall."
        )
    try:
        if isinstance(losses, Sequence) and layout.sharded:
            count = len(losses)
            for k, loss in enumerate(losses):
                check_loss(k, loss)
        else:
            count = rows.write(losses)
    except Exception as error:
        failed = error
    agree({"losses": count} | layout.signature(), layout.device, layout.group, failed)
    if layout.sharded:
        rows.fill(losses)
    else:
        rows.close(count, rows.reaching)
        rows.sum_over(layout.group, 1 / dist.get_world_size(layout.group))


@contextmanager
def in_passing(model: torch.nn.Module, device: torch.device, training: bool) -> Iterator[None]:
    """Put gradients, modes and random state back afterwards; without `training`, dropout is off meanwhile."""
    kept = [(p, p.grad) for p in model.parameters() if p.requires_grad]
    modes = [module for module in model.modules() if module.training]
    # Each CUDA or XPU device has a state of its own; Apple's has none that can be put back like that.
    own = device.type in ("cuda", "xpu")
    fork = torch.random.fork_rng([device] if own else [], device_type=device.type if own else "cuda")
    with fork, torch.enable_grad():
        try:
            for p, _ in kept:
                p.grad = None
            if not training:
                for module in modes:
                    module.training = False
            yield
        finally:
            for p, gradient in kept:
                p.grad = gradient
            for module in modes:
                module.training = True


def _check_belongs(model: torch.nn.Module, layout: Layout) -> None:
    mine = {id(p) for p in layout.parameters}
    # FSDP replaces parameters while they are gathered.
    if not layout.sharded and not any(id(p) in mine for p in model.parameters()):
        raise ValueError(
            "model has none of the parameters of this projector. Make the projector of the model's own "
            "parameters, and after fully_shard, which replaces them."
        )


def _reshard(model: torch.nn.Module) -> None:
    """Let FSDP give up what an evaluation has gathered: the parameters are the model's own again."""
    for module in model.modules():
        if callable(getattr(module, "reshard", None)):
            module.reshard()  # type: ignore[operator]


def _count(batch: Batch, k: int) -> int:
    try:
        return count_examples(batch)
    except (TypeError, ValueError) as error:
        raise type(error)(f"batches[{k}]: {error}") from None


def _mean(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"loss(model, batch) must return a tensor; found {type(value).__name__}.")
    return value.mean()
