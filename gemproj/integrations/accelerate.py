"""Gradient projection in a training loop of Accelerate."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError(
        "gemproj.integrations.accelerate needs Accelerate: "
        "pip install '.[accelerate]' in a checkout of gemproj."
    ) from error

from gemproj.integrations._accelerate import AcceleratedGEM, read
from gemproj.torch import EpisodicMemory
from gemproj.torch.batches import Loss
from gemproj.torch.losses import model_loss


class GEM(AcceleratedGEM):
    """`gemproj.torch.GEM` for a model and an optimizer that ``accelerator.prepare`` has returned.

    ::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        gem = GEM(accelerator, model, optimizer, memory, loss=loss)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss(model, batch))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()  # projected, then clipped
                optimizer.zero_grad()
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
    memory : EpisodicMemory
        The past tasks. In several processes each has its own examples of the same tasks.
    loss : callable
        As in `gemproj.torch.GEM`.
    **options
        Of `gemproj.torch.GEM`.

    Attributes
    ----------
    memory : EpisodicMemory
    gem : gemproj.torch.GEM

    Raises
    ------
    ValueError
        For Megatron-LM and FSDP1, which hide steps or parameters; FSDP2 works. With DeepSpeed (ZeRO 1, 2
        and 3) for another `on` than "step".
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        memory: EpisodicMemory,
        loss: Loss = model_loss,
        **options: Any,
    ) -> None:
        super().__init__(memory, loss, **options)
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
        self._detach()
        self._numbers.discard(self._number)
        for hook in self._hooks:
            hook.remove()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring back what `state_dict` returned."""
        super().load_state_dict(state)
        self._resume()
