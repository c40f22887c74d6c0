"""A projector at work on what Accelerate has prepared, for its own loops and for those of transformers."""

from __future__ import annotations

import os
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, extract_model_from_parallel, send_to_device

from gemproj.torch import EpisodicMemory, GradientProjector
from gemproj.torch.batches import Batch, Loss
from gemproj.torch.layout import mesh_of

# The scale of the loss of now is near the largest that float16 bears; past tasks may have larger losses.
_HEADROOM = 1024.0


class Prepared:
    """A `GradientProjector` for a prepared model, attached to its prepared optimizer, with its memory.

    Parameters
    ----------
    model : torch.nn.Module
        In one process or many (DistributedDataParallel, FSDP2); prepared, so that its forward pass runs in
        the precision of training.
    optimizer : torch.optim.Optimizer
        What Accelerate made of it, or any other.
    memory : EpisodicMemory
    loss, microbatch, training
        As in `GradientProjector.recall`.
    **options
        Of `GradientProjector`.

    Attributes
    ----------
    projector : GradientProjector
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        memory: EpisodicMemory,
        loss: Loss,
        microbatch: int | None = None,
        training: bool = False,
        **options: Any,
    ) -> None:
        self._state = AcceleratorState()
        refuse_engine(self._state)
        self._model = extract_model_from_parallel(model)
        self._memory = memory
        self._loss = loss
        self._recall_options: dict[str, Any] = {"microbatch": microbatch, "training": training}
        self._scaler: Any = getattr(optimizer, "scaler", None)
        self.projector = GradientProjector(
            self._model.parameters(), group=_group(self._model, self._state), **options
        )
        while isinstance(optimizer, AcceleratedOptimizer):
            optimizer = optimizer.optimizer
        self._attached = self.projector.attach(optimizer)

    def recall(self, exclude: Hashable = None) -> bool:
        """Compute the constraints for the next step, with the precision and on the device of training."""
        batches = [send_to_device(batch, self._state.device) for batch in self._memory.batches(exclude)]
        # In float16, gradients of a loss that is not scaled vanish.
        scaled = self._scaler is not None and self._scaler.is_enabled()
        scale = self._scaler.get_scale() / _HEADROOM if scaled else 1.0

        def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
            value = self._loss(model, batch)
            return value * scale if scaled else value

        computed = self.projector.recall(self._model, batches, loss, **self._recall_options)
        if computed and scaled:
            self.projector.constraints.div_(scale)
        return computed

    def remove(self) -> None:
        """Detach the projector from the optimizer."""
        self._attached.remove()

    def save(self, folder: str | os.PathLike[str], **more: int) -> None:
        """Write this process's memory, warm start and, where they are used again, constraints to a file."""
        if self.projector.interval == 1:
            self.projector.constrain([])  # computed anew before the next step
        state = {"memory": self._memory.state_dict(), "projector": self.projector.state_dict(), **more}
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(state, file_in(folder))

    def load(self, state: dict[str, Any]) -> None:
        """Bring back what `save` wrote."""
        self._memory.load_state_dict(state["memory"])
        self.projector.load_state_dict(state["projector"])


def file_in(folder: str | os.PathLike[str]) -> Path:
    """Return where in a checkpoint this process keeps its part: each has examples and shards of its own."""
    state = AcceleratorState()
    name = "gem.pt" if state.num_processes == 1 else f"gem_rank{state.process_index}.pt"
    return Path(folder) / name


def read(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what `Prepared.save` wrote to a checkpoint.

    Raises
    ------
    FileNotFoundError
        If the checkpoint was not made by as many processes, or without GEM.
    """
    file = file_in(folder)
    if not file.is_file():
        found = sorted(other.name for other in Path(folder).glob("gem*.pt")) or "none"
        raise FileNotFoundError(
            f"Checkpoint {folder} has no {file.name}; of such files it has {found}. It must come from a run "
            "with GEM and with the same number of processes."
        )
    return torch.load(file, map_location="cpu", weights_only=True)


def refuse_engine(state: AcceleratorState) -> None:
    """Raise for engines whose steps or parameters a projector cannot reach."""
    kind = state.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        raise ValueError(
            f"{kind.value} takes its steps itself, out of reach of the hooks that project them. Use "
            "DistributedDataParallel or FSDP2 (fsdp_version=2)."
        )
    plugin = getattr(state, "fsdp_plugin", None)
    if kind == DistributedType.FSDP and getattr(plugin, "fsdp_version", 1) == 1:
        raise ValueError(
            "FSDP1 hides parameters in flat ones, of which a projector sees neither gradients nor steps. Use "
            "FSDP2: fsdp_version=2."
        )


def _group(model: torch.nn.Module, state: AcceleratorState) -> Any:
    """Return the processes over which rows are averaged, if parameters are replicated."""
    if state.num_processes == 1 or any(mesh_of(p) is not None for p in model.parameters()):
        return None
    return dist.group.WORLD
