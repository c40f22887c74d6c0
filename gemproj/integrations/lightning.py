"""GEM as a callback of PyTorch Lightning; one callback serves every task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.plugins import Precision
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:
    raise ImportError(
        "gemproj.integrations.lightning needs Lightning: pip install '.[lightning]' in a checkout of gemproj."
    ) from error

import torch

from gemproj.torch.batches import Loss, map_nested
from gemproj.torch.distributed import everyone
from gemproj.torch.gem import Keeper
from gemproj.torch.hooks import clip_grad_norm_

_REFUSED = {
    DeepSpeedStrategy: "DeepSpeed keeps gradients in its own flat buffers, which no callback sees",
    FSDPStrategy: "FSDP1 keeps parameters in flat shards; ModelParallelStrategy (FSDP2) works",
}


# Hooks with which a module or a data module may change batches.
_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def _changing(*given: Any) -> list[str]:
    """Return the hooks that modules and data modules override to change batches; skip None."""
    return [name for one in given if one is not None for name in _HOOKS if is_overridden(name, one)]


def _transferred(module: Any, batch: Any, device: torch.device) -> Any:
    """Apply the batch hooks of a module, or of its trainer's data module, as in training."""
    # Hooks may change their input in place.
    batch = map_nested(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, batch)
    try:
        return module._apply_batch_transfer_handler(module._on_before_batch_transfer(batch, 0), device, 0)
    except RuntimeError as error:
        if module._trainer is not None:
            raise
        names = " or ".join(_changing(module))
        raise ValueError(f"{names} needs a trainer: call keep after a first fit. {error}") from error


def _clip(self: Precision, optimizer: Any, clip_val: float) -> None:
    if isinstance(optimizer, LightningOptimizer):  # other wrappers may have their own projector
        optimizer = optimizer.optimizer
    clip_grad_norm_([optimizer], self.main_params(optimizer), clip_val)


# No callback runs after clipping. Without an attached projector, the method behaves as before.
Precision.clip_grad_by_norm = _clip


class GEMCallback(Keeper, Callback):
    """A callback that keeps a `Trainer` from raising the losses of earlier tasks while it fits the next task.

    One call of ``Trainer.fit`` is one task. Parameters that are trainable when the fit begins are projected.
    Pass the same callback to the Trainer of each task, and call `end_task` after each fit. The callback works
    with automatic and manual optimization, accumulated gradients, mixed precision and
    DistributedDataParallel, for modules with one optimizer.

    The gradient is projected, then its norm is clipped to ``gradient_clip_val``, so a margin acts as a weight
    of replay. With a logger, steps with constraints log the numbers of `logs`, such as ``gem/violations``,
    without synchronising a device.

    Checkpoints hold the memory, the warm start and, if they are reused, the constraints, so
    ``fit(..., ckpt_path=...)`` continues as if it had not been interrupted. Lightning saves only the state of
    process 0, so after a restart all processes have the memory of process 0.

    Parameters
    ----------
    loss : callable or Promise
        A function of a module and a batch from the dataloader, as in `gemproj.torch.GEM`. The batch is
        converted and moved to the device as in training. A method of the module, such as ``MyModule.loss``,
        is possible; ``training_step`` is not, because it logs.
    per_task, per, examples, weight, tolerance, memory, method, on, every, project, microbatch, rows_dtype
        See `gemproj.torch.GEM`, also for the attributes. The scaler is the trainer's scaler.
    process_group
        The process group; by default all processes.

    Examples
    --------
    >>> from gemproj.integrations.lightning import GEMCallback
    >>> def loss(module, batch):
    ...     return torch.nn.functional.cross_entropy(module(batch[0]), batch[1])
    >>> gem = GEMCallback(loss, on="both", weight=0.5, examples=16)
    >>> for loader in stream:  # doctest: +SKIP
    ...     Trainer(max_epochs=1, callbacks=[gem]).fit(module, loader)
    ...     gem.end_task(loader)
    """

    _stage = "fit"
    _trainer: Trainer | None = None
    _early = False  # whether examples were stored before there was a trainer
    _bare = False  # whether a loss was computed with a model that is not a LightningModule

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note the stage, because a checkpoint loaded for evaluation must not change the memory."""
        self._stage = stage
        if not isinstance(trainer, Trainer):
            raise TypeError(
                f"trainer must be a lightning.pytorch.Trainer; found one of {type(trainer).__module__}. Use "
                "`import lightning.pytorch as pl` in place of `import pytorch_lightning as pl`."
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note that the stage has ended."""
        self._stage = "fit"

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state from a checkpoint if training will continue from it."""
        if self._stage == "fit":
            super().load_state_dict(state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a task, or continue the task of a checkpoint."""
        for strategy, reason in _REFUSED.items():
            if isinstance(trainer.strategy, strategy):
                raise ValueError(f"GEMCallback cannot work with {strategy.__name__}: {reason}.")
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"GEMCallback needs a module with one optimizer; found {len(trainer.optimizers)}. For "
                "several, make gemproj.torch.GEM(self, [opt.optimizer for opt in self.optimizers()], loss, "
                "memory=memory) in the module's on_train_start, and remove() it in on_train_end; without "
                "toggle_optimizer, which freezes parameters."
            )
        promises = [self.promises.get(name, self.promise) for name in self.memory.tasks]
        stored = any(one.tolerance is not None or hasattr(one.loss, "outputs") for one in promises)
        changed = _changing(getattr(trainer, "datamodule", None), pl_module if self._bare else None)
        if self._trainer is None and self._early and stored and changed:
            raise ValueError(
                "Outputs or losses were stored before there was a trainer, without the hook "
                f"{changed[0]} that changes batches. Make a new callback, and call keep after a first fit."
            )
        self._trainer = trainer
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._attach(pl_module, trainer.optimizers[0], scaler=scaler, process_group=everyone())

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Log the numbers of the step, if it had constraints."""
        if numbers := self.logs():
            values = {name: torch.as_tensor(n, dtype=torch.float32) for name, n in numbers.items()}
            pl_module.log_dict(values)

    def state_dict(self) -> dict[str, Any]:
        """Return the memory and the state of the projector; omit the rows if parameters are sharded.

        Lightning loads the state of process 0 on all processes, but each process has its own columns.
        """
        state = super().state_dict()
        if self.projector is not None and self.projector.sharded:
            state["projector"]["constraints"] = None
        return state

    def on_train_end(self, *args: Any) -> None:
        """Detach from the optimizer."""
        self.remove()

    on_exception = on_train_end

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copying and pickling; a copy is not attached to a trainer."""
        return super().__getstate__() | {"_trainer": None}

    def _wrapped(self, loss: Loss) -> Loss:
        trainer = self._trainer
        self._early = self._early or trainer is None

        def in_precision(function: Any) -> Any:
            def call(module: Any, batch: Any, *outputs: Any) -> Any:
                learner, precision = (getattr(module, "_orig_mod", module), Precision())
                if trainer is not None:
                    learner, precision = trainer.lightning_module, trainer.precision_plugin
                device = next(module.parameters()).device  # after `fit`, Lightning moves modules to the CPU
                with precision.forward_context():
                    batch = precision.convert_input(batch)
                    if isinstance(learner, LightningModule):
                        batch = _transferred(learner, batch, device)
                    self._bare = self._bare or not isinstance(learner, LightningModule)
                    return function(module, batch, *outputs)

            return call

        found = in_precision(loss)
        if hasattr(loss, "outputs"):
            found.outputs = in_precision(loss.outputs)
        return found
