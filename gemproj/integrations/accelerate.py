"""Gradient projection in a training loop of Accelerate."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError(
        "gemproj.integrations.accelerate needs Accelerate: pip install 'gemproj[accelerate]'."
    ) from error

from gemproj.integrations.prepared import Prepared, read
from gemproj.torch import EpisodicMemory
from gemproj.torch.batches import Loss
from gemproj.torch.recall import model_loss


class GEM(Prepared):
    """Projects the gradients or the steps of a model that ``accelerator.prepare`` has returned.

    ::

        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        gem = GEM(accelerator, model, optimizer, memory, loss=loss)
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(loss(model, batch))
                gem.recall()
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    The projection is part of ``optimizer.step()``, which does nothing within an accumulation window.
    Losses on the memory run through the forward pass of the prepared model, in its precision; an
    ``accelerator.autocast()`` around the loss belongs into `loss`. With float16 they are scaled, too.

    Memory and projector are part of ``accelerator.save_state`` and ``load_state``: a file ``gem.pt`` in the
    folder, or one per process.

    Parameters
    ----------
    accelerator : accelerate.Accelerator
    model, optimizer
        As ``accelerator.prepare`` returned them. In several processes, each brings its own examples of
        the same tasks, and constraints are those of all together.
    memory : EpisodicMemory
        The past tasks; batches are moved to the accelerator's device.
    loss : callable
        ``loss(model, batch)``, see `GradientProjector.recall`.
    microbatch : int, optional
    training : bool, default False
        As in `GradientProjector.recall`.
    **options
        Of `gemproj.torch.GradientProjector`: method, margin, penalty, on, metric, interval.

    Attributes
    ----------
    projector : GradientProjector
        Call its ``reset()`` between tasks; its ``last`` tells what a step did.

    Raises
    ------
    ValueError
        For DeepSpeed, Megatron-LM and FSDP1, which hide steps or parameters. FSDP2 works.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        memory: EpisodicMemory,
        *,
        loss: Loss = model_loss,
        microbatch: int | None = None,
        training: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(model, optimizer, memory, loss, microbatch, training, **options)
        self._accelerator = accelerator
        # Not register_for_checkpointing: that keeps the state of the first process only.
        self._hooks = [
            accelerator.register_save_state_pre_hook(lambda models, weights, folder: self.save(folder)),
            accelerator.register_load_state_pre_hook(lambda models, folder: self.load(read(folder))),
        ]

    def recall(self, exclude: Hashable = None) -> bool:
        """Compute the constraints for the step that follows; within an accumulation window do nothing.

        Parameters
        ----------
        exclude : task, optional
            A task to leave out: the current one, when its examples are stored while it is learned.

        Returns
        -------
        bool
            Whether constraints were computed.
        """
        return self._accelerator.sync_gradients and super().recall(exclude)

    def remove(self) -> None:
        """Detach from the optimizer and from the accelerator's checkpoints."""
        super().remove()
        for hook in self._hooks:
            hook.remove()
