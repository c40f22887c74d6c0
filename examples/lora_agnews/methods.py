"""The methods: what each replays, and how its GEM projects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from gemproj import PGD
from gemproj.torch import EpisodicMemory

from .config import Config


@dataclass(frozen=True)
class Method:
    """A continual-learning method; colours are Okabe and Ito's."""

    title: str
    colour: str
    options: Callable[[Config], dict[str, Any]] | None = None  # of its GEM; None: nothing is projected
    replayed: Callable[[EpisodicMemory, Config], Iterable[Any]] = lambda memory, c: ()  # learned along
    weight: Callable[[Config], float] = lambda c: 1.0  # of each replayed batch
    policy: str = "balanced"  # which examples are stored; the paper balances labels


METHODS = {
    "plain": Method("Fine-tuning", "#999999"),
    "agem": Method("A-GEM", "#E69F00", lambda c: {"per": "all", "examples": c.sample_size}),
    "gem": Method("GEM", "#0072B2", lambda c: {"weight": c.margin}),
    "igem": Method("I-GEM", "#D55E00", lambda c: {"weight": c.margin, "method": PGD(c.pgd_steps)}),
    "gem-step": Method("GEM, step", "#56B4E9", lambda c: {"weight": c.margin, "on": "both"}),
    "replay": Method(
        "Replay", "#009E73", replayed=lambda memory, c: memory.batches(n=c.sample_size, per="all")
    ),
    "gem-few": Method(
        "GEM, weighted", "#882255", lambda c: {"weight": c.weight, "examples": c.few}, policy="reservoir"
    ),
    "replay-few": Method(
        "Replay, weighted",
        "#CC79A7",
        replayed=lambda memory, c: memory.batches(n=c.few),
        weight=lambda c: c.weight,
        policy="reservoir",
    ),
}
