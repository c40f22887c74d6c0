"""The methods: what each of them replays, and how its GEM projects."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from gemproj import PGD
from gemproj.torch import EpisodicMemory

from ..common import colours
from .config import Config


@dataclass(frozen=True)
class Method:
    """A continual-learning method."""

    title: str
    colour: str
    options: Callable[[Config], dict[str, Any]] | None = None  # of its GEM; None: no projection
    replayed: Callable[[EpisodicMemory, Config], Iterable[Any]] = lambda memory, c: ()  # also learned
    weight: Callable[[Config], float] = lambda c: 1.0  # of each replayed batch
    policy: str = "balanced"  # which examples are stored; the paper balances labels


METHODS = {
    "plain": Method("Fine-tuning", colours.FINE_TUNING),
    "agem": Method("A-GEM", colours.AGEM, lambda c: {"per": "all", "examples": c.sample_size}),
    "gem": Method("GEM", colours.GEM, lambda c: {"weight": c.margin}),
    "igem": Method("I-GEM", colours.IGEM, lambda c: {"weight": c.margin, "method": PGD(c.pgd_steps)}),
    "gem-step": Method("GEM, step", colours.GEM_STEP, lambda c: {"weight": c.margin, "on": "both"}),
    "replay": Method(
        "Replay", colours.REPLAY, replayed=lambda memory, c: memory.batches(n=c.sample_size, per="all")
    ),
    "gem-few": Method(
        "GEM, weighted",
        colours.GEM_WEIGHTED,
        lambda c: {"weight": c.weight, "examples": c.few},
        policy="reservoir",
    ),
    "replay-few": Method(
        "Replay, weighted",
        colours.REPLAY_WEIGHTED,
        replayed=lambda memory, c: memory.batches(n=c.few),
        weight=lambda c: c.weight,
        policy="reservoir",
    ),
}
