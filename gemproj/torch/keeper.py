"""`Keeper`, which keeps promises about sets of examples while an optimizer trains on something else."""

from __future__ import annotations

import copy
import itertools
import types
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor

from gemproj._arrays import on_host
from gemproj._checks import check_count
from gemproj.methods import AnyMethod, as_method
from gemproj.torch.data import Collate, read
from gemproj.torch.forecast import Forecast
from gemproj.torch.history import History, Projection, Report, make_report
from gemproj.torch.joint import SharedPasses
from gemproj.torch.keep import examined, scored, undisturbed
from gemproj.torch.memory import Draw, KeptSet
from gemproj.torch.processes import check_alone
from gemproj.torch.promise import Loss, Promise, as_promise
from gemproj.torch.rows import Rows, check_spread, reshard, unwrapped
from gemproj.torch.step import On, ProjectedStep, Terms, check_promise, total_norm
from gemproj.torch.vector import ParameterVector

# The loss scale of training leaves little room below the float16 maximum; kept losses may be larger.
_HEADROOM = 1024.0
# The norm of the weights, which tells their rounding, is computed anew after so many steps.
_WEIGHED = 100


class KeeperBase:
    """Base class of `Keeper` and of the callbacks for other libraries; see `Keeper` for the options."""

    _vector_type: Any = ParameterVector
    _step_type: Any = ProjectedStep
    _usual = Promise()  # the promise if none is given
    _remedy = "Call keep(examples)."
    _waits = False  # whether `keep` waits for a training that has a model
    _soon = 20  # number of steps after which a rate is judged
    max_norm: float | None = None  # norm to which every gradient is clipped after its projection

    def __init__(
        self,
        promise: Promise | Loss | None = None,
        *,
        on: On = "both",
        method: AnyMethod = "exact",
        look: int | Literal["auto"] = 1,
        project: bool = True,
        microbatch: int | None = None,
        process_group: Any = None,
    ) -> None:
        self._given = promise is not None
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
        self.last: Projection | None = None
        self._random = torch.Generator().manual_seed(0)
        self._collate: Collate | None = None  # for sets of a state that were kept one by one
        self._pending: list[Any] = []  # arguments of `keep`, for the training that begins next
        self._model: torch.nn.Module | None = None
        self._handles: list[Any] = []
        self._steps: list[ProjectedStep] = []
        self.rows: Rows | None = None
        self._warm: dict[str, Any] = {}  # by kind of vector: names of the rows, and their multipliers
        self._changed, self.terms = True, Terms()
        self._forecast = Forecast()
        self._idle = False  # whether the present step is left alone, because no row was computed
        self._scaler: Any = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copying and pickling; a copy is not attached."""
        self._commit()
        gone = dict.fromkeys(("_model", "rows", "_scaler", "_group", "_joint", "last", "_counted"))
        held = self.__dict__ | gone | {"_handles": [], "_steps": [], "_warm": {}, "_replaced": []}
        return held | {"_random": self._random.get_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state of a copy."""
        self.__dict__.update(state, _random=torch.Generator())
        self._random.set_state(state["_random"])

    def __repr__(self) -> str:
        sizes = {name: len(kept) for name, kept in self.sets.items()}
        return f"{type(self).__name__}({sizes}, {self.promise!r}, on={self.on!r}, {as_method(self.method)!r})"

    def keep(
        self,
        data: Any,
        promise: Promise | Loss | None = None,
        *,
        name: Hashable = None,
        collate: Collate | None = None,
        limit: int | None = None,
        hold_out: float = 0.0,
    ) -> None:
        """Keep examples, with a promise that every later step keeps.

        Every example is looked at now, with as many examples at a time as in a step: its loss is computed and
        stored, and the outputs of the model, if the loss needs them. Examples without any label are left out.
        An error leaves everything as it was. Examples that are added to a set leave the bound of the others.

        Parameters
        ----------
        data : DataLoader, Dataset or iterable of batches
            Read to the end, and all of it is kept. With `collate`, or for a loader with a custom
            ``collate_fn``, single examples are kept, which may differ in length. Otherwise, batches of
            tensors.
        promise : Promise or loss, optional
            By default the promise of this set from an earlier call, or else the keeper's. A loss alone takes
            the other options of the keeper's promise.
        name : hashable, optional
            Name of the set; a known name adds to that set. By default the first unused integer.
        collate : callable, optional
            Function that makes a batch from a list of examples, if `data` holds examples; by default the
            loader's. Random masking is not allowed if outputs or losses are stored: they fit only one mask.
        limit : int, optional
            Keep a uniform sample of at most so many examples. Of data without a length, at most a thousand
            times as many are read.
        hold_out : float, default 0
            Share of the examples that training never sees: the report says their loss, with an interval.

        Raises
        ------
        ValueError, TypeError
            If `data` has no example, or an example that cannot be stored; if a loss is not finite, which
            names the examples; if the loss does not fit the examples, or the method cannot keep the promise.
        """
        known, chosen = self._checked(promise, name, limit)
        if not 0.0 <= hold_out < 1.0:
            raise ValueError(f"hold_out must be a share, at least 0 and below 1; found {hold_out}.")
        if self._model is None:
            if not self._waits:
                raise ValueError(f"{type(self).__name__} has no model yet.")
            named = {"name": name, "collate": collate, "limit": limit, "hold_out": hold_out}
            self._pending.append((data, promise, named))
            return
        data, collate = self._prepared(data, collate)
        if name is None:
            name = next(k for k in itertools.count(len(self.sets)) if k not in self.sets)
        model, before = self._model, self._random.get_state()
        vector = self._vector_now(model)
        facts = {"option tolerance": chosen.allowed is not None, "option microbatch": self._microbatch}
        facts["option examples"] = chosen.examples
        loss = self._wrapped(chosen.loss)
        evaluated = chosen.allowed is not None or hasattr(chosen.loss, "outputs")
        try:
            # Tensors that are made in inference mode cannot be used in training.
            with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
                with vector.topology.agreement(facts), undisturbed(data):
                    examples, collate = read(data, collate, limit, self._random)
                inner, _ = unwrapped(model)
                if not evaluated:
                    inner = getattr(inner, "_orig_mod", inner)  # a trial should not compile
                kept = examined(inner, vector, chosen, loss, examples, collate, name, self._microbatch)
            if hold_out:
                kept = _divided(kept, hold_out, self._random)
            kept.adapter = _adapter(inner)
            kept.own = promise is not None or (known is not None and known.own)
            if known is not None:
                whole = copy.copy(known)
                whole.add(kept)
                kept = whole
        except BaseException:
            self._random.set_state(before)
            raise
        if known is not None and known.promise != chosen:
            self._close(name)
        self.sets[name] = kept
        self._changed = True

    def forget(self, name: Hashable) -> None:
        """Drop a set: its promise ends."""
        if name not in self.sets:
            raise KeyError(f"no set is named {name!r}; found {list(self.sets)}")
        self._close(name)
        del self.sets[name]
        self._changed, self._warm = True, {}

    def report(self) -> Report:
        """Return a report on each promise; it prints as a table, and its ``plot()`` draws the losses.

        Held-out examples are evaluated now, in a forward pass; on several processes, all of them must call
        it.
        """
        self._commit()
        return make_report(self.history, self.sets, self.held_out())

    def held_out(self) -> dict[Hashable, tuple[float, float, float]]:
        """Return the loss of the held-out examples of each set now, with the ends of its 95 % interval."""
        apart = {name: kept for name, kept in self.sets.items() if kept.held is not None}
        if self._model is None or not apart:
            return {}
        vector, (inner, _) = self._vector_now(self._model), unwrapped(self._model)
        return {
            name: scored(inner, vector, kept.held, self._wrapped(kept.promise.loss), self._microbatch)
            for name, kept in apart.items()
            if kept.held is not None
        }

    def logs(self) -> dict[str, float]:
        """Return statistics of the steps since the last call, for logging; see `History.means`."""
        self._commit()
        return self.history.means()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradient in the next step, after its projection; return its current norm.

        Use this in place of `torch.nn.utils.clip_grad_norm_` with a weight: replayed rows are then clipped
        with the gradient, as in replay.
        """
        for step in self._steps:
            step.max_norm = max_norm
        return total_norm(p for step in self._steps for g in step.optimizer.param_groups for p in g["params"])

    def remove(self) -> None:
        """Detach from the optimizer."""
        for handle in [*self._handles, *self._steps]:
            handle.remove()
        self._handles, self._steps = [], []

    def state_dict(self) -> dict[str, Any]:
        """Return the kept sets, the history and the warm start; not the promises and collate functions.

        With ``look="auto"``, the next step looks at all sets, as the one that resumes from the state does.
        ``torch.load(..., weights_only=True)`` can read it if the examples are nestings of tensors, numbers
        and strings. To resume, keep the same sets in the same way, then load the state.
        """
        self._commit()
        warm = {kind: (list(names), torch.as_tensor(lam).cpu()) for kind, (names, lam) in self._warm.items()}
        if self.look == "auto":
            self._changed = True  # the next step looks, as that of a training which resumes from the state
        return {
            "sets": [kept.state_dict() for kept in self.sets.values()],
            "random": self._random.get_state(),
            "history": self.history.state_dict(),
            "warm": warm,
            "forecast": self._forecast.state_dict(),
            "processes": 1 if self.rows is None else self.rows.vector.topology.world,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the kept sets by those of a state that `state_dict` returned; an error changes nothing."""
        lacking = {"sets", "random", "history", "warm"} - (
            state.keys() if isinstance(state, Mapping) else set()
        )
        if lacking:
            raise ValueError(f"state has no {min(lacking)!r}: it is not the state of a keeper.")
        sets: dict[Hashable, KeptSet] = {}
        for one in state["sets"]:
            name = one["name"]
            known = self.sets.get(name)
            if known is None and one["own"]:
                raise ValueError(
                    f"The set {name!r} had a promise of its own, which is not in a state. Before loading "
                    f"call keep(..., name={name!r}) as the saved training did."
                )
            collate = self._collate if known is None else known.collate
            if known is None and "examples" in one["listed"] and collate is None:
                raise ValueError(
                    f"The examples of {name!r} were kept with a collate function, which is not in a state. "
                    f"Before loading call keep(..., name={name!r}) as the saved training did."
                )
            collate = collate if "examples" in one["listed"] else None
            promise = self.promise if known is None else known.promise
            sets[name] = KeptSet.from_state_dict(one, promise, collate)
        random = torch.Generator()
        random.set_state(state["random"].cpu())
        dropped = [name for name in self.sets if name not in sets]
        if dropped:
            warnings.warn(
                f"The state has no examples of {', '.join(map(repr, dropped))}, which are dropped: these "
                "sets are no longer protected. Keep them after the state is loaded.",
                stacklevel=2,
            )
        here = 1 if self.rows is None else self.rows.vector.topology.world
        if state.get("processes", 1) not in (1, here):
            warnings.warn(
                f"The state was saved by one of {state['processes']} processes, and {here} train now: it "
                "lacks the examples that the other processes kept.",
                stacklevel=2,
            )
        self.sets, self._random, self._changed = sets, random, True
        self.history.load_state_dict(state["history"])
        if "forecast" in state:  # states of earlier versions have none
            self._forecast.load_state_dict(state["forecast"])
        self._warm = {kind: (list(names), lam) for kind, (names, lam) in state["warm"].items()}

    def _attach(
        self, model: torch.nn.Module, optimizer: Any, *, scaler: Any = None, group: Any = None
    ) -> None:
        """Attach to optimizers, and project their steps from now on."""
        self.remove()
        if not isinstance(model, torch.nn.Module):
            raise TypeError(f"model must be a torch.nn.Module; found {type(model).__name__}.")
        if scaler is not None and not _is_scaler(scaler):
            raise TypeError(
                f"scaler must be the torch.amp.GradScaler of training; found {type(scaler).__name__}. Leave "
                "it out if losses are not scaled."
            )
        reshard(model)
        self._group = group if self._group is None else self._group
        self._model, self._scaler = model, scaler
        self.rows, self._warm, self._changed, self.last = None, {}, True, None
        self._stepped: set[int] = set()  # the optimizers that have used the present rows
        self._noise: Any = None
        self._sums: tuple[Tensor, Tensor]  # squared norm of the last step, and its products with the rows
        self._begun = self._looks = 0  # steps since attaching, and since the sets have changed
        self._first: list[tuple[Sequence[Any], Tensor]] = []  # names and excesses of the first steps
        self._left_out, self._replaced = set[Hashable](), list[Tensor]()
        optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        _check_disjoint(optimizers)
        try:
            for one in optimizers:
                self._steps.append(self._step_type(self, one))
                self._steps[-1].check(self.on)
            for promise in [self.promise] * self._given + [kept.promise for kept in self.sets.values()]:
                self._check(promise)
            self._renew()
        except Exception:
            self.remove()
            raise

    def _vector_now(self, model: torch.nn.Module) -> ParameterVector:
        """Return the vector of the rows, or another one if the model has other parameters now."""
        vector = None if self.rows is None else self.rows.vector
        if vector is None or not (vector.topology.collective or vector.is_of(model.parameters())):
            vector = self._vector_of(model)
        return vector

    def _vector_of(self, model: torch.nn.Module) -> ParameterVector:
        """Return the trainable parameters of a model as a vector."""
        whole, parallel = unwrapped(model)
        check_spread(list(whole.modules()))
        group = self._group
        if group is None and parallel is not None:
            group = parallel.process_group
        vector: ParameterVector = self._vector_type(model.named_parameters(), group)
        check_alone(vector.topology)
        return vector

    def _renew(self) -> None:
        """Begin to project the parameters that the model has now; raise if the optimizers hold others."""
        assert self._model is not None
        model = self._model
        # Parameters of a layer that was replaced may stay in the optimizer; no loss depends on them any more.
        before = [] if self.rows is None else self.rows.vector.parameters
        now = set(map(id, model.parameters()))
        gone = {id(p): p for p in (*self._replaced, *before) if id(p) not in now}
        self._replaced = list(gone.values())
        held = {id(p) for p in self._held()}
        trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        lacking = [name for name, p in trainable.items() if id(p) not in held]
        if lacking:
            raise ValueError(
                f"optimizer lacks {len(lacking)} of the {len(trainable)} trainable parameters of the model, "
                f"such as {lacking[0]!r}. Add those of a new layer with optimizer.add_param_group, freeze "
                "parameters that stay, with requires_grad_(False), or pass a list of all optimizers."
            )
        vector = self._vector_of(model)
        mine = set(map(id, vector.parameters))
        others = [tuple(p.shape) for p in self._held() if id(p) not in mine]
        if others:
            raise ValueError(
                f"optimizer moves {len(others)} parameters that are not the model's, the first one of shape "
                f"{others[0]}, so that no promise would be kept. Pass a model that has all parameters of the "
                "optimizer."
            )
        self.rows, self._joint, self._warm, self._changed = Rows(vector), SharedPasses(), {}, True
        for step in self._steps:
            step.use(vector)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if len(self._steps) > 1:
            stepped = self._stepped  # a hook that refers to self would keep this object alive
            for p in vector.parameters:  # a backward pass computes gradients at new weights
                self._handles.append(p.register_post_accumulate_grad_hook(lambda _: stepped.clear()))

    def _look(self, step: ProjectedStep) -> None:
        """Compute the rows for a step that begins, unless another optimizer has used them for its part."""
        rows, model = self.rows, self._model
        assert rows is not None
        assert model is not None
        if self._stepped and id(step) not in self._stepped:
            self._stepped.add(id(step))
            return
        self._commit()
        self._stepped.clear()
        self._stepped.add(id(step))
        if not rows.vector.topology.collective and not (
            rows.vector.is_of(model.parameters()) and rows.vector.is_of(self._held())
        ):
            self._renew()
            rows = self.rows
            assert rows is not None
        if self._begun == 0:
            self._begin(model)
        due = self._due(step, rows)
        self._begun += 1
        self._looks += 1
        self._idle = self.look == "auto" and due is not None and not any(due)
        if self._idle:
            rows.wait()
            self.history.wait(rows.names)
        if due is not None and not any(due):
            return
        with rows.vector.topology.agreement(facts := self._facts(rows)):
            sets = self._active(model)
            facts["names of sets"] = names = [kept.name for kept in sets]
            facts["promises"] = [kept.promise.numbers() for kept in sets]
            draws = [
                Draw(kept, kept.draw(self._random), self._wrapped(kept.promise.loss), k)
                for k, kept in enumerate(sets)
                if due is None or due[k]
            ]
        if self._changed:
            self._joint, self._looks = SharedPasses(), 1
        if sets:
            self.terms = Terms.of([kept.promise for kept in sets], rows.vector.device)
        (inner, _), scale = unwrapped(model), self._scale()
        rows.fill(inner, draws, names, microbatch=self._microbatch, scale=scale, joint=self._joint)
        self._changed = False
        if self.look == "auto" and self.terms.held:
            self._forecast.take(rows, due, self.terms.tolerance)
            rows.vector.read(step._before)

    def _due(self, step: ProjectedStep, rows: Rows) -> list[bool] | None:
        """Return which rows are computed in a step that begins; None for all, maybe of other sets."""
        if self.look != "auto":
            some = not self._changed and self._looks % self.look
            return [False] * len(rows) if some else None
        if not len(rows) or not self.terms.held:
            return None
        whole = self._changed or bool(step._written)  # the second attempt of a step
        if whole and rows.vector.topology.world == 1:
            return None
        due = self._forecast.due(rows, step._before, self.terms, whole)
        return None if whole else due

    def _begin(self, model: torch.nn.Module) -> None:
        """Say what a training that begins does not protect."""
        if not self.sets and not self._given:
            warnings.warn(f"0 sets kept: this run protects nothing. {self._remedy}", stacklevel=6)
        if self.sets:
            _warn_of_statistics(model)

    def _active(self, model: torch.nn.Module) -> list[KeptSet]:
        """Return the sets whose losses can move now: not those of other adapters."""
        adapter, found = _adapter(unwrapped(model)[0]), []
        for name, kept in self.sets.items():
            if kept.adapter == adapter:
                found.append(kept)
            elif name not in self._left_out:
                self._left_out.add(name)
                warnings.warn(
                    f"The set {name!r} was kept with adapter {kept.adapter!r}, and {adapter!r} is active: "
                    "its promise is left out until its adapter is active again.",
                    stacklevel=6,
                )
        return found

    def _facts(self, rows: Rows) -> dict[str, Any]:
        """Return the facts that must be equal on all processes of a training; empty for one process."""
        if rows.vector.topology.world == 1:
            return {}
        # The repr of a function contains an address, which differs between processes.
        method = getattr(self.method, "__name__", self.method)
        given = {"on": self.on, "look": self.look, "project": self.project, "method": method}
        given["microbatch"] = self._microbatch
        return {f"option {name}": repr(value) for name, value in given.items()} | rows.vector.signature()

    def _scale(self) -> float:
        """Return the factor of losses in backward passes, as in training with a scaler."""
        scaler = self._scaler
        return scaler.get_scale() / _HEADROOM if scaler is not None and scaler.is_enabled() else 1.0

    def _warm_start(self, kind: str, names: list[Any]) -> Any:
        """Return the last multipliers of each set, zero for a new one; None if there are none."""
        had, lam = self._warm.get(kind, (None, None))
        if lam is None or len(lam) != len(had):
            return None
        assert self.rows is not None
        found = lam = torch.as_tensor(lam)
        if had != names:
            found = lam.new_zeros(len(names))
            for k, name in enumerate(names):
                if name in had:
                    found[k] = lam[had.index(name)]
        device = self.rows.vector.device  # a state has the multipliers on the CPU
        return found.numpy() if on_host(device) else found.to(device)

    def _note(
        self,
        step: ProjectedStep,
        gradient: Any,
        solution: Any,
        square: Tensor,
        products: Tensor,
        seconds: float,
    ) -> None:
        """Take the statistics of a step; those of several optimizers add up to one step."""
        rows = self.rows
        assert rows is not None
        if len(self._steps) > 1 and len(self._stepped) > 1 and self.last is not None:
            square, products = square + self._sums[0], products + self._sums[1]
        self._sums = square, products
        assert rows.norms is not None
        sizes = rows.norms * square.sqrt()
        if self._noise is None or self._begun % _WEIGHED == 0:
            self._noise = step.rounding()
        eps = torch.finfo(rows.vector.dtype).eps
        self.last = Projection(
            names=list(rows.names),
            losses=rows.losses,
            stored=rows.stored,
            excess=self.terms.excess(rows),
            cosines=torch.where(sizes > 0, products / sizes, 0.0),
            noise=16 * eps + self._noise / square.sqrt().clamp(min=1e-30),
            ages=rows.ages,
            seconds=seconds + sum(rows.seconds),
            costs=rows.seconds,
            _solution=gradient,
            _step=solution,
        )

    def _commit(self) -> None:
        """Count the last step, which is complete when the next one begins."""
        if self.last is None or self.rows is None or self.last is self._counted:
            return
        self._counted = self.last
        self.history.add(self.last)
        self._tell_rate(self.last)
        self.rows.follow(self._sums[1])

    _counted: Projection | None = None

    def _tell_rate(self, step: Projection) -> None:
        """Warn, after the first steps, if most losses are above their bounds by more than the tolerance."""
        if step.excess is None or not self.project or len(self._first) >= self._soon:
            return
        self._first.append((step.names, step.excess))
        if len(self._first) < self._soon:
            return
        late = [(n, e) for n, e in self._first[self._soon // 2 :] if n == step.names]
        excess = torch.stack([e for _, e in late]).cpu()
        tolerance = torch.as_tensor(self.terms.tolerance).cpu()
        above = ((excess > tolerance) & (tolerance > 0.0)).double().mean(0)  # of zero, rounding is an excess
        far = [name for name, share in zip(step.names, above.tolist(), strict=True) if share > 0.5]
        if far:
            most = float(excess.nan_to_num(0.0).max())
            warnings.warn(
                f"After {self._soon} steps, losses of {', '.join(map(repr, far[:5]))} are above their bounds "
                f"by more than their tolerances in most steps, by up to {most:.2g}: the tolerance is not "
                "kept at this learning rate. Lower the rate, or use more examples per step.",
                stacklevel=7,
            )

    def _close(self, name: Hashable) -> None:
        """End the statistics of a set, with those of the last step."""
        self._commit()
        self.history.close(name)

    def _prepared(self, data: Any, collate: Collate | None) -> tuple[Any, Collate | None]:
        """Return data as `read` takes it, and the function that makes a batch of its examples."""
        return data, collate

    def _wrapped(self, loss: Loss) -> Loss:
        """Return the loss as the framework computes it, for example in the precision of training."""
        return loss

    def _checked(self, promise: Any, name: Any, limit: int | None) -> tuple[KeptSet | None, Promise]:
        """Return the set of this name, if there is one, and the promise for new examples."""
        if isinstance(name, Promise) or not isinstance(name, Hashable):
            raise TypeError(f"name must be hashable, such as a string; found {name!r}.")
        if limit is not None:
            check_count(limit, "limit", 1)
        known = self.sets.get(name) if name is not None else None
        chosen = as_promise(promise, self.promise)
        if promise is None and known is not None:
            chosen = known.promise
        elif known is not None and not _alike(known.promise.loss, chosen.loss):
            raise ValueError(
                f"promise about {name!r} must have the loss of the examples that are kept under this name, "
                f"because their losses are stored; found {chosen.loss!r}. Pass another name, or call "
                f"forget({name!r}) first."
            )
        self._check(chosen)
        return known, chosen

    def _check(self, promise: Promise) -> None:
        """Raise if this object cannot keep the promise."""
        check_promise(promise, self.method, self.on)
        if promise.allowed is not None and len(self._steps) > 1:
            raise ValueError(
                "tolerance is about a whole step, and each optimizer takes a part of it; pass one optimizer."
            )

    def _held(self) -> list[Tensor]:
        groups = [group for step in self._steps for group in step.optimizer.param_groups]
        replaced = set(map(id, self._replaced))
        return [p for group in groups for p in group["params"] if p.requires_grad and id(p) not in replaced]


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

    Gradient Episodic Memory, task after task, and A-GEM, with one growing set::

        keeper = Keeper(model, optimizer, Promise(loss, weight=0.5), on="gradient")
        for task in stream:
            train(task)
            keeper.keep(task, limit=100)

        keeper = Keeper(model, optimizer, Promise(loss, examples=256), method="agem", on="gradient")
        for task in stream:
            train(task)
            keeper.keep(task, name="past", limit=100)

    Each set is a row of G, the gradient of its loss. Rows are computed at the beginning of
    ``optimizer.step()``, once per accumulation window and before a closure is called, but not for steps that
    a gradient scaler skips. ``.grad``, module modes and torch's random state are restored. The model runs in
    evaluation mode: dropout is off, and batch normalisation uses its running statistics. The model may be
    wrapped in DistributedDataParallel or sharded by ``fully_shard``; each process then keeps its own examples
    of the same sets. A step that is refused, for example because the gradient is not finite, leaves weights
    and the optimizer's state as they were.

    Parameters
    ----------
    model : torch.nn.Module
        The model to train.
    optimizer : torch.optim.Optimizer or list of them
        Must update all trainable parameters of the model, and no other parameters. With several optimizers,
        such as Muon and AdamW, the step of each optimizer is projected separately; rows are computed once for
        all that step after the same backward pass.
    promise : Promise or loss, optional
        The promise about sets that are kept without their own; by default about ``model(**batch).loss``.
    on : {"both", "gradient", "step"}, default "both"
        What is projected: the gradient before the step, as GEM does; the optimizer's step, in Adam's metric
        if it keeps second moments; or both. Only a projected step keeps a promise exactly, to first order,
        with momentum, adaptive rates and weight decay.
    method : str, Method or callable, default "exact"
        The solver, as in `gemproj.project`. Multipliers of one step start the next.
    look : int or "auto", default 1
        When rows are computed: in every so many steps, between which losses are updated to first order; or
        with "auto", for each set when its loss may pass its bound in the next step, as far as a forecast can
        tell, and after 64 steps at the latest. A step in which no row is computed is left alone. Sets whose
        promise has no tolerance, or has a weight, then have their rows computed in every step.
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
        promise: Promise | Loss | None = None,
        *,
        on: On = "both",
        method: AnyMethod = "exact",
        look: int | Literal["auto"] = 1,
        project: bool = True,
        microbatch: int | None = None,
        scaler: Any = None,
        process_group: Any = None,
    ) -> None:
        super().__init__(
            promise, on=on, method=method, look=look, project=project, microbatch=microbatch,
            process_group=process_group,
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
        promise: Promise | Loss | None = None,
        *,
        name: Hashable = None,
        collate: Collate | None = None,
        limit: int | None = None,
        hold_out: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(promise, **options)
        if data is not None:
            self.keep(data, name=name, collate=collate, limit=limit, hold_out=hold_out)

    def _keep_pending(self) -> None:
        """Keep what `keep` was called with before there was a model."""
        pending, self._pending = self._pending, []
        for data, promise, named in pending:
            self.keep(data, promise, **named)


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


def _adapter(model: Any) -> str:
    """Return the names of the active adapters of a model of peft; empty for other models."""
    active = getattr(model, "active_adapter", "")
    return active if isinstance(active, str) else ", ".join(active) if isinstance(active, list) else ""


def _alike(one: Loss, other: Loss) -> bool:
    """Return whether losses are the same function, or objects of the same class."""
    return one is other or (type(one) is type(other) and not isinstance(one, types.FunctionType))


def _is_scaler(thing: Any) -> bool:
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


def _check_disjoint(optimizers: Iterable[Any]) -> None:
    """Raise if several optimizers hold the same parameters."""
    groups = [group for one in optimizers for group in getattr(one, "param_groups", ())]
    ids = [id(p) for group in groups for p in group["params"]]
    if len(ids) > len(set(ids)):
        raise ValueError("optimizer: parameters are in several optimizers, which would each move them.")
