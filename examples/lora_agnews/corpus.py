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

SEED = 2004
OWN = 0.4  # probability that a sentence part speaks of the article's own topic
SHARED = 0.42  # ... in words that a second topic uses as well; otherwise any topic may speak
VOCABULARY: dict[str, Any] = json.loads(
    Path(__file__).with_name("vocabulary.json").read_text(encoding="utf-8")
)


def generate(rows_per_class: Sequence[int], seed: int = SEED) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Write articles, no two of them alike.

    Parameters
    ----------
    rows_per_class : sequence of int
        How many to write of each class.
    seed : int
        The same seed writes the same articles.

    Returns
    -------
    texts : tuple of str
        Title and description, shuffled over the classes.
    labels : tuple of int
        The main topic of each text.
    """
    random = Random(seed)
    articles: dict[str, int] = {}
    for label, wanted in enumerate(rows_per_class):
        full = len(articles) + wanted
        while len(articles) < full:
            articles.setdefault(_write(CLASSES[label], random), label)
    order = list(articles.items())
    random.shuffle(order)
    return tuple(text for text, _ in order), tuple(label for _, label in order)


def _write(topic: str, random: Random) -> str:
    templates = random.choice(VOCABULARY["titles"]), random.choice(VOCABULARY["bodies"])
    return " ".join(_fill(template, topic, random) for template in templates)


def _fill(template: str, topic: str, random: Random) -> str:
    words = {role: random.choice(_words(topic, random)[role]) for role in ("who", "did", "what", "more")}
    words |= {role: random.choice(VOCABULARY[role]) for role in ("city", "day", "aside")}
    sentences = template.format(number=random.randint(2, 90), **words).rstrip(".").split(". ")
    return ". ".join(sentence[:1].upper() + sentence[1:] for sentence in sentences) + "."


def _words(topic: str, random: Random) -> dict[str, list[str]]:
    """Draw the word lists that one sentence part is taken from."""
    draw = random.random()
    if draw < OWN:
        return VOCABULARY["topics"][topic]
    if draw < OWN + SHARED:
        return random.choice(
            [shared["words"] for shared in VOCABULARY["shared"] if topic in shared["topics"]]
        )
    return random.choice(list(VOCABULARY["topics"].values()))
