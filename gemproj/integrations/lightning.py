"""GEM in PyTorch Lightning: a callback, the same one for every task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
except ImportError as error:
    raise ImportError(
        "gemproj.integrations.lightning needs Lightning: pip install 'gemproj[lightning]'."
    ) from error

import torch
from torch import Tensor

from gemproj.methods import AnyMethod
from gemproj.torch import EpisodicMemory, GradientProjector
from gemproj.torch.applied import Metric, On
from gemproj.torch.attached import Attached
from gemproj.torch.projection import Projection

_REFUSED = {
    DeepSpeedStrategy: "DeepSpeed keeps gradients in flat buffers of its own, where no callback sees them",
    FSDPStrategy: "FSDP1 keeps parameters in flat shards; ModelParallelStrategy (FSDP2) works",
}


class GEMCallback(Callback):
    """Keeps what is in a memory from being unlearned while a `Trainer` fits the next task.

    One call of ``Trainer.fit`` is one task: it makes a new projector of the parameters that are trainable
    then. Pass the same callback to the Trainer of each task, and put examples of a task into the memory when
    it has been learned. Works with automatic and manual optimization, accumulated gradients, mixed precision
    and DistributedDataParallel, for modules with one optimizer.

    Constraints are computed before each step of the optimizer, after accumulation and unscaling, with the
    precision of training. The projection is that of an attached projector: of the gradient that the
    optimizer is given, which with ``gradient_clip_val`` is the clipped one.

    With a logger, steps under constraints log ``gem/violations``, ``gem/active``, ``gem/cosine``,
    ``gem/worst_cosine`` and ``gem/seconds``, see `gemproj.torch.Projection`; no device is waited for.

    Checkpoints hold the memory, the constraints and the warm start, so that ``fit(..., ckpt_path=...)`` goes
    on as if it had not been interrupted. Lightning saves those of process 0: after a restart with
    several processes all of them have its memory.

    Parameters
    ----------
    memory : EpisodicMemory
        Batches as the dataloader yields them; they are converted and moved to the device as in training.
        With several processes each has a memory of its own, with the same tasks; rows are averages over all.
    loss : callable
        ``loss(module, batch)`` returns the mean over the examples, or one number for each. A method of
        the module will do, ``MyModule.loss``. Not ``training_step``, which logs.
    method, margin, penalty, on, metric, interval
        As in `gemproj.torch.GradientProjector`.
    microbatch, training
        As in `gemproj.torch.GradientProjector.recall`.

    Attributes
    ----------
    memory : EpisodicMemory
    projector : GradientProjector or None
        That of the present or last call of ``fit``.

    Examples
    --------
    >>> from gemproj.integrations.lightning import GEMCallback
    >>> from gemproj.torch import EpisodicMemory
    >>> def loss(module, batch):
    ...     return torch.nn.functional.cross_entropy(module(batch[0]), batch[1])
    >>> gem = GEMCallback(EpisodicMemory(per_task=100), loss, on="both", metric="adam")
    >>> for task, loader in enumerate(stream):  # doctest: +SKIP
    ...     Trainer(max_epochs=1, callbacks=[gem]).fit(module, loader)
    ...     for batch in loader:
    ...         gem.memory.add(batch, task)
    """

    def __init__(
        self,
        memory: EpisodicMemory,
        loss: Callable[[LightningModule, Any], Tensor],
        method: AnyMethod = "exact",
        *,
        margin: float = 0.0,
        penalty: float | None = None,
        on: On = "gradient",
        metric: Metric = "euclidean",
        interval: int = 1,
        microbatch: int | None = None,
        training: bool = False,
    ) -> None:
        if not callable(loss):
            raise TypeError(f"loss must be a function of module and batch; found {type(loss).__name__}.")
        self.memory = memory
        self.projector: GradientProjector | None = None
        self._loss = loss
        self._projector = partial(
            GradientProjector,
            method=method,
            margin=margin,
            penalty=penalty,
            on=on,
            metric=metric,
            interval=interval,
        )
        self._projector([torch.nn.Parameter(torch.zeros(1))])  # bad options are reported here
        self._recall: dict[str, Any] = {"microbatch": microbatch, "training": training}
        self._attached: Attached | None = None
        self._resumed: Any = None
        self._logged: Projection | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a task, or go on with the one of a checkpoint."""
        for strategy, reason in _REFUSED.items():
            if isinstance(trainer.strategy, strategy):
                raise ValueError(f"GEMCallback cannot work with {strategy.__name__}: {reason}.")
        if len(trainer.optimizers) != 1:
            raise ValueError(
                f"GEMCallback needs a module with one optimizer; found {len(trainer.optimizers)}."
            )
        self._detach()
        group = torch.distributed.group.WORLD if trainer.world_size > 1 else None
        self.projector = self._projector(pl_module.parameters(), group=group)
        if self._resumed is not None:
            self.projector.load_state_dict(self._resumed)
            self._resumed = None
        self._attached = self.projector.attach(trainer.optimizers[0])

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Compute the constraints of the step."""
        # Mostly inside of a step, in the closure that takes the gradient; with a GradScaler before it. The
        # attached projector works after the closure, so that it has these rows either way.
        assert self.projector is not None

        def loss(module: Any, batch: Any) -> Tensor:
            with trainer.precision_plugin.forward_context():
                batch = trainer.strategy.batch_to_device(trainer.precision_plugin.convert_input(batch))
                return self._loss(module, batch)

        self.projector.recall(pl_module, self.memory.batches(), loss, **self._recall)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Log what the step did, if there was one."""
        last = None if self.projector is None else self.projector.last
        if last is None or last is self._logged or last.solution is None:
            return
        self._logged, sol = last, last.solution
        values = {"violations": sol.violated.sum(), "active": sol.active.sum(), "cosine": sol.cosine()}
        if last.slopes is not None:
            values["worst_cosine"] = last.slopes.min()
        logged = {f"gem/{name}": value.to(torch.float32) for name, value in values.items()}
        pl_module.log_dict(logged | {"gem/seconds": last.seconds})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the optimizer alone from now on."""
        self._detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the optimizer alone from now on."""
        self._detach()

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the memory, and the state of the projector."""
        projector = None if self.projector is None else self.projector.state_dict()
        return {"memory": self.memory.state_dict(), "projector": projector}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Bring back what `state_dict` returned; the projector's part when there is one."""
        self.memory.load_state_dict(state_dict["memory"])
        self._resumed = state_dict["projector"]

    def _detach(self) -> None:
        if self._attached is not None:
            self._attached.remove()
        self._attached = None
