"""AG News as a stream: each task is dominated by another class, as in the AG News experiment."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from ...lora_agnews import data
from ...lora_agnews import stream as experiences
from ...lora_agnews.config import CLASSES
from . import Stream, text

_load = lru_cache(maxsize=1)(data.load)  # a worker has many runs in one environment, each with its own stream

SETTINGS = ("rows", "dominant_share", *text.MODEL)


def agnews(
    seed: int,
    tasks: int = 3,
    preset: str = "quick",
    data_folder: str | None = None,
    cache: str | None = None,
    **settings: Any,
) -> Stream:
    """Deal AG News out to the tasks, each with more of one class; the seed shuffles their order.

    The articles are in a folder, by default ``$AGNEWS_DIR``, else the Hugging Face hub is asked. The model is
    that of a preset of the AG News experiment, of which settings can be changed; the small one is kept in a
    cache, by default the user's.
    """
    config = text.configure(preset, settings, SETTINGS, experiences=tasks)
    articles = _load(Path(data_folder) if data_folder else None, "data_folder")
    dealt = experiences.build(
        articles.texts, articles.labels, config.experiences, config.rows, config.dominant_share
    )
    return text.build(config, dealt, experiences.order(tasks, seed), seed, len(CLASSES), cache)
