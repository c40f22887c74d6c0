"""The step that an optimizer applies: theta before minus theta after, whatever made it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor

from gemproj._array import wide_dtype
from gemproj.torch.layout import Layout, local

On = Literal["gradient", "update", "both"]
Metric = Literal["euclidean", "adam"]

# What these keep in their state was computed from weights that a projection would replace.
_UNFIT = {
    "LBFGS": "it takes differences of gradients between the weights that it has set itself",
    "ASGD": "it keeps an average of the weights that it has set itself",
}


class AppliedStep:
    """One step of an optimizer on the parameters of a layout: observed, and replaced by a better one.

    Parameters
    ----------
    layout : Layout
    optimizer : torch.optim.Optimizer
    """

    def __init__(self, layout: Layout, optimizer: torch.optim.Optimizer) -> None:
        if not hasattr(optimizer, "param_groups"):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer; found {type(optimizer).__name__}.")
        self._layout = layout
        self.optimizer = optimizer
        self._before = self._step = layout.empty(0)
        if not self._groups():
            raise ValueError(
                "optimizer holds none of the parameters of this projector. Make both of the same parameters, "
                "after freezing, adding adapters and fully_shard."
            )

    def refuse_unfit(self, metric: Metric) -> None:
        """Raise for optimizers whose steps cannot be projected, as far as it can be told before a step.

        The state of some would not belong to the weights that a projection leaves; others have no second
        moments for Adam's metric.
        """
        name = type(self.optimizer).__name__
        if name in _UNFIT:
            raise ValueError(f"The steps of {name} cannot be projected: {_UNFIT[name]}. Use on='gradient'.")
        if any(group.get("maximize") for group in self._groups().values()):
            raise ValueError(
                f"{name} with maximize=True steps towards larger losses, against which constraints hold it. "
                "Minimise the negative loss instead, or use on='gradient'."
            )
        if metric == "adam" and not all("betas" in group for group in self._groups().values()):
            self._refuse_metric()

    def begin(self) -> None:
        """Remember where the parameters are."""
        if self._before.ndim > 1:  # not yet needed
            self._before, self._step = self._layout.empty(), self._layout.empty()
        torch._foreach_copy_(self._layout.split(self._before), self._layout.held())

    def moving(self) -> list[bool]:
        """Tell which parameters the optimizer moves: those with a gradient, at a rate that is not zero."""
        groups = self._groups()
        return [
            id(p) in groups and p.grad is not None and not _is_zero(groups[id(p)].get("lr"))
            for p in self._layout.parameters
        ]

    def taken(self) -> Tensor:
        """Return the step up to now, theta before minus theta, as one vector: a buffer that is kept."""
        self._step.copy_(self._before)
        torch._foreach_sub_(self._layout.split(self._step), self._layout.held())
        return self._step

    def replace(self, step: Tensor) -> None:
        """Put the parameters where `step` leads from where they were."""
        ends = torch._foreach_sub(self._layout.split(self._before), self._layout.split(step))
        torch._foreach_copy_(self._layout.held(), ends)

    def undo(self) -> None:
        """Put the parameters back where they were."""
        torch._foreach_copy_(self._layout.held(), self._layout.split(self._before))

    def rate(self) -> float:
        """Return the largest learning rate: the size of a step in units of a gradient."""
        rates = [group["lr"] for group in self._groups().values() if "lr" in group]
        if not rates:
            raise ValueError(
                f"margin and penalty are in units of gradients, and {type(self.optimizer).__name__} has no "
                "learning rate to convert them into units of its steps; use on='gradient' or on='both'."
            )
        return max(float(rate) for rate in rates)

    def weight(self, metric: Metric, moving: Sequence[bool]) -> Tensor | None:
        """Return the weights of the distance between steps, one for each entry; None for ones.

        Adam's own: ``(sqrt(v_hat) + eps) / lr``, in which its step minimises a quadratic model of the loss.
        """
        if metric == "euclidean":
            return None
        w = torch.ones_like(self._before)
        groups = self._groups()
        parts = self._layout.split(w)
        for p, part, moves in zip(self._layout.parameters, parts, moving, strict=True):
            if not moves:
                continue
            group, state = groups[id(p)], self.optimizer.state.get(p, {})
            second = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
            if second is None or "betas" not in group:
                self._refuse_metric()
            correction = 1 - group["betas"][1] ** _number(state["step"])
            part.copy_(((local(second) / correction).sqrt_() + group["eps"]) / _number(group["lr"]))
        return w

    def _refuse_metric(self) -> NoReturn:
        raise ValueError(
            "metric='adam' needs an optimizer that keeps second moments (exp_avg_sq), such as Adam or AdamW; "
            f"found {type(self.optimizer).__name__}. Use metric='euclidean'."
        )

    def _groups(self) -> dict[int, dict[str, Any]]:
        mine = {id(p) for p in self._layout.parameters}
        return {
            id(p): group for group in self.optimizer.param_groups for p in group["params"] if id(p) in mine
        }


def _is_zero(rate: Any) -> bool:
    """Tell whether a learning rate is zero, where looking is free."""
    return (not isinstance(rate, Tensor) or rate.device.type == "cpu") and bool(rate == 0)


def _number(value: Any) -> Any:
    """Return a count or a rate in full precision: a tensor only where reading it would wait for a device."""
    if not isinstance(value, Tensor):
        return value
    return float(value) if value.device.type == "cpu" else value.to(wide_dtype(torch, value.device))
