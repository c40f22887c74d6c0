"""The hooks of a projector in an optimizer's step, and gradient clipping after the projection.

The order in a step: store the parameters; project the gradient, then clip it; take the optimizer's own step;
project that step.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.utils.weak import TensorWeakRef

from gemproj.torch.changes import Step
from gemproj.torch.parameters import mesh_of

_STEP: Any = torch.optim.Optimizer.profile_hook_step(print)  # the wrapper of a step, which calls the hooks


def attached(optimizer: Any) -> list[ProjectedOptimizer]:
    """Return the `ProjectedOptimizer` objects that are attached to an optimizer."""
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    owners: list[Any] = [getattr(hook, "__self__", None) for hook in hooks]
    return [one for one in owners if type(one).__module__ == __name__]  # notebooks may load this module twice


def detach(optimizer: Any) -> None:
    """Detach every `GEM` and projector from an optimizer, even if no variable refers to them any more.

    An optimizer keeps attached objects alive, for example objects from an earlier run of a notebook cell. The
    optimizer may be prepared by Accelerate, or belong to a DeepSpeed engine.
    """
    while not hasattr(optimizer, "_optimizer_step_pre_hooks"):  # a wrapper, or DeepSpeed's optimizer
        optimizer = getattr(optimizer, "_gemproj", optimizer.optimizer)
    for one in attached(optimizer):
        one.remove()


@torch.no_grad()
def total_norm(parameters: Iterable[Tensor], norm_type: float = 2.0) -> Tensor:
    """Return the norm of all gradients, which may be on several devices and meshes; write nothing."""
    on_mesh: dict[Any, list[Tensor]] = {}
    for p in parameters:
        if p.grad is not None:
            on_mesh.setdefault(mesh_of(p.grad), []).append(p.grad)
    norms: list[Any] = [get_total_norm(gradients, norm_type) for gradients in on_mesh.values()]
    whole = [norm if mesh_of(norm) is None else norm.full_tensor() for norm in norms]
    return get_total_norm(whole, norm_type)


def clip(parameters: list[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip the norm of the gradients as torch does; return the norm before clipping.

    With sharded gradients, `torch.nn.utils.clip_grad_norm_` may add its 1e-6 to the norm of each shard
    instead of the total norm. The clipped gradients then differ from the gradients on one process.
    """
    norm = total_norm(parameters, norm_type)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


class Clips:
    """Clipping, postponed until the next step of an optimizer has projected the gradient.

    A request is dropped if all of its gradients have been replaced before that step.
    """

    def __init__(self) -> None:
        self._waiting: dict[frozenset[int], tuple[list[Any], Callable[[], Tensor]]] = {}

    def add(
        self, clip: Callable[..., Tensor], parameters: list[Tensor], max_norm: float, kind: float
    ) -> None:
        """Clip these gradients in the next step; drop an earlier request for the same parameters."""

        def clipped() -> Tensor:
            norm: Any = clip(parameters, max_norm, kind)
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            # The same factor as in torch. After an overflow no step is taken, but a margin must not be NaN.
            return (max_norm / (norm + 1e-6)).clamp(max=1.0).nan_to_num(1.0)

        # Weak references do not keep the gradients of a dropped batch in memory.
        held = [(p, TensorWeakRef(p.grad)) for p in parameters if p.grad is not None]
        self._waiting[frozenset(map(id, parameters))] = held, clipped

    def run(self) -> Any:
        """Clip now; return the factor by which the gradient was multiplied."""
        factor: Any = 1.0
        while self._waiting:
            held, clipped = self._waiting.popitem()[1]
            if any(p.grad is not None and p.grad is gradient() for p, gradient in held):
                factor = clipped()
        return factor


def clip_grad_norm_(
    optimizers: Sequence[Any],
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    *,
    now: Callable[..., Tensor] = torch.nn.utils.clip_grad_norm_,
    later: Callable[..., Tensor] = clip,
    measure: Callable[..., Tensor] = total_norm,
) -> Tensor:
    """Clip the gradients in the next step, after their projection; return their current norm.

    The gradients are clipped immediately if no optimizer holds all of them, or if the last optimizer that
    holds them has no projector for all of them.

    Parameters
    ----------
    optimizers : sequence
        The optimizers that may take the next step.
    parameters, max_norm, norm_type
        As in `torch.nn.utils.clip_grad_norm_`.
    now, later : callable, optional
        Functions that clip immediately and in the step; by default torch's `clip_grad_norm_` and `clip`.
    measure : callable, optional
        Function that returns the norm before clipping in the step; by default `total_norm`.
    """
    given: Any = max_norm
    if not isinstance(given, Real | Tensor):
        raise TypeError(f"max_norm must be a number; found {type(given).__name__}.")
    parameters = list(parameters)
    mine = {id(p) for p in parameters if p.grad is not None}
    holding = [o for o in optimizers if mine <= {id(p) for group in o.param_groups for p in group["params"]}]
    last = attached(holding[-1]) if holding else []
    one = next((one for one in last if mine <= one._step.groups().keys()), None)
    if one is None:
        return now(parameters, max_norm, norm_type)
    # No gradient is written before the step. Clipping to infinity would write NaN if the norm overflows.
    norm = measure(parameters, norm_type)
    if max_norm != math.inf:
        one.clips.add(later, parameters, max_norm, norm_type)
    return norm


class ProjectedOptimizer:
    """The hooks of a projector in an optimizer, returned by `GradientProjector.attach`."""

    def __init__(self, projector: Any, step: Step) -> None:
        step.metric = projector.metric
        step.check(projector.on)
        self._projector, self._step, self.clips = projector, step, Clips()
        for other in attached(step.optimizer):
            if not other._step.groups().keys() & step.groups():
                continue
            raise ValueError(
                f"{'This' if other._projector is projector else 'Another'} projector is attached to this "
                "optimizer already, and both would project. Attach once, before the loop, or call remove() "
                "on the other GEM or on the object that attach returned, or gemproj.torch.detach(optimizer) "
                "if these are lost; combine two losses of a task in one function."
            )
        self.optimizer = step.optimizer
        self._before: Callable[[Any], Any] = lambda optimizer: None
        self._after: Callable[[], Any] = lambda: None
        self._projected: list[tuple[Tensor | None, int]] = []  # projected gradients, until the step ends
        self._hooks: list[Any] = [
            step.optimizer.register_step_pre_hook(self._begin),
            step.optimizer.register_step_post_hook(self._finish),
        ]

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip the gradient in the next step, after its projection; see `GEM.clip_grad_norm_`."""
        return clip_grad_norm_([self._step.optimizer], self._projector.parameters, max_norm, norm_type)

    def around(self, before: Callable[[Any], Any], after: Callable[[], Any]) -> None:
        """Call ``before(optimizer)`` when a step begins, and ``after()`` after a step with constraints."""
        self._before, self._after = before, after

    def remove(self) -> None:
        """Detach the projector from the optimizer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @torch.compiler.disable
    @torch.no_grad()
    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        if is_within(optimizer):
            return None
        self._before(optimizer)
        start = time.perf_counter()
        if self._projector.scale_dependent and getattr(optimizer, "grad_scale", None) is not None:
            raise ValueError(
                "A weight, a penalty, a tolerance and the numbers of GEM2017 are in units of gradients, but "
                "these are still scaled: call scaler.unscale_(optimizer) before scaler.step(optimizer)."
            )
        self._skipped = will_skip(optimizer)
        # `args` starts with the optimizer itself in some versions of torch.
        closure = next((a for a in [*args, *kwargs.values()] if callable(a)), None)
        # A closure may compute the first constraints.
        self._watches = not self._skipped and (self._projector.count > 0 or closure is not None)
        if self._watches:
            self._step.metric = self._projector.metric
            self._step.begin()
        self._seconds = time.perf_counter() - start
        if closure is None:
            self._project_gradient()
            return None

        def projecting() -> Any:
            loss = closure()
            self._project_gradient()
            return loss

        swap = {id(closure): projecting}
        return tuple(swap.get(id(a), a) for a in args), {k: swap.get(id(a), a) for k, a in kwargs.items()}

    @torch.compiler.disable
    def _project_gradient(self) -> None:
        # After a failed step, a second attempt finds gradients that are projected, and perhaps clipped.
        if not self._projected or not self._unchanged():
            self._projector.before_step(None if self._skipped else self._step)
            self._step.clipped = 1.0
        self._step.clipped *= self.clips.run()  # after weighted rows are added, as in replay
        if self._projector.on != "gradient":
            self._step.note_moving()
        self._projected = self._versions()

    def _versions(self) -> list[tuple[Tensor | None, int]]:
        """Return each gradient and its number of writes."""
        return [(p.grad, 0 if p.grad is None else p.grad._version) for p in self._projector.parameters]

    def _unchanged(self) -> bool:
        """Return whether no gradient was replaced or written since its projection."""
        pairs = zip(self._versions(), self._projected, strict=True)
        return all(now is then and m == n for (now, m), (then, n) in pairs)

    @torch.compiler.disable
    @torch.no_grad()
    def _finish(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if is_within(optimizer):
            return
        begun, self._projected = bool(self._projected), []
        if self._watches and begun and self._projector.count:
            self._projector.after_step(self._step, self._seconds)
            self._after()


def is_within(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the hooks run in an inner step of the optimizer; only the outer step is projected.

    In torch, the ``step`` of each class calls the hooks, so hooks run twice if a subclass calls its parent's
    ``step``. Running steps are counted on the call stack, because a failed step calls no hook at its end.
    """
    frame, steps = sys._getframe(), 0
    while frame.f_back is not None and steps < 2:
        frame = frame.f_back
        steps += frame.f_code is _STEP.__code__ and frame.f_locals.get("self") is optimizer
    return steps == 2


def will_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a fused optimizer will skip its step; False if reading that would synchronise."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and found.device.type == "cpu" and bool(found)
