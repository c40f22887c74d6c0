"""Time and memory of one step, by part: what the paper's experiment would need on this machine.

Three tasks of one batch each are learned as in the experiment. The rows are articles joined until they are as
long as the model may see, so that no batch is shorter.
"""

import sys
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from examples.common.command import SetupError
from examples.common.tables import markdown_table, significant
from examples.lora_agnews import backbone, data, train
from examples.lora_agnews.config import CLASSES, PAPER, Config
from examples.lora_agnews.methods import METHODS
from examples.lora_agnews.record import PHASES, Recorder
from examples.lora_agnews.stream import Split

from . import peaks

TASKS = 3


class Meter(Recorder):
    """Measures the parts of steps and nothing in between; also their memory."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.peak_bytes: dict[str, int] = defaultdict(int)

    def turn(self, phase: str | None) -> None:
        """Time another part of the step, and note the most memory that the one before took."""
        if self.phase is not None:
            self.peak_bytes[self.phase] = max(self.peak_bytes[self.phase], peaks.peak(self.device) or 0)
        super().turn(phase)
        peaks.restart(self.device)

    def _due(self, interval: int) -> bool:
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; return 0, or 2 if the data or the backbone cannot be read."""
    parser = ArgumentParser("python -m examples.study.one_step", description=__doc__)
    parser.add_argument("--backbone", default=PAPER.backbone, help="as for examples.lora_agnews")
    parser.add_argument("--data", type=Path, help="as for examples.lora_agnews")
    parser.add_argument("--rows", type=int, default=PAPER.batch_size, help="rows of a batch, and of a memory")
    parser.add_argument("--microbatch", type=int, default=PAPER.microbatch, help="rows in one forward pass")
    parser.add_argument("--max-length", type=int, default=PAPER.max_length, help="tokens of every row")
    parser.add_argument("--methods", default=",".join(PAPER.methods), help="with commas between")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    given = parser.parse_args(arguments)
    try:
        shape = dict.fromkeys(("batch_size", "per_task", "sample_size"), given.rows)
        others = {name: getattr(given, name) for name in ("microbatch", "max_length", "device")}
        config = replace(PAPER, methods=tuple(given.methods.split(",")), **shape, **others)
        folder = backbone.locate(given.backbone)
        articles = data.load(given.data, "--data", [TASKS * given.rows * given.max_length] * 4)
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if config.device == "cpu" else threads)  # as in the experiment
    parts = [f"{phase.capitalize()} ({unit})" for unit in ("s", "GiB") for phase in PHASES]
    rows = [measured(config, name, folder, long_rows(articles.texts, config)) for name in config.methods]
    torch.set_num_threads(threads)
    print(markdown_table(["Method", *parts], rows))
    return 0


def long_rows(texts: Sequence[str], config: Config) -> list[str]:
    """Join articles to as many rows as the tasks take, each longer than the model may see."""
    found: list[str] = []
    words: list[str] = []
    for text in texts:
        words += text.split()
        if len(words) > config.max_length:
            found.append(" ".join(words))
            words = []
        if len(found) == TASKS * config.batch_size:
            break
    return found


def measured(config: Config, name: str, folder: Path, texts: Sequence[str]) -> list[str]:
    """Learn the tasks; return the title, seconds of each part of a step, and its peak of memory in GiB."""
    model, tokenizer = backbone.load(folder, seed=0)
    model.to(config.device)
    size = config.batch_size
    labels = tuple(row % len(CLASSES) for row in range(size))
    splits = [Split(tuple(texts[k * size : (k + 1) * size]), labels) for k in range(TASKS)]
    tasks = [backbone.encode(split, tokenizer, config) for split in splits]
    short = backbone.encode(Split(("News.",), (0,)), tokenizer, config)  # evaluation is not measured
    learned = model, tasks, [short] * TASKS, lambda done, total, note: None
    meter = Meter(config, *learned, backbone.batch_loss, backbone.logits)
    train.learn(config, METHODS[name], 0, model, tasks, meter)
    found: dict[str, Any] = meter.result()
    seconds, most = found["seconds"]["per_step"], meter.peak_bytes
    return [
        METHODS[name].title,
        *(significant(seconds[phase]) if seconds[phase] else "-" for phase in PHASES),
        *(significant(most[phase] / 2**30) if most[phase] else "-" for phase in PHASES),
    ]


if __name__ == "__main__":
    sys.exit(main())
