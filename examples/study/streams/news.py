"""AG News as a stream: each task is dominated by another class, as in the AG News experiment."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from ...lora_agnews import data
from ...lora_agnews import stream as experiences
from ...lora_agnews.config import CLASSES
from ..stream import Stream
from . import text

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
    """Deal AG News out to the tasks, of which the seed shuffles the order.

    Parameters
    ----------
    seed : int
        Of the order, the adapters and the head.
    tasks : int
        Task k is dominated by class k modulo 4.
    preset : str
        Preset of the AG News experiment: ``"quick"`` (a small GPT-2), ``"paper"`` or ``"mini"``.
    data_folder : str, optional
        Folder with AG News' ``train.csv``; by default ``$AGNEWS_DIR``, else the Hugging Face hub is asked.
    cache : str, optional
        Folder for the small GPT-2; by default the user's cache.
    **settings
        Settings of the preset to be changed: `rows` of a task, `dominant_share`, and those of the model.
    """
    config = text.configure(preset, settings, SETTINGS, experiences=tasks)
    articles = _load(Path(data_folder) if data_folder else None, "data_folder")
    dealt = experiences.build(
        articles.texts, articles.labels, config.experiences, config.rows, config.dominant_share
    )
    return text.build(config, dealt, experiences.order(tasks, seed), seed, len(CLASSES), cache)
