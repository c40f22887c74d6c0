"""A built-in news corpus, written from templates, so that the experiment runs without any download.

Each article has a main topic, but its words come from that topic only part of the time; the rest come from
words that two topics share, or from any topic at all. A classifier has to weigh evidence; none is perfect.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from .config import CLASSES

OWN = 0.4  # probability that a sentence part speaks of the article's own topic
SHARED = 0.42  # ... in words that a second topic uses as well; otherwise any topic may speak
WORDS: dict[str, Any] = json.loads(Path(__file__).with_name("vocabulary.json").read_text(encoding="utf-8"))


def generate(rows_per_class: Sequence[int], seed: int = 2004) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Write that many articles of each class, no two of them alike; return shuffled texts and labels."""
    random = Random(seed)
    articles: dict[str, int] = {}
    for label, wanted in enumerate(rows_per_class):
        full = len(articles) + wanted
        while len(articles) < full:
            templates = random.choice(WORDS["titles"]), random.choice(WORDS["bodies"])
            text = " ".join(_fill(template, CLASSES[label], random) for template in templates)
            articles.setdefault(text, label)
    order = list(articles.items())
    random.shuffle(order)
    return tuple(text for text, _ in order), tuple(label for _, label in order)


def _fill(template: str, topic: str, random: Random) -> str:
    words = {role: random.choice(_draw(topic, random)[role]) for role in ("who", "did", "what", "more")}
    words |= {role: random.choice(WORDS[role]) for role in ("city", "day", "aside")}
    sentences = template.format(number=random.randint(2, 90), **words).rstrip(".").split(". ")
    return ". ".join(sentence[:1].upper() + sentence[1:] for sentence in sentences) + "."


def _draw(topic: str, random: Random) -> dict[str, list[str]]:
    """Draw the word lists that one sentence part is taken from."""
    draw = random.random()
    if draw < OWN:
        return WORDS["topics"][topic]
    if draw < OWN + SHARED:
        return random.choice([shared for shared in WORDS["shared"] if topic in shared["topics"]])
    return random.choice(list(WORDS["topics"].values()))
