"""The methods: what each asks of the memory, and how its gradient is projected."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from gemproj import PGD

from .config import Config


@dataclass(frozen=True)
class Method:
    """A continual-learning method.

    Parameters
    ----------
    title, colour : str
        Name in tables and figures; colour in figures (Okabe and Ito's palette).
    constraints : {"none", "tasks", "task", "sample"}
        Which gradients constrain the step: none, one for each past task on its whole memory, that of one past
        task at random, or one on a random sample of all memories.
    projector : callable
        From the settings to the options of the `GradientProjector`.
    replay : bool
        Whether a sample of the memory is learned along with each batch.
    """

    title: str
    colour: str
    constraints: Literal["none", "tasks", "task", "sample"] = "none"
    projector: Callable[[Config], dict[str, Any]] = lambda config: {}
    replay: bool = False


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "plain": Method("Fine-tuning", "#999999"),
        "agem": Method("A-GEM", "#E69F00", "sample", lambda config: {"method": "agem"}),
        "gem": Method("GEM", "#0072B2", "tasks", lambda config: {"method": "exact", "margin": config.margin}),
        "igem": Method(
            "I-GEM",
            "#D55E00",
            "tasks",
            lambda config: {"method": PGD(steps=config.pgd_steps), "margin": config.margin},
        ),
        "gem-step": Method(
            "GEM, step",
            "#56B4E9",
            "tasks",
            lambda config: {"margin": config.margin, "on": config.on, "metric": config.metric},
        ),
        "sgem": Method("S-GEM", "#CC79A7", "task", lambda config: {"method": "agem"}),
        "softgem": Method("SOFT-GEM", "#882255", "tasks", lambda config: {"penalty": config.penalty}),
        "mega1": Method("MEGA-I", "#44AA99", "sample", lambda config: {"method": "mega1"}),
        "mega2": Method("MEGA-II", "#999933", "sample", lambda config: {"method": "mega2"}),
        "replay": Method("Replay", "#009E73", replay=True),
    }
)
