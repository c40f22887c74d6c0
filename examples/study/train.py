"""One run: one method learns one stream under one seed."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from examples.common.batch import Batch, batches, rows
from examples.lora_agnews.record import Recorder
from gemproj.torch.losses import CrossEntropy

from . import digest, streams
from .learners import Learner, Setup, concatenate
from .results import numbers, origin, rounded, setting_of
from .settings import METHODS, Setting
from .streams import Stream, Task

OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


@dataclass(frozen=True)
class Run:
    """One method, with a learning rate and a knob, on one stream under one seed.

    `phase` is "tune", of which only the accuracy is kept; "report"; or "time", of which only the times are.
    """

    stream: str
    setting: Setting
    method: str
    rate: float
    knob: float
    seed: int
    phase: str

    @property
    def title(self) -> str:
        """Name on the screen."""
        method = METHODS[self.method]
        return f"{self.stream}, {method.title}, {setting_of(method, self.rate, self.knob)}, seed {self.seed}"

    @property
    def key(self) -> str:
        """What tells it from other runs, with a hash of all settings that shape it."""
        free = ("title", "methods", "fixed", "seeds")
        setting = {name: value for name, value in vars(self.setting).items() if name not in free}
        method = METHODS[self.method]
        own = {"learner": describe(method.learner), "changes": method.changes, "joint": method.joint}
        numbers = f"lr{self.rate:g}-knob{self.knob:g}-seed{self.seed}"
        return f"{self.method}-{self.phase}-{numbers}-{digest.of_values([setting, own])}"

    @staticmethod
    def brief(result: Mapping[str, Any]) -> str:
        """Say in a few words what was found."""
        return f"average accuracy {result['metrics']['average_accuracy']:.1%}"

    def __call__(self) -> dict[str, Any]:
        """Learn."""
        torch.set_num_threads(1)
        start = time.perf_counter()
        found = learn(self, streams.load(self.setting.kind, self.seed, **self.setting.options))
        return found | {"wall_seconds": time.perf_counter() - start}

    def record(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is kept of a result, rounded to what can be told from noise."""
        named: dict[str, Any] = {"key": self.key, "stream": self.stream, "method": self.method}
        named["phase"] = self.phase
        if self.phase == "report":
            setting = replace(self.setting, **METHODS[self.method].changes)
            named |= {"per_task": setting.per_task, "policy": setting.policy}
        kept = {"tune": ["metrics", "diverged"], "time": ["seconds"]}.get(self.phase, set(result) - {"about"})
        named |= numbers(self, METHODS[self.method])
        return named | rounded({name: result[name] for name in result if name in kept})


def learn(run: Run, stream: Stream) -> dict[str, Any]:
    """Learn a stream, and return what was measured; `about` says what it depends on."""
    method, model = METHODS[run.method], stream.model
    setting = replace(run.setting, **method.changes)
    tasks = mixed(stream.tasks, run.seed) if method.joint else stream.tasks
    cross_entropy = CrossEntropy(stream.logits)
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[setting.optimizer](learned, lr=run.rate)
    setup = Setup(stream, optimizer, run.knob, setting, run.seed)
    # Where nothing is reported, only the end counts.
    measured = setting if run.phase == "report" else replace(setting, eval_interval=0, probe_interval=0)
    record = Recorder(
        measured,
        model,
        [task.train for task in tasks],
        [task.test for task in stream.tasks],
        lambda model, batch: cross_entropy(model, batch).mean(),
        stream.logits,
    )
    stored = setup.memory()  # the same for all methods
    record.watch(optimizer, stored)
    learner = method.learner(setup)
    record.watch_gem(optimizer, getattr(learner, "gem", None))
    shuffler = torch.Generator().manual_seed(run.seed)
    torch.manual_seed(run.seed)  # of dropout
    model.train()
    diverged = False
    for k, task in enumerate(tasks):
        for batch in batches(task.train, setting.batch_size, setting.epochs, shuffler):
            diverged = diverged or not stepped(learner, record, batch)
        record.turn(None)
        stored.add(task.train, k)
        if diverged:
            record.end_task()  # of which no step has told
        else:
            kept: Any = stored.batch(k)
            diverged = not survived(partial(learner.end_task, k, kept))
        record.turn("batch")
    about = origin(stream.hashes) | {"setting": vars(setting)}
    return record.result() | {"bytes": learner.nbytes, "diverged": diverged, "about": about}


def stepped(learner: Learner, record: Recorder, batch: Batch) -> bool:
    """Take a step; return False where the loss or gradients are not finite any more."""
    optimizer = learner.setup.optimizer
    optimizer.zero_grad()
    loss = learner.loss(batch)
    loss.backward()
    if not loss.isfinite():
        return False

    def rest() -> None:
        learner.constrain(record, loss)
        optimizer.step()
        learner.end_step()

    return survived(rest)


def survived(act: Callable[[], None]) -> bool:
    """Return False where an act finds that a loss or gradients are not finite any more."""
    try:
        act()
    except ValueError as error:
        if not re.search("is not finite|and finite|loss of examples .* is (nan|-?inf)", str(error)):
            raise
        return False
    return True


def mixed(tasks: Sequence[Task], seed: int) -> list[Task]:
    """Return as many tasks of the same sizes, each with training examples of all: joint training."""
    union = concatenate([task.train for task in tasks])
    order = torch.randperm(len(union["labels"]), generator=torch.Generator().manual_seed(seed))
    parts = order.split([len(task.train["labels"]) for task in tasks])
    return [Task("all", rows(union, part), task.test) for part, task in zip(parts, tasks, strict=True)]


def describe(learner: Any) -> str:
    """Return the maker of a learner as text that is the same in every process."""
    if not isinstance(learner, partial):
        return str(learner.__name__)
    named = {name: getattr(value, "__name__", repr(value)) for name, value in learner.keywords.items()}
    return f"{learner.func.__name__}{sorted(named.items())}"
