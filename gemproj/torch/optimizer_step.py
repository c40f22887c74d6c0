"""The step that an optimizer applies: observed, projected, replaced; and the hooks that do it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from gemproj._arrays import wide_dtype
from gemproj.torch.attached import Clips, clip_grad_norm_, find, forget, register, unchanged, versions
from gemproj.torch.parameters import ParameterVector, local
from gemproj.torch.stats import Projection

On = Literal["gradient", "step", "both"]
Metric = Literal["euclidean", "adam"]

# Their state was computed from weights that a projection would replace.
_UNFIT = {
    "LBFGS": "it takes differences of gradients between the weights that it has set itself",
    "ASGD": "it keeps an average of the weights that it has set itself",
}


class OptimizerStep:
    """One step of an optimizer on a parameter vector, theta before minus theta after."""

    def __init__(self, vector: ParameterVector, optimizer: torch.optim.Optimizer) -> None:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer; found {type(optimizer).__name__}.")
        own = isinstance(optimizer, torch.optim.Optimizer)
        if own and not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            raise TypeError(
                f"optimizer has no hooks: {type(optimizer).__name__} wraps another one. Pass that one, or "
                "for Accelerate use gemproj.integrations.accelerate.GEM."
            )
        self._vector = vector
        self.optimizer = optimizer
        self._buffers: tuple[Tensor, Tensor] | None = None  # before, step: allocated with the first step
        self.clipped: Any = 1.0  # what clipping has multiplied the gradient with
        if not self._groups():
            raise ValueError(
                "optimizer holds none of the parameters of this projector. Make both of the same parameters, "
                "after freezing, adding adapters and fully_shard."
            )

    def check_projectable(self, on: On, metric: Metric) -> None:
        """Raise for optimizers that cannot be projected, as far as can be told before a step."""
        name, groups = type(self.optimizer).__name__, self._groups().values()
        if any(group.get("maximize") for group in groups):
            raise ValueError(
                f"{name} with maximize=True steps along its gradient, and constraints are for steps against "
                "it. Minimise the negative loss instead."
            )
        if on == "gradient":
            return
        if name in _UNFIT:
            raise ValueError(f"The steps of {name} cannot be projected: {_UNFIT[name]}. Use on='gradient'.")
        # Adamax has betas, but keeps largest gradients.
        if metric == "adam" and (name == "Adamax" or not all("betas" in group for group in groups)):
            self._refuse_metric()

    def begin(self) -> None:
        """Store the parameters."""
        self._vector.check()
        if self._buffers is None:
            self._buffers = self._vector.empty(), self._vector.empty()
        torch._foreach_copy_(self._vector.split(self._buffers[0]), self._vector.local())

    def shares(self, other: OptimizerStep) -> bool:
        """Return whether both have a parameter in common."""
        return not set(map(id, self._vector.parameters)).isdisjoint(map(id, other._vector.parameters))

    def held_ids(self) -> set[int]:
        """Return which parameters the optimizer holds, by their ids."""
        return set(self._groups())

    def held(self) -> list[bool] | None:
        """Return which parameters the optimizer holds; None for all of them."""
        groups = self._groups()
        if len(groups) == len(self._vector.parameters):
            return None
        return [id(p) in groups for p in self._vector.parameters]

    def moving(self) -> list[bool]:
        """Return which parameters the optimizer moves: those with a gradient and a nonzero rate."""
        groups = self._groups()
        return [
            id(p) in groups and p.grad is not None and not _is_zero(groups[id(p)].get("lr"))
            for p in self._vector.parameters
        ]

    def taken(self) -> Tensor:
        """Return the step so far as one vector, in a buffer that is kept."""
        before, step = self._stored()
        step.copy_(before)
        torch._foreach_sub_(self._vector.split(step), self._vector.local())
        return step

    def replace(self, step: Tensor) -> None:
        """Apply another step to the stored parameters."""
        split = self._vector.split
        self._vector.assign(torch._foreach_sub(split(self._stored()[0]), split(step)))

    def undo(self) -> None:
        """Restore the stored parameters."""
        self._vector.assign(self._vector.split(self._stored()[0]))

    def learning_rate(self) -> float:
        """Return the largest learning rate, which converts gradient units into those of steps."""
        rates = [group["lr"] for group in self._groups().values() if group.get("lr") is not None]
        if not rates:
            raise ValueError(
                f"{type(self.optimizer).__name__} has no learning rate to convert a margin, a penalty or a "
                "bound between units of gradients and of its steps; use an optimizer that has one."
            )
        return max(float(rate) for rate in rates)

    def weight(self, metric: Metric, moving: Sequence[bool], largest: Callable[[], Tensor]) -> Tensor | None:
        """Return the weights of the distance between steps, None for ones.

        Adam's own, ``(sqrt(v_hat) + eps) / lr``: its step minimises a quadratic model with this metric.
        There v_hat is at least the square of the `largest` value of the entry in the constraints. Where the
        new loss has had no gradient, v_hat alone is zero, and a multiplier of 1 would move an entry by
        ``lr / eps`` times its gradient; so it moves it by the learning rate at most, like Adam.
        """
        if metric == "euclidean":
            return None
        w = largest()
        groups, states = self._groups(), self.optimizer.state
        parts = self._vector.split(w)
        for p, part, moves in zip(self._vector.parameters, parts, moving, strict=True):
            if not moves:
                part.fill_(1.0)
                continue
            group, state = groups[id(p)], states.get(p, {})
            second = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
            if second is None or "betas" not in group:
                self._refuse_metric()
            steps = state.get("step", group.get("step"))  # some optimizers count in the group
            correction = 1 - group["betas"][1] ** _number(steps)
            root = torch.maximum((local(second) / correction).sqrt_(), part)
            part.copy_((root + group["eps"]) / _number(group["lr"]))
        return w

    def _stored(self) -> tuple[Tensor, Tensor]:
        assert self._buffers is not None
        return self._buffers

    def _refuse_metric(self) -> NoReturn:
        raise ValueError(
            "metric='adam' needs an optimizer that keeps second moments (exp_avg_sq), such as Adam or AdamW; "
            f"found {type(self.optimizer).__name__}. Use metric='euclidean'."
        )

    def _groups(self) -> dict[int, dict[str, Any]]:
        mine = {id(p) for p in self._vector.parameters}
        return {
            id(p): group for group in self.optimizer.param_groups for p in group["params"] if id(p) in mine
        }


class ProjectedOptimizer:
    """The hooks of a projector in an optimizer, returned by `GradientProjector.attach`.

    They observe the step, and have the projector change the gradient before it, or the step after it.
    """

    def __init__(self, projector: Any, step: OptimizerStep) -> None:
        step.check_projectable(projector.on, projector.metric)
        self._projector, self._step, self.clips = projector, step, Clips()
        other = find(lambda one: one._step.optimizer is step.optimizer and one._step.shares(step))
        if other is not None:
            raise ValueError(
                f"{'This' if other._projector is projector else 'Another'} projector is attached to this "
                "optimizer already, and both would act. Attach once, before the loop, or call remove() on "
                "the other GEM, or on what its attach returned, or gemproj.torch.detach(optimizer) if it is "
                "lost; two losses of a task go into one function."
            )
        self._done: Projection | None = None
        self._projected: list[tuple[Tensor | None, int]] = []  # gradients, until the step is complete
        self._hooks: list[Any] = [
            step.optimizer.register_step_pre_hook(self._begin),
            before_steps(step.optimizer, self._project_gradient),
            step.optimizer.register_step_post_hook(self._finish),
        ]
        register(self)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip what the projection leaves of the gradient, in the next step; see `GEM.clip_grad_norm_`."""
        return clip_grad_norm_([self._step.optimizer], self._projector.parameters, max_norm, norm_type)

    def remove(self) -> None:
        """Detach the projector from the optimizer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        forget(self)

    @torch.compiler.disable
    @torch.no_grad()
    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        start = time.perf_counter()
        if self._projector.scale_dependent and getattr(optimizer, "grad_scale", None) is not None:
            raise ValueError(
                "A margin, a penalty and what GEM2017 adds are in units of gradients, and these are still "
                "scaled: call scaler.unscale_(optimizer) before scaler.step(optimizer)."
            )
        self._skipped = will_skip(optimizer)
        # A closure may bring the first constraints.
        has_closure = _closure(args, kwargs) is not None
        self._watches = not self._skipped and (len(self._projector.constraints) > 0 or has_closure)
        if self._watches:
            self._step.begin()
        self._seconds = time.perf_counter() - start

    @torch.compiler.disable
    def _project_gradient(self) -> None:
        projector = self._projector
        # Else a step that broke off after this is taken again, perhaps with its clipping repeated.
        if not self._projected or not unchanged(projector.parameters, self._projected):
            wanted = projector.on != "step" and not self._skipped
            rate = self._step.learning_rate() if wanted and projector.bound is not None else None
            self._done = projector.project_(rate, self._step.held()) if wanted else projector.skip()
            self._step.clipped = 1.0
        self._step.clipped *= self.clips.run()  # the gradient with the margin, as replay does
        if projector.on != "gradient":
            # Optimizers and other hooks may drop gradients within the step.
            self._moving = self._step.moving()
        self._projected = versions(projector.parameters)

    @torch.compiler.disable
    @torch.no_grad()
    def _finish(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        done, self._done, self._projected = self._done, None, []
        projector = self._projector
        if not self._watches or done is None or not len(projector.constraints):
            return
        start = time.perf_counter()
        if projector.on != "gradient":
            try:
                sol = projector.project_step(self._step, self._moving)
            except Exception as error:
                self._step.undo()
                if not isinstance(error, ValueError):
                    raise
                name = type(optimizer).__name__
                raise ValueError(
                    f"A step of {name} could not be projected and was undone. There g is the step: {error}"
                ) from error
            done = replace(done, step=sol, solution=sol if projector.on == "step" else done.solution)
        cosines = projector.follow(self._step.taken())
        seconds = done.seconds + self._seconds + time.perf_counter() - start
        projector.last = replace(done, cosines=cosines, seconds=seconds)


def before_steps(optimizer: torch.optim.Optimizer, change: Callable[[], Any]) -> Any:
    """Call `change` before every ``optimizer.step()``, or after every call of its closure."""

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        closure = _closure(args, kwargs)
        if closure is None:
            change()
            return None

        def changing() -> Any:
            loss = closure()
            change()
            return loss

        swap = {id(closure): changing}
        return tuple(swap.get(id(a), a) for a in args), {k: swap.get(id(a), a) for k, a in kwargs.items()}

    return optimizer.register_step_pre_hook(before_step)


def will_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a fused optimizer will find infinities and skip its step; False where asking waits."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and found.device.type == "cpu" and bool(found)


def _closure(args: Any, kwargs: Any) -> Callable[[], Any] | None:
    # `args` starts with the optimizer itself in some versions of torch.
    return next((a for a in [*args, *kwargs.values()] if callable(a)), None)


def _is_zero(rate: Any) -> bool:
    """Return whether a learning rate is zero; False where asking would wait for a device."""
    return (not isinstance(rate, Tensor) or rate.device.type == "cpu") and bool(rate == 0)


def _number(value: Any) -> Any:
    """Return a count or a rate in full precision: a tensor only where reading it would wait for a device."""
    if not isinstance(value, Tensor):
        return value
    return float(value) if value.device.type == "cpu" else value.to(wide_dtype(torch, value.device))
