"""Time and memory of one step, by part: what the paper's experiment would need on this machine.

Three tasks of one batch each are learned as in the experiment, of whose options all are options here; --rows
are those of a batch, and of a memory. The rows are articles joined until they are as long as the model may
see, so that no batch is shorter.
"""

import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from asv_benchmarks.benchmarks import peaks
from examples.common import command
from examples.common.tables import markdown_table, significant
from examples.lora_agnews import backbone, data, experiment, train
from examples.lora_agnews.__main__ import configured, parser
from examples.lora_agnews.config import CLASSES, PAPER, Config
from examples.lora_agnews.methods import METHODS
from examples.lora_agnews.record import PHASES, Recorder
from examples.lora_agnews.stream import Split

TASKS = 3


class Meter(Recorder):
    """Measures the parts of steps and nothing in between; also their memory."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.peak_bytes: dict[str, float] = defaultdict(float)

    def turn(self, phase: str | None) -> None:
        """Time another part of the step, and note the most memory that the one before took.

        That is of tensors on a CUDA device, else of the process, where Linux tells.
        """
        cuda = self.device.type == "cuda"
        with suppress(OSError):
            if self.phase is not None:
                most = torch.cuda.max_memory_allocated(self.device) if cuda else peaks.status("VmHWM")
                self.peak_bytes[self.phase] = max(self.peak_bytes[self.phase], most)
        super().turn(phase)
        torch.cuda.reset_peak_memory_stats(self.device) if cuda else peaks.forget()

    def _due(self, interval: int) -> bool:
        return False


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table; return the exit status, see `command.finish`."""
    asked = parser("python -m examples.study.one_step", __doc__).parse_args(arguments)
    given = vars(asked) | {"preset": "paper", "rows": None}
    rows = asked.rows or PAPER.batch_size

    def job() -> None:
        config = replace(configured(given), batch_size=rows, per_task=rows, sample_size=rows)
        config = replace(config, device=experiment.usable(config.device))
        folder = backbone.locate(config.backbone)
        articles = data.load(asked.data, "--data", [TASKS * rows * config.max_length] * 4)
        threads = torch.get_num_threads()
        torch.set_num_threads(1 if config.device == "cpu" else threads)  # as in the experiment
        parts = [f"{phase.capitalize()} ({unit})" for unit in ("s", "GiB") for phase in PHASES]
        texts = long_rows(articles.texts, config)
        lines = [measured(config, name, folder, texts) for name in config.methods]
        torch.set_num_threads(threads)
        print(markdown_table(["Method", *parts], lines))

    return command.finish(job, Console(stderr=True))


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
    learned = model, tasks, [short] * TASKS
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
