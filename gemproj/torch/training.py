"""A model and its optimizers while a keeper is attached: when rows are computed, and what a step tells."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from gemproj._arrays import on_host, wide_dtype
from gemproj._warn import warn
from gemproj.torch.history import Projection
from gemproj.torch.joint import SharedPasses
from gemproj.torch.memory import Draw, KeptSet
from gemproj.torch.processes import check_alone
from gemproj.torch.promise import Loss
from gemproj.torch.rows import Rows, check_spread, reshard, unwrapped
from gemproj.torch.step import ProjectedStep, Terms
from gemproj.torch.vector import ParameterVector

# The loss scale of training leaves little room below the float16 maximum; kept losses may be larger.
_HEADROOM = 1024.0


class Training:
    """What a keeper is attached to: a model, the steps of its optimizers, and the rows that they share."""

    def __init__(self, keeper: Any, model: torch.nn.Module, optimizers: Sequence[Any], scaler: Any) -> None:
        self.keeper, self.model, self._scaler = keeper, model, scaler
        self.terms, self.joint = Terms(), SharedPasses()
        self.last: Projection | None = None  # statistics of the last step, of all its optimizers
        self.watched: Any = None  # number of steps, and norm of the weights, when sets were kept
        self.begun = 0  # steps since attaching
        self._again = False  # whether the next step looks, whatever `look` says
        # All sets by name, and the active ones, of the last look; None if an error has dropped its rows.
        self._sets: tuple[list[Any], list[Any]] | None = None
        self._stepped = set[int]()  # the optimizers that have used the rows since the last backward pass
        self._noise: Any = None  # norm of the rounding of the weights
        self._losses: list[Loss] = []  # of the sets whose rows are computed, as in training
        self._known: list[Any] = []  # the parameters of model and optimizers
        self._handles: list[Any] = []
        self.steps: list[ProjectedStep] = []
        self.rows: Rows  # of the last look
        try:
            for one in optimizers:
                self.steps.append(keeper._step_type(self, one))
            self._renew()
        except Exception:
            self.remove()
            raise

    def remove(self) -> None:
        """Detach from the optimizers."""
        for one in [*self._handles, *self.steps]:
            one.remove()
        self._handles, self.steps = [], []

    def vector(self) -> ParameterVector:
        """Return the trainable parameters that the model has now, as a vector."""
        if self._parameters() != self._known:
            return self._new_vector()
        check_alone(self.rows.vector.topology)  # other processes may have come since it was made
        return self.rows.vector

    def _new_vector(self) -> ParameterVector:
        reshard(self.model)
        whole, parallel = unwrapped(self.model)
        check_spread(list(whole.modules()))
        group = self.keeper._group
        if group is None and parallel is not None:
            group = parallel.process_group
        vector: ParameterVector = self.keeper._vector_type(self.model.named_parameters(), group)
        check_alone(vector.topology)
        return vector

    def _held(self) -> list[Tensor]:
        """Return the parameters of the optimizers."""
        return [p for step in self.steps for group in step.optimizer.param_groups for p in group["params"]]

    def _parameters(self) -> list[Any]:
        """Return what tells whether model and optimizers still have the same trainable parameters."""
        if self.rows.vector.topology.collective:  # gathered parameters are other objects
            return [(name,) for name, p in self.model.named_parameters() if p.requires_grad]
        every = [*self.model.parameters(), *self._held()]
        return [(id(p), p.dtype, p.device, p.shape) for p in every if p.requires_grad]

    def _renew(self) -> None:
        """Begin to project the parameters that the model has now; raise if the optimizers hold others."""
        vector = self._new_vector()
        held = [p for p in self._held() if p.requires_grad]
        ids = set(map(id, held))
        lacking = [name for name, p in zip(vector.names, vector.parameters, strict=True) if id(p) not in ids]
        if lacking:
            raise ValueError(
                f"optimizer lacks {len(lacking)} of the {len(vector.names)} trainable parameters of the "
                f"model, such as {lacking[0]!r}. Add those of a new layer with optimizer.add_param_group, "
                "freeze parameters that stay, with requires_grad_(False), or pass a list of all optimizers."
            )
        # Parameters of a layer that was replaced may stay in the optimizer; no loss depends on them any more.
        known = {id(p) for p in vector.parameters} | {at for at, *_ in self._known}
        others = [tuple(p.shape) for p in held if id(p) not in known]
        if others:
            raise ValueError(
                f"optimizer moves {len(others)} parameters that are not the model's, the first one of shape "
                f"{others[0]}, so that no promise would be kept. Pass a model that has all parameters of the "
                "optimizer."
            )
        self.rows, self.keeper._warm, self._sets, self._noise = Rows(vector), {}, None, None
        self._known = self._parameters()
        for step in self.steps:
            step.use(vector)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if len(self.steps) > 1:
            stepped = self._stepped  # a hook that refers to self would keep this object alive
            for p in vector.parameters:  # a backward pass computes gradients at new weights
                self._handles.append(p.register_post_accumulate_grad_hook(lambda _: stepped.clear()))

    @property
    def scales(self) -> bool:
        """Whether a gradient scaler is at work; it skips the steps of optimizers whose gradients overflow."""
        return self._scaler is not None and self._scaler.is_enabled()

    def watch(self) -> None:
        """Warn if weights have changed since the last call, and no step of these optimizers was taken."""
        norms = [vector_norm(p, dtype=wide_dtype(torch, p.device)) for p in self.rows.vector.local()]
        now = self.begun, math.hypot(*map(float, norms))  # parameters may be on several devices
        had, self.watched = self.watched, now
        if had and had[0] == now[0] and not math.isclose(had[1], now[1], rel_tol=1e-12):
            warn(
                "The weights have changed since the last keep, and the optimizer of this keeper took no "
                "step: nothing was projected. For a new optimizer make a new keeper, and hand it the sets: "
                "new.sets.update(keeper.sets). If you loaded the weights, ignore this."
            )

    def look_again(self) -> None:
        """Have the next step compute all rows, unless another process may not know of it."""
        vector = self.rows.vector
        # With "auto" processes agree on the looks of a step, on a device only one step later.
        agrees = self.keeper.look == "auto" and vector.device.type != "cuda"
        self._again = self._again or agrees or vector.topology.world == 1

    def drop(self) -> None:
        """Drop the rows, which may not be finite: the next step computes all of them."""
        self.rows.clear()
        self._sets = None

    def look(self, step: ProjectedStep) -> Rows | None:
        """Return the rows for a step that begins, computed now if they are due; None to leave it alone."""
        keeper, same = self.keeper, self._parameters() == self._known
        # Another optimizer takes its part of a step. It takes a step of its own if the rows are gone, or if
        # other parameters are frozen now, as those of adversaries in turn.
        if same and self._sets is not None and self._stepped and id(step) not in self._stepped:
            self._stepped.add(id(step))
            return self.rows if len(self.rows) else None
        self._stepped.clear()
        if not same:
            self._renew()
        if self.begun == 0:
            check_alone(self.rows.vector.topology)  # processes may have been set up later
            if not keeper.sets and not keeper._given:
                warn(f"0 sets kept: this run protects nothing. {keeper._remedy}")
        if self.begun in keeper._soon and keeper.project:
            self._tell_rate()
        self.begun += 1
        self.rows.ages = [age + 1 for age in self.rows.ages]
        sets = self.active()
        now = list(keeper.sets.items()), list(sets)
        due, projects = self._due(self._again or now != self._sets)
        if not projects:
            keeper.history.wait(self.rows.names)
            return None
        if due is None or any(due):
            fresh, self._sets = now != self._sets, None
            self._compute(sets, due, fresh)
            self._sets, self._again = now, False
        self._stepped.add(id(step))
        return self.rows if len(self.rows) else None

    def _due(self, whole: bool) -> tuple[list[bool] | None, bool]:
        """Return which rows are computed in a step that begins, and whether the step is projected.

        None stands for all rows, as if they must be `whole`.
        """
        keeper, rows = self.keeper, self.rows
        if keeper.look != "auto":
            late = whole or max(rows.ages, default=0) >= keeper.look
            return None if late else [False] * len(rows), True
        # The copy of the weights, from which the way is measured, is that of one optimizer's part of a step.
        if not len(rows) or self.terms.tolerance is None or len(self.steps) > 1:
            return None, True
        if keeper._forecast.names != rows.names:  # `look` was a number when they were computed
            return None, True
        if whole and rows.vector.topology.world == 1:
            return None, True
        return keeper._forecast.due(rows, self.terms, whole)

    def _compute(self, sets: Mapping[Hashable, KeptSet], due: Sequence[bool] | None, fresh: bool) -> None:
        """Compute the rows that are due, those of all sets for None; `fresh` if they are other sets."""
        keeper, rows, topology = self.keeper, self.rows, self.rows.vector.topology
        inner, parallel = unwrapped(self.model)
        if getattr(getattr(parallel, "_join_config", None), "enable", False):
            raise ValueError(
                "model trains in DistributedDataParallel.join(), where a process that has no more data takes "
                "no steps, and the others would wait for its rows. Give every process as many batches, and "
                "train without join()."
            )
        with topology.agreement(facts := dict[str, Any]()):
            if topology.world > 1:
                facts |= self._facts(sets.values())
            if fresh:
                self._begin_sets(sets.values())
            draws = [
                Draw(kept, kept.draw(keeper._random), loss, k)
                for k, (kept, loss) in enumerate(zip(sets.values(), self._losses, strict=True))
                if due is None or due[k]
            ]
        # Losses are scaled as in training with a scaler.
        scale = self._scaler.get_scale() / _HEADROOM if self.scales else 1.0
        rows.fill(inner, draws, list(sets), microbatch=keeper._microbatch, scale=scale, joint=self.joint)
        if keeper.look == "auto" and self.terms.tolerance is not None:
            keeper._forecast.take(rows, draws, self.terms.tolerance, fresh=due is None)
        else:
            keeper._forecast.names = []  # its models are not of these rows

    def _facts(self, sets: Iterable[KeptSet]) -> dict[str, Any]:
        """Return the facts that must be equal on all processes of a training."""
        keeper = self.keeper
        # The repr of a function contains an address, which differs between processes.
        given = {name: getattr(keeper, name) for name in ("on", "look", "project", "method", "_microbatch")}
        given["method"] = getattr(keeper.method, "__name__", keeper.method)
        facts: dict[str, Any] = {f"option {name.strip('_')}": repr(one) for name, one in given.items()}
        facts["names of sets"] = list(keeper.sets)
        facts["promises"] = [kept.promise.numbers() for kept in sets]
        return facts | self.rows.vector.signature()

    def active(self) -> dict[Hashable, KeptSet]:
        """Return the sets whose losses can move now, by name: not those of other adapters."""
        adapter = adapters(unwrapped(self.model)[0])
        return {name: kept for name, kept in self.keeper.sets.items() if kept.is_of(adapter)}

    def _begin_sets(self, active: Iterable[KeptSet]) -> None:
        """Begin to compute the rows of these sets, and warn about those of other adapters."""
        keeper, adapter = self.keeper, adapters(unwrapped(self.model)[0])
        if keeper.sets:
            _warn_of_statistics(self.model)
        promises = [kept.promise for kept in active]
        self.joint, self.terms = SharedPasses(), Terms.of(promises, self.rows.vector.device)
        self._losses = [keeper._wrapped(promise.loss) for promise in promises]
        for name, kept in keeper.sets.items():
            if not kept.is_of(adapter):
                warn(
                    f"The set {name!r} was kept with adapter {kept.adapter!r}, and {adapter!r} is active: "
                    "its promise is left out until its adapter is active again. To keep its examples now, "
                    "keep them under another name."
                )

    def warm_start(self, kind: str, names: list[Any]) -> Any:
        """Return the last multipliers of each set, zero for a new one; None if there are none."""
        if kind not in self.keeper._warm:
            return None
        had, last = self.keeper._warm[kind]
        lam, device = torch.as_tensor(last), self.rows.vector.device  # a state has them on the CPU
        if had != names:
            known = dict(zip(had, lam, strict=True))
            lam = torch.stack([known.get(name, lam.new_zeros(())) for name in names])
        return lam.numpy() if on_host(device) else lam.to(device)

    def note(self, gradient: Any, step: Any, square: Tensor, products: Tensor, seconds: float) -> None:
        """Take the statistics of a step, and update the losses to first order."""
        rows = self.rows
        assert rows.norms is not None
        if self._noise is None or self.begun % 100 == 0:  # it changes slowly, and takes long
            self._noise = rows.vector.rounding()
        part = Projection(
            names=rows.names,
            losses=rows.losses,
            stored=rows.stored,
            excess=self.terms.excess(rows),
            unit=self.terms.unit,
            square=square,
            products=products,
            norms=rows.norms,
            rounding=self._noise,
            eps=torch.finfo(rows.vector.dtype).eps,
            ages=rows.ages,
            seconds=seconds,
            _solution=step if gradient is None else gradient,
            _step=step,
        )
        before = self.last if len(self._stepped) > 1 else None
        self.last = part if before is None else before.with_part(part)
        self.keeper.history.add(self.last, before)
        rows.losses = rows.losses - products  # a new tensor, because statistics hold the old one

    def _tell_rate(self) -> None:
        """Warn, after the first steps, if most losses are above their bounds by more than the tolerance."""
        soon, history, far, drawn = self.begun, self.keeper.history, dict[str, float](), False
        last = min(soon // 2, max(10, soon // 20))  # steps that are judged; a history has some of many
        for name, points in history.points().items():
            late = [loss - bound for step, loss, bound in points if step >= history.steps - last]
            kept = self.keeper.sets.get(name)
            allowed = kept and kept.promise.allowed  # of a tolerance of zero, rounding is an excess
            if points and late and max(late) < points[0][1] - points[0][2]:
                continue  # it began above its bound, and falls
            if allowed and sum(excess > allowed for excess in late) > 0.5 * len(late):
                far[kept.title], draws = max(late), kept.promise.examples
                drawn = drawn or (draws is not None and draws < len(kept))
        if far:
            more = ", or use more examples per step" if drawn else ""
            warn(
                f"After {soon} steps, losses of {', '.join([*far][:5])} are above their bounds by more than "
                f"their tolerances in most steps, by up to {max(far.values()):.2g}: the tolerance is not "
                f"kept at this learning rate. Lower the rate{more}; if it falls by itself, see the report."
            )


def adapters(model: Any) -> str:
    """Return the names of the active adapters of a model of peft; empty for other models."""
    active = getattr(model, "active_adapter", "")
    return active if isinstance(active, str) else ", ".join(active) if isinstance(active, list) else ""


def _warn_of_statistics(model: torch.nn.Module) -> None:
    """Warn about layers whose running statistics change during training."""
    kinds = torch.nn.modules.batchnorm._NormBase
    named = ((name, one) for name, one in model.named_modules() if isinstance(one, kinds) and one.training)
    moving = [name for name, one in named if one.track_running_stats and one.momentum != 0]
    if moving:
        warn(
            f"Layers such as {moving[0]!r} ({len(moving)} of them) move their running statistics with the "
            "new data, which is not projected: losses of kept examples may rise. Call eval() on these layers "
            "after model.train() or, if a trainer calls train(), set their momentum to 0."
        )
