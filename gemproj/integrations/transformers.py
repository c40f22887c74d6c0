"""One line that keeps what a model can do, for the Trainer of transformers and those of TRL."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

try:
    import torch
    from accelerate.state import AcceleratorState
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        "gemproj.integrations.transformers needs transformers and Accelerate: "
        "pip install '.[transformers]' in a checkout of gemproj."
    ) from error

from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from gemproj.integrations.accelerate import AcceleratedKeeper, file_in, read
from gemproj.torch.data import Collate
from gemproj.torch.keeper import CallbackBase
from gemproj.torch.losses import Distillation
from gemproj.torch.promise import Promise
from gemproj.torch.references import write_references
from gemproj.torch.rows import unwrapped
from gemproj.torch.step import ProjectedStep

# Longest kept text, in tokens, unless the training arguments set a length.
_LONGEST = 1024
# Columns of examples that are tokenised already, and those of texts in the formats of TRL.
_COLUMNS = {"input_ids", "pixel_values", "labels", "label"}
_TEXTS = [("messages",), ("text",), ("prompt", "completion")]
# Key of the tokens of a text, which no collator of a Trainer knows.
_TEXT = "tokens of a text"
# Number of texts that a model writes where no data is given, and the share that is held out.
_TEXTS_WRITTEN, _HELD_OUT = 256, 0.2
# Names in the logs of the held-out loss and the ends of its 95 % interval.
_HELD = ("held_out", "held_out_low", "held_out_high")


class KeeperCallback(CallbackBase, AcceleratedKeeper, TrainerCallback):
    """A callback that keeps what a model says about `data`, within a bound, while a Trainer teaches it more.

    ::

        Trainer(model, args, train_dataset=new, callbacks=[KeeperCallback()]).train()
        Trainer(model, args, train_dataset=new, callbacks=[KeeperCallback(texts)]).train()

    When training begins, the outputs of the model for `data` are stored; without data, for 256 texts that the
    model writes itself (`gemproj.torch.write_references`; a fifth is held out, and they are cached). Every
    step then keeps their mean divergence below the tolerance of the promise, 0.05 nats by default. At an
    evaluation and at the end, the logs have the divergence on held-out examples, in a forward pass over them.
    For tasks one after another, pass the same callback to the trainer of each task, and keep each task when
    it is learned::

        callback = KeeperCallback(promise=Promise(weight=0.5))
        for dataset in datasets:
            trainer = Trainer(model, args, train_dataset=dataset, callbacks=[callback])
            trainer.train()
            callback.keep(trainer.get_train_dataloader(), limit=100)

    The projected gradient is clipped to ``args.max_grad_norm``, so a weight acts as in replay; the Trainer
    itself does not clip. ``grad_norm`` in the logs is the norm of the projected gradient before it is
    clipped. Only trainable parameters are projected, so with peft only the adapters add to the cost. Logs
    include the numbers of `logs`, such as ``keep/excess``, wherever `report_to` sends them.

    Checkpoints include a file ``keeper.pt``, or one per process. It is found if training resumes from a
    folder in ``args.output_dir``; for another one, which callbacks are not told, also set
    ``args.resume_from_checkpoint``.

    Parameters
    ----------
    data : list of texts, of conversations or of examples; datasets.Dataset; or DataLoader, optional
        What to keep. Texts, and conversations (lists of messages with a role and a content), are tokenised by
        the tokenizer of the trainer. Examples are collated by its collator. More can be kept by `keep`,
        before training, in which case it waits until training begins, or after it.
    promise : Promise, loss or float, optional
        By default ``Promise(Distillation())``; a number is its tolerance, in nats per token.
    name, collate, limit, hold_out
        As in `gemproj.torch.Keeper.keep`, for `data`; its name is "kept" by default.
    **options
        `on`, `method`, `look`, `project`, `microbatch` and `process_group` of `gemproj.torch.Keeper`.

    Raises
    ------
    ValueError
        When training begins with Megatron-LM or FSDP1, which hide steps or parameters, or with DeepSpeed and
        any `on` except "step"; or when it resumes from a checkpoint without ``keeper.pt``.
    """

    _usual = Promise(Distillation())
    _remedy = "Pass KeeperCallback(texts): this model does not write texts."
    _collate: _Examples | None  # since the first training began

    def _prepared(self, data: Any, collate: Collate | None) -> tuple[Any, Collate | None]:
        return (data, collate) if collate or not self._collate else self._collate.of(data)

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give back the norm to which gradients are clipped, after a training that broke off."""
        _clip_again(args)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Attach to the optimizer, and keep what waits for a model."""
        _clip_again(args)
        self.max_norm = None
        self._attach_prepared(model, optimizer)
        self._come_first()
        loader, tokenizer = kwargs.get("train_dataloader"), kwargs.get("processing_class")
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
        self._collate = _Examples(model, tokenizer, args, loader)
        tenth = max(state.max_steps // 10, 4)
        self._soon = (min(tenth, 20), tenth)  # a warm-up may end between the two
        self._keep_pending()
        self._noted, self._noted_at = 0, -1  # a callback that was added twice is called twice
        self.logs()  # drops the numbers of an earlier training
        if state.global_step:
            self.load_state_dict(self._find(args, state.global_step))
        elif not self.sets and hasattr(self.promise.loss, "outputs"):
            self._keep_references()

    def _keep_references(self) -> None:
        """Let a language model write what to keep, where no data was given."""
        assert self._collate is not None
        assert self._model is not None
        tokenizer, (model, _) = self._collate.tokenizer, unwrapped(self._model)
        if not getattr(model, "can_generate", bool)():
            return
        if tokenizer is None:
            raise ValueError(
                "Without data the model writes what to keep, which needs its tokenizer: pass "
                "processing_class=tokenizer to the trainer, or data to KeeperCallback."
            )
        world, rank = AcceleratorState().num_processes, AcceleratorState().process_index
        folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "gemproj"
        texts = write_references(model, tokenizer, max(_TEXTS_WRITTEN // world, 1), seed=rank, cache=folder)
        # Only the texts of an encoder-decoder have labels of their own.
        examples = [{_TEXT: {"labels": one["input_ids"]} | one} for one in texts]
        self.keep(examples, name="references", hold_out=_HELD_OUT, collate=self._collate)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the Trainer from clipping the gradient, which is clipped after its projection instead."""
        # DeepSpeed clips within its step.
        if args.max_grad_norm and self._steps and type(self._steps[0]) is ProjectedStep:
            self.max_norm, self._steps[0].norm = float(args.max_grad_norm), None
            args.max_grad_norm = _Later()
            args.max_grad_norm.norm = self.max_norm

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Raise if ``optimizer.step()`` did not take the step; the check does not synchronise a device."""
        _clip_again(args)
        calls = self._steps[0].calls if self._steps else 0
        if calls > self._noted:
            self._noted, self._noted_at = calls, state.global_step
        elif self._noted_at != state.global_step and not getattr(optimizer, "step_was_skipped", False):
            raise RuntimeError(
                f"The steps of optim={args.optim!r} are not taken by optimizer.step(), so they cannot be "
                "projected. Use another optimizer."
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add numbers of the steps since the last log; at evaluations and at the end, held-out losses."""
        logs = {} if logs is None else logs
        numbers: dict[str, float] = self.logs() if {"loss", "train_loss"} & logs.keys() else {}
        if "train_loss" in logs or any(key.startswith("eval_") for key in logs):
            for name, found in self.held_out().items():
                numbers |= {f"keep/{name}/{key}": n for key, n in zip(_HELD, found, strict=True)}
        norm = self._steps[0].norm if self._steps and "loss" in logs else None
        if norm is not None:  # not after an overflow, of which the Trainer tells
            numbers["grad_norm"] = float(norm)
        logs.update(numbers)
        state.log_history[-1].update(numbers)  # a copy of logs from before the callbacks

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the state of the keeper to the checkpoint."""
        # In a hyperparameter search, the folder of the checkpoints is unknown.
        if not (args.save_only_model or state.is_hyper_param_search):
            self._save(_checkpoint(args, state.global_step), step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach from the optimizer."""
        self.remove()

    def _come_first(self) -> None:
        """Move before the callbacks that report logs, which otherwise would not see our numbers.

        A callback is not told in which list it is; it is called by the object that has the list.
        """
        frame: Any = sys._getframe(1)
        while frame is not None:
            callbacks = getattr(frame.f_locals.get("self"), "callbacks", None)
            if isinstance(callbacks, list) and self in callbacks:
                callbacks.remove(self)
                callbacks.insert(0, self)
                return
            frame = frame.f_back

    def _find(self, args: Any, step: int) -> dict[str, Any]:
        """Return the state of the keeper at the step from which training resumes, or raise."""
        named = args.resume_from_checkpoint
        folder = Path(named) if named and os.path.isdir(named) else _checkpoint(args, step)
        if file_in(folder).is_file() and (found := read(folder))["step"] == step:
            return found
        raise ValueError(
            f"Training resumes at step {step}, but the state of the keeper at that step is not in {folder}. "
            "Set args.resume_from_checkpoint to the checkpoint. If it was made without a keeper, begin a "
            "training from its model instead: Model.from_pretrained(checkpoint), and train() without "
            "resume_from_checkpoint."
        )


def _checkpoint(args: Any, step: int) -> Path:
    return Path(args.output_dir) / f"checkpoint-{step}"


class _Later(float):
    """Zero in place of the norm to which the Trainer would clip, with that norm.

    If a training breaks off, no callback is told. The norm is then still here, also in copies.
    """

    norm: float


def _clip_again(args: Any) -> None:
    if isinstance(args.max_grad_norm, _Later):
        args.max_grad_norm = args.max_grad_norm.norm


class _Examples:
    """Makes examples of texts, and batches: of texts itself, of other examples by the Trainer's collator."""

    def __init__(self, model: Any, tokenizer: Any, args: Any, loader: Any) -> None:
        self.tokenizer = tokenizer
        # Without a batch sampler, the elements of the data set are batches.
        batched = getattr(loader, "batch_sampler", None) is not None
        self.collate: Collate | None = loader.collate_fn if batched else None
        longest = min(getattr(tokenizer, "model_max_length", _LONGEST), _LONGEST)
        self.longest = getattr(args, "max_length", None) or longest
        self.labelled = getattr(model, "can_generate", bool)()
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft
        columns = {
            *inspect.signature(base.forward).parameters,
            "label",
            "label_ids",
            *(args.label_names or ()),
        }
        self.columns = columns if args.remove_unused_columns else set()

    def of(self, data: Any) -> tuple[Any, Collate | None]:
        """Return data of a Trainer's user as `keep` takes it, with a collate function."""
        if isinstance(data, str):
            raise TypeError("data must be a list of texts; found one text. Pass [text].")
        if isinstance(data, DataLoader | Mapping) or not hasattr(data, "__getitem__") or not len(data):
            return data, None
        keys = data[0].keys() if isinstance(data[0], Mapping) else set()
        if keys >= {"role", "content"}:
            raise TypeError(
                "data must be a list of conversations; found one conversation. Pass [conversation]."
            )
        parts = [names for names in _TEXTS if keys >= set(names)]
        if parts and not keys & _COLUMNS:
            data = [reduce(add, (one[name] for name in parts[0])) for one in data]
        first = data[0]
        if isinstance(first, str) or (isinstance(first, list) and first and isinstance(first[0], Mapping)):
            if self.tokenizer is None:
                raise ValueError(
                    "data holds texts, and the trainer has no tokenizer: pass processing_class=."
                )
            return [self.tokens(one) for one in data], self
        if not keys or self.collate is None:
            return data, None
        if keys & self.columns:  # otherwise the collator makes what the model takes
            data = [{key: one[key] for key in keys if key in self.columns} for one in data]
        return data, self

    def tokens(self, one: Any) -> dict[str, dict[str, list[int]]]:
        """Return the tokens of a text or of a conversation as an example; an empty one has no label."""
        plain = isinstance(one, str)
        text = one if plain else self.tokenizer.apply_chat_template(one, tokenize=False)
        # A template writes its own special tokens.
        found = self.tokenizer(text, truncation=True, max_length=self.longest, add_special_tokens=plain)
        ids = list(found["input_ids"])
        example = {"input_ids": ids or [0]} | ({"labels": ids or [-100]} if self.labelled else {})
        return {_TEXT: example}

    def __call__(self, examples: list[Any]) -> Any:
        if _TEXT not in examples[0]:
            assert self.collate is not None
            return self.collate(examples)
        texts = [one[_TEXT] for one in examples]
        texts = [one | {"attention_mask": [1] * len(one["input_ids"])} for one in texts]
        padding = {"input_ids": getattr(self.tokenizer, "pad_token_id", None) or 0, "labels": -100}
        return {
            name: pad_sequence([torch.tensor(one[name]) for one in texts], True, padding.get(name, 0))
            for name in texts[0]
        }
