"""GEM in PyTorch Lightning: a callback, the same one for every task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.plugins import Precision
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
except ImportError as error:
    raise ImportError(
        "gemproj.integrations.lightning needs Lightning: pip install '.[lightning]' in a checkout of gemproj."
    ) from error

import torch

from gemproj.integrations._base import FrameworkGEM
from gemproj.torch import Projection
from gemproj.torch.attached import clip_grad_norm_
from gemproj.torch.stats import LogMeans

_REFUSED = {
    DeepSpeedStrategy: "DeepSpeed keeps gradients in flat buffers of its own, where no callback sees them",
    FSDPStrategy: "FSDP1 keeps parameters in flat shards; ModelParallelStrategy (FSDP2) works",
}


def _clip(self: Precision, optimizer: Any, clip_val: float) -> None:
    if isinstance(optimizer, LightningOptimizer):  # others with one in them may be attached to
        optimizer = optimizer.optimizer
    clip_grad_norm_([optimizer], self.main_params(optimizer), clip_val)


# Callbacks come before it or not at all. Where no projector is attached, it does what it did.
Precision.clip_grad_by_norm = _clip


class GEMCallback(FrameworkGEM, Callback):
    """Keeps a `Trainer` from raising the losses on a memory of earlier tasks while it fits the next one.

    One call of ``Trainer.fit`` is one task: it projects the parameters that are trainable then. Pass the same
    callback to the Trainer of each task, and call `end_task` after it. Works with automatic and manual
    optimization, accumulated gradients, mixed precision and DistributedDataParallel, for modules with one
    optimizer.

    Constraint gradients are computed in each step of the optimizer, with the precision of training. The
    gradient is projected, then clipped as ``gradient_clip_val`` says: a margin is the weight of replay.

    With a logger, steps under constraints log ``gem/violations``, ``gem/active``, ``gem/cosine``,
    ``gem/worst_cosine`` and ``gem/seconds``, see `gemproj.torch.Projection`; no device is waited for.

    Checkpoints hold the memory, the warm start and, where they are reused, the constraints, so that
    ``fit(..., ckpt_path=...)`` goes on as if it had not been interrupted. Lightning saves those of process
    0: after a restart with several processes all of them have its memory.

    Parameters
    ----------
    memory : EpisodicMemory
        Batches as the dataloader yields them; they are converted and moved to the device as in training.
        In several processes each has its own examples of the same tasks.
    loss : callable
        ``loss(module, batch)`` returns the mean over the examples, or one number for each. A method of
        the module will do, ``MyModule.loss``; not ``training_step``, which logs.
    **options
        Of `gemproj.torch.GEM`.

    Attributes
    ----------
    memory : EpisodicMemory
    gem : gemproj.torch.GEM or None
        That of the present or last call of ``fit``.

    Examples
    --------
    >>> from gemproj.integrations.lightning import GEMCallback
    >>> from gemproj.torch import EpisodicMemory
    >>> def loss(module, batch):
    ...     return torch.nn.functional.cross_entropy(module(batch[0]), batch[1])
    >>> gem = GEMCallback(EpisodicMemory(per_task=100), loss, on="both", metric="adam")
    >>> for loader in stream:  # doctest: +SKIP
    ...     Trainer(max_epochs=1, callbacks=[gem]).fit(module, loader)
    ...     gem.end_task(loader)
    """

    _logged: Projection | None = None
    _stage = "fit"

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Note what begins: a checkpoint that is only evaluated has no say in what is remembered."""
        self._stage = stage

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
                "memory=memory) in the module's on_train_start, and remove() it in on_train_end."
            )

        def in_precision(function: Any) -> Any:
            def call(module: Any, batch: Any, *outputs: Any) -> Any:
                with trainer.precision_plugin.forward_context():
                    device = next(module.parameters()).device  # after `fit` Lightning moves it to the CPU
                    batch = trainer.precision_plugin.convert_input(batch)
                    return function(module, trainer.strategy.batch_to_device(batch, device), *outputs)

            return call

        loss = in_precision(self._loss)
        if hasattr(self._loss, "outputs"):
            loss.outputs = in_precision(self._loss.outputs)

        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._attach(pl_module, trainer.optimizers[0], loss=loss, scaler=scaler)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Log what the step did, if there was one."""
        if self.last is None or self.last is self._logged:
            return
        self._logged = self.last
        means = LogMeans()
        means.add(self.last)
        if numbers := means.take():
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

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the optimizer alone from now on."""
        self._detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the optimizer alone from now on."""
        self._detach()
