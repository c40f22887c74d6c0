"""What is measured beside the learning: accuracy, time, and whether steps violate constraints."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import accumulate
from math import nan
from typing import Any

import torch
from torch import Tensor, nn

from gemproj import project
from gemproj.torch import EpisodicMemory, GradientProjector

from . import metrics
from .batch import Batch, accuracy, rows

PHASES = ("batch", "constraints", "projection", "optimizer")


@dataclass(frozen=True)
class Schedule:
    """When and how is measured: settings of an experiment.

    With an `eval_interval` of 0 accuracies are measured at the end only; with a `probe_interval` of 0 no
    step is probed.
    """

    epochs: int
    batch_size: int
    eval_batch_size: int
    eval_rows: int
    eval_interval: int
    probe_interval: int
    device: str

    @classmethod
    def of(cls, config: Any) -> Schedule:
        """Take them from a configuration that has more."""
        return cls(**{one.name: getattr(config, one.name) for one in fields(cls)})


class Recorder:
    """Watches one run.

    A step v is theta before minus theta after. To first order it raises the loss of task k where its cosine
    with that task's gradient is negative. The same is asked of the gradient that the optimizer was given,
    since an adaptive optimizer does not apply what it is given.
    """

    def __init__(
        self,
        schedule: Schedule,
        model: nn.Module,
        train: Sequence[Batch],
        test: Sequence[Batch],
        on_step: Callable[[int, int, str], None],
        loss: Callable[[nn.Module, Batch], Tensor],
        logits: Callable[[nn.Module, Batch], Tensor],
    ) -> None:
        self.schedule, self.model, self.on_step = schedule, model, on_step
        self.loss, self.logits = loss, logits
        steps = (schedule.epochs * -(-len(task["labels"]) // schedule.batch_size) for task in train)
        self.boundaries = list(accumulate(steps))
        self.test, self.glimpse = test, [rows(part, slice(schedule.eval_rows)) for part in test]
        self.device = torch.device(schedule.device)
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.probes: list[dict[str, float]] = []
        self.held: list[float] = []  # losses on the stored examples of each task, when they were stored
        self.R = [self._accuracies(test)]
        self.curve: list[dict[str, Any]] = [{"step": 0, "accuracy": self._accuracies(self.glimpse)}]

    def start(
        self, parameters: Sequence[nn.Parameter], memory: EpisodicMemory, projector: Any, own: bool
    ) -> None:
        """Note what is watched, and whether the projector holds the gradients of all tasks as its own."""
        self.parameters, self.memory, self.projector = parameters, memory, projector
        self.witness = projector if own else GradientProjector(parameters)
        ones = torch.ones(2, sum(p.numel() for p in parameters), device=parameters[0].device)
        project(ones, -ones[0])  # compiling and loading is not timed

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Time a phase of a step, with the device synchronised at both ends."""
        start = self._now()
        yield
        self.seconds[phase].append(self._now() - start)
        self.timed.add(phase)

    def begin_step(self, step: int) -> None:
        """Begin a step, the first one being number 1."""
        self.step = step
        self.timed: set[str] = set()  # the phases of this step
        self.probed = len(self.memory) > 0 and self._due(self.schedule.probe_interval)

    def before_update(self) -> None:
        """Compute the gradients of all tasks where the method has not, and note the parameters."""
        if self.probed:
            if not (self.witness is self.projector and "constraints" in self.timed):
                self.witness.recall(self.model, self.memory.batches(), self.loss)
            self.before = _flat(self.parameters)

    def after_update(self) -> None:
        """Write down what the step has done."""
        if "constraints" in self.timed and self.projector.on != "gradient":  # projected in optimizer.step
            spent = self.projector.last.seconds - self.seconds["constraints"][-1]
            self.seconds["optimizer"][-1] -= spent
            self.seconds["projection"].append(spent)
        if self.probed:
            G = self.witness.constraints.cpu().double()
            gradient, update = _flat(p.grad for p in self.parameters), self.before - _flat(self.parameters)
            worst = {"gradient": worst_cosine(G, gradient), "update": worst_cosine(G, update)}
            self.probes.append({"step": self.step} | worst)
        if self._due(self.schedule.eval_interval):
            self.curve.append({"step": self.step, "accuracy": self._accuracies(self.glimpse)})
        self.on_step(self.step, self.boundaries[-1], f"task {len(self.R)}/{len(self.test)}")

    def end_task(self) -> None:
        """Measure the accuracy on all tasks."""
        self.R.append(self._accuracies(self.test, last=len(self.R) == len(self.test)))
        self.held.append(self._held_loss(self.memory.tasks[-1]))
        if len(self.R) == 2:
            self.seconds.clear()  # until here every method is plain fine-tuning

    def result(self) -> dict[str, Any]:
        """Return the accuracies R, metrics, curve, guarantee, drift and seconds as plain numbers.

        The drift is the mean rise of the loss on the stored examples of past tasks, in nats.
        """
        later_steps = self.boundaries[-1] - self.boundaries[0]
        projections = self.seconds["projection"]
        past = zip(self.memory.tasks[:-1], self.held[:-1], strict=True)
        rises = [self._held_loss(task) - then for task, then in past]
        cosines = {v: [probe[v] for probe in self.probes] for v in ("gradient", "update")}
        return {
            "accuracies": self.R,
            "metrics": {name: metric(self.R) for name, metric in metrics.METRICS.items()},
            "boundaries": self.boundaries,
            "curve": self.curve,
            "guarantee": {v: metrics.guarantee(c) for v, c in cosines.items()} | {"probes": self.probes},
            "drift": sum(rises) / len(rises),
            "seconds": {
                "per_step": {phase: sum(self.seconds[phase]) / later_steps for phase in PHASES},
                "mean_projection": sum(projections) / len(projections) if projections else None,
                "projections": len(projections),
            },
        }

    def _due(self, interval: int) -> bool:
        return interval > 0 and (self.step % interval == 0 or self.step in self.boundaries)

    def _accuracies(self, parts: Sequence[Batch], last: bool = False) -> list[float]:
        if not (last or self.schedule.eval_interval):
            return [nan] * len(parts)
        return [accuracy(self.model, part, self.schedule.eval_batch_size, self.logits) for part in parts]

    @torch.no_grad()
    def _held_loss(self, task: Hashable) -> float:
        self.model.eval()
        batch: Any = self.memory.batch(task)
        loss = float(self.loss(self.model, batch))
        self.model.train()
        return loss

    def _now(self) -> float:
        if self.device.type != "cpu":
            getattr(torch, self.device.type).synchronize()
        return time.perf_counter()


def worst_cosine(G: Tensor, v: Tensor) -> float:
    """Return the smallest cosine between a vector and the rows of a matrix; 0 where one of them is zero."""
    return float((G @ v / (G.norm(dim=1) * v.norm()).clamp_min(1e-300)).min())


def _flat(tensors: Iterable[Tensor | None]) -> Tensor:
    return torch.cat([t.detach().cpu().double().reshape(-1) for t in tensors if t is not None])
