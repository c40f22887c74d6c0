"""Gradient Episodic Memory in one object: all that a plain training loop needs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gemproj.methods._method import check_count
from gemproj.torch.batches import Batch, Field, Loss
from gemproj.torch.constraint_gradients import model_loss, reshard
from gemproj.torch.memory import EpisodicMemory
from gemproj.torch.optimizer_step import will_skip
from gemproj.torch.projector import GradientProjector
from gemproj.torch.remember import remember
from gemproj.torch.stats import Projection
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
        ``loss(model, batch)`` returns the mean over the examples, or one number for each, which a
        `bound` needs; by default ``model(**batch).loss``. Runs under no autocast but its own. If it has a
        method ``outputs(model, batch)``, as `gemproj.torch.losses.Distillation` does, `end_task` stores
        what that returns, and the loss is called as ``loss(model, batch, outputs)``.
    per_task, label
        As in `EpisodicMemory`.
    memory : EpisodicMemory, optional
        Instead of `per_task` and `label`. Batches are moved to the device of the parameters.
    promise : {"task", "label", "example"}, default "task"
        One constraint for each task; for each label of each task; or for each example.
    rows : int, optional
        So many fresh examples of each task (or label) at every step, without replacement until all were
        drawn: a step costs what replay of these examples costs. By default all of them.
    microbatch, training
        As in `GradientProjector.recall`.
    sample : int, optional
        One constraint, on so many random examples of all tasks, instead of one per task (A-GEM).
    scaler : torch.amp.GradScaler, optional
        That of float16 training: constraint gradients are computed with its scale, too.
    group
        As in `GradientProjector`.
    **projection
        Other options of `GradientProjector`: method, margin, penalty, equality, bound, kappa, room,
        smoothing, rows_dtype, rows_device, groups, gate, on, metric, interval, refresh. Calls are steps:
        with ``interval=4`` every fourth step computes constraint gradients, and every step is projected.

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
        label: Field | None = None,
        *,
        memory: EpisodicMemory | None = None,
        promise: str = "task",
        rows: int | None = None,
        microbatch: int | None = None,
        training: bool = False,
        sample: int | None = None,
        group: Any = None,
        scaler: Any = None,
        **projection: Any,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module; found {type(model).__name__}.")
        if not callable(loss):
            raise TypeError(f"loss must be a function of model and batch; found {type(loss).__name__}.")
        for name, count in (("microbatch", microbatch), ("rows", rows), ("sample", sample)):
            if count is not None:
                check_count(count, name, 1)
        if sample is not None and (rows is not None or promise != "task"):
            raise ValueError(
                "sample is one constraint on examples of all tasks; rows and promise are for others."
            )
        if promise not in ("task", "label", "example"):
            raise ValueError(f"promise must be 'task', 'label' or 'example'; found {promise!r}.")
        if projection.get("refresh") == "rising" and not (sample is None and rows is None):
            raise ValueError(
                "refresh='rising' compares losses on the same examples; rows and sample draw others."
            )
        if not isinstance(memory, EpisodicMemory | None):
            raise TypeError(f"memory must be an EpisodicMemory; found {type(memory).__name__}.")
        self.memory = EpisodicMemory(per_task, label) if memory is None else memory
        if promise == "label" and self.memory.label is None:
            raise ValueError("promise='label' needs label: where the labels of a batch are.")
        reshard(model)
        self.projector = GradientProjector(model.named_parameters(), group=group, **projection)
        self.exclude: Hashable = None
        self._model, self._loss, self._sample, self._scaler = model, loss, sample, scaler
        self._rows, self._promise, self._group = rows, promise, group
        self._options: dict[str, Any] = {"microbatch": microbatch, "training": training}
        self._tasks: list[Hashable] | None = None  # of the rows; None for any
        optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        self._optimizers = [with_hooks(one) for one in optimizers]
        if len(optimizers) > 1 and self.projector.bound is not None:
            raise ValueError("bound is about a whole step, and each optimizer takes a part of it; pass one.")
        self._stepped: set[int] = set()  # the optimizers that have used the constraints at this point
        self._handles: list[Any] = []
        for one in self._optimizers:
            if isinstance(one, ZeroOptimizer):
                self._scaler = one
            self.projector.attach(one).remove()  # reports an optimizer that does not fit
        self._check_nothing_else_held()
        self._check_all_held(dict(model.named_parameters()))
        if len(optimizers) > 1:
            stepped = self._stepped  # not self, which would live as long as the model
            for p in self.projector.parameters:  # a backward pass brings gradients at another point
                self._handles.append(p.register_post_accumulate_grad_hook(lambda _: stepped.clear()))
        for one in self._optimizers:  # hooks are called in this order
            self._handles.append(one.register_step_pre_hook(self._compute_constraints))
            self._handles.append(self.projector.attach(one))

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
        those that an earlier call has stored for the same task.

        Parameters
        ----------
        batches : iterable
            The examples, such as the loader of the task.
        task : hashable, optional
            By default the number of tasks stored before, or the next integer that no task is named after.
        model : torch.nn.Module, optional
            Another model whose outputs and losses are stored.
        """
        remember(
            self.memory,
            batches,
            task,
            self._model if model is None else model,
            self._loss,
            bounded=self.projector.bound is not None,
            group=self._group,
            **self._options,
        )
        self._forget()

    def remove(self) -> None:
        """Detach from the optimizer."""
        for handle in self._handles:
            handle.remove()

    def state_dict(self) -> dict[str, Any]:
        """Return the memory, `exclude`, the warm start and, where they are reused, the constraints."""
        p = self.projector
        reused = p.interval > 1 or p.smoothing > 0.0 or p.refresh != "all"
        state = {"memory": self.memory.state_dict(), "projector": p.state_dict(constraints=reused)}
        return state | {"exclude": self.exclude, "tasks": self._tasks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Bring back what `state_dict` returned."""
        lacking = {"memory", "projector"} - state.keys()
        if lacking:
            raise ValueError(f"state has no {min(lacking)!r}: it is not of a GEM.")
        self.projector.load_state_dict(state["projector"])
        self.memory.load_state_dict(state["memory"])
        self.exclude, self._tasks = state.get("exclude", self.exclude), state.get("tasks")
        self._stepped.clear()

    @torch.compiler.disable
    def _compute_constraints(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if will_skip(optimizer):
            return
        if self._stepped and id(optimizer) not in self._stepped:
            self._stepped.add(id(optimizer))
            return
        if self._tasks not in (None, self._past()):
            self._forget()  # row k was of another task
        self._stepped.clear()
        scaled = self._scaler is not None and self._scaler.is_enabled()
        scale = self._scaler.get_scale() / _HEADROOM if scaled else 1.0
        names = [] if self._sample is not None else self.memory.names(self.exclude, per=self._promise)
        self.projector.recall(
            self._model, self._batches(), self._loss, scale=scale, names=names, **self._options
        )
        self._tasks = self._past()
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

    def _check_all_held(self, named: dict[str, torch.Tensor]) -> None:
        """Raise unless each parameter that is projected is held by one optimizer."""
        held = [id(p) for p in self._held()]
        if len(held) > len(set(held)):
            raise ValueError("optimizer: parameters are in several optimizers, which would each move them.")
        lacking = [name for name, p in named.items() if p.requires_grad and id(p) not in set(held)]
        if lacking:
            raise ValueError(
                f"optimizer lacks {len(lacking)} of the {len(self.projector.parameters)} trainable "
                f"parameters of the model, such as {lacking[0]!r}. Freeze those that stay, with "
                "requires_grad_(False); if other optimizers move them, pass a list of all."
            )

    def _check_nothing_else_held(self) -> None:
        """Raise for parameters that optimizers move and nothing projects."""
        mine = set(map(id, self.projector.parameters))
        others = [tuple(p.shape) for p in self._held() if id(p) not in mine]
        if others:
            raise ValueError(
                f"optimizer moves {len(others)} parameters that are not projected, the first one of shape "
                f"{others[0]}, so that nothing would be promised. Pass a model that has all of its "
                "parameters; after unfreezing or adding some, call remove() and make a new GEM with the same "
                "memory."
            )

    def _batches(self) -> Iterator[Batch]:
        self._check_nothing_else_held()  # here, where an error is one of all processes
        device = self.projector.device
        batches = self.memory.batches(self.exclude, n=self._rows, per=self._promise)
        if self._sample is not None:
            batches = iter([self.memory.sample(self._sample, self.exclude)] if self._past() else [])
        for batch in batches:
            yield tree_map(lambda leaf: leaf.to(device), batch)
