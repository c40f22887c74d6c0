"""The five methods: what each asks of the memory, and how its gradient is projected."""

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
    constraints : {"none", "tasks", "sample"}
        Which gradients constrain the step: none, one for each past task on its whole memory, or one on a
        random sample of all memories.
    projector : callable
        From the settings to the options of the `GradientProjector`.
    replay : bool
        Whether a sample of the memory is learned along with each batch.
    """

    title: str
    colour: str
    constraints: Literal["none", "tasks", "sample"] = "none"
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
        "replay": Method("Replay", "#009E73", replay=True),
    }
)
