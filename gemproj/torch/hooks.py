"""Change gradients before every step of an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def before_steps(optimizer: torch.optim.Optimizer, change: Callable[[Any], Any]) -> Any:
    """Call ``change(None)`` before every ``optimizer.step()``.

    In ``optimizer.step(closure)`` that is ``change(loss)`` after every call of the closure instead, with
    what it returned.
    """

    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        closure = _closure(args, kwargs)
        if closure is None:
            change(None)
            return None

        def changing() -> Any:
            loss = closure()
            change(loss)
            return loss

        swap = {id(closure): changing}
        return tuple(swap.get(id(a), a) for a in args), {k: swap.get(id(a), a) for k, a in kwargs.items()}

    return optimizer.register_step_pre_hook(before_step)


def has_closure(args: Any, kwargs: Any) -> bool:
    """Tell whether a step with these arguments computes its gradients itself."""
    return _closure(args, kwargs) is not None


def _closure(args: Any, kwargs: Any) -> Callable[[], Any] | None:
    # `args` starts with the optimizer itself in some versions of torch.
    return next((a for a in [*args, *kwargs.values()] if callable(a)), None)
