"""Models and optimizers prepared by Accelerate, for its own loops and the Trainer of transformers."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType, extract_model_from_parallel

import gemproj.integrations.deepspeed  # noqa: F401
from gemproj.integrations._processes import everyone
from gemproj.torch.gem import Keeper
from gemproj.torch.hooks import clip_grad_norm_, total_norm

_clip_at_once = Accelerator.clip_grad_norm_


@wraps(_clip_at_once)
def _clip(self: Accelerator, parameters: Iterable[Any], max_norm: float, norm_type: float = 2) -> Any:
    now = partial(_clip_at_once, self)
    if self.distributed_type == DistributedType.DEEPSPEED:  # which clips in its own step
        return now(parameters, max_norm, norm_type)

    def measure(parameters: Iterable[Any], norm_type: float) -> Any:
        self.unscale_gradients()  # which may be done once, and `now` does
        return total_norm(parameters, norm_type)

    later = getattr(self, "_clip_grad_norm_dtensor_aware", torch.nn.utils.clip_grad_norm_)
    optimizers = [bare(one) for one in self._optimizers]
    return clip_grad_norm_(optimizers, parameters, max_norm, norm_type, now=now, later=later, measure=measure)


# The method of the class, since the Trainer does not show its accelerator to callbacks. Where no projector
# is attached, it does what it did.
Accelerator.clip_grad_norm_ = _clip


class AcceleratedKeeper(Keeper):
    """A `Keeper` for prepared models and optimizers, with a file of its own in checkpoints."""

    _number = 0  # of several in one checkpoint

    def _attach_prepared(self, model: torch.nn.Module, optimizer: Any) -> None:
        """Attach; the forward pass of a prepared model runs in the precision of training."""
        refuse_engine(AcceleratorState())
        # A compiled model would be changed by what extracts the one within it.
        model = extract_model_from_parallel(getattr(model, "_orig_mod", model))
        optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        scaler = getattr(optimizers[0], "scaler", None)
        self._attach(model, [bare(one) for one in optimizers], scaler=scaler, process_group=everyone())

    def _save(self, folder: str | os.PathLike[str], **more: int) -> None:
        """Write the part of this process to a file in the checkpoint."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict() | more, file_in(folder, self._number))


def bare(optimizer: Any) -> Any:
    """Return the optimizer that Accelerate has wrapped."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def file_in(folder: str | os.PathLike[str], number: int = 0) -> Path:
    """Return the file of this process in a checkpoint: each has its own examples and shards."""
    state = AcceleratorState()
    name = f"gem_{number}" if number else "gem"
    rank = f"_rank{state.process_index}" if state.num_processes > 1 else ""
    return Path(folder) / f"{name}{rank}.pt"


def read(folder: str | os.PathLike[str], number: int = 0) -> dict[str, Any]:
    """Return the part of this process in a checkpoint, made by as many processes with GEM."""
    file = file_in(folder, number)
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
    if kind == DistributedType.MEGATRON_LM:
        raise ValueError(
            f"{kind.value} takes its steps itself, out of reach of the hooks that project them. Use "
            "DistributedDataParallel, FSDP2 (fsdp_version=2) or DeepSpeed ZeRO."
        )
    plugin = getattr(state, "fsdp_plugin", None)
    if kind == DistributedType.FSDP and getattr(plugin, "fsdp_version", 1) == 1:
        raise ValueError(
            "FSDP1 hides parameters in flat ones, of which a projector sees neither gradients nor steps. Use "
            "FSDP2: fsdp_version=2."
        )
