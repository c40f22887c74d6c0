"""A keeper as a callback of PyTorch Lightning; one callback serves every task."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
except ImportError as error:
    raise ImportError(
        "gemproj.integrations.lightning needs Lightning: pip install '.[lightning]' in a checkout of gemproj."
    ) from error

import torch

from gemproj.torch.data import map_nested
from gemproj.torch.keeper import CallbackBase
from gemproj.torch.processes import everyone
from gemproj.torch.promise import Loss
from gemproj.torch.step import total_norm

_REFUSED = {
    DeepSpeedStrategy: "DeepSpeed keeps gradients in its own flat buffers, which no callback sees",
    FSDPStrategy: "FSDP1 keeps parameters in flat shards; ModelParallelStrategy (FSDP2) works",
}


class KeeperCallback(CallbackBase, Callback):
    """A callback that keeps promises about `data` while a `Trainer` fits something else.

    One call of ``Trainer.fit`` is one task. Parameters that are trainable in a step are projected. Pass the
    same callback to the Trainer of each task, and call `keep` after each fit. The callback works with
    automatic and manual optimization, accumulated gradients, mixed precision and DistributedDataParallel, for
    modules with one optimizer. The gradient is projected before Lightning clips it; with manual optimization
    call `clip_grad_norm_` of the callback. The numbers of `logs`, such as ``keep/excess``, are logged as
    often as the trainer logs.

    Checkpoints hold the kept sets, which replace those of `data` when a fit resumes, the history and the warm
    start. Lightning saves only the state of process 0, so all processes then have the examples of process 0.

    Parameters
    ----------
    data, name, collate, limit, hold_out
        What to keep when the first fit begins, as in `gemproj.torch.Keeper.keep`.
    promise : Promise or loss, optional
        As in `gemproj.torch.Keeper`. A loss is a function of a module and a batch from the dataloader, which
        is converted and moved to the device as in validation. A method of the module, such as
        ``MyModule.loss``, is possible; ``training_step`` is not, because it logs.
    **options
        `on`, `method`, `look`, `project`, `microbatch` and `process_group` of `gemproj.torch.Keeper`.

    Examples
    --------
    >>> from gemproj.integrations.lightning import KeeperCallback
    >>> from gemproj.torch import Promise
    >>> def loss(module, batch):
    ...     return torch.nn.functional.cross_entropy(module(batch[0]), batch[1])
    >>> callback = KeeperCallback(promise=Promise(loss, weight=0.5))
    >>> for loader in stream:  # doctest: +SKIP
    ...     Trainer(max_epochs=1, callbacks=[callback]).fit(module, loader)
    ...     callback.keep(loader, limit=100)
    """

    _trainer: Trainer | None = None
    _restored: Mapping[str, Any] | None = None  # the state of a checkpoint, until training begins

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise for a trainer of the package that was renamed."""
        if not isinstance(trainer, Trainer):
            raise TypeError(
                f"trainer must be a lightning.pytorch.Trainer; found one of {type(trainer).__module__}. Use "
                "`import lightning.pytorch as pl` in place of `import pytorch_lightning as pl`."
            )

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Take the state out of the checkpoint, for when training begins; leave it if there is none.

        Lightning itself would load it now, before there is an optimizer.
        """
        state = checkpoint["callbacks"].pop(self.state_key, self._restored)
        if trainer.state.fn == "fit":
            self._restored = state

    def state_dict(self) -> dict[str, Any]:
        """Return the state; nothing while examples wait, as when a tuner saves weights before a trial."""
        return {} if self._pending else super().state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state; until a training has begun, it waits, as `keep` does."""
        if self._training is None:
            self._restored = state_dict
        else:
            super().load_state_dict(state_dict)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Load the state of a checkpoint from the end of a training, which has not begun again."""
        if self._training is not None:
            self._load_restored()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a task, or continue the task of a checkpoint."""
        for strategy, reason in _REFUSED.items():
            if isinstance(trainer.strategy, strategy):
                raise ValueError(f"KeeperCallback cannot work with {strategy.__name__}: {reason}.")
        if getattr(trainer.strategy.launcher, "is_interactive_compatible", False):  # as in notebooks
            raise ValueError(
                "KeeperCallback cannot work with processes that are forked: what it keeps is lost with them. "
                "Use one device, or strategy='ddp' in a script."
            )
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"KeeperCallback needs a module with one optimizer; found {len(trainer.optimizers)}. For "
                "several, make gemproj.torch.Keeper(self, [opt.optimizer for opt in self.optimizers()]) in "
                "the module's on_train_start, and remove() it in on_train_end; without toggle_optimizer, "
                "which freezes parameters."
            )
        self._trainer = trainer
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._attach(pl_module, trainer.optimizers[0], scaler=scaler, group=everyone())
        self.logs()  # drops the numbers of an earlier fit
        # Lightning clips after the hook before the step. With manual optimization the module clips, and it
        # may call the optimizer itself.
        self._steps[0].early = pl_module.automatic_optimization
        self._collate = getattr(trainer.train_dataloader, "collate_fn", None)
        self._keep_pending()
        self._load_restored()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Project the gradient, before Lightning clips it."""
        if not self._steps[0].early:
            return
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        scaled = scaler is not None and scaler.is_enabled()
        # After an overflow, the scaler takes no step. It reads the gradients, too.
        if not (scaled and not total_norm(pl_module.parameters()).isfinite()):
            self._steps[0].begin()
            most = trainer.gradient_clip_val
            if most and self.on != "gradient" and trainer.gradient_clip_algorithm != "value":
                self._steps[0].clips(most, total_norm(pl_module.parameters()))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Log the numbers of the steps since the last log, when Lightning sends its own."""
        loop = trainer.fit_loop.epoch_loop
        accumulates = pl_module.automatic_optimization and loop._should_accumulate()
        if trainer._logger_connector.should_update_logs and not accumulates:
            pl_module.log_dict(self.logs())

    def on_train_end(self, *args: Any) -> None:
        """Detach from the optimizer."""
        self.remove()

    on_exception = on_train_end

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copying and pickling; a copy is not attached to a trainer."""
        held = super().__getstate__() | {"_trainer": None}
        # Lightning gives a callback these methods of the module.
        return {name: value for name, value in held.items() if name not in ("log", "log_dict")}

    def _load_restored(self) -> None:
        restored, self._restored = self._restored, None
        if restored is not None:
            self.load_state_dict(restored)

    def _wrapped(self, loss: Loss) -> Loss:
        found: Any = partial(self._called, loss)
        if hasattr(loss, "outputs"):
            found.outputs = partial(self._called, loss.outputs)
        if hasattr(loss, "labelled"):
            found.labelled = loss.labelled
        return found

    def _called(self, function: Any, module: Any, batch: Any, *outputs: Any) -> Any:
        """Call a function of a batch in the precision of the trainer, as it calls its module."""
        assert self._trainer is not None
        learner, precision = self._trainer.lightning_module, self._trainer.precision_plugin
        device = next(module.parameters()).device  # after `fit`, Lightning moves modules to the CPU
        with precision.forward_context(), _silent(learner):
            # Hooks of the module or its data module may change their input in place.
            given = precision.convert_input(batch)
            batch = map_nested(lambda a: a.clone() if isinstance(a, torch.Tensor) else a, given)
            stage = self._trainer.state.stage
            self._trainer.validating = True  # what hooks draw at random in training fits no stored output
            try:
                batch = learner._on_before_batch_transfer(batch, 0)
                batch = learner._apply_batch_transfer_handler(batch, device, 0)
            finally:
                self._trainer.state.stage = stage
            return function(module, batch, *outputs)


@contextmanager
def _silent(module: Any) -> Iterator[None]:
    """Have a module log nothing: losses of kept examples are none of its metrics."""
    silent = dict.fromkeys(("log", "log_dict"), lambda *args, **options: None)
    own = {name: vars(module)[name] for name in silent if name in vars(module)}
    vars(module).update(silent)
    try:
        yield
    finally:
        for name in silent:
            del vars(module)[name]
        vars(module).update(own)
