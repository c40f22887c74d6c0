"""A projector at work in ``optimizer.step()``: hooks before and after it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from gemproj._dual import Options
from gemproj._solution import DualSolution
from gemproj.methods import GEM2017
from gemproj.torch.applied import AppliedStep, Metric, On
from gemproj.torch.cone import Cone
from gemproj.torch.hooks import before_steps, has_closure
from gemproj.torch.projection import Projection


class Attached:
    """What `GradientProjector.attach` returns.

    Parameters
    ----------
    cone : Cone
    step : AppliedStep
        Of the optimizer that is attached to.
    options : Options
        Of projections of the gradient.
    on, metric
        As in `GradientProjector`.
    before : callable
        ``before(loss, skipped=False)`` does with the gradient what is to be done before the step.
    report : callable
        ``report(projection)`` is told what the step did.
    """

    def __init__(
        self,
        cone: Cone,
        step: AppliedStep,
        options: Options,
        on: On,
        metric: Metric,
        before: Callable[..., Projection],
        report: Callable[[Projection], None],
    ) -> None:
        if on != "gradient":
            step.refuse_unfit(metric)
        self._cone, self._step, self._options = cone, step, options
        self._on, self._metric = on, metric
        self._before, self._report = before, report
        self._last: Projection | None = None
        self._hooks = [
            step.optimizer.register_step_pre_hook(self._begin),
            before_steps(step.optimizer, self._change),
            step.optimizer.register_step_post_hook(self._finish),
        ]

    def remove(self) -> None:
        """Detach the projector from the optimizer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def holds(self, optimizer: torch.optim.Optimizer) -> bool:
        """Tell whether it is at work in this optimizer."""
        return bool(self._hooks) and self._step.optimizer is optimizer

    @torch.compiler.disable
    @torch.no_grad()
    def _begin(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        start = time.perf_counter()
        if _has_units(self._options) and getattr(optimizer, "grad_scale", None) is not None:
            raise ValueError(
                "A margin, a penalty and what GEM2017 adds are in units of gradients, and these are still "
                "scaled: call scaler.unscale_(optimizer) before scaler.step(optimizer)."
            )
        self._skipped = _will_skip(optimizer)
        # A closure may bring constraints that are not there yet.
        self._watches = not self._skipped and (len(self._cone.rows) > 0 or has_closure(args, kwargs))
        if self._watches:
            self._step.begin()
        self._seconds = time.perf_counter() - start

    @torch.compiler.disable
    def _change(self, loss: Any) -> None:
        self._last = self._before(loss, skipped=self._skipped)
        if self._on != "gradient":
            # Gradients may be gone after the step: optimizers and other hooks drop them.
            self._moving = self._step.moving()

    @torch.compiler.disable
    @torch.no_grad()
    def _finish(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        last, self._last = self._last, None
        if not (self._watches and len(self._cone.rows) and last is not None):
            return
        start = time.perf_counter()
        update, solution = None, last.solution
        if self._on != "gradient":
            try:
                update = self._project_step()
            except Exception as error:
                self._step.undo()
                if not isinstance(error, ValueError):
                    raise
                name = type(optimizer).__name__
                raise ValueError(
                    f"A step of {name} could not be projected and was undone. There g is the step: {error}"
                ) from error
            if self._on == "update":
                solution = update
        slopes = self._cone.slopes(self._step.taken())
        seconds = last.seconds + self._seconds + time.perf_counter() - start
        self._report(replace(last, solution=solution, update=update, slopes=slopes, seconds=seconds))

    def _project_step(self) -> DualSolution:
        """Put what the cone leaves of the step in its place."""
        weight = self._step.weight(self._metric, self._moving)
        step = self._step.taken()
        update, changed = self._cone.project("update", step, self._step_options(), self._moving, weight)
        if changed:
            self._step.replace(step)
        return update

    def _step_options(self) -> Options:
        """Return the options for a step: in Adam's metric multipliers are in units of gradients as it is."""
        options = self._options
        if self._on == "both":
            options = options._replace(margin=0.0)
        if self._metric == "euclidean" and (options.margin or options.penalty < math.inf):
            rate = self._step.rate()
            options = options._replace(margin=options.margin * rate, penalty=options.penalty * rate)
        return options


def _has_units(options: Options) -> bool:
    """Tell whether a projection changes with the scale of the gradient by more than that scale."""
    return bool(options.margin) or options.penalty < math.inf or isinstance(options.method, GEM2017)


def _will_skip(optimizer: torch.optim.Optimizer) -> bool:
    """Tell whether a fused optimizer will find infinities and do nothing, where looking is free."""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and found.device.type == "cpu" and bool(found)
