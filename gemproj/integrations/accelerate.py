"""A keeper for models and optimizers prepared by Accelerate, in your own loop or a Trainer."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
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

from gemproj.torch.keeper import KeeperBase
from gemproj.torch.processes import everyone
from gemproj.torch.promise import Loss, Promise


class AcceleratedKeeper(KeeperBase):
    """A keeper of prepared models and optimizers, with its own file in checkpoints."""

    _number = 0  # distinguishes several objects in one checkpoint

    def _attach_prepared(self, model: torch.nn.Module, optimizer: Any) -> None:
        """Attach to optimizers; a prepared model runs its forward pass in the precision of training."""
        state = AcceleratorState()
        kind, plugin = state.distributed_type, getattr(state, "fsdp_plugin", None)
        flat = kind == DistributedType.FSDP and getattr(plugin, "fsdp_version", 1) == 1
        if flat or kind == DistributedType.MEGATRON_LM:
            how = "of version 1 hides parameters in flat ones" if flat else "takes its steps itself"
            raise ValueError(
                f"{kind.value} {how}, so a keeper cannot project the steps. Use DistributedDataParallel, "
                "FSDP2 (fsdp_version=2) or DeepSpeed ZeRO."
            )
        optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        scaler, optimizers = getattr(optimizers[0], "scaler", None), [bare(one) for one in optimizers]
        if kind == DistributedType.DEEPSPEED:  # experimental
            from gemproj.integrations.deepspeed import ZeroStep, ZeroVector, adapted

            self._vector_type, self._step_type = ZeroVector, ZeroStep
            optimizers = [adapted(one) for one in optimizers]
            scaler = optimizers[0]
        # `extract_model_from_parallel` would change a compiled model.
        if isinstance(model, torch.nn.Module):
            model = extract_model_from_parallel(getattr(model, "_orig_mod", model))
        self._attach(model, optimizers, scaler=scaler, group=everyone())

    def _save(self, folder: str | os.PathLike[str], **more: int) -> None:
        """Write the state of this process to a file in the checkpoint."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        torch.save(self.state_dict() | more, file_in(folder, self._number))


class Keeper(AcceleratedKeeper):
    """`gemproj.torch.Keeper` for a model and an optimizer returned by ``accelerator.prepare``.

    After it, ``keeper = Keeper(accelerator, model, optimizer)`` is the only change of a loop.

    Losses on kept examples use the forward pass of the prepared model, with its precision and, in float16,
    its loss scale. If the loss needs ``accelerator.autocast()``, use it inside the loss.
    ``accelerator.save_state`` and ``load_state`` include the keeper, in a file ``keeper.pt`` or one file per
    process; a second keeper uses ``keeper_1.pt``. ``accelerator.clip_grad_norm_`` clips before the
    projection; with a weight, use `clip_grad_norm_` of the keeper, which clips after it.

    Parameters
    ----------
    accelerator : accelerate.Accelerator
    model, optimizer
        Results of ``accelerator.prepare``; pass several optimizers as a list.
    promise, **options
        As in `gemproj.torch.Keeper`; the scaler is that of the accelerator.

    Raises
    ------
    ValueError
        With Megatron-LM or FSDP1, which hide steps or parameters (FSDP2 works), or with DeepSpeed ZeRO 1, 2
        or 3 (experimental) and any `on` except "step".
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        promise: Promise | Loss | float | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(accelerator, Accelerator):
            raise TypeError(f"accelerator must be an Accelerator; found {type(accelerator).__name__}.")
        super().__init__(promise, **options)
        self._accelerator = accelerator
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

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the gradient in the next step, after its projection; return its current norm."""
        self._accelerator.unscale_gradients()
        return super().clip_grad_norm_(max_norm)

    def remove(self) -> None:
        """Detach from the optimizer and from the accelerator's checkpoints."""
        super().remove()
        if not hasattr(self, "_hooks"):  # during the first attachment
            return
        self._numbers.discard(self._number)
        for hook in self._hooks:
            hook.remove()
        del self._hooks


def bare(optimizer: Any) -> Any:
    """Return the optimizer inside Accelerate's wrappers."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def file_in(folder: str | os.PathLike[str], number: int = 0) -> Path:
    """Return the file of this process in a checkpoint; each process has its own examples and shards."""
    state = AcceleratorState()
    which = f"_{number}" if number else ""
    rank = f"_rank{state.process_index}" if state.num_processes > 1 else ""
    return Path(folder) / f"keeper{which}{rank}.pt"


def read(folder: str | os.PathLike[str], number: int = 0) -> dict[str, Any]:
    """Read the state of this process from a checkpoint made with a keeper by the same number of processes."""
    file, count = file_in(folder, number), AcceleratorState().num_processes
    if not file.is_file():
        found = sorted(other.name for other in Path(folder).glob("keeper*.pt")) or "none"
        raise FileNotFoundError(
            f"Checkpoint {folder} has no {file.name}; it has {found}. It must come from a run "
            "with a keeper and with the same number of processes."
        )
    state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    if (saved := state["process"][1]) > count:
        raise ValueError(
            f"Checkpoint {folder} was made by {saved} processes, each with its own examples, but this run "
            f"has {count}. Resume with {saved}, or keep the examples anew."
        )
    return state
