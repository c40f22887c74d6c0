"""What is measured beside the learning: accuracy, time, and whether steps violate constraints."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gemproj import project
from gemproj.torch import EpisodicMemory, GradientProjector

from . import metrics
from .config import Config
from .methods import Method, all_tasks

Batch = dict[str, Tensor]
PHASES = ("batch", "constraints", "projection", "optimizer")


class Recorder:
    """Watches one run; nothing that it does changes what is learned.

    A step v is theta before minus theta after. To first order it raises the loss of task k where its cosine
    with that task's gradient is negative. The same is asked of the gradient that the optimizer was given,
    since an adaptive optimizer does not apply what it is given.

    Parameters
    ----------
    config, method
        The run.
    test : sequence of dict
        The test rows of each task.
    lengths : sequence of int
        The number of steps of each task.
    on_step : callable
        Told steps done, steps in total, and a word on where the run is.
    """

    def __init__(
        self,
        config: Config,
        method: Method,
        test: Sequence[Batch],
        lengths: Sequence[int],
        on_step: Callable[[int, int, str], None],
    ) -> None:
        self.config, self.method, self.test, self.on_step = config, method, test, on_step
        self.boundaries = [sum(lengths[: k + 1]) for k in range(len(lengths))]
        self.glimpse = [rows(part, slice(config.eval_rows)) for part in test]
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.probes: list[dict[str, float]] = []
        self.step = 0

    def start(
        self, model: nn.Module, parameters: Sequence[Tensor], projector: Any, memory: EpisodicMemory
    ) -> None:
        """Note what is watched, and measure the model as it is before it learns."""
        self.model, self.parameters, self.projector, self.memory = model, parameters, projector, memory
        own = self.method.batches is all_tasks  # then the gradients of all tasks are there already
        self.witness = projector if own else GradientProjector(parameters)
        self.d = sum(p.numel() for p in parameters)
        ones = torch.ones(2, self.d, device=parameters[0].device)
        project(ones, -ones[0])  # compiling and loading is not timed
        self.R = [self._accuracies(self.test)]
        self.curve: list[dict[str, Any]] = [{"step": 0, "accuracy": self._accuracies(self.glimpse)}]

    @contextmanager
    def time(self, phase: str) -> Iterator[None]:
        """Time a phase of a step, with the device synchronised at both ends."""
        start = self._now()
        yield
        self.seconds[phase].append(self._now() - start)

    def before_step(self) -> None:
        """Outside of every timer, compute the gradients of all tasks where the method has not."""
        interval = self.config.projection_interval
        self._projected = bool(self.method.batches and len(self.memory) and self.step % interval == 0)
        self._probed = len(self.memory) > 0 and self._due(self.config.probe_interval)
        if self._probed:
            if not (self._projected and self.witness is self.projector):
                self.witness.recall(self.model, self.memory.batches(), batch_loss)
            self._before = _flat(self.parameters)

    def after_step(self) -> None:
        """Write down what the step has done."""
        if self._projected and self.projector.on != "gradient":  # projected inside of optimizer.step
            spent = self.projector.last.seconds - self.seconds["constraints"][-1]
            self.seconds["optimizer"][-1] -= spent
            self.seconds["projection"].append(spent)
        if self._probed:
            G = self.witness.constraints.cpu().double()
            gradient, update = _flat(p.grad for p in self.parameters), self._before - _flat(self.parameters)
            worst = {"gradient": worst_cosine(G, gradient), "update": worst_cosine(G, update)}
            self.probes.append({"step": self.step} | worst)
        if self._due(self.config.eval_interval):
            self.curve.append({"step": self.step, "accuracy": self._accuracies(self.glimpse)})
        self.on_step(self.step, self.boundaries[-1], f"task {len(self.R)}/{len(self.test)}")

    def after_task(self) -> None:
        """Measure the accuracy on all tasks."""
        self.R.append(self._accuracies(self.test))
        if len(self.R) == 2:
            self.seconds.clear()  # until here every method is plain fine-tuning

    def result(self) -> dict[str, Any]:
        """Return the accuracies R, metrics, curve, guarantee and seconds, all as plain numbers."""
        later_steps = self.boundaries[-1] - self.boundaries[0]
        projections = self.seconds["projection"]
        return {
            "parameters": self.d,
            "accuracies": self.R,
            "metrics": metrics.summary(self.R),
            "boundaries": self.boundaries,
            "curve": self.curve,
            "guarantee": {
                "probed_steps": len(self.probes),
                "gradient": metrics.guarantee([probe["gradient"] for probe in self.probes]),
                "update": metrics.guarantee([probe["update"] for probe in self.probes]),
                "probes": self.probes,
            },
            "seconds": {
                "per_step": {phase: sum(self.seconds[phase]) / later_steps for phase in PHASES},
                "mean_projection": sum(projections) / len(projections) if projections else None,
                "median_projection": sorted(projections)[len(projections) // 2] if projections else None,
                "projections": len(projections),
            },
        }

    def _due(self, interval: int) -> bool:
        return self.step % interval == 0 or self.step in self.boundaries

    def _accuracies(self, parts: Sequence[Batch]) -> list[float]:
        return [accuracy(self.model, part, self.config.eval_batch_size) for part in parts]

    def _now(self) -> float:
        device = torch.device(self.config.device).type
        if device != "cpu":
            getattr(torch, device).synchronize()
        return time.perf_counter()


def batch_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the mean cross-entropy on a batch."""
    return model(**trim(batch)).loss


def rows(batch: Batch, which: slice | Tensor) -> Batch:
    """Select rows of a batch."""
    return {name: values[which] for name, values in batch.items()}


def trim(batch: Batch) -> Batch:
    """Drop the columns in which every row is padding."""
    width = int(batch["attention_mask"].sum(dim=1).max())
    return {name: values if name == "labels" else values[:, :width] for name, values in batch.items()}


@torch.no_grad()
def accuracy(model: nn.Module, examples: Batch, size: int) -> float:
    """Return the share of examples that the model classifies correctly."""
    model.eval()
    right = 0
    for start in range(0, len(examples["labels"]), size):
        batch = trim(rows(examples, slice(start, start + size)))
        labels = batch.pop("labels")
        right += int((model(**batch).logits.argmax(dim=1) == labels).sum())
    model.train()
    return right / len(examples["labels"])


def worst_cosine(G: Tensor, v: Tensor) -> float:
    """Return the smallest cosine between a vector and the rows of a matrix; 0 where one of them is zero."""
    return float((G @ v / (G.norm(dim=1) * v.norm()).clamp_min(1e-300)).min())


def _flat(tensors: Iterable[Tensor | None]) -> Tensor:
    return torch.cat([t.detach().cpu().double().reshape(-1) for t in tensors if t is not None])
