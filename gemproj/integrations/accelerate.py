"""Gradient projection for models and optimizers prepared by Accelerate, in your own loop or a Trainer."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any

try:
    import torch
    from accelerate import Accelerator
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, extract_model_from_parallel
except ImportError as error:
    raise ImportError(
        "gemproj.integrations.accelerate needs Accelerate: "
        "pip install '.[accelerate]' in a checkout of gemproj."
    ) from error

import gemproj.integrations.deepspeed  # noqa: F401
from gemproj.methods import AnyMethod
from gemproj.torch import EpisodicMemory, Promise
from gemproj.torch.batches import Loss
from gemproj.torch.changes import On
from gemproj.torch.distributed import everyone
from gemproj.torch.gem import Keeper
from gemproj.torch.hooks import clip_grad_norm_, total_norm
from gemproj.torch.keywords import suggesting
from gemproj.torch.losses import model_loss
from gemproj.torch.promise import Per

_clip_at_once = Accelerator.clip_grad_norm_


@wraps(_clip_at_once)
def _clip(self: Accelerator, parameters: Iterable[Any], max_norm: float, norm_type: float = 2) -> Any:
    now = partial(_clip_at_once, self)
    if self.distributed_type == DistributedType.DEEPSPEED:  # DeepSpeed clips in its own step
        return now(parameters, max_norm, norm_type)

    def measure(parameters: Iterable[Any], norm_type: float) -> Any:
        self.unscale_gradients()  # allowed only once per step; `now` also does it
        return total_norm(parameters, norm_type)

    later = getattr(self, "_clip_grad_norm_dtensor_aware", torch.nn.utils.clip_grad_norm_)
    optimizers = [bare(one) for one in self._optimizers]
    return clip_grad_norm_(optimizers, parameters, max_norm, norm_type, now=now, later=later, measure=measure)


# The method of the class is replaced, because the Trainer does not pass its accelerator to callbacks. Without
# an attached projector, the method behaves as before.
Accelerator.clip_grad_norm_ = _clip


class AcceleratedKeeper(Keeper):
    """A `Keeper` for prepared models and optimizers, with its own file in checkpoints."""

    _number = 0  # distinguishes several objects in one checkpoint

    def _attach_prepared(self, model: torch.nn.Module, optimizer: Any) -> None:
        """Attach to optimizers; a prepared model runs its forward pass in the precision of training."""
        refuse_engine(AcceleratorState())
        # `extract_model_from_parallel` would change a compiled model.
        model = extract_model_from_parallel(getattr(model, "_orig_mod", model))
        optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        scaler = getattr(optimizers[0], "scaler", None)
        self._attach(model, [bare(one) for one in optimizers], scaler=scaler, process_group=everyone())

    def _save(self, folder: str | os.PathLike[str], **more: int) -> None:
        """Write the state of this process to a file in the checkpoint."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict() | more, file_in(folder, self._number))


class GEM(AcceleratedKeeper):
    """`gemproj.torch.GEM` for a model and an optimizer returned by ``accelerator.prepare``.

    ::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        gem = GEM(accelerator, model, optimizer, loss, weight=0.5, examples=16)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss(model, batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()  # projected, then clipped
                optimizer.zero_grad()
            accelerator.log(gem.logs())
        gem.end_task(loader)

    Losses on the memory use the forward pass of the prepared model, with its precision and, in float16, its
    loss scale. If the loss needs ``accelerator.autocast()``, use it inside `loss`. ``accelerator.save_state``
    and ``load_state`` include memory and projector, in a file ``gem.pt`` or one file per process. A second
    object uses ``gem_1.pt``.

    Parameters
    ----------
    accelerator : accelerate.Accelerator
    model, optimizer
        Results of ``accelerator.prepare``; pass several optimizers as a list.
    loss, per_task, per, examples, weight, tolerance, memory, method, on, every, project
        See `gemproj.torch.GEM`, also for `microbatch`, `rows_dtype` and the attributes.
    process_group
        The process group; by default all processes.

    Raises
    ------
    ValueError
        With Megatron-LM or FSDP1, which hide steps or parameters (FSDP2 works), or with DeepSpeed ZeRO 1, 2
        or 3 and any `on` except "step".
    """

    @suggesting
    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loss: Loss | Promise = model_loss,
        per_task: int = 100,
        *,
        per: Per = "task",
        examples: int | None = None,
        weight: float = 0.0,
        tolerance: float | None = None,
        memory: EpisodicMemory | None = None,
        method: AnyMethod = "exact",
        on: On = "gradient",
        every: int = 1,
        project: bool = True,
        microbatch: int | None = None,
        rows_dtype: torch.dtype | None = None,
        process_group: Any = None,
    ) -> None:
        if not isinstance(accelerator, Accelerator):
            raise TypeError(f"accelerator must be an Accelerator; found {type(accelerator).__name__}.")
        super().__init__(
            loss, per_task, per=per, examples=examples, weight=weight, tolerance=tolerance, memory=memory,
            method=method, on=on, every=every, project=project, microbatch=microbatch, rows_dtype=rows_dtype,
            process_group=process_group,
        )  # fmt: skip
        self._attach_prepared(model, optimizer)

        self._numbers: set[int] = accelerator.__dict__.setdefault("_gemproj_numbers", set())
        self._number = next(k for k in itertools.count() if k not in self._numbers)
        self._numbers.add(self._number)

        def load(models: Any, folder: str) -> None:
            self.load_state_dict(read(folder, self._number))

        # register_for_checkpointing would save only the state of the first process.
        self._hooks = [
            accelerator.register_save_state_pre_hook(lambda models, weights, folder: self._save(folder)),
            accelerator.register_load_state_pre_hook(load),
        ]

    def remove(self) -> None:
        """Detach from the optimizer and from the accelerator's checkpoints."""
        super().remove()
        if not hasattr(self, "_hooks"):  # during the first attachment
            return
        self._numbers.discard(self._number)
        for hook in self._hooks:
            hook.remove()


def bare(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's wrappers."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def file_in(folder: str | os.PathLike[str], number: int = 0) -> Path:
    """Return the file of this process in a checkpoint; each process has its own examples and shards."""
    state = AcceleratorState()
    rank = f"_rank{state.process_index}" if state.num_processes > 1 else ""
    return Path(folder) / f"{_name(number)}{rank}.pt"


def _name(number: int) -> str:
    return f"gem_{number}" if number else "gem"


def read(folder: str | os.PathLike[str], number: int = 0) -> dict[str, Any]:
    """Read the state of this process from a checkpoint made with GEM by the same number of processes."""
    file = file_in(folder, number)
    if not file.is_file():
        found = sorted(other.name for other in Path(folder).glob("gem*.pt")) or "none"
        raise FileNotFoundError(
            f"Checkpoint {folder} has no {file.name}; it has {found}. It must come from a run "
            "with GEM and with the same number of processes."
        )
    parts, count = len(list(file.parent.glob(f"{_name(number)}_rank*.pt"))), AcceleratorState().num_processes
    if parts > count:
        raise ValueError(
            f"Checkpoint {folder} was made by {parts} processes, each with its own examples, but "
            f"this run has {count}. Resume with {parts}, or store the examples anew."
        )
    return torch.load(file, map_location="cpu", weights_only=True)


def refuse_engine(state: AcceleratorState) -> None:
    """Raise for engines whose steps or parameters a projector cannot reach."""
    kind = state.distributed_type
    if kind == DistributedType.MEGATRON_LM:
        raise ValueError(
            f"{kind.value} takes its steps itself, so hooks cannot project them. Use "
            "DistributedDataParallel, FSDP2 (fsdp_version=2) or DeepSpeed ZeRO."
        )
    plugin = getattr(state, "fsdp_plugin", None)
    if kind == DistributedType.FSDP and getattr(plugin, "fsdp_version", 1) == 1:
        raise ValueError(
            "FSDP1 hides parameters in flat parameters, so a projector sees neither their gradients nor "
            "their steps. Use FSDP2: fsdp_version=2."
        )
