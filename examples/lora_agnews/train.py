"""One run: one method learns the stream with one seed."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import default_collate

from gemproj.torch import Keeper, Promise

from ..common.batch import Batch, batches, parts
from ..common.memory import Memory, seed_draws
from ..common.origin import VERSIONS, origin
from . import backbone, stream
from .config import Config
from .methods import METHODS, Method
from .record import Recorder


@dataclass(frozen=True)
class Run:
    """One method with one seed, with the stream and the backbone's folder."""

    config: Config
    method: str
    seed: int
    experiences: Sequence[stream.Experience]
    folder: Path
    brief: ClassVar[str] = "average accuracy {metrics[average_accuracy]:.1%}"

    @property
    def title(self) -> str:
        """Name on the screen."""
        return f"{METHODS[self.method].title}, seed {self.seed}"

    @property
    def key(self) -> str:
        """A unique name of the run: method, seed, and a hash of all settings that affect it."""
        others = {"preset": "", "seeds": (), "methods": ()}
        shaping = [asdict(self.config) | others, self.experiences, str(self.folder), VERSIONS]
        digest = hashlib.sha256(repr(shaping).encode()).hexdigest()
        return f"{self.method}-seed{self.seed}-{digest[:12]}"

    def __call__(self) -> dict[str, Any]:
        """Learn the stream in the order of the seed, and return the measurements."""
        config = self.config
        if config.device == "cpu":
            torch.set_num_threads(1)
        model = backbone.load(self.folder, self.seed, config).to(config.device)
        tasks = [self.experiences[k] for k in stream.order(config.experiences, self.seed)]
        train_rows = [backbone.encode(task.train, self.folder, config) for task in tasks]
        test_rows = [backbone.encode(task.test, self.folder, config) for task in tasks]
        record = Recorder(config, model, train_rows, test_rows, backbone.batch_loss, backbone.logits)
        learn(config, METHODS[self.method], self.seed, model, train_rows, record)
        named = {"method": self.method, "seed": self.seed, "order": [task.name for task in tasks]}
        return named | record.result() | {"about": origin("lora_agnews")}

    def record(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return the record of a result."""
        return {"key": self.key} | {name: value for name, value in result.items() if name != "about"}


def learn(
    config: Config, method: Method, seed: int, model: nn.Module, tasks: Sequence[Batch], record: Recorder
) -> None:
    """Learn one task after the other. To copy the loop, leave out `record`, which watches the optimizer."""
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=config.lr)
    memory = Memory(config.per_task, seed, method.policy)
    shuffler = torch.Generator().manual_seed(seed)
    record.watch(optimizer, memory.tasks)
    keeper = None
    if method.promise:
        promise = Promise(backbone.batch_loss, **method.promise(config))
        options = {"on": method.on, "method": method.method(config), "microbatch": config.microbatch}
        keeper = Keeper(model, optimizer, promise, **options)
        seed_draws(keeper, seed)
    record.watch_keeper(optimizer, keeper)

    for k, task in enumerate(tasks):
        for batch in batches(task, config.batch_size, config.epochs, shuffler):
            optimizer.zero_grad()
            backward(model, batch, config.microbatch)
            for stored in method.replayed(memory, config):
                backward(model, stored, config.microbatch, method.weight(config))
            optimizer.step()  # projected, if there is a keeper
        record.turn(None)  # what is stored is no part of a step
        if keeper and method.policy == "reservoir":  # the keeper itself takes a uniform sample
            keeper.keep([task], name=k, limit=config.per_task)
            memory.tasks[k] = default_collate(keeper.sets[k].examples)
        else:
            memory.add(task, k)
            if keeper:
                keeper.keep([memory.tasks[k]], name="past" if method.together else k)
        record.turn("batch")


def backward(model: nn.Module, batch: Batch, microbatch: int, weight: float = 1.0) -> None:
    """Add the gradient of `weight` times the mean loss to ``.grad``, with the graph of one part at a time."""
    for part in parts(batch, microbatch):
        share = len(part["labels"]) / len(batch["labels"])
        (weight * (backbone.batch_loss(model, part) * share)).backward()
