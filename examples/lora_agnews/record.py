"""Measurements during training: accuracy, time, and whether steps violate constraints."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from math import nan
from typing import Any

import torch
from torch import Tensor, nn

from gemproj import project
from gemproj.torch import Keeper
from gemproj.torch import rows as gradients

from ..common import metrics
from ..common.batch import Batch, parts, rows

PHASES = ("batch", "constraints", "projection", "optimizer")


class Recorder:
    """Measures one run; the settings are a `Config` here, and a `Setting` in the study.

    With an `eval_interval` of 0 accuracies are measured at the end only; with a `probe_interval` of 0 no
    step is probed. A step v is theta before minus theta after. To first order it raises the loss of task k if
    its cosine with the gradient of that task is negative. The cosine of the gradient itself is measured, too,
    because the step of an adaptive optimizer has another direction.

    After `watch` and `watch_keeper`, hooks of the optimizer measure every step. Test rows are evaluated once
    at a step.
    """

    def __init__(
        self,
        config: Any,
        model: nn.Module,
        train: Sequence[Batch],
        test: Sequence[Batch],
        loss: Callable[[nn.Module, Batch], Tensor],
        logits: Callable[[nn.Module, Batch], Tensor],
    ) -> None:
        self.counts: dict[Any, int] = {}  # right answers, by the step, the task, and the part of its rows
        self.config, self.model, self.loss, self.logits = config, model, loss, logits
        steps = (config.epochs * -(-len(task["labels"]) // config.batch_size) for task in train)
        self.step, self.boundaries = 0, list(accumulate(steps))
        few = config.eval_rows  # of the curves
        self.test = [(rows(task, slice(few)), rows(task, slice(few, None))) for task in test]
        self.device = torch.device(config.device)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.phase: str | None = None  # the timed part of a step, its start, and the seconds of all parts
        self.since, self.spent = 0.0, defaultdict[str, float](float)
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.cosines: dict[str, list[float]] = {"gradient": [], "update": []}  # the worst of each probe
        self.keeper: Keeper | None = None
        self.loss_when_stored: list[float] = []  # of each task's stored examples
        self.R = [self._accuracies() if config.eval_interval else [nan] * len(test)]
        self.curve: list[dict[str, Any]] = []
        self._add_point()
        ones = torch.ones(2, sum(p.numel() for p in self.parameters), device=self.device)
        project(ones, -ones[0])  # compile and load now, so that no time includes it

    def watch(self, optimizer: torch.optim.Optimizer, stored: Mapping[Any, Batch]) -> None:
        """Measure the steps of an optimizer; call it before a keeper is attached, as hooks run in order.

        `stored` has the stored examples of each task, which are added later.
        """

        def before(*_: Any) -> None:
            """Count the step; if it is probed, save parameters and the gradients on all stored examples."""
            self.turn(None)
            self._note_stored_losses()
            self.step += 1
            self.probed = len(self.stored) > 0 and self._due(self.config.probe_interval)
            if self.probed:
                self.G = torch.stack([self._gradient(batch) for batch in self.stored.values()])
                self.before = _flat(self.parameters)
            self._turn_to_keeper()

        self.stored = stored
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(lambda *_: self._turn_to_keeper())

    def watch_keeper(self, optimizer: torch.optim.Optimizer, keeper: Keeper | None) -> None:
        """Measure a keeper, which has just been attached; or begin without one."""

        def after(*_: Any) -> None:
            """Record the times of the step, its cosines and accuracies."""
            self.turn(None)
            for phase, seconds in self.spent.items():
                self.seconds[phase].append(seconds)
            self.spent.clear()
            if self.probed:
                update = self.before - _flat(self.parameters)
                gradient = _flat(p.grad for p in self.parameters)
                for v, found in ((gradient, self.cosines["gradient"]), (update, self.cosines["update"])):
                    found.append(worst_cosine(self.G, v))
            self._add_point()
            if self.step == self.boundaries[len(self.R) - 1]:
                self.end_task()
            self.turn("batch")

        self.keeper = keeper
        optimizer.register_step_pre_hook(lambda *_: self.turn("optimizer"))
        optimizer.register_step_post_hook(after)
        if keeper is not None:
            computed: Any = keeper.rows
            fill = computed.fill

            def timed(*given: Any, **named: Any) -> None:
                self.turn("constraints")
                fill(*given, **named)
                self.turn("projection")

            computed.fill = timed
        self.turn("batch")

    def turn(self, phase: str | None) -> None:
        """Synchronise the device and begin to time another part of the step; None stops the clock."""
        if self.device.type != "cpu":
            getattr(torch, self.device.type).synchronize()
        now = time.perf_counter()
        if self.phase is not None:
            self.spent[self.phase] += now - self.since
        self.phase, self.since = phase, now

    def _turn_to_keeper(self) -> None:
        """Begin to time the keeper, or the optimizer if nothing is kept."""
        self.turn("projection" if self.keeper and self.keeper.sets else "optimizer")

    def end_task(self) -> None:
        """Measure the accuracy on all tasks."""
        measured = self.config.eval_interval or len(self.R) == len(self.test)
        self.R.append(self._accuracies() if measured else [nan] * len(self.test))
        self._note_stored_losses()
        if len(self.R) == 2:  # during the first task every method is plain fine-tuning
            self.seconds.clear()

    def result(self) -> dict[str, Any]:
        """Return the accuracies R, metrics, curve, guarantee, drift and seconds as plain numbers.

        The drift is the mean rise of the loss on the stored examples of past tasks, in nats.
        """
        later_steps = self.boundaries[-1] - self.boundaries[0]
        projections = self.seconds["projection"]
        past = list(zip(list(self.stored.values())[:-1], self.loss_when_stored, strict=False))
        rises = [self._stored_loss(batch) - then for batch, then in past]
        return {
            "accuracies": self.R,
            "metrics": {name: metric(self.R) for name, metric in metrics.METRICS.items()},
            "boundaries": self.boundaries,
            "curve": self.curve,
            "guarantee": {v: metrics.guarantee(found) for v, found in self.cosines.items()},
            "drift": sum(rises) / len(rises),
            "seconds": {
                "per_step": {phase: sum(self.seconds[phase]) / later_steps for phase in PHASES},
                "mean_projection": sum(projections) / len(projections) if projections else None,
                "projections": len(projections),
            },
        }

    def _due(self, interval: int) -> bool:
        return interval > 0 and (self.step % interval == 0 or self.step in self.boundaries)

    def _add_point(self) -> None:
        if self._due(self.config.eval_interval):
            accuracy = [self._right(k, 0) / len(few["labels"]) for k, (few, _) in enumerate(self.test)]
            self.curve.append({"step": self.step, "accuracy": accuracy})

    def _accuracies(self) -> list[float]:
        return [
            (self._right(k, 0) + self._right(k, 1)) / (len(few["labels"]) + len(rest["labels"]))
            for k, (few, rest) in enumerate(self.test)
        ]

    def _right(self, task: int, part: int) -> int:
        """Return the number of right answers on the rows of the curves (0), or on the others (1)."""
        at = self.step, task, part
        if at not in self.counts:
            self.counts[at] = self._count(self.test[task][part])
        return self.counts[at]

    @torch.inference_mode()
    def _count(self, examples: Batch) -> int:
        self.model.eval()
        found = [
            (self.logits(self.model, part).argmax(dim=1) == part["labels"]).sum()
            for part in parts(examples, self.config.eval_batch_size)
        ]
        self.model.train()
        return int(sum(found))

    def _gradient(self, batch: Batch) -> Tensor:
        """Return the gradient of the mean loss without dropout, from one part of the batch at a time."""
        self.model.eval()
        n = len(batch["labels"])
        some = parts(batch, getattr(self.config, "microbatch", n))  # the study has no such setting
        losses = (self.loss(self.model, part) * (len(part["labels"]) / n) for part in some)
        found = gradients(losses, self.parameters, flat=True).sum(0)
        self.model.train()
        return found.cpu().double()

    @torch.no_grad()
    def _stored_loss(self, batch: Batch) -> float:
        self.model.eval()
        loss = float(self.loss(self.model, batch))
        self.model.train()
        return loss

    def _note_stored_losses(self) -> None:
        self.loss_when_stored += map(
            self._stored_loss, list(self.stored.values())[len(self.loss_when_stored) :]
        )


def worst_cosine(G: Tensor, v: Tensor) -> float:
    """Return the smallest cosine between a vector and the rows of a matrix; 0 for zero vectors."""
    return float((G @ v / (G.norm(dim=1) * v.norm()).clamp_min(1e-300)).min())


def _flat(tensors: Iterable[Tensor | None]) -> Tensor:
    return torch.cat([t.detach().cpu().double().reshape(-1) for t in tensors if t is not None])
