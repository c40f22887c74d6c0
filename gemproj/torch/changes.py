"""The vectors that a projection changes: the gradient before an optimizer's step, or the step taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, ClassVar, Literal, NoReturn

import torch
from torch import Tensor

from gemproj._arrays import wide_dtype
from gemproj.torch.parameters import Buffer, ParameterVector, local

On = Literal["gradient", "step", "both"]
Metric = Literal["euclidean", "adam"]

# Optimizers whose state is computed from weights that a projection would replace.
_UNFIT = {
    "LBFGS": "it uses differences of gradients between weights that it has set itself",
    "ASGD": "it averages weights that it has set itself",
}


class Change:
    """A gradient or a step, as a vector that a projection replaces.

    Attributes
    ----------
    name : str
        "gradient" or "step"; each has its own warm start.
    """

    name: str

    def moving(self) -> list[bool] | None:
        """Return, for each parameter, whether its entries are projected; None if all are projected."""
        return None

    def unit(self) -> float:
        """Return the factor that converts units of gradients to units of this vector."""
        return 1.0

    def scale(self) -> Any:
        """Return the factor for weights and penalties, including clipping, as a number or a tensor."""
        return self.unit()

    def rate(self) -> float:
        """Return the first-order decrease of a loss per unit of the product of this vector with its row."""
        return 1.0

    def weights(self, largest: Callable[[Tensor], None]) -> Tensor | None:
        """Return the weights of the metric; None for the Euclidean metric."""
        return None

    def read(self) -> Tensor:
        """Return the vector, in a buffer that every step reuses."""
        raise NotImplementedError

    def write(self, changed: bool, reached: Sequence[bool]) -> None:
        """Apply the vector in the buffer if it `changed`; `reached` marks parameters with entries in G."""
        raise NotImplementedError


class Gradient(Change):
    """The ``.grad`` of the parameters; a missing gradient counts as zero."""

    name = "gradient"

    def __init__(
        self, vector: ParameterVector, step: Step | None = None, learning_rate: float | None = None
    ) -> None:
        self._vector, self._step, self._rate = vector, step, learning_rate
        self._moving = None if step is None else step.held()

    def moving(self) -> list[bool] | None:  # noqa: D102
        return self._moving

    def rate(self) -> float:  # noqa: D102
        rate = self._rate if self._step is None else self._step.learning_rate()
        if rate is None:
            raise ValueError(
                "tolerance is about steps: attach(optimizer), or pass the learning_rate of the step."
            )
        return rate

    def read(self) -> Tensor:  # noqa: D102
        return self._vector.read_gradient()

    def write(self, changed: bool, reached: Sequence[bool]) -> None:  # noqa: D102
        if self._moving is not None:
            reached = [a and b for a, b in zip(reached, self._moving, strict=True)]
        self._vector.write_gradient(reached, changed)


class Step(Change):
    """One step of an optimizer on a parameter vector: parameters before minus parameters after the step.

    The metric of the projection is by default Adam's if the optimizer keeps second moments.

    Attributes
    ----------
    clipped : float or Tensor
        The factor by which clipping multiplied the gradient of the step.
    """

    name = "step"
    clipped: Any = 1.0

    kinds: ClassVar[list[Any]] = []  # subclasses for other libraries; see `of`

    def __init__(self, vector: ParameterVector, optimizer: torch.optim.Optimizer) -> None:
        if type(optimizer).__module__.startswith("deepspeed."):
            raise TypeError(
                f"optimizer is DeepSpeed's {type(optimizer).__name__}: import gemproj.integrations.deepspeed "
                "first, before deepspeed's parameters are passed to a projector or GEM."
            )
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer; found {type(optimizer).__name__}.")
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
            raise TypeError(
                f"optimizer has no hooks: {type(optimizer).__name__} wraps another one. Pass the inner "
                "one, or for Accelerate use gemproj.integrations.accelerate.GEM."
            )
        self._vector, self.optimizer = vector, optimizer
        self.metric: Metric | None = None
        self._moving: list[bool] = []
        if not self.groups():
            raise ValueError(
                "optimizer holds none of the parameters of this projector. Make both of the same parameters, "
                "after freezing, adding adapters and fully_shard."
            )

    @classmethod
    def of(cls, vector: ParameterVector, optimizer: Any) -> Step:
        """Return a `Step` of the class that fits the optimizer."""
        kind = next((kind for kind in cls.kinds if kind.fits(optimizer)), cls)
        return kind(vector, optimizer)

    def check(self, on: On) -> None:
        """Raise if steps of the optimizer cannot be projected, as far as this is known before a step."""
        name, groups = type(self.optimizer).__name__, self.groups().values()
        if any(group.get("maximize") for group in groups):
            raise ValueError(
                f"{name} with maximize=True steps along its gradient, and constraints are for steps against "
                "it. Minimise the negative loss instead."
            )
        if on == "gradient":
            return
        if name in _UNFIT:
            raise ValueError(f"The steps of {name} cannot be projected: {_UNFIT[name]}. Use on='gradient'.")
        # Adamax has betas, but keeps the largest gradients instead of second moments.
        if self.metric == "adam" and (name == "Adamax" or not all("betas" in group for group in groups)):
            self._refuse_metric()

    def held(self) -> list[bool] | None:
        """Return which parameters the optimizer holds; None for all of them."""
        groups = self.groups()
        if len(groups) == len(self._vector.parameters):
            return None
        return [id(p) in groups for p in self._vector.parameters]

    def begin(self) -> None:
        """Store the parameters before the step."""
        self._vector.check()
        torch._foreach_copy_(self._before.parts, self._vector.local())

    def note_moving(self) -> None:
        """Note which parameters have a gradient, which the step may drop, and a nonzero learning rate."""
        groups = self.groups()
        self._moving = [
            id(p) in groups and p.grad is not None and not _is_zero(groups[id(p)].get("lr"))
            for p in self._vector.parameters
        ]

    def moving(self) -> list[bool]:
        """Return which parameters the optimizer moves."""
        return self._moving

    def read(self) -> Tensor:
        """Return the current step as one vector, in the scratch buffer of the parameter vector."""
        step = self._vector.scratch
        step.whole.copy_(self._before.whole)
        torch._foreach_sub_(step.parts, self._vector.local())
        return step.whole

    def finish(self) -> Tensor:
        """Return the applied step, which overwrites the stored parameters and can no longer be undone."""
        torch._foreach_sub_(self._before.parts, self._vector.local())
        return self._before.whole

    def write(self, changed: bool, reached: Sequence[bool]) -> None:
        """If the step has `changed`, apply the step in the scratch buffer to the stored parameters."""
        if changed:
            step = self._vector.scratch.parts
            torch._foreach_sub_(step, self._before.parts)
            torch._foreach_neg_(step)
            self._vector.assign(step)

    def undo(self) -> None:
        """Restore the stored parameters."""
        self._vector.assign(self._before.parts)

    def unit(self) -> float:  # noqa: D102
        # Adam's metric has the unit of a gradient divided by a step.
        return 1.0 if self._has_moments() else self.learning_rate()

    def scale(self) -> Any:  # noqa: D102
        skipped = getattr(self.optimizer, "found_inf", None)
        # After an overflow, a fused optimizer takes no step, and a weight must not move parameters either.
        return self.clipped * self.unit() * (1.0 if skipped is None else skipped == 0)

    def learning_rate(self) -> float:
        """Return the largest learning rate."""
        rates = [group["lr"] for group in self.groups().values() if group.get("lr") is not None]
        if not rates:
            raise ValueError(
                f"{type(self.optimizer).__name__} has no learning rate to convert a weight, a penalty or a "
                "tolerance between units of gradients and of its steps; use an optimizer that has one."
            )
        return max(float(rate) for rate in rates)

    def weights(self, largest: Callable[[Tensor], None]) -> Tensor | None:
        """Return the weights of Adam's metric, ``(sqrt(v_hat) + eps) / lr``; None for the Euclidean metric.

        Adam's step minimises a quadratic model with this metric. Here v_hat is at least the square of the
        `largest` value of the entry in the rows. Without this minimum, v_hat is zero for entries without a
        gradient of the new loss, and a multiplier of 1 would move them by ``lr / eps`` times the row. With
        the minimum, a multiplier of 1 moves an entry by at most the learning rate, as Adam does.
        """
        if not self._has_moments():
            return None
        w = self._weights.whole
        largest(w)
        groups, states = self.groups(), self.optimizer.state
        parts, seconds, corrections, eps, rates = [], [], [], [], []
        for p, part, moves in zip(self._vector.parameters, self._weights.parts, self._moving, strict=True):
            if not moves:
                part.fill_(1.0)
                continue
            group, state = groups[id(p)], states.get(p, {})
            steps = state.get("step", group.get("step"))  # some optimizers count steps in the group
            count = _number(steps)  # zero if the first step was skipped after an overflow
            count = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
            parts.append(part)
            seconds.append(_dequantised(local(state.get("max_exp_avg_sq", state.get("exp_avg_sq")))))
            corrections.append(1 - group["betas"][1] ** count)
            eps.append(group["eps"])
            rates.append(_number(group["lr"]))
        if parts:
            # All parameters at once: six operations for each would take longer than the optimizer's step.
            roots = torch._foreach_div(seconds, _alike(corrections, w))
            torch._foreach_sqrt_(roots)
            torch._foreach_maximum_(parts, [a if a.dtype == w.dtype else a.to(w.dtype) for a in roots])
            torch._foreach_add_(parts, eps)
            torch._foreach_div_(parts, _alike(rates, w))
        return w

    def _has_moments(self) -> bool:
        """Return whether the metric is Adam's, which needs second moments of all moving parameters."""
        if self.metric == "euclidean":
            return False
        groups, states = self.groups(), self.optimizer.state
        every = zip(self._vector.parameters, self._vector.shapes, self._moving, strict=True)
        # Each process updates the moments of some parameters; other moments may come from an old state.
        partial = type(self.optimizer).__name__ == "ZeroRedundancyOptimizer"
        found = not partial and all(
            "exp_avg_sq" in states.get(p, {})
            and local(states[p]["exp_avg_sq"]).shape == shape  # GaLore has moments of projected gradients
            and groups[id(p)].keys() >= {"betas", "eps"}
            and ("step" in states[p] or "step" in groups[id(p)])
            for p, shape, moves in every
            if moves
        )
        if self.metric == "adam" and not found:
            self._refuse_metric()
        return found

    @cached_property
    def _before(self) -> Buffer:
        """The parameters before the step."""
        return self._vector.buffer()

    @cached_property
    def _weights(self) -> Buffer:
        """The weights of the metric."""
        return self._vector.buffer()

    def _refuse_metric(self) -> NoReturn:
        raise ValueError(
            "metric='adam' needs an optimizer that keeps second moments (exp_avg_sq) of each entry and a "
            "count of steps, with betas and eps, such as Adam or AdamW; "
            f"found {type(self.optimizer).__name__}. Use metric='euclidean'."
        )

    def groups(self) -> dict[int, dict[str, Any]]:
        """Return the groups of the parameters that the optimizer holds, keyed by parameter id."""
        mine = {id(p) for p in self._vector.parameters}
        return {
            id(p): group for group in self.optimizer.param_groups for p in group["params"] if id(p) in mine
        }


def _is_zero(rate: Any) -> bool:
    """Return whether a learning rate is zero; False if reading it would synchronise a device."""
    return (not isinstance(rate, Tensor) or rate.device.type == "cpu") and bool(rate == 0)


def _dequantised(moments: Tensor) -> Tensor:
    """Return moments as a plain tensor; optimizers of torchao keep moments in 4 or 8 bits."""
    return moments if type(moments) is Tensor else moments.dequantize()


def _alike(numbers: list[Any], like: Tensor) -> list[Any]:
    """Return the numbers; if any number is a tensor, return tensors on the device of `like`."""
    if not any(isinstance(number, Tensor) for number in numbers):
        return numbers
    return [n if isinstance(n, Tensor) else torch.full((), n, device=like.device) for n in numbers]


def _number(value: Any) -> Any:
    """Return a number in full precision, as a tensor only if reading the value would synchronise a device."""
    if not isinstance(value, Tensor):
        return value
    return float(value) if value.device.type == "cpu" else value.to(wide_dtype(torch, value.device))
