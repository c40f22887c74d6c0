"""AG News as a stream, and shared by all streams of texts: the model of the demo, and its tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.console import Console

from ...common.command import cache_folder, check_known
from ...lora_agnews import backbone, data, small, stream
from ...lora_agnews.config import CLASSES, QUICK, Config
from ...lora_agnews.stream import Experience
from .. import digest
from . import Stream, Task

MODEL = ("backbone", "max_length", "dropout")

_load = lru_cache(maxsize=1)(data.load)  # a worker has many runs, each with its own stream


def agnews(seed: int, tasks: int = 3, data_folder: str | None = None, **settings: Any) -> Stream:
    """Distribute AG News to the tasks, each dominated by one class; the seed shuffles their order.

    The articles come from a folder, by default ``$AGNEWS_DIR``, or else from the Hugging Face hub. The model
    is that of the AG News experiment's quick preset with changed `settings`; the small one is kept in the
    user's cache.
    """
    config = configure(settings, ("rows", "dominant_share", *MODEL), experiences=tasks)
    articles = _load(Path(data_folder) if data_folder else None, "data_folder")
    dealt = stream.build(articles.texts, articles.labels, config)
    return build(config, dealt, stream.order(tasks, seed), seed, len(CLASSES))


def configure(given: Mapping[str, Any], allowed: Sequence[str] = MODEL, **fixed: Any) -> Config:
    """Return the quick preset of the AG News experiment with given settings, which must be `allowed`."""
    check_known("options", given, allowed)
    return replace(QUICK, device="cpu", **given, **fixed)


def build(
    config: Config, experiences: Sequence[Experience], order: Sequence[int], seed: int, classes: int
) -> Stream:
    """Return the stream of the experiences in this order; a small backbone not in the cache is pretrained."""
    folder = small.backbone_folder(config, experiences, cache_folder(), Console(quiet=True))
    model = backbone.load(folder, seed, config.dropout, classes)
    tasks = []
    for experience in (experiences[k] for k in order):
        parts = (backbone.encode(part, folder, config) for part in (experience.train, experience.test))
        tasks.append(Task(experience.name, *parts))
    rows = [[part.texts, part.labels] for e in experiences for part in (e.train, e.test)]
    weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    hashes = {"data": digest.of_values(rows), "backbone": digest.of_files(weights)}
    return Stream(tasks, model.train(), backbone.logits, hashes)
