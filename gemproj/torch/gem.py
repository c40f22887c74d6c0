"""Gradient Episodic Memory in one object: all that a plain training loop needs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gemproj.methods import AnyMethod
from gemproj.torch.attached import clip_grad_norm_
from gemproj.torch.batches import Batch, Batches, Field, Loss, Source
from gemproj.torch.checks import check_all_held, check_kinds, check_nothing_else_held
from gemproj.torch.constraint_gradients import reshard, unwrapped
from gemproj.torch.losses import check_function, model_loss
from gemproj.torch.memory import EpisodicMemory
from gemproj.torch.optimizer_step import Metric, On, will_skip
from gemproj.torch.projector import GradientProjector
from gemproj.torch.remember import remember
from gemproj.torch.stats import Projection
from gemproj.torch.unprotected import Watch
from gemproj.torch.zero import ZeroOptimizer, with_hooks

# The loss scale of training is near the largest that float16 bears; past tasks may have larger losses.
_HEADROOM = 1024.0


class GEM:
    """Projects every ``optimizer.step()`` so that no loss on the memory of earlier tasks rises.

    ::

        gem = GEM(model, optimizer, loss, per_task=100, rows=16, margin=0.5)
        for loader in stream:
            for batch in loader:
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
            gem.end_task(loader)

    Constraint gradients are computed at the beginning of ``optimizer.step()``: once per accumulation
    window, not for steps that a gradient scaler skips, and before a closure. ``.grad``, module modes and
    torch's random state are restored. The model may be wrapped in DistributedDataParallel or sharded by
    ``fully_shard``; each process then has a memory of its own examples of the same tasks.

    Parameters
    ----------
    model : torch.nn.Module
        After freezing parameters or adding adapters call `remove`, and make a new object with the same
        `memory`.
    optimizer : torch.optim.Optimizer or list of them
        What moves the trainable parameters of the model, and no others. Of several, such as Muon and AdamW,
        each projects its own part; constraints are computed once for all that step after the same backward
        pass.
    loss : callable
        ``loss(model, batch)`` returns the mean over the examples, or one number for each, shape (n,), which a
        `bound` needs; by default ``model(**batch).loss``. Runs under no autocast but its own. If it has a
        method ``outputs(model, batch)``, as `gemproj.torch.losses.Distillation` does, `end_task` stores
        what that returns, and the loss is called as ``loss(model, batch, outputs)``.
    per_task, label
        As in `EpisodicMemory`.
    memory : EpisodicMemory, optional
        Instead of `per_task` and `label`. Batches are moved to the device of the parameters.
    promise : {"task", "label", "example", "all"}, default "task"
        One constraint for each task; for each label of each task; for each example; or for all tasks
        together (A-GEM).
    rows : int, optional
        So many fresh examples of each task (or label) at every step, without replacement until all were
        drawn: a step costs what replay of these examples costs. With ``promise="all"`` so many random
        examples of all tasks. By default all of them.
    microbatch
        As in `GradientProjector.recall`.
    method, margin, penalty, equality, bound, kappa, rows_dtype, on, metric
        As in `GradientProjector`.
    interval : int, default 1
        Every so many steps constraint gradients are computed; every step is projected.
    scaler : torch.amp.GradScaler, optional
        That of float16 training: constraint gradients are computed with its scale, too.
    group
        As in `GradientProjector`; needed where several processes are initialised, and the model is neither
        wrapped nor sharded.

    Attributes
    ----------
    memory : EpisodicMemory
    projector : GradientProjector
    exclude : task or None
        A task to leave out: set it if examples of the current task are stored while it is learned.

    Examples
    --------
    >>> import torch
    >>> from gemproj.torch import GEM
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> gem = GEM(model, optimizer, lambda model, x: model(x).mean(), per_task=10, on="both")
    >>> gem.end_task([torch.eye(2)[:1]])
    >>> (-model(torch.ones(1, 2)).sum()).backward()
    >>> optimizer.step()
    >>> gem.last.num_violated, gem.last.worst_cosine > -1e-6
    (1, True)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loss: Loss = model_loss,
        per_task: int = 100,
        *,
        label: Field | None = None,
        memory: EpisodicMemory | None = None,
        promise: str = "task",
        rows: int | None = None,
        microbatch: int | None = None,
        method: AnyMethod = "exact",
        margin: float | Tensor = 0.0,
        penalty: float | Tensor | None = None,
        equality: bool | Tensor = False,
        bound: float | None = None,
        kappa: float = 1.0,
        rows_dtype: torch.dtype | None = None,
        on: On = "gradient",
        metric: Metric = "euclidean",
        interval: int = 1,
        scaler: Any = None,
        group: Any = None,
    ) -> None:
        check_kinds(model, memory, scaler, microbatch=microbatch, rows=rows)
        check_function(loss)
        self.memory = EpisodicMemory(per_task, label) if memory is None else memory
        self.memory.check_per(promise, "promise")
        reshard(model)
        parallel = unwrapped(model)[1]
        group = parallel.process_group if group is None and parallel is not None else group
        self.projector = GradientProjector(
            model.parameters(),
            method,
            margin=margin,
            penalty=penalty,
            equality=equality,
            bound=bound,
            kappa=kappa,
            rows_dtype=rows_dtype,
            on=on,
            metric=metric,
            interval=interval,
            group=group,
        )
        self.projector.check_processes()
        self.exclude: Hashable = None
        self._model, self._loss, self._scaler, self._promise = model, loss, scaler, promise
        self._group = group
        self._options: dict[str, Any] = {"bound": bound, "rows": rows, "microbatch": microbatch}
        self._tasks: list[Hashable] | None = None  # of the rows; None for any
        self._removals = 0  # of the memory, when they were computed
        optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        self._watch = Watch(self.memory, self.projector.parameters)
        self._optimizers = [with_hooks(one) for one in optimizers]
        if len(optimizers) > 1 and self.projector.bound is not None:
            raise ValueError("bound is about a whole step, and each optimizer takes a part of it; pass one.")
        self._stepped: set[int] = set()  # the optimizers that have used the constraints at this point
        self._handles: list[Any] = []
        for one in self._optimizers:
            if isinstance(one, ZeroOptimizer):
                self._scaler = one
            self.projector.attach(one).remove()  # reports an optimizer that does not fit
        check_nothing_else_held(self._held(), self.projector.parameters)
        check_all_held(self._held(), model)
        if len(optimizers) > 1:
            stepped = self._stepped  # not self, which would live as long as the model
            for p in self.projector.parameters:  # a backward pass brings gradients at another point
                self._handles.append(p.register_post_accumulate_grad_hook(lambda _: stepped.clear()))
        for one in self._optimizers:  # hooks are called in this order
            self._handles.append(one.register_step_pre_hook(self._compute_constraints))
            self._handles.append(self.projector.attach(one))

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy has, too: it is attached to nothing."""
        return {name: value for name, value in self.__dict__.items() if name != "_watch"} | {"_handles": []}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._watch = Watch(self.memory, self.projector.parameters)

    def __repr__(self) -> str:
        return f"GEM({self.memory!r}, {self.projector!r})"

    @property
    def last(self) -> Projection | None:
        """Statistics of the last step; see `Projection`."""
        return self.projector.last

    def end_task(
        self, batches: Iterable[Batch], task: Hashable = None, *, model: torch.nn.Module | None = None
    ) -> None:
        """Store examples of the task that has been learned, and forget its warm start.

        Before training it stores what the model can do already. What the loss or a bound needs of the
        model, its outputs and losses, is computed with it as it is now, for the kept examples: also for
        those that an earlier call has stored for the same task. Otherwise the loss is tried on two examples,
        or else on as many as a step passes. An error leaves the memory as it was; its `remove` drops a task.

        Parameters
        ----------
        batches : iterable
            The examples, such as the loader of the task, which is read to its end. One that has no length may
            have 100,000 batches at most.
        task : hashable, optional
            By default the number of tasks stored before, or the next integer that no task is named after.
        model : torch.nn.Module, optional
            Another model whose outputs and losses are stored.
        """
        self._watch.warn(self._past())
        remember(
            self.memory,
            batches,
            task,
            self._model if model is None else model,
            self._loss,
            group=self._group,
            **self._options,
        )
        self._watch.begin()
        self._forget()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradient in the next step, after its projection; return its norm as it is now.

        In place of `torch.nn.utils.clip_grad_norm_`, after which a margin is a weight beside the clipped
        gradient. With several optimizers it is clipped at once.
        """
        return clip_grad_norm_(self._optimizers, self.projector.parameters, max_norm, norm_type)

    def remove(self) -> None:
        """Detach from the optimizer."""
        for handle in self._handles:
            handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return the memory, `exclude`, the warm start and, where they are reused, the constraints."""
        p = self.projector
        state = {"memory": self.memory.state_dict(), "projector": p.state_dict(constraints=p.interval > 1)}
        return state | {"exclude": self.exclude, "tasks": self._tasks, "stepped": self._watch.stepped}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring back what `state_dict` returned."""
        lacking = {"memory", "projector"} - state.keys()
        if lacking:
            raise ValueError(f"state has no {min(lacking)!r}: it is not of a GEM.")
        self.projector.load_state_dict(state["projector"])
        self.memory.load_state_dict(state["memory"])
        self.exclude, self._tasks = state.get("exclude", self.exclude), state.get("tasks")
        self._removals = self.memory.removals
        self._watch.begin(state.get("stepped", True))  # older states do not tell
        self._stepped.clear()

    @torch.compiler.disable
    def _compute_constraints(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if will_skip(optimizer):
            return
        if self._stepped and id(optimizer) not in self._stepped:
            self._stepped.add(id(optimizer))
            return
        if self._tasks is not None and (self._tasks, self._removals) != (self._past(), self.memory.removals):
            self._forget()  # row k was of another task, or of other examples
        self._stepped.clear()
        scaled = self._scaler is not None and self._scaler.is_enabled()
        scale = self._scaler.get_scale() / _HEADROOM if scaled else 1.0
        if not self.projector.due:
            check_nothing_else_held(self._held(), self.projector.parameters)
        self.projector.recall(
            self._model,
            Batches(self._sources()),
            self._loss,
            microbatch=self._options["microbatch"],
            scale=scale,
            names=partial(self.memory.names, self.exclude, per=self._promise),
        )
        self._tasks, self._removals = self._past(), self.memory.removals
        self._watch.step(len(self._tasks))
        self._stepped.add(id(optimizer))

    def _past(self) -> list[Hashable]:
        return [task for task in self.memory.tasks if task != self.exclude]

    def _forget(self) -> None:
        """Forget constraints and warm start, but not the statistics of the last step."""
        last, self._tasks = self.projector.last, None
        self.projector.reset()
        self.projector.last = last
        self._stepped.clear()

    def _held(self) -> list[torch.Tensor]:
        groups = [group for one in self._optimizers for group in one.param_groups]
        return [p for group in groups for p in group["params"] if p.requires_grad]

    def _sources(self) -> Iterator[Source]:
        # Here an error is one of all processes.
        check_nothing_else_held(self._held(), self.projector.parameters)
        drawn = self.memory.batches(self.exclude, n=self._options["rows"], per=self._promise)
        for source in drawn.sources:
            yield source.to(self.projector.device)
