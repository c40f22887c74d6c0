"""The methods: what each asks of the memory, and how it changes the gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from gemproj import PGD
from gemproj.torch import EpisodicMemory

from .config import Config
from .mega import Weights, mega1, mega2

Memory = Callable[[EpisodicMemory, Config], Iterable[Any]]


@dataclass(frozen=True)
class Method:
    """A continual-learning method; colours are Okabe and Ito's."""

    title: str
    colour: str
    batches: Memory | None = None  # of the memory, whose gradients constrain the step
    options: Callable[[Config], dict[str, Any]] = lambda c: {}  # of the GradientProjector
    balance: Weights | None = None  # of MEGA, which takes the projector's place
    replayed: Memory | None = None  # batches of the memory that are learned along with the new one
    weight: Callable[[Config], float] = lambda c: 1.0  # of each of them
    policy: str = "balanced"  # which examples are stored; the paper balances labels


def all_tasks(memory: EpisodicMemory, config: Config) -> Iterable[Any]:
    """GEM: one constraint for each past task, on its whole memory."""
    return memory.batches()


def few_rows(memory: EpisodicMemory, config: Config) -> Iterable[Any]:
    """One constraint for each past task, on a few of its examples, drawn at each step."""
    return memory.batches(n=config.few)


def one_task(memory: EpisodicMemory, config: Config) -> Iterable[Any]:
    """S-GEM: the constraint of one past task at random."""
    with torch.random.fork_rng(devices=[]):  # training draws the same numbers with every method
        return [memory.batch(memory.tasks[int(torch.randint(len(memory), ()))])]


def one_sample(memory: EpisodicMemory, config: Config) -> Iterable[Any]:
    """A-GEM, MEGA and replay: a sample of all memories."""
    return [memory.sample(config.sample_size)]


METHODS = {
    "plain": Method("Fine-tuning", "#999999"),
    "agem": Method("A-GEM", "#E69F00", one_sample, lambda c: {"method": "agem"}),
    "sgem": Method("S-GEM", "#CC79A7", one_task, lambda c: {"method": "agem"}),
    "gem": Method("GEM", "#0072B2", all_tasks, lambda c: {"margin": c.margin}),
    "igem": Method("I-GEM", "#D55E00", all_tasks, lambda c: {"method": PGD(c.pgd_steps), "margin": c.margin}),
    "gem-step": Method(
        "GEM, step", "#56B4E9", all_tasks, lambda c: {"margin": c.margin, "on": c.on, "metric": c.metric}
    ),
    "softgem": Method("SOFT-GEM", "#882255", all_tasks, lambda c: {"penalty": c.penalty}),
    "mega1": Method("MEGA-I", "#44AA99", one_sample, balance=mega1),
    "mega2": Method("MEGA-II", "#999933", one_sample, balance=mega2),
    "replay": Method("Replay", "#009E73", replayed=one_sample),
    "gem-few": Method("GEM, study", "#882255", few_rows, lambda c: {"margin": c.weight}, policy="reservoir"),
    "replay-few": Method(
        "Replay, study", "#44AA99", replayed=few_rows, weight=lambda c: c.weight, policy="reservoir"
    ),
}
