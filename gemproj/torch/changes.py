"""What a projection changes: the gradient before an optimizer's step, or the step that was taken."""

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

# Their state was computed from weights that a projection would replace.
_UNFIT = {
    "LBFGS": "it takes differences of gradients between the weights that it has set itself",
    "ASGD": "it keeps an average of the weights that it has set itself",
}


class Change:
    """A vector on the parameters that a projection replaces.

    Attributes
    ----------
    name : str
        "gradient" or "step"; each has a warm start of its own.
    """

    name: str

    def moving(self) -> list[bool] | None:
        """Return for each parameter whether it takes part; None for all."""
        return None

    def unit(self) -> float:
        """Return what turns numbers in units of gradients into those of this vector."""
        return 1.0

    def scale(self) -> Any:
        """Return the same for multipliers, a number or a tensor: of what was made of the gradient before."""
        return self.unit()

    def rate(self) -> float:
        """Return by how much a loss falls, to first order, per unit of the product with its gradient."""
        return 1.0

    def weights(self, largest: Callable[[Tensor], None]) -> Tensor | None:
        """Return the weights of the distance to the projection, None for ones."""
        return None

    def read(self) -> Tensor:
        """Return the vector, in a buffer that is kept."""
        raise NotImplementedError

    def write(self, changed: bool, reached: Sequence[bool]) -> None:
        """Take the vector in the buffer, if it has `changed`; G has entries of the parameters `reached`."""
        raise NotImplementedError


class Gradient(Change):
    """The ``.grad`` of the parameters; a missing one counts as zero."""

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
    """One step of an optimizer on a parameter vector, theta before minus theta after.

    The metric of the projection is by default Adam's where the optimizer keeps second moments.

    Attributes
    ----------
    clipped : float or Tensor
        What clipping has multiplied the gradient with, from which the step is made.
    """

    name = "step"
    clipped: Any = 1.0

    kinds: ClassVar[list[Any]] = []  # of other libraries, which register theirs; see `of`

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
                f"optimizer has no hooks: {type(optimizer).__name__} wraps another one. Pass that one, or "
                "for Accelerate use gemproj.integrations.accelerate.GEM."
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
        """Return the step of an optimizer, of the kind that fits it."""
        kind = next((kind for kind in cls.kinds if kind.fits(optimizer)), cls)
        return kind(vector, optimizer)

    def check(self, on: On) -> None:
        """Raise for optimizers that cannot be projected, as far as can be told before a step."""
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
        # Adamax has betas, but keeps largest gradients.
        if self.metric == "adam" and (name == "Adamax" or not all("betas" in group for group in groups)):
            self._refuse_metric()

    def held(self) -> list[bool] | None:
        """Return which parameters the optimizer holds; None for all of them."""
        groups = self.groups()
        if len(groups) == len(self._vector.parameters):
            return None
        return [id(p) in groups for p in self._vector.parameters]

    def begin(self) -> None:
        """Store the parameters, before the step."""
        self._vector.check()
        torch._foreach_copy_(self._before.parts, self._vector.local())

    def note_moving(self) -> None:
        """Note which parameters move: with a gradient, which may be dropped in the step, and a rate."""
        groups = self.groups()
        self._moving = [
            id(p) in groups and p.grad is not None and not _is_zero(groups[id(p)].get("lr"))
            for p in self._vector.parameters
        ]

    def moving(self) -> list[bool]:
        """Return which parameters the optimizer moves."""
        return self._moving

    def read(self) -> Tensor:
        """Return the step so far as one vector, in the scratch buffer of the parameter vector."""
        step = self._vector.scratch
        step.whole.copy_(self._before.whole)
        torch._foreach_sub_(step.parts, self._vector.local())
        return step.whole

    def finish(self) -> Tensor:
        """Return the step that was taken, where the stored parameters were: it can be undone no more."""
        torch._foreach_sub_(self._before.parts, self._vector.local())
        return self._before.whole

    def write(self, changed: bool, reached: Sequence[bool]) -> None:
        """Apply another step to the stored parameters."""
        if changed:
            step = self._vector.scratch.parts
            torch._foreach_sub_(step, self._before.parts)
            torch._foreach_neg_(step)
            self._vector.assign(step)

    def undo(self) -> None:
        """Restore the stored parameters."""
        self._vector.assign(self._before.parts)

    def unit(self) -> float:  # noqa: D102
        # Adam's metric has the unit of a gradient over a step.
        return 1.0 if self._has_moments() else self.learning_rate()

    def scale(self) -> Any:  # noqa: D102
        skipped = getattr(self.optimizer, "found_inf", None)
        # A fused optimizer takes no step after an overflow, and a weight must not make one.
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
        """Return Adam's own weights, ``(sqrt(v_hat) + eps) / lr``; None for an optimizer without moments.

        Adam's step minimises a quadratic model with this metric. There v_hat is at least the square of the
        `largest` value of the entry in the constraints. Where the new loss has had no gradient, v_hat alone
        is zero, and a multiplier of 1 would move an entry by ``lr / eps`` times its gradient; so it moves it
        by the learning rate at most, like Adam.
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
            steps = state.get("step", group.get("step"))  # some optimizers count in the group
            count = _number(steps)  # zero where an overflow had the first step skipped
            count = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
            parts.append(part)
            seconds.append(_dequantised(local(state.get("max_exp_avg_sq", state.get("exp_avg_sq")))))
            corrections.append(1 - group["betas"][1] ** count)
            eps.append(group["eps"])
            rates.append(_number(group["lr"]))
        if parts:
            # For all at once: six operations for each parameter would take longer than an optimizer's step.
            roots = torch._foreach_div(seconds, _alike(corrections, w))
            torch._foreach_sqrt_(roots)
            torch._foreach_maximum_(parts, [a if a.dtype == w.dtype else a.to(w.dtype) for a in roots])
            torch._foreach_add_(parts, eps)
            torch._foreach_div_(parts, _alike(rates, w))
        return w

    def _has_moments(self) -> bool:
        """Return whether the distance is Adam's, for which all parameters that move need second moments."""
        if self.metric == "euclidean":
            return False
        groups, states = self.groups(), self.optimizer.state
        every = zip(self._vector.parameters, self._vector.shapes, self._moving, strict=True)
        # Each process has those of some parameters only, and they are old ones that were loaded.
        partial = type(self.optimizer).__name__ == "ZeroRedundancyOptimizer"
        found = not partial and all(
            "exp_avg_sq" in states.get(p, {})
            and local(states[p]["exp_avg_sq"]).shape == shape  # GaLore's are of a projection
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
        """The weights of the distance."""
        return self._vector.buffer()

    def _refuse_metric(self) -> NoReturn:
        raise ValueError(
            "metric='adam' needs an optimizer that keeps second moments (exp_avg_sq) of each entry and a "
            "count of steps, with betas and eps, such as Adam or AdamW; "
            f"found {type(self.optimizer).__name__}. Use metric='euclidean'."
        )

    def groups(self) -> dict[int, dict[str, Any]]:
        """Return the group of each parameter that the optimizer holds, by the id of the parameter."""
        mine = {id(p) for p in self._vector.parameters}
        return {
            id(p): group for group in self.optimizer.param_groups for p in group["params"] if id(p) in mine
        }


def _is_zero(rate: Any) -> bool:
    """Return whether a learning rate is zero; False where asking would wait for a device."""
    return (not isinstance(rate, Tensor) or rate.device.type == "cpu") and bool(rate == 0)


def _dequantised(moments: Tensor) -> Tensor:
    """Return moments as a plain tensor: optimizers of torchao keep them in 4 or 8 bits."""
    return moments if type(moments) is Tensor else moments.dequantize()


def _alike(numbers: list[Any], like: Tensor) -> list[Any]:
    """Return the numbers; where some of them are tensors, all as tensors on that device."""
    if not any(isinstance(number, Tensor) for number in numbers):
        return numbers
    return [n if isinstance(n, Tensor) else torch.full((), n, device=like.device) for n in numbers]


def _number(value: Any) -> Any:
    """Return a count or a rate in full precision: a tensor only where reading it would wait for a device."""
    if not isinstance(value, Tensor):
        return value
    return float(value) if value.device.type == "cpu" else value.to(wide_dtype(torch, value.device))
