"""The runs of an experiment."""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..common.workers import VERSIONS, origin
from . import backbone, stream, train
from .config import Config
from .methods import METHODS
from .record import Recorder


@dataclass(frozen=True)
class Run:
    """One method with one seed, with the stream and the backbone's folder."""

    config: Config
    method: str
    seed: int
    experiences: Sequence[stream.Experience]
    folder: Path

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

    @staticmethod
    def brief(result: dict[str, Any]) -> str:
        """Summarize a result in a few words."""
        return f"average accuracy {result['metrics']['average_accuracy']:.1%}"

    def __call__(self) -> dict[str, Any]:
        """Learn the stream in the order of the seed, and return the measurements."""
        config = self.config
        if config.device == "cpu":
            torch.set_num_threads(1)
        model = backbone.load(self.folder, self.seed, config.dropout).to(config.device)
        tasks = [self.experiences[k] for k in stream.order(config.experiences, self.seed)]
        train_rows = [backbone.encode(task.train, self.folder, config) for task in tasks]
        test_rows = [backbone.encode(task.test, self.folder, config) for task in tasks]
        record = Recorder(config, model, train_rows, test_rows, backbone.batch_loss, backbone.logits)
        train.learn(config, METHODS[self.method], self.seed, model, train_rows, record)
        named = {"method": self.method, "seed": self.seed, "order": [task.name for task in tasks]}
        return named | record.result() | {"about": origin()}

    def record(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return the record of a result."""
        return {"key": self.key} | {name: value for name, value in result.items() if name != "about"}
