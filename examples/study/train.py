"""One run: one method learns one stream with one seed."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from examples.common.batch import Batch, batches, concatenate, rows
from examples.common.metrics import Record
from examples.common.origin import origin
from examples.common.results import rounded
from examples.lora_agnews.record import Recorder
from gemproj.torch.losses import CrossEntropy

from . import streams
from .compare import average_accuracy
from .learners import Learner, Setup
from .runs import AnyRun
from .settings import METHODS, STREAMS
from .streams import Stream, Task

OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


class Run(AnyRun):
    """One method on one stream."""

    kind, places, methods = "stream", STREAMS, METHODS
    brief = "average accuracy {metrics[average_accuracy]:.1%}"
    score = staticmethod(average_accuracy)

    @property
    def key(self) -> str:
        """A unique name among the runs on the stream."""
        free = ("title", "methods", "fixed", "seeds")
        setting = {name: value for name, value in vars(STREAMS[self.where]).items() if name not in free}
        method = METHODS[self.method]
        own = {"learner": describe(method.learner), "changes": method.changes, "joint": method.joint}
        return self.name([setting, own])

    @staticmethod
    def space(stream: str, name: str) -> tuple[Sequence[float], Sequence[float]]:
        """Return the learning rates and knobs to try: five settings for every method."""
        rates, grid = STREAMS[stream].rates, METHODS[name].grid
        return (rates[1:4], grid) if grid else (rates, (0.0,))

    def __call__(self) -> dict[str, Any]:
        """Learn the stream, and return the measurements."""
        torch.set_num_threads(1)
        setting = STREAMS[self.where]
        return learn(self, streams.load(setting.kind, self.seed, **setting.options))

    def record(self, result: Mapping[str, Any]) -> Record:
        """Return the record of a result, without digits that are noise."""
        setting = replace(STREAMS[self.where], **METHODS[self.method].changes)
        memory = {"per_task": setting.per_task, "policy": setting.policy} if self.phase == "report" else {}
        kept = {"tune": ["metrics", "diverged"], "time": ["seconds"]}.get(self.phase, set(result) - {"about"})
        return self.named(**memory) | rounded({name: result[name] for name in result if name in kept})


def learn(run: Run, stream: Stream) -> dict[str, Any]:
    """Learn a stream, and return the measurements; `about` has the versions and hashes behind them."""
    method, model = METHODS[run.method], stream.model
    setting = replace(STREAMS[run.where], **method.changes)
    tasks = mixed(stream.tasks, run.seed) if method.joint else stream.tasks
    cross_entropy = CrossEntropy(stream.logits)
    learned = [p for p in model.parameters() if p.requires_grad]
    optimizer = OPTIMIZERS[setting.optimizer](learned, lr=run.rate)
    setup = Setup(stream, optimizer, run.knob, setting, run.seed)
    # Unless the run is reported, accuracies are only measured at the end.
    measured = setting if run.phase == "report" else replace(setting, eval_interval=0, probe_interval=0)
    record = Recorder(
        measured,
        model,
        [task.train for task in tasks],
        [task.test for task in stream.tasks],
        lambda model, batch: cross_entropy(model, batch).mean(),
        stream.logits,
    )
    stored = setup.memory()  # the same examples for all methods
    record.watch(optimizer, stored.tasks)
    learner = method.learner(setup)
    record.watch_keeper(optimizer, getattr(learner, "keeper", None))
    shuffler = torch.Generator().manual_seed(run.seed)
    torch.manual_seed(run.seed)  # for dropout
    model.train()
    diverged = False
    for k, task in enumerate(tasks):
        for batch in batches(task.train, setting.batch_size, setting.epochs, shuffler):
            diverged = diverged or not survived(partial(step, learner, record, batch))
        record.turn(None)
        stored.add(task.train, k)
        if diverged:
            record.end_task()  # otherwise the last step calls it
        else:
            diverged = not survived(partial(learner.end_task, k, stored.tasks[k]))
        record.turn("batch")
    about = origin("study", "lora_agnews", **stream.hashes) | {"setting": vars(setting)}
    return record.result() | {"bytes": learner.nbytes, "diverged": diverged, "about": about}


def step(learner: Learner, record: Recorder, batch: Batch) -> None:
    """Take a step."""
    optimizer = learner.setup.optimizer
    optimizer.zero_grad()
    loss = learner.loss(batch)
    loss.backward()
    if not loss.isfinite():
        raise ValueError("the loss is not finite")
    learner.constrain(record, loss)
    optimizer.step()
    learner.end_step()


def survived(act: Callable[[], None]) -> bool:
    """Call `act`; return False if it raises because a loss or a gradient is not finite."""
    try:
        act()
    except ValueError as error:
        if not re.search("is not finite|and finite|loss of example .* is (nan|-?inf)", str(error)):
            raise
        return False
    return True


def mixed(tasks: Sequence[Task], seed: int) -> list[Task]:
    """Return tasks of the same sizes with training examples of all tasks, for joint training."""
    union = concatenate([task.train for task in tasks])
    order = torch.randperm(len(union["labels"]), generator=torch.Generator().manual_seed(seed))
    parts = order.split([len(task.train["labels"]) for task in tasks])
    return [Task("all", rows(union, part), task.test) for part, task in zip(parts, tasks, strict=True)]


def describe(learner: Any) -> str:
    """Return a text for the constructor of a learner, the same in every process."""
    if not isinstance(learner, partial):
        return str(learner.__name__)
    named = {name: getattr(value, "__name__", repr(value)) for name, value in learner.keywords.items()}
    return f"{learner.func.__name__}{sorted(named.items())}"
