"""The methods: what each of them replays, and what it promises."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from gemproj import PGD
from gemproj.torch.step import On

from ..common import colours
from ..common.memory import Memory
from .config import Config


@dataclass(frozen=True)
class Method:
    """A continual-learning method; without a promise, it does not project."""

    title: str
    colour: str
    promise: Callable[[Config], dict[str, Any]] | None = None  # options of its `Promise`
    on: On = "gradient"
    method: Callable[[Config], Any] = lambda c: "exact"
    replayed: Callable[[Memory, Config], Iterable[Any]] = lambda memory, c: ()  # also learned
    weight: Callable[[Config], float] = lambda c: 1.0  # of each replayed batch
    policy: str = "balanced"  # which examples are stored; the paper balances labels
    together: bool = False  # whether one promise is about the examples of all tasks


def every(c: Config) -> dict[str, Any]:
    """Return the options of the paper's promise, about all stored examples, with its memory strength."""
    return {"weight": c.margin, "examples": None}


METHODS = {
    "plain": Method("Fine-tuning", colours.FINE_TUNING),
    "agem": Method("A-GEM", colours.AGEM, lambda c: {"examples": c.sample_size}, together=True),
    "gem": Method("GEM", colours.GEM, every),
    "igem": Method("I-GEM", colours.IGEM, every, method=lambda c: PGD(c.pgd_steps)),
    "gem-step": Method("GEM, step", colours.GEM_STEP, every, on="both"),
    "replay": Method(
        "Replay",
        colours.REPLAY,
        replayed=lambda memory, c: [memory.sample(c.sample_size)] if memory.tasks else [],
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
        replayed=lambda memory, c: memory.draw(c.few),
        weight=lambda c: c.weight,
        policy="reservoir",
    ),
}
