"""Gradient projection in a training loop of Accelerate."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError(
        "gemproj.integrations.accelerate needs Accelerate: "
        "pip install '.[accelerate]' in a checkout of gemproj."
    ) from error

import torch

from gemproj.integrations._accelerate import AcceleratedKeeper, read
from gemproj.methods import AnyMethod
from gemproj.torch import EpisodicMemory, Promise
from gemproj.torch.batches import Loss
from gemproj.torch.changes import On
from gemproj.torch.keywords import suggesting
from gemproj.torch.losses import model_loss
from gemproj.torch.promise import Per


class GEM(AcceleratedKeeper):
    """`gemproj.torch.GEM` for a model and an optimizer that ``accelerator.prepare`` has returned.

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

    Losses on the memory run through the forward pass of the prepared model, in its precision; an
    ``accelerator.autocast()`` around the loss belongs into `loss`. With float16 they are scaled, too.
    Memory and projector are part of ``accelerator.save_state`` and ``load_state``: a file ``gem.pt`` in the
    folder, or one per process, and ``gem_1.pt`` of a second object.

    Parameters
    ----------
    accelerator : accelerate.Accelerator
    model, optimizer
        As ``accelerator.prepare`` returned them; of several optimizers a list.
    loss, per_task, per, examples, weight, tolerance, memory, method, on, every, project, microbatch
        As in `gemproj.torch.GEM`; the scaler is that of the accelerator. In several processes each has its
        own examples of the same tasks.
    rows_dtype, process_group
        As there; by default all processes.

    Attributes
    ----------
    memory, promise, promises, projector, history, metric, exclude
        As in `gemproj.torch.GEM`.

    Raises
    ------
    ValueError
        For Megatron-LM and FSDP1, which hide steps or parameters; FSDP2 works. With DeepSpeed (ZeRO 1, 2
        and 3) for another `on` than "step".
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

        # Not register_for_checkpointing: that keeps the state of the first process only.
        self._hooks = [
            accelerator.register_save_state_pre_hook(lambda models, weights, folder: self._save(folder)),
            accelerator.register_load_state_pre_hook(load),
        ]

    def remove(self) -> None:
        """Detach from the optimizer and from the accelerator's checkpoints."""
        super().remove()
        if not hasattr(self, "_hooks"):  # as it is attached
            return
        self._numbers.discard(self._number)
        for hook in self._hooks:
            hook.remove()
