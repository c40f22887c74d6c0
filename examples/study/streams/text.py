"""AG News as a stream, and shared by all streams of texts: the model of the demo, and its tasks."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.console import Console

from ...common.command import cache_folder, check_known
from ...lora_agnews import backbone, data, small, stream
from ...lora_agnews.config import CLASSES, PRESETS, Config
from ...lora_agnews.stream import Experience
from .. import digest
from . import Stream, Task

SMALL = ("small_layers", "small_width", "small_vocabulary", "small_steps")
MODEL = ("backbone", "max_length", "dropout", *SMALL)

_load = lru_cache(maxsize=1)(data.load)  # a worker has many runs, each with its own stream


def agnews(
    seed: int,
    tasks: int = 3,
    preset: str = "quick",
    data_folder: str | None = None,
    cache: str | None = None,
    **settings: Any,
) -> Stream:
    """Distribute AG News to the tasks, each dominated by one class; the seed shuffles their order.

    The articles come from a folder, by default ``$AGNEWS_DIR``, or else from the Hugging Face hub. The model
    is that of a preset of the AG News experiment with changed `settings`; the small one is kept in a cache,
    by default the user's.
    """
    config = configure(preset, settings, ("rows", "dominant_share", *MODEL), experiences=tasks)
    articles = _load(Path(data_folder) if data_folder else None, "data_folder")
    dealt = stream.build(articles.texts, articles.labels, config)
    return build(config, dealt, stream.order(tasks, seed), seed, len(CLASSES), cache)


def configure(preset: str, given: Mapping[str, Any], allowed: Sequence[str] = MODEL, **fixed: Any) -> Config:
    """Return a preset of the AG News experiment with the given settings, which must be among `allowed`."""
    check_known("preset", [preset], PRESETS)
    check_known("options", given, allowed)
    return replace(PRESETS[preset], device="cpu", **given, **fixed)


def build(
    config: Config,
    experiences: Sequence[Experience],
    order: Sequence[int],
    seed: int,
    classes: int,
    cache: str | None,
) -> Stream:
    """Return the stream of the experiences in this order; a small backbone not in the cache is pretrained."""
    where = Path(cache) if cache else cache_folder()
    folder = small.backbone_folder(config, experiences, where, Console(quiet=True))
    model = backbone.load(folder, seed, config.dropout, classes)
    tasks = []
    for experience in (experiences[k] for k in order):
        parts = (backbone.encode(part, folder, config) for part in (experience.train, experience.test))
        tasks.append(Task(experience.name, *parts))
    rows = [[part.texts, part.labels] for e in experiences for part in (e.train, e.test)]
    weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    hashes = {"data": digest.of_values(rows), "backbone": digest.of_files(weights)}
    return Stream(tasks, model.train(), backbone.logits, hashes)
