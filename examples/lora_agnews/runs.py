"""The runs of an experiment, in worker processes; finished runs are kept and not repeated."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ..common.command import SetupError
from ..common.workers import VERSIONS, work
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
    files: Sequence[Any] = ()  # names, sizes and dates in a local folder, whose backbone may change

    @property
    def title(self) -> str:
        """Name on the screen."""
        return f"{METHODS[self.method].title}, seed {self.seed}"

    @property
    def file(self) -> str:
        """Name of the file for the result: method, seed, and a hash of all settings that affect it."""
        others = {"preset": "", "seeds": (), "methods": ()}
        shaping = [asdict(self.config) | others, self.experiences, str(self.folder), VERSIONS, *self.files]
        digest = hashlib.sha256(repr(shaping).encode()).hexdigest()
        return f"{self.method}-seed{self.seed}-{digest[:12]}.json"

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
        return named | record.result()


def complete(runs: Sequence[Run], folder: Path, jobs: int, console: Console) -> list[dict[str, Any]]:
    """Execute the runs that have no file in the folder, and return the results of all runs."""
    folder.mkdir(parents=True, exist_ok=True)
    waiting = []
    for run in runs:
        if (folder / run.file).is_file():
            _read(folder / run.file)  # raises before any run starts
            console.print(f"[dim]kept      {run.title} (finished earlier with the same settings)")
        else:
            waiting.append(run)

    def keep(run: Run, result: dict[str, Any]) -> None:
        draft = folder / f"{run.file}.draft"  # the file appears complete or not at all
        draft.write_text(json.dumps(result, indent=1), encoding="utf-8")
        draft.replace(folder / run.file)

    if waiting:
        work(waiting, keep, jobs, console)
    return [_read(folder / run.file) for run in runs]


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SetupError(f"{path} is damaged: {error}; delete it, and that run is done again") from error
