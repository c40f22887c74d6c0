"""Gradient Episodic Memory in one object, for a plain training loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gemproj._checks import check_count
from gemproj.methods import AnyMethod
from gemproj.torch.batches import Batch, Batches, Loss, Source
from gemproj.torch.changes import Metric, On
from gemproj.torch.constraint_gradients import check_spread, reshard, unwrapped
from gemproj.torch.hooks import clip_grad_norm_, will_skip
from gemproj.torch.keywords import suggesting
from gemproj.torch.losses import model_loss
from gemproj.torch.memory import EpisodicMemory
from gemproj.torch.projector import GradientProjector, check_choices
from gemproj.torch.promise import Per, Promise
from gemproj.torch.remember import remember
from gemproj.torch.report import History, Projection, Report, make_report
from gemproj.torch.unprotected import Watch

# The loss scale of training leaves little room below the float16 maximum; past losses may be larger.
_HEADROOM = 1024.0


class Keeper:
    """Base class of `GEM` and of the framework integrations; holds stored sets, promises and a projector.

    The documentation of `GEM` explains the options.
    """

    @suggesting
    def __init__(
        self,
        loss: Loss | Promise = model_loss,
        per_task: int = 100,
        *,
        per: Per = "task",
        examples: int | None = None,
        weight: float = 0.0,
        tolerance: float | None = None,
        memory: EpisodicMemory | None = None,
        method: AnyMethod = "exact",
        on: On = "gradient",
        every: int = 1,
        project: bool = True,
        microbatch: int | None = None,
        rows_dtype: torch.dtype | None = None,
        process_group: Any = None,
    ) -> None:
        if isinstance(loss, EpisodicMemory):
            raise TypeError("loss must be a function of model and batch; pass memory= for a memory.")
        if not isinstance(memory, EpisodicMemory | None):
            raise TypeError(f"memory must be an EpisodicMemory; found {type(memory).__name__}.")
        self.promise = _one_promise(loss, per=per, examples=examples, weight=weight, tolerance=tolerance)
        check_choices(self.promise, method, on, every, project, rows_dtype)
        if microbatch is not None:
            check_count(microbatch, "microbatch", 1)
        self.memory = EpisodicMemory(per_task) if memory is None else memory
        self.memory.check_label(self.promise)
        self.exclude: Hashable = None
        self.metric: Metric | None = None
        self.history = History()
        self.projector: GradientProjector | None = None
        self._options: dict[str, Any] = {
            "method": method, "on": on, "every": every, "project": project, "rows_dtype": rows_dtype
        }  # fmt: skip
        self._microbatch, self._group = microbatch, process_group
        self._model: torch.nn.Module | None = None
        self._optimizers: list[Any] = []
        self._scaler: Any = None
        self._handles: list[Any] = []
        self._resumed: Mapping[str, Any] | None = None  # a state loaded before attaching
        self._watch: Watch | None = None
        self._tasks: list[Hashable] | None = None  # tasks of the rows; None accepts any tasks

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copying and pickling, without the projector, model and optimizers."""
        detached: dict[str, Any] = dict.fromkeys(
            ("projector", "_model", "_scaler", "_tasks", "_watch", "_group")  # a group cannot be copied
        )
        return self.__dict__ | detached | {"_optimizers": [], "_handles": [], "_computed": {}}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.memory!r}, {self.promise!r}, {self.projector!r})"

    @property
    def promises(self) -> dict[Hashable, Promise]:
        """The promises of sets that have their own promise, keyed by set name."""
        return self.memory.promises

    @property
    def last(self) -> Projection | None:
        """Statistics of the last step; see `Projection`."""
        return None if self.projector is None else self.projector.last

    def keep(
        self,
        data: Iterable[Any],
        promise: Promise | Loss | None = None,
        *,
        name: Hashable = None,
        collate: Callable[[list[Any]], Batch] | None = None,
        model: torch.nn.Module | None = None,
    ) -> None:
        """Store examples, with a promise that every later step keeps.

        If the promise needs stored outputs or losses, `model` computes them now for all kept examples of the
        set, including those of earlier calls. Otherwise the loss is tested on two examples and, if that test
        fails, on the number of examples that a step uses. An error leaves the memory unchanged. Constraints
        and warm start are reset.

        Parameters
        ----------
        data : DataLoader, Dataset or iterable of batches
            The data are read to the end. With `collate`, or for a loader with a custom ``collate_fn``, single
            examples are stored, which may differ in length. Otherwise, batches of tensors are stored. An
            iterable without a length may have at most 100,000 batches.
        promise : Promise or loss, optional
            By default the promise of this set from an earlier call, or else the `promise` of this object.
        name : hashable, optional
            Name of this set. By default the first unused integer, counted from the number of stored sets.
        collate : callable, optional
            Function that makes a batch from a list of examples, if `data` holds examples; by default the
            loader's. Random masking is not allowed if outputs or losses are stored: they fit only one mask.
        model : torch.nn.Module, optional
            The model that computes the stored outputs and losses; by default the attached model.

        Raises
        ------
        ValueError, TypeError
            If `data` has no example, or an example that cannot be stored, if the loss does not fit the
            examples or is not finite, or if the method cannot keep the promise.
        """
        if promise is not None:
            promise = promise if isinstance(promise, Promise) else Promise(promise)
            self._check(promise)
        if not isinstance(name, Hashable):
            raise TypeError(f"name must be hashable, such as a string; found {name!r}.")
        before = self.memory.promises.get(name, self.promise)
        chosen = before if promise is None else promise
        self._warn_if_unseen()
        known = self.memory.counts
        model = self._model if model is None else model
        # Tensors that are made in inference mode cannot be used in training.
        with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
            name = remember(
                self.memory, data, name, model, self._as_computed(chosen),
                collate=collate, microbatch=self._microbatch, process_group=self._group,
            )  # fmt: skip
        if promise is not None:
            self.memory.promises[name] = promise
        if name not in known or chosen != before:
            self.history.close(name)
        if self.projector is not None:
            self._watch = Watch(self.memory, self.projector.parameters)
            self._forget()
        else:
            self._watch = None if model is None else Watch(self.memory, model.parameters())

    def end_task(
        self, batches: Iterable[Any], task: Hashable = None, *, model: torch.nn.Module | None = None
    ) -> None:
        """Store examples of the task just learned; equivalent to `keep` without a promise."""
        self.keep(batches, name=task, model=model)

    def report(self) -> Report:
        """Return a report on each promise; it prints as a table, and its ``plot()`` draws the losses."""
        if self._watch is not None and self._watch.never_stepped:
            self._warn_if_unseen()
        counts, promises = self.memory.counts, self.memory.promises
        together = [name for name in counts if promises.get(name, self.promise) == self.promise]
        return make_report(self.history, counts, together)

    def logs(self) -> dict[str, Tensor | float]:
        """Return statistics of the steps since the last call, for logging; see `History.means`."""
        return self.history.means()

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradient in the next step, after its projection; return its current norm.

        Use this in place of `torch.nn.utils.clip_grad_norm_`, which clips before weighted rows are added to
        the gradient. With several optimizers, the gradient is clipped immediately.
        """
        return clip_grad_norm_(self._optimizers, self._attached().parameters, max_norm, norm_type)

    def remove(self) -> None:
        """Detach from the optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def state_dict(self) -> dict[str, Any]:
        """Return the memory, `exclude`, the history, the warm start and, with ``every > 1``, the constraints.

        Promises are not included: make the same promises, with the same names, before loading the state.
        """
        own = {"memory": self.memory.state_dict(), "exclude": self.exclude}
        own["history"] = self.history.state_dict()
        if self._resumed is not None:  # a state was loaded before attaching
            return {**self._resumed, **own}
        if self.projector is None:
            return {"projector": None} | own
        state = self.projector.state_dict(constraints=self.projector.every > 1)
        watched = self._watch is not None and self._watch.stepped
        known = {"projector": state, "processes": self.projector.processes}
        return known | {"tasks": self._tasks, "stepped": watched} | own

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state returned by `state_dict`; the projector's part is loaded after attaching."""
        lacking = {"memory", "projector"} - (state.keys() if isinstance(state, Mapping) else set())
        if lacking:
            raise ValueError(f"state has no {min(lacking)!r}: it is not a {type(self).__name__} state.")
        stored, stepped = self.memory.tasks, self._watch is not None and not self._watch.never_stepped
        if self._handles and state["projector"] is not None:
            self._load_projector(state)
        else:
            self._resumed = None if state["projector"] is None else state
            self.memory.load_state_dict(state["memory"])
        self.exclude = state.get("exclude", self.exclude)
        if "history" in state:
            self.history.load_state_dict(state["history"])
        dropped = [name for name in stored if name not in self.memory.tasks]
        if dropped and not stepped:  # after steps, loading returns to an earlier state
            warnings.warn(
                f"The state has no examples of {', '.join(map(repr, dropped))}, which are dropped: these "
                "sets are no longer protected. Store them after the state is loaded.",
                stacklevel=2,
            )

    def _load_projector(self, state: Mapping[str, Any]) -> None:
        projector, draft = self._attached(), self.memory.draft()
        draft.load_state_dict(state["memory"])  # raises before anything has changed
        names = (state["projector"]["constraints"] or {}).get("names", ())
        promises = []
        for name in names:
            of = name[0] if name else None
            if isinstance(of, tuple) and of not in draft.tasks:  # a row about several sets
                of = of[0]
            promises.append(self.promises.get(of, self.promise))
        projector.load_state_dict(state["projector"], promises or None)
        self.memory.adopt(draft)
        saved, here = state.get("processes", 1), projector.processes
        if saved not in (1, here):
            warnings.warn(
                f"The state was saved by one of {saved} processes, and {here} processes train now: it lacks "
                "the examples that the other processes stored.",
                stacklevel=3,
            )
        self._tasks, self._removals = state.get("tasks"), self.memory.removals
        self._watch = Watch(self.memory, projector.parameters)
        self._watch.begin(state.get("stepped", True))  # states of older versions lack this entry
        self._stepped.clear()

    def _attach(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        scaler: Any = None,
        process_group: Any = None,
    ) -> None:
        """Attach to optimizers and project their steps, initially without constraints and warm start."""
        self.remove()
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module; found {type(model).__name__}.")
        if scaler is not None and not _is_scaler(scaler):
            raise TypeError(
                f"scaler must be the torch.amp.GradScaler of training; found {type(scaler).__name__}. Leave "
                "it out if losses are not scaled."
            )
        reshard(model)
        whole, parallel = unwrapped(model)
        check_spread(list(whole.modules()))
        group = self._group if self._group is not None else process_group
        self._group = parallel.process_group if group is None and parallel is not None else group
        self.projector = projector = GradientProjector(
            model.parameters(), self.promise, process_group=self._group, **self._options
        )
        projector.check_processes()
        self._model, self._scaler = model, scaler
        self._tasks = None
        self._removals = 0  # `memory.removals` when the rows were computed
        self._computed: dict[int, tuple[Promise, Promise]] = {}  # by id: a promise and its form in training
        optimizers: list[Any] = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        self._watch = Watch(self.memory, projector.parameters)
        self._stepped: set[int] = set()  # the optimizers that have used the current constraints
        _check_disjoint(optimizers)
        attached = []
        try:
            for one in optimizers:
                attached.append(projector.attach(one))
                self._handles.append(attached[-1])
            self._optimizers = [one.optimizer for one in attached]
            for promise in [self.promise, *self.memory.promises.values()]:
                self._check(promise)
            _check_nothing_else_held(self._held(), projector.parameters)
            _check_all_held(self._held(), model)
        except Exception:
            self.remove()
            raise
        if len(optimizers) > 1:
            stepped = self._stepped  # a hook that refers to self would keep this object alive
            for p in projector.parameters:  # a backward pass computes gradients at new weights
                self._handles.append(p.register_post_accumulate_grad_hook(lambda _: stepped.clear()))
        for one in attached:
            one.around(self._compute_constraints, self._note)
        if self._resumed is not None:
            state, self._resumed = self._resumed, None
            self._load_projector({**state, "memory": self.memory.state_dict()})

    def _compute_constraints(self, optimizer: torch.optim.Optimizer) -> None:
        projector = self._attached()
        if will_skip(optimizer):
            return
        if self._stepped and id(optimizer) not in self._stepped:
            self._stepped.add(id(optimizer))
            return
        if self._tasks is not None and (self._tasks, self._removals) != (self._past(), self.memory.removals):
            self._forget()  # row k belonged to another task, or to other examples
        self._stepped.clear()
        scaler: Any = optimizer if _is_scaler(optimizer) else self._scaler
        scaled = scaler is not None and scaler.is_enabled()
        scale = scaler.get_scale() / _HEADROOM if scaled else 1.0
        projector.metric = self.metric
        if not projector.due:
            _check_nothing_else_held(self._held(), projector.parameters)
        assert self._model is not None
        assert self._watch is not None
        projector.recall(
            self._model, Batches(self._sources()), self.promise, microbatch=self._microbatch, scale=scale
        )
        self._tasks, self._removals = self._past(), self.memory.removals
        if self._tasks and not self._watch.stepped:
            _warn_of_statistics(self._model)
        self._watch.step(len(self._tasks))
        self._stepped.add(id(optimizer))

    def _note(self) -> None:
        """Add the last step to the history."""
        if self.last is not None:
            self.history.add(self.last)

    def _sources(self) -> Iterator[Source]:
        # An error in this generator is raised on all processes.
        projector = self._attached()
        device = projector.device
        _check_nothing_else_held(self._held(), projector.parameters)
        before, self._computed = self._computed, {}
        for source in self.memory.promised(self.promise, self.exclude).sources:
            given = source.promise
            if id(given) not in self._computed:
                self._computed[id(given)] = before.get(id(given)) or (given, self._as_computed(given))
            source.promise, source.device = self._computed[id(given)][1], device
            yield source

    def _as_computed(self, promise: Promise) -> Promise:
        """Return a promise whose loss is computed as in training."""
        loss = self._wrapped(promise.loss)
        return promise if loss is promise.loss else replace(promise, loss=loss)

    def _wrapped(self, loss: Loss) -> Loss:
        """Return the loss as the framework computes it, for example in the precision of training."""
        return loss

    def _check(self, promise: Promise) -> None:
        """Raise if this object cannot keep the promise."""
        self.memory.check_label(promise)
        check_choices(promise, **self._options)
        if promise.tolerance is not None and self.projector is not None and len(self._optimizers) > 1:
            raise ValueError(
                "tolerance is about a whole step, and each optimizer takes a part of it; pass one optimizer."
            )

    def _attached(self) -> GradientProjector:
        if self.projector is None:
            raise ValueError(f"{type(self).__name__} has not been attached to an optimizer yet.")
        return self.projector

    def _past(self) -> list[Hashable]:
        return [task for task in self.memory.tasks if task != self.exclude]

    def _forget(self) -> None:
        """Forget constraints and warm start, but not the statistics of the last step."""
        projector = self._attached()
        last, self._tasks = projector.last, None
        projector.reset()
        projector.last = last
        self._stepped.clear()

    def _held(self) -> list[torch.Tensor]:
        groups = [group for one in self._optimizers for group in one.param_groups]
        return [p for group in groups for p in group["params"] if p.requires_grad]

    def _warn_if_unseen(self) -> None:
        if self._watch is None or not self._past() or not self._watch.unseen():
            return
        warnings.warn(
            "The weights have changed since the last end_task or keep, or since this object was made, but "
            f"not in step() of the optimizer that this {type(self).__name__} is attached to: if they were "
            f"trained, earlier tasks were not protected. {self._remedy}",
            stacklevel=3,
        )

    _remedy = "Pass this object to the trainer of each task, callbacks=[...]."


class GEM(Keeper):
    """Projects every ``optimizer.step()`` so that no loss on the memory of earlier tasks rises.

    ::

        gem = GEM(model, optimizer, loss, weight=0.5, examples=16)
        for loader in stream:
            for batch in loader:
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
            gem.end_task(loader)

    Several promises about different data, kept while a new task is learned::

        gem = GEM(model, optimizer)
        gem.keep(general_texts, Promise(Distillation(top=32), tolerance=0.05), name="general")
        gem.keep(refusals, Promise(loss, examples=8), name="safety")
        ...
        print(gem.report())

    Constraint gradients are computed at the beginning of ``optimizer.step()``, once per accumulation window
    and before a closure is called, but not for steps that a gradient scaler skips. ``.grad``, module modes
    and torch's random state are restored. The model may be wrapped in DistributedDataParallel or sharded by
    ``fully_shard``; each process then stores its own examples of the same tasks.

    Parameters
    ----------
    model : torch.nn.Module
        The model to train. After freezing parameters or adding adapters, call `remove` and make a new object
        with the same `memory`.
    optimizer : torch.optim.Optimizer or list of them
        Must update all trainable parameters of the model, and no other parameters. With several optimizers,
        such as Muon and AdamW, the step of each optimizer is projected separately. Constraints are computed
        once for all optimizers that step after the same backward pass.
    loss : callable or Promise
        The promise about sets without their own promise, or the loss of that promise.
    per_task : int, default 100
        Largest number of stored examples per set, chosen at random, as in `EpisodicMemory`.
    per, examples, weight, tolerance
        Options of the promise if `loss` is a function; see `Promise`.
    memory : EpisodicMemory, optional
        A memory to use instead of a new memory for `per_task` examples: one with labels, with another policy,
        or with the sets and promises of an earlier training.
    method, on, every, project, rows_dtype
        As in `GradientProjector`.
    microbatch
        As in `GradientProjector.recall`.
    scaler : torch.amp.GradScaler, optional
        The scaler of float16 training, which also scales the losses for constraint gradients.
    process_group
        As in `GradientProjector`; needed if several processes are initialised and the model is neither
        wrapped nor sharded.

    Attributes
    ----------
    memory : EpisodicMemory
    promise : Promise
        The promise about sets without their own promise.
    promises : dict
        The promises of the other sets, keyed by set name.
    projector : GradientProjector
    history : History
        Statistics of all steps, which `report` summarises.
    metric : {"euclidean", "adam"} or None
        The distance between steps, as in `GradientProjector`; may be set before training.
    exclude : name or None
        A set without constraints: the current task, if its examples are stored while it is learned.

    Examples
    --------
    >>> import torch
    >>> from gemproj.torch import GEM
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> loss = lambda model, x: model(x).mean()
    >>> gem = GEM(model, optimizer, loss, per_task=10, on="both")
    >>> gem.end_task([torch.eye(2)[:1]])
    >>> (-model(torch.ones(1, 2)).sum()).backward()
    >>> optimizer.step()
    >>> gem.last.num_violated, gem.last.worst_cosine > -1e-6
    (1, True)
    """

    projector: GradientProjector
    _remedy = (
        "For a new optimizer call remove() and make a new GEM(model, optimizer, loss, memory=gem.memory). "
        "If one optimizer calls the step of another one, as SAM does with its base_optimizer, pass "
        "the inner one."
    )

    @suggesting
    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        loss: Loss | Promise = model_loss,
        per_task: int = 100,
        *,
        per: Per = "task",
        examples: int | None = None,
        weight: float = 0.0,
        tolerance: float | None = None,
        memory: EpisodicMemory | None = None,
        method: AnyMethod = "exact",
        on: On = "gradient",
        every: int = 1,
        project: bool = True,
        microbatch: int | None = None,
        rows_dtype: torch.dtype | None = None,
        scaler: Any = None,
        process_group: Any = None,
    ) -> None:
        super().__init__(
            loss, per_task, per=per, examples=examples, weight=weight, tolerance=tolerance, memory=memory,
            method=method, on=on, every=every, project=project, microbatch=microbatch, rows_dtype=rows_dtype,
            process_group=process_group,
        )  # fmt: skip
        self._attach(model, optimizer, scaler=scaler)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copying and pickling, with the model; a copy is not attached."""
        return self.__dict__ | {"_watch": None, "_handles": [], "_group": None}


def _one_promise(loss: Loss | Promise, **given: Any) -> Promise:
    if not isinstance(loss, Promise):
        return Promise(loss, **given)
    default = Promise(loss.loss)
    for name, value in given.items():
        if value != getattr(default, name):
            raise ValueError(f"{name} is given beside a Promise; set it in the Promise.")
    return loss


def _is_scaler(thing: Any) -> bool:
    """Return whether an object scales losses: a gradient scaler, or an optimizer of DeepSpeed."""
    return hasattr(thing, "is_enabled") and hasattr(thing, "get_scale")


def _warn_of_statistics(model: torch.nn.Module) -> None:
    """Warn about layers whose running statistics change during training."""
    kinds = torch.nn.modules.batchnorm._NormBase
    named = ((name, one) for name, one in model.named_modules() if isinstance(one, kinds) and one.training)
    moving = [name for name, one in named if one.track_running_stats and one.momentum != 0]
    if moving:
        warnings.warn(
            f"{len(moving)} layers, such as {moving[0]!r}, move their running statistics with the new data, "
            "which is not projected: losses of kept examples may rise. Call eval() on these layers after "
            "model.train() or, if a trainer calls train(), set their momentum to 0.",
            stacklevel=2,
        )


def _check_disjoint(optimizers: Sequence[Any]) -> None:
    """Raise if several optimizers hold the same parameters."""
    groups = [group for one in optimizers for group in getattr(one, "param_groups", ())]
    ids = [id(p) for group in groups for p in group["params"]]
    if len(ids) > len(set(ids)):
        raise ValueError("optimizer: parameters are in several optimizers, which would each move them.")


def _check_all_held(held: Iterable[torch.Tensor], model: torch.nn.Module) -> None:
    """Raise unless the optimizers hold all trainable parameters of the model."""
    ids = {id(p) for p in held}
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    lacking = [name for name, p in trainable.items() if id(p) not in ids]
    if lacking:
        raise ValueError(
            f"optimizer lacks {len(lacking)} of the {len(trainable)} trainable parameters of the model, such "
            f"as {lacking[0]!r}. Freeze parameters that stay, with requires_grad_(False); if other "
            "optimizers move them, pass a list of all optimizers."
        )


def _check_nothing_else_held(held: Iterable[torch.Tensor], projected: Iterable[torch.Tensor]) -> None:
    """Raise if optimizers hold parameters that are not projected."""
    mine = set(map(id, projected))
    others = [tuple(p.shape) for p in held if id(p) not in mine]
    if others:
        raise ValueError(
            f"optimizer moves {len(others)} parameters that are not projected, the first one of shape "
            f"{others[0]}, so that no promise would be kept. Pass a model that has all parameters of the "
            "optimizer; after unfreezing or adding some, call remove() and make a new GEM with the same "
            "memory."
        )
