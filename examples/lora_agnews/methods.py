"""The methods: what each asks of the memory, and how it changes the gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from gemproj import PGD
from gemproj.torch import EpisodicMemory

from .config import Config

Draw = Callable[[EpisodicMemory, Config], Iterable[Any]]  # batches of the memory


@dataclass(frozen=True)
class Method:
    """A continual-learning method; colours are Okabe and Ito's."""

    title: str
    colour: str
    constrained: Draw | None = None  # batches whose gradients constrain the step
    options: Callable[[Config], dict[str, Any]] = lambda c: {}  # of the GradientProjector
    replayed: Draw | None = None  # batches that are learned along with the new one
    weight: Callable[[Config], float] = lambda c: 1.0  # of each of them
    policy: str = "balanced"  # which examples are stored; the paper balances labels


def all_tasks(memory: EpisodicMemory, config: Config) -> Iterable[Any]:
    """GEM: one constraint for each past task, on its whole memory."""
    return memory.batches()


def few_rows(memory: EpisodicMemory, config: Config) -> Iterable[Any]:
    """One constraint for each past task, on a few of its examples, drawn at each step."""
    return memory.batches(n=config.few)


def one_sample(memory: EpisodicMemory, config: Config) -> Iterable[Any]:
    """A-GEM and replay: a sample of all memories."""
    return [memory.sample(config.sample_size)]


METHODS = {
    "plain": Method("Fine-tuning", "#999999"),
    "agem": Method("A-GEM", "#E69F00", one_sample, lambda c: {"method": "agem"}),
    "gem": Method("GEM", "#0072B2", all_tasks, lambda c: {"margin": c.margin}),
    "igem": Method("I-GEM", "#D55E00", all_tasks, lambda c: {"method": PGD(c.pgd_steps), "margin": c.margin}),
    "gem-step": Method(
        "GEM, step", "#56B4E9", all_tasks, lambda c: {"margin": c.margin, "on": "both", "metric": "adam"}
    ),
    "replay": Method("Replay", "#009E73", replayed=one_sample),
    "gem-few": Method("GEM, tuned", "#882255", few_rows, lambda c: {"margin": c.weight}, policy="reservoir"),
    "replay-few": Method(
        "Replay, tuned", "#CC79A7", replayed=few_rows, weight=lambda c: c.weight, policy="reservoir"
    ),
}
