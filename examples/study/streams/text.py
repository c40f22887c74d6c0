"""AG News as a stream: the articles, the model and the tasks of the demo."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from rich.console import Console

from ...common.command import cache_folder
from ...common.origin import digest
from ...lora_agnews import backbone, data, small, stream
from ...lora_agnews.config import QUICK
from . import Stream, Task

_load = lru_cache(maxsize=1)(data.load)  # a worker has many runs, each with its own stream


def agnews(seed: int, tasks: int = 3, **settings: Any) -> Stream:
    """Distribute AG News to the tasks, each dominated by one class; the seed shuffles their order.

    The articles come from ``$AGNEWS_DIR``, or else from the Hugging Face hub. The model is that of the AG
    News experiment's quick preset with changed `settings`; the small one is kept in the user's cache, and
    pretrained if it is not there.
    """
    config = replace(QUICK, device="cpu", experiences=tasks, **settings)
    articles = _load()
    dealt = stream.build(articles.texts, articles.labels, config)
    folder = small.backbone_folder(config, dealt, cache_folder(), Console(quiet=True))
    model = backbone.load(folder, seed, config)
    found = []
    for one in (dealt[k] for k in stream.order(tasks, seed)):
        parts = (backbone.encode(part, folder, config) for part in (one.train, one.test))
        found.append(Task(one.name, *parts))
    rows = [[part.texts, part.labels] for one in dealt for part in (one.train, one.test)]
    weights = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    hashes = {"data": digest(rows), "backbone": digest(*weights)}
    return Stream(found, model.train(), backbone.logits, hashes)
