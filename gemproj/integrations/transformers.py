"""Gradient projection in the Trainer of transformers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

try:
    import accelerate  # noqa: F401
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "gemproj.integrations.transformers needs transformers and Accelerate: "
        "pip install '.[transformers]' in a checkout of gemproj."
    ) from error

from gemproj.integrations.accelerate import AcceleratedKeeper, file_in, read


class GEMCallback(AcceleratedKeeper, TrainerCallback):
    """A callback that keeps a `transformers.Trainer` from raising the losses of earlier tasks.

    ::

        gem = GEMCallback(weight=0.5, examples=16)
        for dataset in datasets:
            trainer = Trainer(model, args, train_dataset=dataset, callbacks=[gem])
            trainer.train()
            gem.end_task(trainer.get_train_dataloader())

    The projected gradient is clipped to ``args.max_grad_norm``, so a margin acts as a weight of replay.
    ``grad_norm`` in the logs is the norm before the projection. Constraint gradients have the precision of
    training. Only trainable parameters are projected, so with peft only the adapters add to the cost. Every
    call of ``train()`` starts without constraints and warm start, unless it resumes. Examples are stored
    unchanged, and the trainer's collator makes batches of them.

    Training logs and ``trainer.state.log_history`` include the numbers of `logs`, such as ``gem/violations``,
    for the steps since the last log. Callbacks that report elsewhere (`report_to`) run before a callback that
    is passed to the trainer. Use `attach` instead if these callbacks should report the numbers.

    Checkpoints include a file ``gem.pt``, or one per process, with the memory and the projector's state. The
    file is found if training resumes from a folder in ``args.output_dir``, or from
    ``args.resume_from_checkpoint``; otherwise call `load`.

    Parameters
    ----------
    loss : callable or Promise
        See `gemproj.torch.GEM`. If the trainer does not use the loss of the model, pass the trainer's loss.
    per_task, per, examples, weight, tolerance, memory, method, on, every, project, microbatch, rows_dtype
        See `gemproj.torch.GEM`, also for the attributes. The scaler is the trainer's scaler.
    process_group
        The process group; by default all processes.

    Raises
    ------
    ValueError
        When training begins with Megatron-LM or FSDP1, which hide steps or parameters from a projector, or
        with DeepSpeed and any `on` except "step"; or when it resumes from a checkpoint without ``gem.pt``.
    """

    _named: dict[str, Any] | None = None  # the checkpoint that `load` has read

    def attach(self, trainer: Any) -> None:
        """Join a trainer as its first callback, so that reporting callbacks see the numbers of GEM."""
        callbacks = trainer.callback_handler.callbacks
        if self in callbacks:
            callbacks.remove(self)
        callbacks.insert(0, self)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Read the state of GEM from a checkpoint, for the training that begins next.

        `load` is needed only to resume from a checkpoint outside of ``args.output_dir``, because callbacks do
        not receive its path. Call `load` after making the trainer. The checkpoint must have been made with
        GEM and by the same number of processes.
        """
        self._named = read(folder)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Attach to the optimizer."""
        self._attach_prepared(model, optimizer)
        if self.memory.collate is None:  # for example after loading a checkpoint, which has no functions
            self.memory.collate = getattr(kwargs.get("train_dataloader"), "collate_fn", None)
        self._noted: Any = None
        self._noted_at = -1  # the step of `_noted`; a callback that was added twice is called twice
        self.logs()  # drops the numbers of an earlier training
        if state.global_step:
            self.load_state_dict(self._find(args, state.global_step))
        self._named = None

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Raise if ``optimizer.step()`` did not take the step; the check does not synchronise a device."""
        if self.last is not None and self.last is not self._noted:
            self._noted, self._noted_at = self.last, state.global_step
        elif self._noted_at != state.global_step and not getattr(optimizer, "step_was_skipped", False):
            raise RuntimeError(
                f"The steps of optim={args.optim!r} are not taken by optimizer.step(), so they cannot be "
                "projected. Use another optimizer."
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the numbers of the steps since the last log."""
        if not ({"loss", "train_loss"} & set(logs or ())):
            return  # an evaluation
        numbers = {name: float(value) for name, value in self.logs().items()}
        logs.update(numbers)
        state.log_history[-1].update(numbers)  # a copy of logs from before the callbacks

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the state of GEM to the checkpoint."""
        # In a hyperparameter search, the folder of the checkpoints is unknown.
        if not (args.save_only_model or state.is_hyper_param_search):
            self._save(_checkpoint(args, state.global_step), step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach from the optimizer."""
        self.remove()

    def _find(self, args: Any, step: int) -> dict[str, Any]:
        """Return the state of GEM at the step from which training resumes, or raise."""
        folders = [_checkpoint(args, step)]
        if args.resume_from_checkpoint and os.path.isdir(args.resume_from_checkpoint):
            folders.insert(0, Path(args.resume_from_checkpoint))
        states = [read(folder) for folder in folders if file_in(folder).is_file()]
        for found in [self._named, *states]:
            if found is not None and found["step"] == step:
                return found
        raise ValueError(
            f"Training resumes at step {step}, but the state of GEM at that step is not in "
            f"{' or '.join(map(str, folders))}. Call GEMCallback.load(folder) with the checkpoint before "
            "train(). If the checkpoint was made without GEM, begin a training from its model instead: "
            "Model.from_pretrained(checkpoint), and train() without resume_from_checkpoint."
        )


def _checkpoint(args: Any, step: int) -> Path:
    return Path(args.output_dir) / f"checkpoint-{step}"
