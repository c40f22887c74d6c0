"""The methods: terms of the loss, or constraints on the step, in addition to plain fine-tuning."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from examples.common.batch import rows
from examples.lora_agnews.record import Recorder
from gemproj.torch import GEM, EpisodicMemory, GradientProjector, Promise
from gemproj.torch.losses import CrossEntropy, Distillation
from gemproj.torch.promise import Per

from . import mega
from .gpm import SubspaceProjector
from .streams import Batch, Stream

if TYPE_CHECKING:  # settings imports this module
    from .settings import Setting


@dataclass
class Setup:
    """The arguments of a learner; `knob` is the main setting of its method."""

    stream: Stream
    optimizer: torch.optim.Optimizer
    knob: float
    setting: "Setting"
    seed: int

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters."""
        return [p for p in self.stream.model.parameters() if p.requires_grad]

    def memory(self, extra: int = 0) -> EpisodicMemory:
        """Return an empty memory, for fewer examples if each needs `extra` bytes in addition."""
        example = self.bytes_of_example()
        size = max(1, self.setting.per_task * example // (example + extra))
        return EpisodicMemory(size, "labels", self.seed, policy=self.setting.policy)

    def bytes_of_example(self) -> int:
        """Return the size of one example."""
        return sum(values[:1].nbytes for values in self.stream.tasks[0].train.values())

    def bytes_of_outputs(self) -> int:
        """Return the size of the model's outputs for one example."""
        with torch.no_grad():
            return self.stream.logits(self.stream.model, rows(self.stream.tasks[0].train, slice(1))).nbytes


class Learner:
    """Plain fine-tuning, and the base class of the methods."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.model, self.memory = setup, setup.stream.model, setup.memory()
        self.cross_entropy = CrossEntropy(setup.stream.logits)
        self.kept: list[Tensor] = []  # tensors about past tasks, in addition to the memory

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of a step on a batch."""
        return self.cross_entropy(self.model, batch).mean()

    def constrain(self, record: Recorder, loss: Tensor) -> None:
        """Change the gradient between the backward pass and the step."""

    def end_step(self) -> None:
        """Observe the step that was taken."""

    def end_task(self, task: int, batch: Batch) -> None:
        """Finish a task; its examples in `batch` may be stored."""

    @property
    def nbytes(self) -> int:
        """The bytes that are kept about past tasks."""
        return self.memory.nbytes + sum(tensor.nbytes for tensor in self.kept)


class Replay(Learner):
    """Adds ``weight`` times the mean loss of each past task on a few of its stored examples."""

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of the batch plus that of past tasks, from one forward pass."""
        stored: list[Any] = list(self.memory.batches(n=self.setup.setting.examples))
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
    """DER++ (Buzzega et al., 2020), with the divergence from stored outputs instead of squared logits."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.past = Distillation(setup.stream.logits, labels=self.cross_entropy)
        self.memory = setup.memory(setup.bytes_of_outputs())

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of the batch plus that of past tasks."""
        loss = self.cross_entropy(self.model, batch).mean()
        stored: list[Any] = list(self.memory.batches(n=self.setup.setting.examples))
        if stored:
            past = concatenate([one.batch for one in stored])
            said = torch.cat([one.outputs for one in stored])
            loss = loss + self.setup.knob * len(stored) * self.past(self.model, past, said).mean()
        return loss

    def end_task(self, task: int, batch: Batch) -> None:
        """Store examples, and the outputs of the model for them."""
        self.memory.add(batch, task)
        self.model.eval()
        self.memory.record(task, outputs=self.past.outputs(self.model, self.memory.batch(task)))
        self.model.train()


class Projected(Learner):
    """GEM and its variants: a promise about the stored examples of each task; `options` are those of `GEM`.

    The promise is about the loss or, if `distilled`, about the divergence from stored outputs; `knob` is its
    tuned field. Each example takes `extra` bytes that are stored for another promise.
    """

    def __init__(
        self,
        setup: Setup,
        distilled: bool = False,
        knob: str = "",
        per: Per = "task",
        tolerance: float | None = None,
        extra: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(setup)
        self.memory = setup.memory(setup.bytes_of_outputs() if distilled else extra)
        past: Any = Distillation(setup.stream.logits) if distilled else self.cross_entropy
        tuned: dict[str, Any] = {knob: setup.knob} if knob else {}
        promise = Promise(past, per=per, examples=setup.setting.examples, tolerance=tolerance, **tuned)
        self.gem = GEM(self.model, setup.optimizer, promise, memory=self.memory, **options)
        self.labels = 1

    def end_task(self, task: int, batch: Batch) -> None:
        """Store examples; a step passes equally many of each task, whatever a row of G is about."""
        self.gem.end_task([batch], task)
        self.labels = max(self.labels, len(batch["labels"].unique()))
        n = self.setup.setting.examples
        sizes = {"label": max(1, n // self.labels), "all": n * len(self.memory)}
        self.gem.promise = replace(self.gem.promise, examples=sizes.get(self.gem.promise.per, n))


class Mixture(Projected):
    """Two promises about each task: one on the labels, with a weight; one that stored outputs do not drift.

    Each has its own examples, half as many in a step as other methods. The sum of bytes is the same.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup, knob="weight", extra=setup.bytes_of_example() + setup.bytes_of_outputs())
        half = max(1, setup.setting.examples // 2)
        self.gem.promise = replace(self.gem.promise, examples=half)
        self.said = Promise(Distillation(setup.stream.logits), examples=half, tolerance=0.0)

    def end_task(self, task: int, batch: Batch) -> None:
        """Store examples for both promises."""
        self.gem.end_task([batch], task)
        self.gem.keep([batch], self.said, name=f"outputs of {task}")


class TwoMoments(Projected):
    """GEM with the projected gradient in Adam's first moment, and the original gradient in the second."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        setup.optimizer.register_step_pre_hook(self.correct)  # runs after the hooks of GEM

    def constrain(self, record: Recorder, loss: Tensor) -> None:
        """Copy the gradient."""
        self.raw = [None if p.grad is None else p.grad.clone() for p in self.setup.parameters]

    def correct(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Correct the second moments to be those of the gradient g before the projection to x.

        The optimizer computes ``v <- beta v + (1 - beta) x^2``. Adding ``(1 - beta) / beta (g^2 - x^2)`` to v
        first replaces x^2 by g^2.
        """
        beta = optimizer.param_groups[0]["betas"][1]
        for p, g in zip(self.setup.parameters, self.raw, strict=True):
            if g is not None and p.grad is not None and p in optimizer.state:
                change = g.square() - p.grad.square()
                optimizer.state[p]["exp_avg_sq"].add_(change, alpha=(1 - beta) / beta)


class Reference(Learner):
    """Changes the gradient by the gradient on one batch of stored examples."""

    projector: Any
    change: Callable[[Tensor], Any]  # changes the gradient, given the loss

    def draw(self) -> Any:
        """Draw the batch of stored examples."""
        return self.memory.sample(self.setup.setting.examples * len(self.memory))

    def constrain(self, record: Recorder, loss: Tensor) -> None:
        """Compute the gradient on the stored batch, and change the gradient."""
        if len(self.memory):
            record.turn("constraints")
            self.projector.recall(self.model, [self.draw()], self.cross_entropy)
            record.turn("projection")
            self.change(loss)

    def end_task(self, task: int, batch: Batch) -> None:
        """Store examples."""
        self.memory.add(batch, task)


class OneTask(Reference):
    """S-GEM: the constraint of one past task, drawn at random."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.projector = GradientProjector(setup.parameters, method="agem")
        self.change = lambda loss: self.projector.project_()
        self.random = torch.Generator().manual_seed(0)

    def draw(self) -> Any:
        """Draw a task, and as many of its examples as other methods take of all tasks together."""
        tasks = self.memory.tasks
        one: Any = self.memory.batch(tasks[int(torch.randint(len(tasks), (), generator=self.random))])
        order = torch.randperm(len(one["labels"]), generator=self.random)
        return rows(one, order[: self.setup.setting.examples * len(tasks)])


class Balanced(Reference):
    """MEGA: a weighted sum of the gradients on the batch and on the memory."""

    def __init__(self, setup: Setup, weights: mega.Weights) -> None:
        super().__init__(setup)
        self.projector = mega.MEGA(setup.parameters, weights)
        self.change = self.projector.balance_


class Subspaces(Learner):
    """GPM: weight changes are orthogonal to past inputs of their layer."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.subspaces = SubspaceProjector(self.model, threshold=setup.knob)

    def constrain(self, record: Recorder, loss: Tensor) -> None:
        """Project the gradients of the layers."""
        record.turn("projection")
        self.subspaces.project_()

    def end_task(self, task: int, batch: Batch) -> None:
        """Add the inputs of this task, on as many examples as other methods store."""
        self.subspaces.remember([batch], lambda one: self.setup.stream.logits(self.model, one))
        self.kept = list(self.subspaces.bases.values())


def concatenate(batches: Sequence[Batch]) -> Batch:
    """Return one batch with the examples of all batches."""
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
