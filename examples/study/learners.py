"""What the methods add to plain fine-tuning: a term of the loss, or constraints on the step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from examples.common.batch import rows as select
from examples.lora_agnews.record import Recorder
from gemproj.torch import EpisodicMemory, GradientProjector
from gemproj.torch.losses import CrossEntropy, Distillation

from . import mega
from .gpm import SubspaceProjector
from .stream import Batch, Stream


@dataclass
class Setup:
    """What a learner has at hand.

    Attributes
    ----------
    stream : Stream
    optimizer : torch.optim.Optimizer
    knob : float
        The method's main setting.
    per_task : int
        Examples of each task that may be stored.
    policy : str
        Which ones, as in `EpisodicMemory`.
    rows : int
        Stored examples of each past task that may take part in a step.
    seed : int
    """

    stream: Stream
    optimizer: torch.optim.Optimizer
    knob: float
    per_task: int
    policy: str
    rows: int
    seed: int

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are learned."""
        return [p for p in self.stream.model.parameters() if p.requires_grad]

    def memory(self, extra: int = 0) -> EpisodicMemory:
        """Return an empty memory, with fewer examples if each needs `extra` bytes beside itself."""
        example = sum(values[:1].nbytes for values in self.stream.tasks[0].train.values())
        size = max(1, self.per_task * example // (example + extra))
        return EpisodicMemory(size, "labels", self.seed, policy=self.policy)

    def bytes_of_outputs(self) -> int:
        """Return what the outputs for one example take."""
        with torch.no_grad():
            return self.stream.logits(self.stream.model, select(self.stream.tasks[0].train, slice(1))).nbytes


class Learner:
    """Plain fine-tuning; methods replace what they do otherwise."""

    on = "gradient"

    def __init__(self, setup: Setup) -> None:
        self.setup, self.model, self.memory = setup, setup.stream.model, setup.memory()
        self.cross_entropy = CrossEntropy(setup.stream.logits)
        self.projector: Any = self

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss that the step descends."""
        return self.cross_entropy(self.model, batch).mean()

    def constrain(self, record: Recorder, loss: Tensor) -> None:
        """Change the gradient, or say how the step is to be changed."""

    def end_step(self) -> None:
        """Look at the step that was made."""

    def end_task(self, task: int, batch: Batch) -> None:
        """Keep what will be needed of a task, of which these examples may be stored."""

    @property
    def nbytes(self) -> int:
        """What is kept of past tasks, in bytes."""
        return self.memory.nbytes


class Replay(Learner):
    """Adds ``weight`` times the mean loss of each past task on a few of its stored examples."""

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of the batch plus that of the past, from one forward pass."""
        stored: list[Any] = list(self.memory.batches(n=self.setup.rows))
        if not stored:
            return super().loss(batch)
        size, past = len(batch["labels"]), concatenate(stored)
        together = concatenate([batch, past])
        losses = self.cross_entropy(self.model, together)
        return losses[:size].mean() + self.setup.knob * len(stored) * losses[size:].mean()

    def end_task(self, task: int, batch: Batch) -> None:
        """Store examples."""
        self.memory.add(batch, task)


class DistilledReplay(Replay):
    """DER++ (Buzzega et al., 2020), with the divergence from stored outputs in place of squared logits."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.past = Distillation(setup.stream.logits, labels=self.cross_entropy)
        self.memory = setup.memory(setup.bytes_of_outputs())

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of the batch plus that of the past."""
        loss = self.cross_entropy(self.model, batch).mean()
        stored: list[Any] = list(self.memory.batches(n=self.setup.rows))
        if stored:
            past = concatenate([one.batch for one in stored])
            said = torch.cat([one.outputs for one in stored])
            loss = loss + self.setup.knob * len(stored) * self.past(self.model, past, said).mean()
        return loss

    def end_task(self, task: int, batch: Batch) -> None:
        """Store examples, and what the model says about them."""
        self.memory.add(batch, task)
        remember(self.memory, task, self.model, self.past)


class Projected(Learner):
    """GEM and its kin: constraints from stored examples, in a `GradientProjector`.

    Parameters
    ----------
    setup : Setup
    promise : {"task", "label", "sample", "one"}, default "task"
        One constraint for each task; for each label of each; one on examples of all tasks together; or
        that of one task at random.
    distilled : bool, default False
        Whether the constraints are about the divergence from stored outputs.
    knob : str, default ""
        The option of the projector that is tuned.
    **options
        Of the projector.
    """

    def __init__(
        self, setup: Setup, promise: str = "task", distilled: bool = False, knob: str = "", **options: Any
    ) -> None:
        super().__init__(setup)
        self.promise, self.distilled = promise, distilled
        self.past: Any = Distillation(setup.stream.logits) if distilled else self.cross_entropy
        tuned: dict[str, Any] = {knob: setup.knob} if knob else {}
        self.projector = GradientProjector(setup.parameters, **tuned, **options)
        self.attached = self.projector.on != "gradient"
        if self.attached:
            self.projector.attach(setup.optimizer)
        if distilled:
            self.memory = setup.memory(setup.bytes_of_outputs())
        self.random = torch.Generator().manual_seed(0)

    def constrain(self, record: Recorder, loss: Tensor) -> None:
        """Compute the constraints; project the gradient unless the optimizer does."""
        if not len(self.memory):
            return
        with record.time("constraints"):
            self.projector.recall(self.model, self.batches(), self.past)
        if not self.attached:
            rate = self.setup.optimizer.param_groups[0]["lr"]
            with record.time("projection"):
                self.projector.project_(rate)

    def batches(self) -> Iterable[Any]:
        """Return a batch for each constraint."""
        rows, tasks = self.setup.rows, self.memory.tasks
        if self.promise == "sample":
            return [self.memory.sample(rows * len(tasks))]
        if self.promise == "one":
            one: Any = self.memory.batch(tasks[int(torch.randint(len(tasks), (), generator=self.random))])
            drawn = torch.randperm(len(one["labels"]), generator=self.random)[: rows * len(tasks)]
            return [select(one, drawn)]
        if self.promise == "label":
            stored: Any = self.memory.batches()
            labels = max(len(one["labels"].unique()) for one in stored)
            return self.memory.batches(n=max(1, rows // labels), per="label")
        return self.memory.batches(n=rows)

    def end_task(self, task: int, batch: Batch) -> None:
        """Store examples with what the constraints compare with."""
        self.memory.add(batch, task)
        bounded = self.projector.bound is not None
        if self.distilled or bounded:
            remember(self.memory, task, self.model, self.past, bounded)
        self.projector.reset()  # other constraints, no warm start


class TwoMoments(Projected):
    """GEM whose projected gradient enters Adam's first moment, and the gradient itself the second."""

    def constrain(self, record: Recorder, loss: Tensor) -> None:
        """Project, and let the second moments see the gradient instead.

        The optimizer computes ``v <- beta v + (1 - beta) x^2``; adding ``(1 - beta) / beta (g^2 - x^2)`` to v
        before makes that g^2.
        """
        raw = [None if p.grad is None else p.grad.clone() for p in self.setup.parameters]
        super().constrain(record, loss)
        optimizer, [group] = self.setup.optimizer, self.setup.optimizer.param_groups
        beta = group["betas"][1]
        for p, g in zip(self.setup.parameters, raw, strict=True):
            if g is not None and p.grad is not None and p in optimizer.state:
                change = g.square() - p.grad.square()
                optimizer.state[p]["exp_avg_sq"].add_(change, alpha=(1 - beta) / beta)


class Balanced(Learner):
    """MEGA: the gradient of the batch weighed against that of the memory."""

    def __init__(self, setup: Setup, weights: mega.Weights) -> None:
        super().__init__(setup)
        self.projector = mega.MEGA(setup.parameters, weights)

    def constrain(self, record: Recorder, loss: Tensor) -> None:
        """Weigh the gradients."""
        if not len(self.memory):
            return
        size = self.setup.rows * len(self.memory)
        with record.time("constraints"):
            mean = lambda model, batch: self.cross_entropy(model, batch).mean()  # noqa: E731
            self.projector.recall(self.model, [self.memory.sample(size)], mean)
        with record.time("projection"):
            self.projector.balance_(loss)

    def end_task(self, task: int, batch: Batch) -> None:
        """Store examples."""
        self.memory.add(batch, task)


class Subspaces(Learner):
    """GPM: weight changes are orthogonal to past inputs of their layer."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.subspaces = SubspaceProjector(self.model, threshold=setup.knob)

    def constrain(self, record: Recorder, loss: Tensor) -> None:
        """Project the gradients of the layers."""
        if len(self.memory):
            with record.time("projection"):
                self.subspaces.project_()

    def end_task(self, task: int, batch: Batch) -> None:
        """Add the inputs of this task, on as many examples as others store."""
        self.memory.add(batch, task)
        self.subspaces.remember(
            [self.memory.batch(task)], lambda one: self.setup.stream.logits(self.model, one)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the bases; the examples are not needed any more."""
        return sum(basis.nbytes for basis in self.subspaces.bases.values())


def remember(memory: EpisodicMemory, task: int, model: nn.Module, loss: Any, bounded: bool = False) -> None:
    """Store what a loss compares with, for the kept examples of a task, from the model as it is."""
    model.eval()
    batch = memory.batch(task)
    outputs = loss.outputs(model, batch) if isinstance(loss, Distillation) else None
    losses = None
    if bounded:
        with torch.no_grad():
            losses = loss(model, batch) if outputs is None else loss(model, batch, outputs)
    memory.record(task, outputs=outputs, losses=losses)
    model.train()


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Return one batch with the examples of all."""
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
