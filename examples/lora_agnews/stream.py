"""The stream: experiences with disjoint rows and different class priors."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ..common.command import SetupError
from .config import CLASSES, Config

SPLIT_SEED = 0  # rows and split are the same for every seed of a run; only the order of experiences differs
TRAIN_SHARE = 0.8


@dataclass(frozen=True)
class Split:
    """Texts and their labels, row by row."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True)
class Experience:
    """A part of the stream, named by its dominant class; train and test have the same priors."""

    name: str
    train: Split
    test: Split


def rows_needed(config: Config) -> list[list[int]]:
    """Return the number of rows of each class (columns) in each experience (rows).

    Class k modulo 4 dominates experience k. The other classes share the remaining rows equally, and the first
    of them take the remainder.
    """
    dominant, count = round(config.dominant_share * config.rows), len(CLASSES)
    share, left_over = divmod(config.rows - dominant, count - 1)
    others = [share + (i < left_over) for i in range(count - 1)]
    return [[*others[: k % count], dominant, *others[k % count :]] for k in range(config.experiences)]


def build(texts: Sequence[str], labels: Sequence[int], config: Config) -> tuple[Experience, ...]:
    """Distribute articles to experiences; duplicates are used once, so that test rows are unseen."""
    shuffled = list(dict(zip(texts, labels, strict=True)).items())
    random.Random(SPLIT_SEED).shuffle(shuffled)
    pools = [[row for row in shuffled if row[1] == label] for label in range(len(CLASSES))]
    needed = rows_needed(config)
    totals = [sum(column) for column in zip(*needed, strict=True)]
    if any(len(pool) < total for pool, total in zip(pools, totals, strict=True)):
        found = "; ".join(
            f"{name} {total:,} needed, {len(pool):,} found"
            for name, total, pool in zip(CLASSES, totals, pools, strict=True)
        )
        raise SetupError(
            f"too few different articles for {config.experiences} experiences of {config.rows:,} rows: "
            f"{found}"
        )
    decks = [iter(pool) for pool in pools]
    stream = []
    for k, counts in enumerate(needed):
        dealt = [next(deck) for deck, count in zip(decks, counts, strict=True) for _ in range(count)]
        random.Random(SPLIT_SEED + k).shuffle(dealt)
        cut = round(TRAIN_SHARE * config.rows)
        stream.append(Experience(CLASSES[k % len(CLASSES)], split(dealt[:cut]), split(dealt[cut:])))
    return tuple(stream)


def order(experiences: int, seed: int) -> list[int]:
    """Return the order of the experiences in the run with this seed."""
    positions = list(range(experiences))
    random.Random(seed).shuffle(positions)
    return positions


def split(rows: Sequence[tuple[str, int]]) -> Split:
    """Return pairs of a text and a label as a split."""
    return Split(tuple(text for text, _ in rows), tuple(label for _, label in rows))
