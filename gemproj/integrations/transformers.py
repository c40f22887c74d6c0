"""One line that keeps what a model can do, for the Trainer of transformers and those of TRL."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from functools import partial
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

from torch.utils.data import DataLoader

from gemproj.integrations.accelerate import AcceleratedKeeper, file_in, read
from gemproj.torch.data import Collate
from gemproj.torch.losses import Distillation
from gemproj.torch.promise import Loss, Promise
from gemproj.torch.step import ProjectedStep

# Longest kept text, in tokens, where neither the training arguments nor the tokenizer set a length.
_LONGEST = 1024


class KeeperCallback(AcceleratedKeeper, TrainerCallback):
    """A callback that keeps what a model says about `data`, within a bound, while a Trainer teaches it more.

    ::

        Trainer(model, args, train_dataset=new, callbacks=[KeeperCallback(texts)]).train()

    When training begins, the outputs of the model for `data` are stored. Every step then keeps their mean
    divergence below the tolerance of the promise, 0.05 nats by default. For tasks one after another, pass the
    same callback to the trainer of each task, and keep each task when it is learned::

        callback = KeeperCallback(promise=Promise(weight=0.5))
        for dataset in datasets:
            trainer = Trainer(model, args, train_dataset=dataset, callbacks=[callback])
            trainer.train()
            callback.keep(trainer.get_train_dataloader(), limit=100)

    The projected gradient is clipped to ``args.max_grad_norm``, so a weight acts as in replay; the Trainer
    itself does not clip meanwhile. Only trainable parameters are projected, so with peft only the adapters add
    to the cost. Logs include the numbers of `logs`, such as ``keep/excess``, wherever `report_to` sends them.

    Checkpoints include a file ``keeper.pt``, or one per process. It is found if training resumes from a folder
    in ``args.output_dir``, or from ``args.resume_from_checkpoint``; otherwise call `load`.

    Parameters
    ----------
    data : list of texts, of conversations or of examples; datasets.Dataset; or DataLoader, optional
        What to keep. Texts, and conversations (lists of messages with a role and a content), are tokenised by
        the tokenizer of the trainer. Examples are collated by its collator. More can be kept by `keep`, before
        training, in which case it waits until training begins, or after it.
    promise : Promise or loss, optional
        By default ``Promise(Distillation())``.
    name, collate, limit
        As in `gemproj.torch.Keeper.keep`, for `data`.
    **options
        `on`, `method`, `look`, `project`, `microbatch` and `process_group` of `gemproj.torch.Keeper`.

    Raises
    ------
    ValueError
        When training begins with Megatron-LM or FSDP1, which hide steps or parameters, or with DeepSpeed and
        any `on` except "step"; or when it resumes from a checkpoint without ``keeper.pt``.
    """

    _waits = True
    _remedy = "Pass KeeperCallback(texts)."
    _named: dict[str, Any] | None = None  # the checkpoint that `load` has read

    def __init__(
        self,
        data: Any = None,
        promise: Promise | Loss | None = None,
        *,
        name: Any = None,
        collate: Collate | None = None,
        limit: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(Promise(Distillation()) if promise is None else promise, **options)
        self._given = promise is not None
        self._clipping: float | None = None
        self._tools: tuple[Any, ...] | None = None  # tokenizer, collator, model, training arguments
        if data is not None:
            self.keep(data, name=name, collate=collate, limit=limit)

    def keep(
        self,
        data: Any,
        promise: Promise | Loss | None = None,
        *,
        name: Any = None,
        collate: Collate | None = None,
        limit: int | None = None,
    ) -> None:
        """Keep examples, now or when training begins; see `KeeperCallback` and `gemproj.torch.Keeper.keep`."""
        if self._model is not None and self._tools is not None and collate is None:
            data, collate = _prepared(data, *self._tools)
        super().keep(data, promise, name=name, collate=collate, limit=limit)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Read the state of the keeper from a checkpoint, for the training that begins next.

        `load` is needed only to resume from a checkpoint outside of ``args.output_dir``, because callbacks do
        not receive its path. Call `load` after making the trainer. The checkpoint must have been made with
        a keeper and by the same number of processes.
        """
        self._named = read(folder)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Attach to the optimizer, and keep what waits for a model."""
        self._attach_prepared(model, optimizer)
        self._come_first()
        loader = kwargs.get("train_dataloader")
        self._collate = getattr(loader, "collate_fn", None)
        tokenizer = kwargs.get("processing_class") or kwargs.get("tokenizer")
        self._tools = (tokenizer, self._collate, self._model, args)
        self._keep_pending()
        # The gradient is clipped after its projection instead; DeepSpeed clips within its step.
        if args.max_grad_norm and self._step_type is ProjectedStep:
            self._clipping = self.max_norm = args.max_grad_norm
            args.max_grad_norm = 0.0
        self._noted, self._noted_at = self._begun, -1  # a callback that was added twice is called twice
        self.logs()  # drops the numbers of an earlier training
        if state.global_step:
            self.load_state_dict(self._find(args, state.global_step))
        self._named = None

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Raise if ``optimizer.step()`` did not take the step; the check does not synchronise a device."""
        if self._begun != self._noted:
            self._noted, self._noted_at = self._begun, state.global_step
        elif self._noted_at != state.global_step and not getattr(optimizer, "step_was_skipped", False):
            raise RuntimeError(
                f"The steps of optim={args.optim!r} are not taken by optimizer.step(), so they cannot be "
                "projected. Use another optimizer."
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add the numbers of the steps since the last log."""
        if not ({"loss", "train_loss"} & set(logs or ())):
            return  # an evaluation
        numbers = self.logs()
        if self._clipping is not None and self._steps and self._steps[0].norm is not None:
            numbers["grad_norm"] = float(self._steps[0].norm)  # as the Trainer logs it, before clipping
        logs.update(numbers)
        state.log_history[-1].update(numbers)  # a copy of logs from before the callbacks

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the state of the keeper to the checkpoint."""
        # In a hyperparameter search, the folder of the checkpoints is unknown.
        if not (args.save_only_model or state.is_hyper_param_search):
            self._save(_checkpoint(args, state.global_step), step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach from the optimizer."""
        if self._clipping is not None:
            args.max_grad_norm, self._clipping, self.max_norm = self._clipping, None, None
        self._commit()
        self.remove()

    def _come_first(self) -> None:
        """Move before the callbacks that report logs, which otherwise would not see our numbers.

        A callback is not told in which list it is; it is called by the object that has the list.
        """
        caller: Any = sys._getframe(2).f_locals.get("self")
        callbacks = getattr(caller, "callbacks", None)
        if isinstance(callbacks, list) and self in callbacks:
            callbacks.remove(self)
            callbacks.insert(0, self)

    def _find(self, args: Any, step: int) -> dict[str, Any]:
        """Return the state of the keeper at the step from which training resumes, or raise."""
        folders = [_checkpoint(args, step)]
        if args.resume_from_checkpoint and os.path.isdir(args.resume_from_checkpoint):
            folders.insert(0, Path(args.resume_from_checkpoint))
        states = [read(folder) for folder in folders if file_in(folder).is_file()]
        for found in [self._named, *states]:
            if found is not None and found["step"] == step:
                return found
        raise ValueError(
            f"Training resumes at step {step}, but the state of the keeper at that step is not in "
            f"{' or '.join(map(str, folders))}. Call KeeperCallback.load(folder) with the checkpoint before "
            "train(). If the checkpoint was made without a keeper, begin a training from its model instead: "
            "Model.from_pretrained(checkpoint), and train() without resume_from_checkpoint."
        )


def _checkpoint(args: Any, step: int) -> Path:
    return Path(args.output_dir) / f"checkpoint-{step}"


def _prepared(data: Any, tokenizer: Any, collator: Any, model: Any, args: Any) -> tuple[Any, Collate | None]:
    """Return data of a trainer's user as `gemproj.torch.Keeper.keep` takes it, with a collate function."""
    if isinstance(data, DataLoader) or not hasattr(data, "__getitem__") or not len(data):
        return data, None
    first = data[0]
    if isinstance(first, Mapping) and not set(first) & {"input_ids", "labels", "pixel_values", "label"}:
        key = next((key for key in ("messages", "text") if key in first), None)
        if key is not None:
            data, first = [one[key] for one in data], first[key]
    if _is_text(first):
        if tokenizer is None:
            raise ValueError("data holds texts, and the trainer has no tokenizer: pass processing_class=.")
        longest = next(
            (n for n in (getattr(args, "max_length", None), tokenizer.model_max_length) if n), _LONGEST
        )
        longest = min(longest, _LONGEST) if longest > 10**6 else longest
        return [_tokens(one, tokenizer, longest) for one in data], partial(_padded, tokenizer)
    if isinstance(first, Mapping) and args.remove_unused_columns:
        taken = {
            *inspect.signature(model.forward).parameters,
            "label",
            "label_ids",
            "labels",
            *(args.label_names or ()),
        }
        if not set(first) <= taken and set(first) & taken:
            data = [{key: one[key] for key in first if key in taken} for one in data]
    return data, collator if isinstance(first, Mapping) else None


def _is_text(one: Any) -> bool:
    """Return whether an element is a text or a conversation."""
    return isinstance(one, str) or (isinstance(one, list) and bool(one) and isinstance(one[0], Mapping))


def _tokens(one: Any, tokenizer: Any, longest: int) -> dict[str, list[int]]:
    """Return the tokens of a text or of a conversation."""
    text = one if isinstance(one, str) else tokenizer.apply_chat_template(one, tokenize=False)
    # A template writes its own special tokens.
    found = tokenizer(text, truncation=True, max_length=longest, add_special_tokens=isinstance(one, str))
    return {"input_ids": list(found["input_ids"])}


def _padded(tokenizer: Any, examples: list[dict[str, list[int]]]) -> dict[str, Any]:
    """Make a batch of tokens, with labels at all of them."""
    import torch

    tokens = [torch.tensor(one["input_ids"]) for one in examples]
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    ids, mask = (
        torch.nn.utils.rnn.pad_sequence(some, batch_first=True, padding_value=value)
        for some, value in ((tokens, pad), ([torch.ones_like(one) for one in tokens], 0))
    )
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
