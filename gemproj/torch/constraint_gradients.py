"""Constraint gradients: the gradients of the losses on the stored examples of past tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from gemproj._checks import check_count
from gemproj.torch.batches import Batch, Batches, Source, parts, source_of
from gemproj.torch.constraints import ConstraintMatrix, check_loss
from gemproj.torch.distributed import check_alone
from gemproj.torch.one_pass import SharedPasses
from gemproj.torch.parameters import mesh_of
from gemproj.torch.promise import Promise, call_loss, stored_losses


def unwrapped(model: torch.nn.Module) -> tuple[torch.nn.Module, DistributedDataParallel | None]:
    """Return the module for computing gradients, and its DistributedDataParallel wrapper or None.

    The forward pass of the wrapper would expect a backward pass that reduces ``.grad``, and that of a module
    of Lightning Fabric one by ``fabric.backward``.
    """
    model = getattr(model, "_forward_module", model)  # unwraps a module of Fabric
    inner = getattr(model, "_orig_mod", model)  # unwraps torch.compile
    return (inner.module, inner) if isinstance(inner, DistributedDataParallel) else (model, None)


def check_spread(modules: Sequence[torch.nn.Module]) -> None:
    """Raise if the modules of a model are distributed over processes in an unsupported way."""
    if any(isinstance(module, DistributedDataParallel) for module in modules):
        raise ValueError(
            "model has a part that is wrapped in DistributedDataParallel, which does not show the processes "
            "of the whole model. Wrap the whole model, and pass the wrapped model."
        )
    if not (dist.is_available() and dist.is_initialized()):
        return
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in modules):
        raise ValueError(
            "model is wrapped in FullyShardedDataParallel (FSDP1), whose flat buffers hide the parameters. "
            "Shard it with fully_shard of torch.distributed.fsdp (FSDP2)."
        )
    held = [p for module in modules for p in module._parameters.values() if p is not None]
    trained = {mesh_of(p) is not None for p in held if p.requires_grad}
    if trained == {False} and any(mesh_of(p) is not None for p in held):
        raise ValueError(
            "model has trainable parameters that are not sharded, such as adapters, and sharded frozen "
            "parameters. Add adapters before sharding the model, so that they are sharded, too."
        )


def reshard(model: torch.nn.Module) -> None:
    """Reshard the parameters, which FSDP leaves gathered after an evaluation."""
    for module in model.modules():
        if callable(getattr(module, "reshard", None)):
            module.reshard()  # type: ignore[operator]


def from_batches(
    G: ConstraintMatrix,
    model: torch.nn.Module,
    batches: Iterable[Batch],
    promise: Promise | Sequence[Promise],
    facts: Mapping[str, Any],
    shared: SharedPasses,
    *,
    microbatch: int | None = None,
    scale: float = 1.0,
) -> list[Promise]:
    """Fill G with the gradients of the mean losses on `batches`; see `GradientProjector.recall`.

    If one process fails, or if `facts` differ, all processes raise and G has no rows. Return the promise
    about each row: the promise that a memory gave to the batch, or else `promise`.
    """
    topology = G.vector.topology
    facts = {"number of rows": 0, "names of sets or labels": None, "promises": None, **facts}
    G.clear()
    with topology.agreement(facts):
        _check(G, model, batches, microbatch)
        rows = list(batches.sources) if isinstance(batches, Batches) else _sources(batches)
        if not isinstance(promise, Promise) and len(promise) != len(rows):
            raise ValueError(
                f"promise must be one, or one for each of the {len(rows)} batches; found {len(promise)}."
            )
        for k, row in enumerate(rows):
            row.k = k
            row.promise = row.promise or (promise if isinstance(promise, Promise) else promise[k])
        facts["number of rows"] = len(rows)
        if topology.world > 1:
            # The examples of a set or label, and their number, may differ between processes.
            facts["names of sets or labels"] = list(dict.fromkeys(row.name[:2] for row in rows))
            facts["promises"] = [row.promise.numbers() for row in rows]
    totals, passes = topology.plan([row.size for row in rows])
    for row in rows:
        row.weight = topology.weight(row.size, totals[row.k])

    def alone(row: Source) -> Tensor:
        values = G.losses
        for part, n, weight in parts(row, microbatch, passes[row.k]):
            values = call_loss(row.promise.loss, model, part, n, row.name)
            stored = stored_losses(part, row.promise, row.name)
            share = topology.weight(weight, totals[row.k])
            G.add(row.k, values.mean(), share, None if stored is None else stored.mean())
        return values.detach()

    if topology.collective:
        reshard(model)
    with topology.passes(), preserved_state(model, G.vector.device, topology.collective):
        G.open(len(rows), scale)
        shared.fill(G, model, rows, alone, microbatch or 2**62)
    G.close(len(rows))
    G.names = [row.name for row in rows]
    return [row.promise for row in rows]


def from_losses(G: ConstraintMatrix, losses: Iterable[Tensor], facts: Mapping[str, Any]) -> None:
    """Fill G with the gradients of the losses, averaged over processes; see `constrain`."""
    topology = G.vector.topology
    check_alone(topology)
    facts = {"number of losses": 0, **facts}
    weight = topology.weight(1, topology.world)
    G.clear()
    if topology.collective and not isinstance(losses, Sequence):
        raise TypeError(
            "losses must be a list if parameters are sharded: processes that disagree on its length would "
            f"wait for each other; found {type(losses).__name__}. Or use recall."
        )
    with topology.agreement(facts):
        if topology.collective:  # processes must agree before the first backward pass
            for k, loss in enumerate(losses):
                check_loss(k, loss)
                facts["number of losses"] = k + 1
        else:
            facts["number of losses"] = _add_all(G, losses, weight)
    if topology.collective:
        _add_all(G, losses, weight)
    G.close(facts["number of losses"])


@contextmanager
def preserved_state(model: torch.nn.Module, device: torch.device, gradients: bool = False) -> Iterator[None]:
    """Set evaluation mode; at the end restore modes, random state and, with `gradients`, ``.grad``.

    Gradient checkpointing in layers of transformers stays active.
    """
    kept = [(p, p.grad) for p in model.parameters() if p.requires_grad] if gradients else []
    modules = list(model.modules())
    check_spread(modules)
    modes = [module for module in modules if module.training]
    changes = _evaluation(modes) + _without_cache(modules)
    before = [(thing, name, getattr(thing, name)) for thing, name, _ in changes]
    # Each CUDA or XPU device has its own generator; the generator of MPS cannot be restored.
    own = device.type in ("cuda", "xpu")
    fork = torch.random.fork_rng([device] if own else [], device_type=device.type if own else "cuda")
    with fork, torch.enable_grad():
        try:
            for p, _ in kept:
                p.grad = None
            for thing, name, value in changes:
                _set(thing, name, value)
            yield
        finally:
            for p, gradient in kept:
                p.grad = gradient
            for thing, name, value in before:
                _set(thing, name, value)


def _set(thing: Any, name: str, value: Any) -> None:
    """Set an attribute; for plain modules, avoid the much slower `Module.__setattr__`."""
    if name in vars(thing):  # false for scripted modules
        vars(thing)[name] = value
    else:
        setattr(thing, name, value)


def _evaluation(modules: Sequence[torch.nn.Module]) -> list[tuple[Any, str, Any]]:
    """Return the attributes and values to set for evaluation mode with gradient checkpointing."""
    layers = [module for module in modules if _is_checkpointed(module)]
    changes: list[tuple[Any, str, Any]] = [(module, "training", False) for module in modules]
    changes += [(layer, "training", True) for layer in layers]
    changes += [(layer, "_gradient_checkpointing_func", partial(_checkpoint, layer)) for layer in layers]
    return changes


_CONFIGS = ("PretrainedConfig", "PreTrainedConfig")  # class names in transformers before and since version 5


def _without_cache(modules: Iterable[torch.nn.Module]) -> list[tuple[Any, str, Any]]:
    """Return the attributes and values to set so that models of transformers use no cache.

    With a cache, packed texts attend to each other, and checkpoints recompute with the first pass's cache.
    """
    configs = {id(one): one for module in modules if (one := module.__dict__.get("config")) is not None}
    known = [one for one in configs.values() if any(kind.__name__ in _CONFIGS for kind in type(one).__mro__)]
    return [(one, "use_cache", False) for one in known if getattr(one, "use_cache", False)]


def _is_checkpointed(module: Any) -> bool:
    """Return whether a module is a layer of transformers with gradient checkpointing."""
    if "_gradient_checkpointing_func" not in module.__dict__:
        return False
    if not getattr(module, "gradient_checkpointing", False):
        return False
    return any(kind.__name__ == "GradientCheckpointingLayer" for kind in type(module).__mro__)


def _checkpoint(layer: torch.nn.Module, forward: Callable[..., Any], *args: Any) -> Any:
    """Checkpoint a layer; run its forward pass and its recomputation in evaluation mode.

    At other times the layer is in training mode, because transformers checkpoints only in training mode.
    """

    def evaluated(*args: Any) -> Any:
        layer.training = False
        try:
            return forward(*args)
        finally:
            layer.training = True

    return checkpoint(evaluated, *args, use_reentrant=False)


def _add_all(G: ConstraintMatrix, losses: Iterable[Tensor], weight: float) -> int:
    G.open(len(losses) if isinstance(losses, Sequence) else 0)
    k = -1
    for k, loss in enumerate(losses):
        G.add(k, loss, weight)
    return k + 1


def _check(G: ConstraintMatrix, model: torch.nn.Module, batches: Any, microbatch: int | None) -> None:
    if microbatch is not None:
        check_count(microbatch, "microbatch", 1)
    mine = {id(p) for p in G.vector.parameters}
    # FSDP replaces parameters while they are gathered.
    if not G.vector.topology.collective and not any(id(p) in mine for p in model.parameters()):
        raise ValueError(
            "model has none of the parameters of this projector. Make the projector of the model's own "
            "parameters, and after fully_shard, which replaces them."
        )
    if isinstance(batches, Mapping) or not isinstance(batches, Iterable):
        raise TypeError(
            "batches must be an iterable of batches, one per past task, such as memory.batches() or "
            f"[memory.sample(n)]; found {type(batches).__name__}."
        )
    check_alone(G.vector.topology)


def _sources(batches: Iterable[Batch]) -> list[Source]:
    found: list[Source] = []
    for k, batch in enumerate(batches):
        try:
            found.append(source_of(batch))
        except (TypeError, ValueError) as error:
            raise type(error)(f"batches[{k}]: {error}") from None
    return found
