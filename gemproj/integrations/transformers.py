"""One line that keeps what a model can do, for the Trainer of transformers and those of TRL."""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from traceback import walk_stack
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

from torch.utils.data import Subset

from gemproj._warn import warn
from gemproj.integrations.accelerate import AcceleratedKeeper, read
from gemproj.integrations.texts import Examples, base_of, listed
from gemproj.torch.data import Collate, leaves_of, moved
from gemproj.torch.keeper import CallbackBase, alike
from gemproj.torch.losses import Distillation, has_teacher, without_adapters
from gemproj.torch.memory import KeptSet
from gemproj.torch.promise import Loss, Promise
from gemproj.torch.references import tokenizer_of, write_references
from gemproj.torch.rows import unwrapped
from gemproj.torch.step import ProjectedStep

# Number of texts that a model writes where no data is given, and the share that is held out.
_TEXTS_WRITTEN, _HELD_OUT = 256, 0.2
# Fewest texts of a process, of which one is held out.
_FEWEST = 5
# Names in the logs of the held-out loss, the ends of its 95 % interval, and its bound.
_HELD = ("held_out", "held_out_low", "held_out_high", "bound")
# So many examples of a set are compared with those of a checkpoint, or of another process.
_COMPARED = 64


class KeeperCallback(CallbackBase, AcceleratedKeeper, TrainerCallback):
    """A callback that keeps what a model says about `data`, within a bound, while a Trainer teaches it more.

    ::

        Trainer(model, args, train_dataset=new, callbacks=[KeeperCallback()]).train()
        Trainer(model, args, train_dataset=new, callbacks=[KeeperCallback(texts)]).train()

    When training begins, the outputs of the model for `data` are stored; without data, for 256 texts that the
    model writes itself (`gemproj.torch.write_references`; a fifth is held out, and they are cached). Every
    step is then corrected, so that their mean divergence ends near the tolerance of the promise, 0.05 nats by
    default, or below; on the way it may be above. At an evaluation and at the end, the logs have the
    divergence on held-out examples, in a forward pass over them, as ``keep/references/held_out`` with
    ``held_out_low``, ``held_out_high`` and ``bound``; the Trainer's ``metric_for_best_model`` may be one of
    them, with ``greater_is_better=False``.
    For tasks one after another, pass the same callback to the trainer of each task, and then
    ``trainer.get_train_dataloader()`` to its `keep`.

    The projected gradient is clipped to ``args.max_grad_norm``, so a weight acts as in replay; the Trainer
    itself does not clip. ``grad_norm`` in the logs is the norm of the projected gradient before it is
    clipped. Only trainable parameters are projected, so with peft only the adapters add to the cost. Logs
    include the numbers of `logs`, such as ``keep/excess``, wherever `report_to` sends them.

    Checkpoints include a file ``keeper.pt``, or one per process, from which training resumes.

    Parameters
    ----------
    data : list of texts, of conversations or of examples; datasets.Dataset; or DataLoader, optional
        What to keep. Texts, and conversations (lists of messages with a role and a content), are tokenised by
        the tokenizer of the trainer; for an encoder-decoder, they need columns ``prompt`` and ``completion``.
        For other models only the completion, or the last answer of a conversation, then has labels, unless
        TRL's `completion_only_loss` is False; `Distillation` needs none.
        Examples with other columns than tokens and labels are collated by its collator. A list or data set
        that several processes pass alike is divided among them, if there are 5 examples for each. More can be
        kept by `keep`, before training, in which case it waits until training begins, or after it.
    promise : Promise, loss or float, optional
        By default ``Promise(Distillation())``; a number is its tolerance, in nats per token.
    name, collate, limit, hold_out
        As in `gemproj.torch.Keeper.keep`, for `data`; its name is "kept" by default. Without data, `name`,
        `limit` and `hold_out` are those of the texts that the model writes.
    **options
        `on`, `method`, `look`, `project`, `microbatch` and `process_group` of `gemproj.torch.Keeper`.

    Raises
    ------
    ValueError
        When training begins with Megatron-LM or FSDP1, which hide steps or parameters, or with DeepSpeed and
        any `on` except "step", or with a held-out loss as a metric of which more is better; or when it
        resumes from a checkpoint without ``keeper.pt``.
    """

    _usual = Promise(Distillation())
    _remedy = "Pass data to KeeperCallback, for scores with a loss of them: this model does not write texts."
    _collate: Examples | None  # since the first training began

    def __init__(
        self, data: Any = None, promise: Promise | Loss | float | None = None, **options: Any
    ) -> None:
        if isinstance(data, float | int | Promise):
            raise TypeError(f"data must be texts or examples; found {data!r}. Pass promise={data!r}.")
        self._writes = data is None
        if self._writes:
            options = {"hold_out": _HELD_OUT} | options
            options["name"] = "references" if options.get("name") is None else options["name"]
        super().__init__(data, promise, **options)
        self._final: dict[str, Any] = {}  # the last log of a training

    def _prepared(self, data: Any, collate: Collate | None) -> tuple[Any, Collate | None]:
        data = self._own(listed(data))
        return (data, collate) if collate or not self._collate else self._collate.of(data)

    def _own(self, data: Any) -> Any:
        """Return the part of this process of a list or a data set that all processes were given."""
        if self._position()[1] == 1:
            return data
        (rank, world), n, digest = _place(), 0, 0
        if not isinstance(data, str | Mapping | torch.Tensor):  # these are refused later
            with suppress(Exception):  # a loader; what cannot be read is told of later
                some = leaves_of([data[k] for k in range(0, len(data), len(data) // _COMPARED + 1)])
                said = len(data), [one.tolist() if hasattr(one, "tolist") else one for one in some]
                n, digest = len(data), zlib.crc32(repr(said).encode())
        assert self._training is not None
        least = self._training.rows.vector.topology.least
        if least(digest) != -least(-digest) or n < _FEWEST * world:
            return data  # each has its own
        return data[rank::world] if isinstance(data, list | tuple) else Subset(data, range(rank, n, world))

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Attach to the optimizer, and keep what waits for a model."""
        _clip_again(args)
        best = args.metric_for_best_model or ""
        if best.removeprefix("eval_").startswith("keep/") and args.greater_is_better:
            raise ValueError(
                f"The least {best} is best, and greater_is_better is True, as for metrics by default. Set "
                "greater_is_better=False in the arguments."
            )
        before = self._training
        self._attach_prepared(model, optimizer)
        assert self._training is not None
        changed = before is not None and base_of(before.model) is not base_of(self._training.model)
        # A checkpoint has its own sets, and a search makes a model for each trial.
        if changed and self.sets and not (state.global_step or state.is_hyper_param_search):
            warn(
                f"The examples of {', '.join(map(repr, self.sets))} were kept with another model, and this "
                "one is held to what that one said. Unless they are alike, make a new KeeperCallback, or "
                "call forget."
            )
        self._come_first()
        tokenizer = tokenizer_of(kwargs.get("processing_class"))
        self._collate = Examples(model, tokenizer, args, kwargs.get("train_dataloader"))
        tenth = max(state.max_steps // 10, 4)
        self._soon = (min(tenth, 20), tenth)  # a warm-up may end between the two
        self._training.begun = state.global_step  # adapters of a checkpoint are not new ones
        self._keep_pending()
        self._training.begun = self._begun = 0
        self.logs()  # drops the numbers of an earlier training
        if state.global_step:
            given = dict(self.sets)
            self.load_state_dict(self._find(args, state.global_step))
            others = [name for name, kept in given.items() if not _begins(self.sets.get(name, kept), kept)]
            if others:
                warn(
                    f"Training resumes with the examples of {', '.join(map(repr, others))} that are in the "
                    "checkpoint; the other ones that were passed are not kept. To keep those, begin a "
                    "training from the model of the checkpoint."
                )
        elif self._writes and hasattr(self.promise.loss, "outputs"):
            self._keep_references()

    def _keep_references(self) -> None:
        """Let a language model write what to keep, where no data was given."""
        assert self._collate is not None
        assert self._training is not None
        tokenizer, (model, _) = self._collate.tokenizer, unwrapped(self._training.model)
        if self._named["name"] in self.sets:
            return
        reads = getattr(model, "main_input_name", "input_ids")  # others hear or see
        if not getattr(model, "can_generate", bool)() or reads != "input_ids":
            self._given = False  # so that a training without sets is told of
            return
        if not hasattr(tokenizer, "eos_token_id"):
            raise ValueError(
                "Without data the model writes what to keep, which needs its tokenizer: pass "
                "processing_class=tokenizer to the trainer, or data to KeeperCallback."
            )
        rank, world = _place()
        folder = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")) / "gemproj"
        n = self._named["limit"] or max(_TEXTS_WRITTEN // world, _FEWEST)
        base = without_adapters(model) if has_teacher(self.promise.loss) else nullcontext()
        with self._training.vector().topology.agreement({}), base:
            texts = write_references(model, tokenizer, n, seed=rank, cache=folder)
        self.keep(texts, **self._named)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the Trainer from clipping the gradient, which is clipped after its projection instead."""
        self._begun = 0 if self._training is None else self._training.begun
        # DeepSpeed clips within its step.
        if args.max_grad_norm and self._steps and type(self._steps[0]) is ProjectedStep:
            self._steps[0].max_norm, self._steps[0].norm = float(args.max_grad_norm), None
            args.max_grad_norm = _Later()
            args.max_grad_norm.norm = self._steps[0].max_norm

    def on_optimizer_step(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Raise if ``optimizer.step()`` did not take the step; the check does not synchronise a device."""
        _clip_again(args)
        taken = self._training is not None and self._training.begun > self._begun
        if not (taken or getattr(optimizer, "step_was_skipped", False)):
            raise RuntimeError(
                f"The steps of optim={args.optim!r} are not taken by optimizer.step(), so they cannot be "
                "projected. Use another optimizer."
            )

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Add numbers of the steps since the last log; at evaluations and at the end, held-out losses."""
        logs = {} if logs is None else logs
        numbers: dict[str, float] = self.logs() if {"loss", "train_loss"} & logs.keys() else {}
        self._final = logs
        # The best model is loaded after the last log.
        ends = "train_loss" in logs and not args.load_best_model_at_end
        model = getattr(kwargs["model"], "_orig_mod", kwargs["model"])  # of another trainer, maybe
        own = self._training is not None and base_of(model) is base_of(self._training.model)
        if own and (ends or any(key.startswith("eval_") for key in logs)):
            numbers |= self._measured()
        best = (args.metric_for_best_model or "").removeprefix("eval_")
        if best in numbers:  # the Trainer looks for it under this name
            numbers[f"eval_{best}"] = numbers[best]
        norm = self._steps[0].norm if self._steps and "loss" in logs else None
        if norm is not None:  # not after an overflow, of which the Trainer tells
            numbers["grad_norm"] = float(norm)
        logs.update(numbers)
        state.log_history[-1].update(numbers)  # a copy of logs from before the callbacks

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        """Take held-out losses out of what a hyperparameter search optimises: by default a sum of all."""
        if state.is_hyper_param_search:
            for name in [name for name in metrics or () if name.removeprefix("eval_").startswith("keep/")]:
                del metrics[name]

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give back the norm, if training broke off or stops within a step, before a checkpoint is saved."""
        _clip_again(args)

    on_epoch_end = on_init_end

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the state of the keeper to the checkpoint."""
        # In a hyperparameter search, the folder of the checkpoints is unknown.
        if not (args.save_only_model or state.is_hyper_param_search):
            self._save(_checkpoint(args, state.global_step), step=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Detach from the optimizer; add held-out losses to the last log if the best model was loaded."""
        if args.load_best_model_at_end:
            numbers = self._measured()
            for last in (self._final, *state.log_history[-1:]):
                last.update(numbers)
        self.remove()

    def _measured(self) -> dict[str, float]:
        """Return the held-out losses by their names in logs."""
        return {
            f"keep/{name}/{key}": number
            for name, found in self._scored().items()
            for key, number in zip(_HELD, found, strict=False)
            if key == _HELD[0] or abs(number) < float("inf")  # of one example, an interval has no ends
        }

    def _come_first(self) -> None:
        """Move before the callbacks that report logs, which otherwise would not see our numbers.

        A callback is not told in which list it is; it is called by the object that has the list.
        """
        for frame, _ in walk_stack(sys._getframe()):
            callbacks = getattr(frame.f_locals.get("self"), "callbacks", None)
            if isinstance(callbacks, list) and self in callbacks:
                callbacks.remove(self)
                callbacks.insert(0, self)
                return

    def _find(self, args: Any, step: int) -> dict[str, Any]:
        """Return the state of the keeper at the step from which training resumes, or raise."""
        # Callbacks are not told of the folder, which the Trainer that calls them knows.
        known = [frame.f_locals.get("resume_from_checkpoint") for frame, _ in walk_stack(sys._getframe())]
        named = (one for one in (*known, args.resume_from_checkpoint) if isinstance(one, str | Path))
        folder = Path(next(filter(os.path.isdir, named), "") or _checkpoint(args, step))
        if any(folder.glob("keeper*.pt")) and (found := read(folder))["step"] == step:
            return found
        raise ValueError(
            f"Training resumes at step {step}, but the state of the keeper at that step is not in {folder}. "
            "If it was made without a keeper, or with save_only_model, begin a training from its model: "
            "Model.from_pretrained(checkpoint), and train() without resume_from_checkpoint."
        )


def _place() -> tuple[int, int]:
    """Return the number of this process among those that train on other data, and how many these are."""
    state = AcceleratorState()
    parallel = getattr(state, "parallelism_config", None)
    same = 1 if parallel is None else parallel.non_data_parallel_size  # as in tensor parallelism
    return state.process_index // same, state.num_processes // same


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


def _begins(whole: KeptSet, kept: KeptSet) -> bool:
    """Return whether a set begins with the examples of another one, by some of them."""
    if len(whole) < len(kept):
        return False
    some = min(len(kept), _COMPARED)
    leaves, others = (leaves_of(moved(one.examples[:some], "cpu")) for one in (whole, kept))
    return len(leaves) == len(others) and all(map(alike, leaves, others))
