"""`Keeper`, which keeps promises about sets of examples while an optimizer trains on something else."""

from __future__ import annotations

import itertools
import types
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from gemproj._checks import STRENGTHS, check_count, check_number
from gemproj._warn import warn
from gemproj.methods import AnyMethod, as_method
from gemproj.torch.data import Collate, read
from gemproj.torch.forecast import Forecast
from gemproj.torch.history import History, Projection, Report, make_report
from gemproj.torch.keep import Score, check_growth, examine, scored, undisturbed, warn_of_adapters
from gemproj.torch.losses import CrossEntropy, Distillation
from gemproj.torch.memory import KeptSet
from gemproj.torch.promise import Loss, Promise, as_promise
from gemproj.torch.rows import Rows, forked, unwrapped
from gemproj.torch.step import On, ProjectedStep, check_promise, total_norm
from gemproj.torch.training import Training, adapters
from gemproj.torch.vector import ParameterVector


class KeeperBase:
    """Base class of `Keeper` and of the callbacks for other libraries; see `Keeper` for the options."""

    _vector_type: Any = ParameterVector
    _step_type: Any = ProjectedStep
    _usual = Promise()  # the promise if none is given
    _remedy = "Call keep(examples)."
    _waits = False  # whether `keep` waits for a training that has a model
    _soon: tuple[int, ...] = (20,)  # numbers of steps after which a rate is judged

    def __init__(
        self,
        promise: Promise | Loss | float | None = None,
        *,
        on: On = "both",
        method: AnyMethod = "exact",
        look: int | Literal["auto"] = 1,
        project: bool = True,
        microbatch: int | None = None,
        process_group: Any = None,
        **misplaced: Any,
    ) -> None:
        _refuse_options(type(self).__name__, misplaced)
        self._given = callable(promise) or isinstance(promise, Promise)  # for sets that come later
        self.promise, self.on, self.method = as_promise(promise, self._usual), on, method
        check_promise(self.promise, method, on)
        if isinstance(look, str) and look != "auto":
            raise ValueError(f"look must be a number of steps or 'auto'; found {look!r}.")
        if look != "auto":
            check_count(look, "look", 1)
        if not isinstance(project, bool):
            raise TypeError(f"project must be True or False; found {project!r}.")
        if microbatch is not None:
            check_count(microbatch, "microbatch", 1)
        self.look, self.project, self._microbatch, self._group = look, project, microbatch, process_group
        self.sets: dict[Hashable, KeptSet] = {}
        self.history = History()
        self._random = torch.Generator().manual_seed(0)
        self._forecast = Forecast()
        # By kind of vector: names of the rows, and their last multipliers.
        self._warm: dict[str, tuple[list[Any], Any]] = {}
        self._collate: Collate | None = None  # for sets of a state
        self._pending: list[Any] = []  # arguments of `keep`, for the training that begins next
        self._training: Training | None = None  # the last one

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copying and pickling; a copy is not attached."""
        forecast = Forecast.from_state_dict(self._forecast.state_dict())  # without what waits for a device
        return self.__dict__ | {"_training": None, "_group": None, "_forecast": forecast}

    @property
    def last(self) -> Projection | None:
        """Statistics of the last step."""
        return None if self._training is None else self._training.last

    @property
    def rows(self) -> Rows | None:
        """The rows of the last look."""
        return None if self._training is None else self._training.rows

    def __repr__(self) -> str:
        sizes = {name: len(kept) for name, kept in self.sets.items()}
        return f"{type(self).__name__}({sizes}, {self.promise!r}, on={self.on!r}, {as_method(self.method)!r})"

    def keep(
        self,
        data: Any,
        promise: Promise | Loss | float | None = None,
        *,
        name: Hashable = None,
        collate: Collate | None = None,
        limit: int | None = None,
        hold_out: float = 0.0,
        **misplaced: Any,
    ) -> None:
        """Keep examples, with a promise that every later step keeps.

        Every example is looked at now, with as many examples at a time as in a step: its loss is computed and
        stored, and the outputs of the model, if the loss needs them. Examples without any label are left out.
        An error leaves everything as it was. Examples that are added to a set leave the bound of the others.

        Parameters
        ----------
        data : DataLoader, Dataset with a length, or iterable of batches
            Read to the end, and all of it is kept, example by example. Batches of tensors are divided, and
            made again by torch's `default_collate`, with lists in place of tuples. Examples may differ in
            length if a collate function pads them.
        promise : Promise, loss or float, optional
            By default the promise of this set from an earlier call, or else the keeper's. A loss alone, or a
            tolerance alone, takes its other options.
        name : hashable, optional
            Name of the set; a known name adds to that set. By default the first unused integer.
        collate : callable, optional
            Function that makes a batch from a list of examples; by default the loader's, or torch's. Random
            masking is not allowed if outputs or losses are stored: they fit only one mask. With the function
            of what is added to a set, the losses of what it has must be the same.
        limit : int, optional
            Keep a uniform sample of at most so many examples. Of data without a length, at most a thousand
            times as many are read.
        hold_out : float, default 0
            Share of the examples that training never sees: the report says their loss, with an interval. The
            loss must have one number per example. If it draws random numbers, the report draws others than
            were drawn when it was stored; so it does for a set that has grown.

        Raises
        ------
        ValueError, TypeError
            If `data` has no example, or an example that cannot be stored; if a loss is not finite, which
            names the examples; if the loss does not fit the examples, or the method cannot keep the promise.
        """
        _refuse_options("keep", misplaced)
        name = name.item() if isinstance(name, np.generic | Tensor) else name  # a tensor equals no other
        vector = None if self._training is None else self._training.vector()
        facts = {"name of the set": name, "share to hold out": hold_out}
        with nullcontext() if vector is None else vector.topology.meeting("keep()", facts):
            known, chosen = self._checked(promise, name, limit, hold_out)
        if vector is None or self._training is None:
            if not self._waits:
                raise ValueError(f"{type(self).__name__} has no model yet.")
            named = {"name": name, "collate": collate, "limit": limit, "hold_out": hold_out}
            self._pending.append((data, promise, named))
            return
        self._training.watch()
        if name is None:
            name = next(k for k in itertools.count(len(self.sets)) if k not in self.sets)
        before = self._random.get_state()
        facts = {"promises": chosen.numbers(), "option microbatch": self._microbatch}
        inner, loss = _evaluated(unwrapped(self._training.model)[0], chosen), self._wrapped(chosen.loss)
        try:
            with torch.inference_mode(False):  # its tensors cannot be used in training
                with vector.topology.agreement(facts), undisturbed(data):
                    data, collate = self._prepared(data, collate)
                    examples, collate = read(data, collate, limit, self._random)
                losses = torch.zeros(len(examples), dtype=torch.float64, device="cpu")
                kept = KeptSet(name, chosen, examples, collate, [], losses, adapters(inner))
                kept.own = promise is not None or (known is not None and known.own)
                examine(kept, inner, vector, loss, self._microbatch, hold_out > 0.0)
                if known is not None:
                    check_growth(known, collate, inner, vector, loss)
                if self._training.begun == 0:
                    warn_of_adapters(kept, inner, vector, loss)
            with vector.topology.agreement({}), forked():
                if hold_out:
                    kept = _divided(kept, hold_out, self._random)
                if known is not None:
                    kept = known.joined(kept)
        except BaseException:
            self._random.set_state(before)
            raise
        if known is not None and known.promise.numbers() != chosen.numbers():
            self.history.forget(name)
        self.sets[name] = kept
        self._forecast.forget(name)

    def forget(self, name: Hashable) -> None:
        """Drop a set: its promise ends."""
        topology = None if self._training is None else self._training.rows.vector.topology
        facts = {"name of the set": name}
        with nullcontext() if topology is None else topology.meeting("forget()", facts):
            if name not in self.sets:
                raise KeyError(f"no set is named {name!r}; found {list(self.sets)}")
        self.history.forget(name)
        self._forecast.forget(name)
        for kind, (names, lam) in self._warm.items():
            self._warm[kind] = [None if had == name else had for had in names], lam
        del self.sets[name]

    def report(self) -> Report:
        """Return a report on each promise; it prints as a table, and its ``plot()`` draws the losses.

        Each promise is judged by its held-out examples or, if it has none, by all of its examples. They are
        evaluated now, as they were when they were kept, in forward passes; on several processes, all of them
        must call it, which it says after 30 seconds of waiting.
        """
        return make_report(self.history, self.sets, self._scored(everything=True))

    def _scored(self, everything: bool = False) -> dict[Hashable, Score]:
        """Return the score of the held-out examples of each set, or of all if it has none.

        Sets that were kept with other adapters than those that are active are left out, and without
        `everything` sets that have no held-out examples.
        """
        if self._training is None:
            return {}
        active = self._training.active()
        judged = {name: kept.held or kept for name, kept in active.items() if everything or kept.held}
        if not judged:
            return {}
        inner, _ = unwrapped(self._training.model)
        # A model that is frozen after its training has no vector any more.
        frozen = not any(p.requires_grad for p in inner.parameters())
        vector = self._training.rows.vector if frozen else self._training.vector()
        found = {}
        with vector.topology.meeting("report()", {"names of sets": list(judged)}):
            pass
        with torch.inference_mode(False):
            for name, kept in judged.items():
                model, loss = _evaluated(inner, kept.promise), self._wrapped(kept.promise.loss)
                try:
                    found[name] = scored(model, vector, kept, loss, self._microbatch)
                except Exception as error:
                    if hasattr(error, "add_note"):  # since Python 3.11
                        error.add_note(f"The set {name!r} was evaluated; forget({name!r}) drops it.")
                    raise
        return found

    def logs(self) -> dict[str, float]:
        """Return statistics of the steps since the last call, for logging; see `History.means`."""
        return self.history.means()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradient in the next step, after its projection; return its current norm.

        Use this in place of `torch.nn.utils.clip_grad_norm_` with a weight: replayed rows are then clipped
        with the gradient, as in replay. Of several optimizers, each part is clipped by itself.
        """
        if not self._steps:
            raise ValueError(f"{type(self).__name__} is not attached to an optimizer, and clips no gradient.")
        for step in self._steps:
            step.max_norm = max_norm
        return total_norm(p for step in self._steps for g in step.optimizer.param_groups for p in g["params"])

    def remove(self) -> None:
        """Detach from the optimizer."""
        if self._training is not None:
            self._training.remove()

    @property
    def _steps(self) -> list[ProjectedStep]:
        return [] if self._training is None else self._training.steps

    def state_dict(self) -> dict[str, Any]:
        """Return the kept sets, the history and the warm start; not the promises and collate functions.

        The next step looks at all sets, as the one that resumes from the state does; of several processes
        only with ``look="auto"`` on a CPU, because one of them may save alone.
        ``torch.load(..., weights_only=True)`` can read it if the examples are nestings of tensors, numbers
        and strings. To resume, keep the same sets in the same way, then load the state.
        """
        if self._training is not None:
            self._training.look_again()
        return {
            "sets": [kept.state_dict() for kept in self.sets.values()],
            "random": self._random.get_state(),
            "history": self.history.state_dict(),
            "warm": {kind: (names, torch.as_tensor(lam).cpu()) for kind, (names, lam) in self._warm.items()},
            "forecast": self._forecast.state_dict(),
            "process": self._position(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the kept sets by those of a state that `state_dict` returned; an error changes nothing."""
        needed = {"sets", "random", "history", "warm", "forecast", "process"}
        lacking = needed - (state.keys() if isinstance(state, Mapping) else set())
        if lacking:
            raise ValueError(f"state has no {min(lacking)!r}: it is not the state of a keeper.")
        sets: dict[Hashable, KeptSet] = {}
        for one in state["sets"]:
            name = one["name"]
            known, lacks = self.sets.get(name), ""
            promise, collate = self.promise, self._collate
            if known is not None:
                promise, collate = known.promise, known.collate
            elif one["own"]:
                lacks = f"The set {name!r} had a promise of its own, which is not in a state"
            if not one["collated"]:
                collate = default_collate
            elif collate in (None, default_collate):
                lacks = f"The examples of {name!r} were kept with a collate function, which is not in a state"
            if lacks or collate is None:
                remedy = f"Before loading call keep(..., name={name!r}) as the saved training did"
                if self._pending:
                    remedy = "What is to be kept waits for a training: resume one from the checkpoint instead"
                raise ValueError(f"{lacks}. {remedy}.")
            sets[name] = KeptSet.from_state_dict(one, promise, collate)
        random = torch.Generator()
        random.set_state(state["random"].cpu())
        history = History.from_state_dict(state["history"])
        forecast = Forecast.from_state_dict(state["forecast"])
        for one in state["sets"]:
            if one["promise"] != sets[one["name"]].promise.numbers():  # then the statistics begin anew
                history.forget(one["name"])
        dropped = [name for name in self.sets if name not in sets]
        if dropped:
            warn(
                f"The state has no examples of {', '.join(map(repr, dropped))}, which are dropped: these "
                "sets are no longer protected. Keep them after the state is loaded."
            )
        saved, now = tuple(state["process"]), self._position()
        if saved[1] > 1 and saved != now:
            warn(
                f"The state was saved by process {saved[0]} of {saved[1]}, and this is process {now[0]} of "
                f"{now[1]}: it lacks the examples that other processes kept. Save and load one for each."
            )
        self.sets, self._random, self.history, self._forecast = sets, random, history, forecast
        self._warm = dict(state["warm"])
        if self._training is not None:
            self._training.watched = None  # weights are loaded, too
            self._training.rows.clear()  # they may be of other sets

    def _position(self) -> tuple[int, int]:
        """Return the number of this process among those that train together, and how many these are."""
        topology = None if self.rows is None else self.rows.vector.topology
        return (0, 1) if topology is None else (topology.rank, topology.world)

    def _attach(
        self, model: torch.nn.Module, optimizer: Any, *, scaler: Any = None, group: Any = None
    ) -> None:
        """Attach to optimizers, and project their steps from now on."""
        self.remove()
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module; found {type(model).__name__}.")
        self._group = group if self._group is None else self._group
        optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        self._training = Training(self, model, optimizers, scaler)

    def _keep_pending(self) -> None:
        """Keep what `keep` was called with before there was a model."""
        while self._pending:  # what could not be kept waits for the next training
            data, promise, named = self._pending[0]
            self.keep(data, promise, **named)
            del self._pending[0]

    def _prepared(self, data: Any, collate: Collate | None) -> tuple[Any, Collate | None]:
        """Return data as `read` takes it, and the function that makes a batch of its examples."""
        return data, collate

    def _wrapped(self, loss: Loss) -> Loss:
        """Return the loss as the framework computes it, for example in the precision of training."""
        return loss

    def _checked(
        self, promise: Any, name: Any, limit: int | None, hold_out: float
    ) -> tuple[KeptSet | None, Promise]:
        """Return the set of this name, if there is one, and the promise for new examples."""
        if isinstance(name, Promise) or not isinstance(name, Hashable):
            raise TypeError(f"name must be hashable, such as a string; found {name!r}.")
        if limit is not None:
            check_count(limit, "limit", 1)
        check_number(hold_out, "hold_out", 0.0)
        if hold_out >= 1.0:
            raise ValueError(f"hold_out must be a share, at least 0 and below 1; found {hold_out}.")
        known = self.sets.get(name) if name is not None else None
        chosen = as_promise(promise, self.promise if known is None else known.promise)
        if known is not None and not alike(known.promise.loss, chosen.loss):
            raise ValueError(
                f"promise about {name!r} must have the loss of the examples that are kept under this name, "
                f"because their losses are stored; found {chosen.loss!r}. Pass another name, or call "
                f"forget({name!r}) first."
            )
        check_promise(chosen, self.method, self.on)
        if isinstance(chosen.loss, CrossEntropy | Distillation):  # without state, unlike others
            losses = (kept.promise.loss for kept in self.sets.values())
            same = next((loss for loss in losses if alike(loss, chosen.loss)), chosen.loss)
            if same is not chosen.loss:  # equal losses become one object, so that rows may share a pass
                chosen = replace(chosen, loss=same)
        return known, chosen


class Keeper(KeeperBase):
    """Keeps what a model can do while an optimizer teaches it something else: no promised loss rises.

    ::

        keeper = Keeper(model, optimizer)
        keeper.keep(texts, Promise(Distillation(), tolerance=0.05), name="chat")
        keeper.keep(refusals, Promise(loss, examples=8), name="safety")
        for batch in loader:
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()
        print(keeper.report())

    Gradient Episodic Memory is ``Promise(loss, weight=0.5, examples=None)`` and ``on="gradient"``, with
    ``keep(task, limit=100)`` after each task; A-GEM has ``method="agem"``, and ``name="past"`` for all tasks.

    Each set is a row of G, the gradient of its loss. Rows are computed at the beginning of
    ``optimizer.step()``, once per accumulation window and before a closure is called, but not for steps that
    a gradient scaler skips. ``.grad``, torch's random state, and the modes and buffers of modules are
    restored. The model runs in evaluation mode: dropout is off, and batch normalisation uses its running
    statistics. The model may be wrapped in DistributedDataParallel or sharded by ``fully_shard``; each
    process then keeps its own examples of the same sets. A step that is refused, on the CPU for example
    because the gradient is not finite, leaves weights and the optimizer's state as they were. If the
    optimizer's own step overflows, its state has moved.

    Parameters
    ----------
    model : torch.nn.Module
        The model to train.
    optimizer : torch.optim.Optimizer or list of them
        Must update all trainable parameters of the model, and no other parameters. With several optimizers,
        such as Muon and AdamW, each part of a step is projected by itself; rows are computed once for all
        that step after the same backward pass, and losses are updated to first order in between.
    promise : Promise, loss or float, optional
        The promise about sets that are kept without their own; by default about ``model(**batch).loss``. A
        number is a tolerance, which needs a loss with one number per example, such as `CrossEntropy`.
    on : {"both", "gradient", "step"}, default "both"
        What is projected: the gradient before the step, as GEM does; the optimizer's step, in Adam's metric
        if it keeps second moments; or both. Only a projected step keeps a promise exactly, to first order,
        with momentum, adaptive rates and weight decay.
    method : str, Method or callable, default "exact"
        The solver, as in `gemproj.project`. Multipliers of one step start the next.
    look : int or "auto", default 1
        When rows are computed: in every so many steps, between which losses are updated to first order; or
        with "auto", for each set as seldom as a model of its loss and its row is right, after 64 steps at the
        latest, and after 8 if its loss may pass its bound. A step in which no loss may is left alone, others
        are projected with the last rows. Sets whose promise has no tolerance, or has a weight, have their
        rows computed in every step, and so have all sets with several optimizers. Looks are few, so give
        promises more `examples` than 16 where few of a set have most of its loss.
    project : bool, default True
        Whether to change gradients and steps. If False, the report says what a projection would have done.
    microbatch : int, optional
        Largest number of kept examples per forward pass; a row is the gradient of the mean over all.
    scaler : torch.amp.GradScaler, optional
        The scaler of float16 training, which also scales the losses of kept examples.
    process_group
        The processes that train together; needed if several processes are initialised and the model is
        neither wrapped nor sharded. If each trains its own model, pass ``dist.new_subgroups(1)[0]``.

    Attributes
    ----------
    sets : dict
        The kept sets, by name.
    last : Projection or None
        Statistics of the last step.
    history : History
        Statistics of all steps, which `report` summarises.
    rows : Rows
        The rows of the last look.

    Examples
    --------
    >>> import torch
    >>> from gemproj.torch import Keeper
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> keeper = Keeper(model, optimizer)
    >>> keeper.keep([torch.eye(2)[:1]], lambda model, x: model(x).mean(), name="first input")
    >>> (-model(torch.ones(1, 2)).sum()).backward()
    >>> optimizer.step()
    >>> keeper.last.num_violated, keeper.last.worst_cosine > -1e-6
    (1, True)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        promise: Promise | Loss | float | None = None,
        *,
        on: On = "both",
        method: AnyMethod = "exact",
        look: int | Literal["auto"] = 1,
        project: bool = True,
        microbatch: int | None = None,
        scaler: Any = None,
        process_group: Any = None,
        **misplaced: Any,
    ) -> None:
        super().__init__(
            promise, on=on, method=method, look=look, project=project, microbatch=microbatch,
            process_group=process_group, **misplaced,
        )  # fmt: skip
        self._attach(model, optimizer, scaler=scaler)


class CallbackBase(KeeperBase):
    """Base class of callbacks, which get a model when training begins; until then `keep` waits.

    `data` is kept when the first training begins; `name`, `collate`, `limit` and `hold_out` are those of
    `keep`, and the other options those of `Keeper`.
    """

    _waits = True

    def __init__(
        self,
        data: Any = None,
        promise: Promise | Loss | float | None = None,
        *,
        name: Hashable = "kept",
        collate: Collate | None = None,
        limit: int | None = None,
        hold_out: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(promise, **options)
        self._checked(None, name, limit, hold_out)
        self._named: dict[str, Any] = {"name": name, "limit": limit, "hold_out": hold_out}
        if data is not None:
            self.keep(data, collate=collate, **self._named)


def _refuse_options(call: str, options: Iterable[str]) -> None:
    """Raise for options that a call does not have, as those of `Promise`."""
    for option in options:
        name = "weight" if option in STRENGTHS else option
        if name in {known.name for known in fields(Promise)}:
            raise TypeError(f"{name} is an option of Promise: pass promise=Promise(..., {name}=...).")
        raise TypeError(f"{call} got an unexpected keyword argument {option!r}")


def _evaluated(model: torch.nn.Module, promise: Promise) -> torch.nn.Module:
    """Return the model for stored losses: a compiled one only if outputs or losses are compared with them."""
    compares = promise.allowed is not None or hasattr(promise.loss, "outputs")
    return model if compares else getattr(model, "_orig_mod", model)


def _divided(kept: KeptSet, share: float, random: torch.Generator) -> KeptSet:
    """Return a set whose `held` has a share of its examples, at random."""
    n = round(share * len(kept))
    if not 0 < n < len(kept):
        raise ValueError(
            f"hold_out={share} of {len(kept)} examples leaves none to keep, or none to hold out."
        )
    order = torch.randperm(len(kept), generator=random, device="cpu").tolist()
    whole = kept.part(sorted(order[n:]))
    whole.held = kept.part(sorted(order[:n]))
    return whole


def alike(one: Any, other: Any) -> bool:
    """Return whether losses are the same function, or objects of one class with the same attributes."""
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, Tensor):
        return (one.dtype, one.device) == (other.dtype, other.device) and torch.equal(one, other)
    if isinstance(one, types.FunctionType):  # one that is made again is another object
        made = ("__code__", "__closure__", "__defaults__", "__kwdefaults__")
        one, other = ([getattr(function, name) for name in made] for function in (one, other))
    if isinstance(one, types.MethodType | type | torch.nn.Module) or not hasattr(one, "__dict__"):
        try:
            return bool(one == other)
        except (RuntimeError, ValueError):  # of arrays
            return False
    mine, others = vars(one), vars(other)
    if isinstance(one, partial):
        mine, others = (dict(enumerate([p.func, *p.args])) | p.keywords for p in (one, other))
    return mine.keys() == others.keys() and all(alike(mine[name], others[name]) for name in mine)
