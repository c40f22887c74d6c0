"""What a run measures beside its accuracy: time, and whether its steps keep GEM's promise."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from gemproj.torch import GradientProjector


class Clock:
    """Seconds spent in each phase, with the device synchronised at every entry and exit.

    Attributes
    ----------
    seconds : dict of list of float
        Every single measurement, by phase.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device.type
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Measure the block under ``with``."""
        start = self._now()
        yield
        self.seconds[phase].append(self._now() - start)

    def move(self, seconds: float, source: str, target: str) -> None:
        """Count a part of the last measurement of one phase as another's."""
        self.seconds[source][-1] -= seconds
        self.seconds[target].append(seconds)

    def reset(self) -> None:
        """Forget all that was measured."""
        self.seconds.clear()

    def _now(self) -> float:
        if self._device != "cpu":
            getattr(torch, self._device).synchronize()
        return time.perf_counter()


class Gauge:
    """Angles between a step and the gradients of the stored tasks.

    A step v is theta before minus theta after. To first order it raises the loss of task k where its cosine
    with that task's gradient is negative. The same is asked of the gradient that the optimizer was given,
    since an adaptive optimizer does not apply what it is given.

    Parameters
    ----------
    parameters : sequence of Tensor
        What is trained.
    projector : GradientProjector
        Holds the tasks' gradients as its constraints when a step is measured.

    Attributes
    ----------
    probes : list of dict
        For each measured step the smallest cosine of its gradient and of its update.
    """

    def __init__(self, parameters: Sequence[Tensor], projector: GradientProjector) -> None:
        self._parameters = parameters
        self._projector = projector
        self.probes: list[dict[str, float]] = []

    def before_step(self) -> None:
        """Remember where the parameters are."""
        self._before = _flat(self._parameters)

    def after_step(self, step: int) -> None:
        """Write down how the step lies to the tasks' gradients."""
        update = self._before - _flat(self._parameters)
        G = self._projector.constraints.cpu().double()
        gradient = _flat(p.grad for p in self._parameters)  # as the optimizer was given it
        worst = {"gradient": worst_cosine(G, gradient), "update": worst_cosine(G, update)}
        self.probes.append({"step": step} | worst)


def worst_cosine(G: Tensor, v: Tensor) -> float:
    """Return the smallest cosine between a vector and the rows of a matrix; 0 where one of them is zero."""
    return float((G @ v / (G.norm(dim=1) * v.norm()).clamp_min(1e-300)).min())


def _flat(tensors: Iterable[Tensor | None]) -> Tensor:
    return torch.cat([t.detach().cpu().double().reshape(-1) for t in tensors if t is not None])
