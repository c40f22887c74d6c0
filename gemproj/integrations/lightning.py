"""GEM in PyTorch Lightning: a callback, the same one for every task."""

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
    DeepSpeedStrategy: "DeepSpeed keeps gradients in flat buffers of its own, where no callback sees them",
    FSDPStrategy: "FSDP1 keeps parameters in flat shards; ModelParallelStrategy (FSDP2) works",
}


# In these a module or a data module may change batches.
_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def _changing(*given: Any) -> list[str]:
    """Return the hooks of modules and data modules that change batches; None has none."""
    return [name for one in given if one is not None for name in _HOOKS if is_overridden(name, one)]


def _transferred(module: Any, batch: Any, device: torch.device) -> Any:
    """Return a batch as training has it, after the hooks of a module, or of its trainer's data module."""
    # Hooks may write to what they are given.
    batch = map_nested(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, batch)
    try:
        return module._apply_batch_transfer_handler(module._on_before_batch_transfer(batch, 0), device, 0)
    except RuntimeError as error:
        if module._trainer is not None:
            raise
        names = " or ".join(_changing(module))
        raise ValueError(f"{names} needs a trainer: call keep after a first fit. {error}") from error


def _clip(self: Precision, optimizer: Any, clip_val: float) -> None:
    if isinstance(optimizer, LightningOptimizer):  # others with one in them may be attached to
        optimizer = optimizer.optimizer
    clip_grad_norm_([optimizer], self.main_params(optimizer), clip_val)


# Callbacks come before it or not at all. Where no projector is attached, it does what it did.
Precision.clip_grad_by_norm = _clip


class GEMCallback(Keeper, Callback):
    """Keeps a `Trainer` from raising the losses on a memory of earlier tasks while it fits the next one.

    One call of ``Trainer.fit`` is one task: it projects the parameters that are trainable then. Pass the same
    callback to the Trainer of each task, and call `end_task` after it. Works with automatic and manual
    optimization, accumulated gradients, mixed precision and DistributedDataParallel, for modules with one
    optimizer.

    The gradient is projected, then clipped as ``gradient_clip_val`` says: a margin is the weight of replay.
    With a logger, steps under constraints log the numbers of `logs`, ``gem/violations`` and so on; no device
    is waited for.

    Checkpoints hold the memory, the warm start and, where they are reused, the constraints, so that
    ``fit(..., ckpt_path=...)`` goes on as if it had not been interrupted. Lightning saves those of process
    0: after a restart with several processes all of them have its memory.

    Parameters
    ----------
    loss : callable or Promise
        As in `gemproj.torch.GEM`, of a module and a batch as the dataloader yields it, which is converted and
        moved to the device as in training. A method of the module will do, ``MyModule.loss``; not
        ``training_step``, which logs.
    per_task, per, examples, weight, tolerance, memory, method, on, every, project, microbatch, rows_dtype
        As in `gemproj.torch.GEM`, as are the attributes. The scaler is that of the trainer.
    process_group
        By default all processes.

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
    _early = False  # whether something was kept before there was a trainer
    _bare = False  # and with a model that has no hooks of a module

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note what begins: a checkpoint that is only evaluated has no say in what is remembered."""
        self._stage = stage
        if not isinstance(trainer, Trainer):
            raise TypeError(
                f"trainer must be a lightning.pytorch.Trainer; found one of {type(trainer).__module__}. Use "
                "`import lightning.pytorch as pl` in place of `import pytorch_lightning as pl`."
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note that it has ended."""
        self._stage = "fit"

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Bring back what a checkpoint holds, to go on with its training."""
        if self._stage == "fit":
            super().load_state_dict(state_dict)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a task, or go on with the one of a checkpoint."""
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
        """Log what the step did, if there was one."""
        if numbers := self.logs():
            values = {name: torch.as_tensor(n, dtype=torch.float32) for name, n in numbers.items()}
            pl_module.log_dict(values)

    def state_dict(self) -> dict[str, Any]:
        """Return the memory and the state of the projector; of shards without the rows.

        Lightning saves what process 0 returns and gives it to all of them, and each has other columns.
        """
        state = super().state_dict()
        if self.projector is not None and self.projector.sharded:
            state["projector"]["constraints"] = None
        return state

    def on_train_end(self, *args: Any) -> None:
        """Leave the optimizer alone from now on."""
        self.remove()

    on_exception = on_train_end

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has, too: it is attached to nothing."""
        return super().__getstate__() | {"_trainer": None}

    def _wrapped(self, loss: Loss) -> Loss:
        trainer = self._trainer
        self._early = self._early or trainer is None

        def in_precision(function: Any) -> Any:
            def call(module: Any, batch: Any, *outputs: Any) -> Any:
                learner, precision = (getattr(module, "_orig_mod", module), Precision())
                if trainer is not None:
                    learner, precision = trainer.lightning_module, trainer.precision_plugin
                device = next(module.parameters()).device  # after `fit` Lightning moves it to the CPU
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
