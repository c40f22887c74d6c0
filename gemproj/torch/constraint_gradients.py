"""Constraint gradients: the gradients of the losses on the stored examples of past tasks."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from gemproj.methods._method import check_count
from gemproj.torch.batches import Batch, Loss, Remembered, count_examples, output_of, parts
from gemproj.torch.bound import rounding
from gemproj.torch.constraints import ConstraintMatrix, check_loss
from gemproj.torch.parameters import mesh_of

Refresh = Literal["all", "cyclic", "rising"]


def model_loss(model: torch.nn.Module, batch: Batch) -> Tensor:
    """Return the loss that a model of transformers computes itself: ``model(**batch).loss``."""
    return output_of(model, batch, "loss")


def unwrapped(model: torch.nn.Module) -> tuple[torch.nn.Module, DistributedDataParallel | None]:
    """Return the module to compute gradients with, and the DistributedDataParallel around it, if any.

    That one's own forward pass would expect a backward pass that reduces ``.grad``.
    """
    inner = getattr(model, "_orig_mod", model)  # of torch.compile
    if isinstance(inner, DistributedDataParallel):
        return inner.module, inner
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        raise ValueError(
            "model has a part that is wrapped in DistributedDataParallel, by which its processes cannot be "
            "found. Wrap the whole model, and pass what that returns."
        )
    return model, None


def reshard(model: torch.nn.Module) -> None:
    """Give parameters back that FSDP has gathered, as an evaluation leaves them."""
    for module in model.modules():
        if callable(getattr(module, "reshard", None)):
            module.reshard()  # type: ignore[operator]


def check_whole(model: torch.nn.Module) -> None:
    """Raise for a model whose processes would have to work together."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module; found {type(model).__name__}.")
    if unwrapped(model)[1] is not None or any(mesh_of(p) is not None for p in model.parameters()):
        raise ValueError(
            "model is wrapped in DistributedDataParallel or sharded, and its processes would remember "
            "different things. Pass the replica itself (model.module), and the same batches on every process."
        )


def from_batches(
    G: ConstraintMatrix,
    model: torch.nn.Module,
    batches: Iterable[Batch],
    loss: Loss,
    *,
    microbatch: int | None = None,
    training: bool = False,
    scale: float = 1.0,
    names: Sequence[Any] = (),
    smoothing: float = 0.0,
    refresh: Refresh = "all",
    turn: int = 0,
    tolerance: float | None = None,
) -> list[int]:
    """Fill G with the gradients of the mean losses on `batches`; see `GradientProjector.recall`.

    An error on one process is an error on all of them, and leaves no rows.

    Returns
    -------
    list of int
        The rows that are new: all where their number has changed; otherwise as `refresh` says, with
        "cyclic" the one whose `turn` it is, and with "rising" and a `tolerance` only those that exceed
        their bounds by more than that.
    """
    topology = G.vector.topology
    numbers = {"past tasks": 0, "names": _digest(names)} | G.vector.signature()
    before, kept = len(G), G.kept()
    G.clear()
    with topology.agreement(numbers):
        _check(G, model, batches, loss, microbatch)
        tasks = list(batches)
        counts = [_count(batch, k) for k, batch in enumerate(tasks)]
        numbers["past tasks"] = len(tasks)
    totals, passes = topology.plan(counts)
    same, due = before == len(tasks), list(range(len(tasks)))

    def weighted(k: int) -> Iterator[tuple[Batch, Tensor, float]]:
        for part, n in parts(tasks[k], counts[k], microbatch, passes[k]):
            yield part, call_loss(loss, model, part).mean(), topology.weight(n, totals[k])

    if same and due and refresh == "cyclic":
        due = [turn % len(tasks)]
    elif same and due and refresh == "rising":
        now = torch.zeros_like(kept.values[0])
        with topology.passes(), preserved_state(model, G.vector.device, training), torch.no_grad():
            for k in due:
                for _, value, weight in weighted(k):
                    now[k] += weight * value
        losses = topology.sum_values(now)
        _, last, bounds = kept.values
        least = last if tolerance is None else torch.maximum(last, bounds + tolerance)
        # Not "greater": a row whose loss is NaN is due, too, and then an error.
        risen = ~(losses <= least + rounding(losses, G.vector.dtype))
        due = torch.nonzero(risen).flatten().tolist()
        kept = kept._replace(values=torch.stack([losses, losses, bounds]))
    with topology.passes(), preserved_state(model, G.vector.device, training):
        G.open(len(tasks), smoothing if same else 0.0, scale)
        for k in due:
            for part, value, weight in weighted(k):
                stored = isinstance(part, Remembered) and "losses" in part.fields
                G.add(k, value, weight, part.losses.mean() if stored else None)
    G.close(len(tasks), due, kept)
    return due


def from_losses(G: ConstraintMatrix, losses: Iterable[Tensor]) -> None:
    """Fill G with the gradients of given losses, averaged over processes; see `constrain`."""
    topology = G.vector.topology
    numbers = {"losses": 0} | G.vector.signature()
    weight = topology.weight(1, topology.world)
    G.clear()
    if topology.collective and not isinstance(losses, Sequence):
        raise TypeError(
            "losses must be a list where parameters are sharded: processes that disagree on its length would "
            f"wait for each other; found {type(losses).__name__}. Or use recall."
        )
    with topology.agreement(numbers):
        if topology.collective:  # they agree before the first backward pass
            for k, loss in enumerate(losses):
                check_loss(k, loss)
                numbers["losses"] = k + 1
        else:
            numbers["losses"] = _add_all(G, losses, weight)
    if topology.collective:
        _add_all(G, losses, weight)
    G.close(numbers["losses"])


@contextmanager
def preserved_state(model: torch.nn.Module, device: torch.device, training: bool = False) -> Iterator[None]:
    """Restore ``.grad``, module modes and torch's random state; evaluation mode unless `training`."""
    reshard(model)
    kept = [(p, p.grad) for p in model.parameters() if p.requires_grad]
    modes = [module for module in model.modules() if module.training]
    # Each CUDA or XPU device has a generator of its own; that of MPS cannot be restored.
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


def _add_all(G: ConstraintMatrix, losses: Iterable[Tensor], weight: float) -> int:
    G.open(0)
    k = -1
    for k, loss in enumerate(losses):
        G.add(k, loss, weight)
    return k + 1


def _check(
    G: ConstraintMatrix, model: torch.nn.Module, batches: Any, loss: Any, microbatch: int | None
) -> None:
    if microbatch is not None:
        check_count(microbatch, "microbatch", 1)
    mine = {id(p) for p in G.vector.parameters}
    # FSDP replaces parameters while they are gathered.
    if not G.vector.topology.collective and not any(id(p) in mine for p in model.parameters()):
        raise ValueError(
            "model has none of the parameters of this projector. Make the projector of the model's own "
            "parameters, and after fully_shard, which replaces them."
        )
    if not callable(loss):
        raise TypeError(f"loss must be a function of model and batch; found {type(loss).__name__}.")
    if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
        raise TypeError(
            "batches must be an iterable of batches, one per past task, such as memory.batches() or "
            f"[memory.sample(n)]; found {type(batches).__name__}."
        )


def _digest(names: Sequence[Any]) -> int:
    """Return a number that tells names of tasks and labels apart; of other objects only the type counts."""
    plain = [n if isinstance(n, str | int | None) else type(n).__name__ for name in names for n in name]
    return zlib.crc32(repr(plain).encode())


def _count(batch: Batch, k: int) -> int:
    try:
        return count_examples(batch)
    except (TypeError, ValueError) as error:
        raise type(error)(f"batches[{k}]: {error}") from None


def call_loss(loss: Loss, model: torch.nn.Module, examples: Batch | Remembered) -> Tensor:
    """Return the loss; with stored outputs it is a function of these, too."""
    if not isinstance(examples, Remembered):
        examples = Remembered(examples)
    given = (examples.outputs,) if "outputs" in examples.fields else ()
    value = loss(model, examples.batch, *given)
    if not isinstance(value, Tensor):
        raise TypeError(f"loss(model, batch) must return a tensor; found {type(value).__name__}.")
    return value
