"""Gradient projection under the Trainer of transformers."""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import torch

try:
    import accelerate  # noqa: F401
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "gemproj.integrations.transformers needs transformers and Accelerate: "
        "pip install 'gemproj[transformers]'."
    ) from error

from gemproj.integrations.prepared import Prepared, file_in, read
from gemproj.integrations.summary import summary
from gemproj.torch import EpisodicMemory, GradientProjector, Projection
from gemproj.torch.batches import Batch, Loss
from gemproj.torch.recall import model_loss


class GEMCallback(TrainerCallback):
    """Keeps a `transformers.Trainer` from raising the losses of earlier tasks.

    ::

        gem = GEMCallback(EpisodicMemory(per_task=100, label="labels"))
        for task, dataset in enumerate(datasets):
            trainer = Trainer(model, args, train_dataset=dataset, callbacks=[gem])
            trainer.train()
            gem.remember(trainer.get_train_dataloader(), task)

    Constraints are computed once per accumulation window, after clipping, in the precision of training;
    the projection is part of the optimizer's step. Only trainable parameters take part, so with peft it
    costs what the adapters cost. Every call of ``train()`` starts without constraints and warm start,
    unless it resumes.

    Logs of training get ``gem/violations`` and ``gem/active`` (constraints that the gradient violates,
    and that hold it back), ``gem/cosine`` (between the gradient before and after) and ``gem/seconds``,
    each the mean over the steps since the last log, and ``gem/worst_cosine``, the smallest cosine between
    an applied step and a constraint in that time: negative where a step raised a past task's loss, to
    first order. Steps without constraints, and steps that a gradient scaler skips, do not count. The
    numbers are in ``trainer.state.log_history``; callbacks that report elsewhere (`report_to`) come before
    one that is passed to the trainer, and see them if it joins by `attach` instead.

    Checkpoints get a file ``gem.pt``, or one per process, with the memory and the projector's state. It is
    found again if training resumes from a folder in ``args.output_dir``, or from
    ``args.resume_from_checkpoint``; otherwise call `load`.

    Parameters
    ----------
    memory : EpisodicMemory
        The past tasks. In several processes each remembers, and brings, its own examples of the same tasks.
    loss : callable
        ``loss(model, batch)``, by default ``model(**batch).loss``; see `GradientProjector.recall`. If the
        trainer computes another loss than the model's, pass the same here.
    microbatch : int, optional
    training : bool, default False
        As in `GradientProjector.recall`. With `training`, activation checkpointing must not be reentrant.
    **options
        Of `gemproj.torch.GradientProjector`: method, margin, penalty, on, metric, interval. A margin is in
        units of the gradient that clipping leaves.

    Attributes
    ----------
    memory : EpisodicMemory

    Raises
    ------
    ValueError
        When training begins with DeepSpeed, Megatron-LM or FSDP1, which hide steps or parameters from a
        projector, or resumes from a checkpoint without ``gem.pt``.
    """

    def __init__(
        self,
        memory: EpisodicMemory,
        *,
        loss: Loss = model_loss,
        microbatch: int | None = None,
        training: bool = False,
        **options: Any,
    ) -> None:
        GradientProjector([torch.nn.Parameter(torch.zeros(1))], **options)  # bad options are reported here
        self.memory = memory
        self._options = {"loss": loss, "microbatch": microbatch, "training": training, **options}
        self._prepared: Prepared | None = None
        self._resumed: dict[str, Any] | None = None
        self._steps: list[Projection] = []

    @property
    def projector(self) -> GradientProjector | None:
        """The projector that is at work, None except during training."""
        return None if self._prepared is None else self._prepared.projector

    def attach(self, trainer: Any) -> None:
        """Join a trainer as the first of its callbacks, so that those which report see the numbers, too."""
        callbacks = trainer.callback_handler.callbacks
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)

    def remember(self, batches: Iterable[Batch], task: Hashable) -> None:
        """Offer all examples of a task that has been learned to the memory.

        Parameters
        ----------
        batches : iterable
            Such as ``trainer.get_train_dataloader()``, whose collator must pad to a fixed length:
            ``DataCollatorWithPadding(tokenizer, padding="max_length", max_length=...)``.
        task : hashable
            A number or a string, if checkpoints are saved.

        Raises
        ------
        ValueError
            For examples whose shapes differ.
        """
        for batch in batches:
            self.memory.add(batch, task)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Read the state of GEM from a checkpoint, for the training that begins next.

        Only needed to resume from a checkpoint outside of ``args.output_dir``, whose place callbacks are
        not told. Call it when there is a trainer.

        Raises
        ------
        FileNotFoundError
            If the checkpoint was made without GEM, or by another number of processes.
        """
        self._resumed = read(folder)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Build the projector and attach it to the optimizer."""
        self._finish()  # a training that was broken off
        self._prepared = Prepared(model, optimizer, self.memory, **self._options)
        if state.global_step:
            self._prepared.load(self._find(args, state.global_step))
        self._resumed = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compute the constraints."""
        assert self._prepared is not None
        self._prepared.recall()
        self._prepared.projector.last = None

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Take note of what the step did; nothing is read from a device before it is logged."""
        assert self._prepared is not None
        last = self._prepared.projector.last
        if last is not None:
            self._steps.append(last)
        elif not getattr(optimizer, "step_was_skipped", False):
            raise RuntimeError(
                f"The steps of optim={args.optim!r} are not taken by optimizer.step(), so they cannot be "
                "projected. Use another optimizer."
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add what happened since the last log."""
        if not ({"loss", "train_loss"} & set(logs or ())):
            return  # an evaluation
        numbers = summary(self._steps)
        self._steps = []
        logs.update(numbers)
        state.log_history[-1].update(numbers)  # a copy of logs, made before callbacks are called

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add a file to the checkpoint."""
        if self._prepared is not None and not args.save_only_model:
            self._prepared.save(_checkpoint(args, state.global_step), step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach from the optimizer."""
        self._finish()

    def _finish(self) -> None:
        if self._prepared is not None:
            self._prepared.remove()
        self._prepared = None
        self._steps = []

    def _find(self, args: Any, step: int) -> dict[str, Any]:
        """Return the state of GEM at the step from which training resumes, or raise."""
        folders = [_checkpoint(args, step)]
        if args.resume_from_checkpoint and os.path.isdir(args.resume_from_checkpoint):
            folders.insert(0, Path(args.resume_from_checkpoint))
        states = [read(folder) for folder in folders if file_in(folder).is_file()]
        for found in [self._resumed, *states]:
            if found is not None and found["step"] == step:
                return found
        raise ValueError(
            f"Training resumes at step {step}, but the state of GEM at that step is not in "
            f"{' or '.join(map(str, folders))}. Call GEMCallback.load(folder) with the checkpoint before "
            "train()."
        )


def _checkpoint(args: Any, step: int) -> Path:
    return Path(args.output_dir) / f"checkpoint-{step}"
