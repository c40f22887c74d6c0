"""The methods: terms of the loss, or constraints on the step, in addition to plain fine-tuning."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from examples.common.batch import concatenate, rows
from examples.common.memory import Memory, seed_draws
from examples.lora_agnews.record import Recorder
from gemproj import project
from gemproj.torch import Keeper, Promise
from gemproj.torch import rows as gradients
from gemproj.torch.data import leaves_of
from gemproj.torch.losses import CrossEntropy, Distillation
from gemproj.torch.step import On

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

    def memory(self, extra: int = 0) -> Memory:
        """Return an empty memory, for fewer examples if each needs `extra` bytes in addition."""
        example = sum(values[:1].nbytes for values in self.stream.tasks[0].train.values())
        size = max(1, self.setting.per_task * example // (example + extra))
        return Memory(size, self.seed, self.setting.policy)

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
        stored = [tensor for batch in self.memory.tasks.values() for tensor in batch.values()]
        return sum(tensor.nbytes for tensor in [*stored, *self.kept])


class Replay(Learner):
    """Adds ``weight`` times the mean loss of each past task on a few of its stored examples."""

    def loss(self, batch: Batch) -> Tensor:
        """Return the loss of the batch plus that of past tasks, from one forward pass."""
        stored = self.memory.draw(self.setup.setting.examples)
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
        if stored := self.memory.draw(self.setup.setting.examples):
            past = concatenate(stored)
            said = past.pop("said")
            loss = loss + self.setup.knob * len(stored) * self.past(self.model, past, said).mean()
        return loss

    def end_task(self, task: int, batch: Batch) -> None:
        """Store examples, and the outputs of the model for them."""
        super().end_task(task, batch)
        stored = self.memory.tasks[task]
        self.model.eval()
        stored["said"] = self.past.outputs(self.model, stored)
        self.model.train()


class Projected(Learner):
    """GEM and its variants: a promise about the stored examples of each task.

    The promise is about the loss or, if `distilled`, about the divergence from stored outputs; `knob` is its
    tuned field. There is one about each task, each label of a task, or all tasks together.
    """

    def __init__(
        self,
        setup: Setup,
        distilled: bool = False,
        knob: str = "",
        per: Literal["task", "label", "all"] = "task",
        tolerance: float | None = None,
        on: On = "gradient",
        method: Any = "exact",
        every: int = 1,
    ) -> None:
        super().__init__(setup)
        self.per, self.labels = per, 1
        self.size = setup.memory(setup.bytes_of_outputs() if distilled else 0).size
        past: Any = Distillation(setup.stream.logits) if distilled else self.cross_entropy
        tuned: dict[str, Any] = {knob: setup.knob} if knob else {}
        self.promise = Promise(past, setup.setting.examples, tolerance=tolerance, **tuned)
        self.keeper = Keeper(self.model, setup.optimizer, self.promise, on=on, method=method, look=every)
        seed_draws(self.keeper, setup.seed)

    def end_task(self, task: int, batch: Batch) -> None:
        """Keep examples; a step takes equally many of each task, whatever a row of G is about."""
        labels, n = batch["labels"], self.setup.setting.examples
        found = labels.unique().tolist()
        self.labels = max(self.labels, len(found))
        parts: dict[Hashable, Batch] = {"past" if self.per == "all" else task: batch}
        if self.per == "label":
            parts = {(task, label): rows(batch, labels == label) for label in found}
        for name, part in parts.items():
            self.keeper.keep([part], name=name, limit=self.size)
        examples = {"label": max(1, n // self.labels), "all": n * (task + 1)}.get(self.per, n)
        for kept in self.keeper.sets.values():
            kept.promise = replace(kept.promise, examples=examples)

    @property
    def nbytes(self) -> int:
        """The bytes of the kept examples and of their outputs."""
        found = [(kept.examples, kept.outputs) for kept in self.keeper.sets.values()]
        return sum(tensor.nbytes for tensor in leaves_of(found, Tensor))


class Reference(Learner):
    """Projects the gradient of the step by the gradient on one batch of stored examples."""

    def draw(self) -> Batch:
        """Draw the batch of stored examples."""
        return self.memory.sample(self.setup.setting.examples * len(self.memory.tasks))

    def change(self, past: list[Tensor], gradient: list[Tensor], losses: tuple[float, float]) -> None:
        """Change the gradient in place, given that of the past; `losses` are of the batch and of the past."""
        project(past, gradient, method="agem", out=gradient)

    def constrain(self, record: Recorder, loss: Tensor) -> None:
        """Compute the gradient on the stored batch, and change the gradient."""
        if not self.memory.tasks:
            return
        record.turn("constraints")
        self.model.eval()
        reference = self.cross_entropy(self.model, self.draw()).mean()
        past = gradients([reference], self.setup.parameters)
        self.model.train()
        record.turn("projection")
        gradient: Any = [p.grad for p in self.setup.parameters]
        self.change(past, gradient, (float(loss.detach()), float(reference.detach())))

    def end_task(self, task: int, batch: Batch) -> None:
        """Store examples."""
        self.memory.add(batch, task)


class OneTask(Reference):
    """S-GEM: the constraint of one past task, drawn at random."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self.random = torch.Generator().manual_seed(setup.seed)

    def draw(self) -> Batch:
        """Draw a task, and as many of its examples as other methods take of all tasks together."""
        tasks = list(self.memory.tasks.values())
        one = tasks[int(torch.randint(len(tasks), (), generator=self.random))]
        order = torch.randperm(len(one["labels"]), generator=self.random)
        return rows(one, order[: self.setup.setting.examples * len(tasks)])
