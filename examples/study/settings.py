"""The committed settings: streams, methods, what is tuned on which seeds, and what is reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from examples.lora_agnews.mega import mega1, mega2
from gemproj import PGD

from .learners import Balanced, DistilledReplay, Learner, Projected, Replay, Setup, Subspaces
from .penalties import EWC, SI

TUNING_SEEDS = (100, 101, 102, 103, 104)
SEEDS = tuple(range(10))  # nothing is chosen on them
POINTS = 5  # settings tried for each method on each stream


@dataclass(frozen=True)
class Method:
    """A method, and what is tuned.

    Attributes
    ----------
    title : str
    family : str
        Methods of one family are drawn alike.
    colour : str
        Of the palette of Okabe and Ito.
    learner : callable
        Makes the learner from a `Setup`.
    knob : str
        Name of the main setting; empty if there is none.
    grid : tuple of three numbers
        Its values, from small to large.
    like : str
        The method whose learning rate and knob it takes, instead of tuning its own.
    rows : int, optional
        Stored examples of each past task in a step, instead of the stream's.
    joint : bool
        Whether all tasks are learned at once.
    """

    title: str
    family: str
    colour: str
    learner: Callable[[Setup], Learner]
    knob: str = ""
    grid: tuple[float, ...] = ()
    like: str = ""
    rows: int | None = None
    joint: bool = False


@dataclass(frozen=True)
class Setting:
    """A stream, and how it is learned.

    Attributes
    ----------
    kind, options
        As in `streams.load`.
    optimizer : {"sgd", "adamw"}
    rates : tuple of five numbers
        Learning rates, from small to large. With a knob, the three in the middle are tried.
    per_task : int
        Stored examples of each task; methods that store outputs, too, get as many bytes.
    rows : int
        Stored examples of each past task that take part in a step.
    """

    title: str
    kind: str
    optimizer: str
    rates: tuple[float, ...]
    per_task: int
    rows: int
    options: Mapping[str, Any] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    batch_size: int = 10
    epochs: int = 1
    eval_batch_size: int = 512
    eval_rows: int = 200
    eval_interval: int = 50
    probe_interval: int = 20
    device: str = "cpu"


WEIGHTS = (0.1, 0.5, 2.0)  # of the past, whether in the loss or as a margin


METHODS = {
    "plain": Method("Fine-tuning", "bounds", "#999999", Learner),
    "joint": Method("Joint", "bounds", "#000000", Learner, joint=True),
    "replay": Method("Replay", "replay", "#009E73", Replay, "weight", WEIGHTS),
    "der": Method("Replay + KL (DER++)", "replay", "#009E73", DistilledReplay, "weight", WEIGHTS),
    "ewc": Method("EWC", "penalties", "#CC79A7", EWC, "strength", (10.0, 100.0, 1000.0)),
    "si": Method("SI", "penalties", "#CC79A7", SI, "strength", (0.03, 0.3, 3.0)),
    "gpm": Method("GPM", "subspaces", "#882255", Subspaces, "threshold", (0.9, 0.95, 0.99)),
    "agem": Method("A-GEM", "one constraint", "#E69F00", partial(Projected, promise="sample", method="agem")),
    "sgem": Method("S-GEM", "one constraint", "#E69F00", partial(Projected, promise="one", method="agem")),
    "mega1": Method("MEGA-I", "one constraint", "#E69F00", partial(Balanced, weights=mega1)),
    "mega2": Method("MEGA-II", "one constraint", "#E69F00", partial(Balanced, weights=mega2)),
    "gem": Method("GEM", "GEM", "#0072B2", Projected),
    "igem1": Method("I-GEM, 1 step", "GEM", "#56B4E9", partial(Projected, method=PGD(1)), like="gem"),
    "igem3": Method("I-GEM, 3 steps", "GEM", "#56B4E9", partial(Projected, method=PGD(3)), like="gem"),
    "igem10": Method("I-GEM, 10 steps", "GEM", "#56B4E9", partial(Projected, method=PGD(10)), like="gem"),
    "gem-all": Method("GEM, all rows", "GEM", "#0072B2", Projected, like="gem", rows=10**9),
    "softgem": Method("SOFT-GEM", "GEM", "#0072B2", partial(Projected, knob="penalty"), "penalty", WEIGHTS),
    "gem-margin": Method("GEM, margin", "GEM + weight", "#D55E00", partial(Projected, knob="margin"), "margin", WEIGHTS),
    "gem-label": Method(
        "GEM, label, margin", "GEM + weight", "#D55E00", partial(Projected, promise="label", knob="margin"), "margin", WEIGHTS
    ),
    "gem-kl": Method(
        "GEM, KL, margin", "GEM + weight", "#D55E00", partial(Projected, distilled=True, knob="margin"), "margin", WEIGHTS
    ),
    "gem-bound": Method(
        "GEM, held at bound", "GEM", "#0072B2", partial(Projected, bound=0.0, knob="kappa"), "kappa", (0.1, 0.3, 1.0)
    ),
    "gem-step": Method("GEM, step", "GEM", "#0072B2", partial(Projected, on="both", metric="adam")),
}
DIGITS: dict[str, Any] = {"optimizer": "sgd", "rates": (0.01, 0.03, 0.1, 0.3, 1.0), "per_task": 50, "rows": 10}
NO_MOMENTUM = tuple(name for name in METHODS if name != "gem-step")  # steps of SGD are gradients
STREAMS = {
    "permuted": Setting("Permuted digits", "permuted", options={"tasks": 10}, methods=NO_MOMENTUM, **DIGITS),
    "rotated": Setting("Rotated digits", "rotated", options={"tasks": 10}, methods=NO_MOMENTUM, **DIGITS),
    "split": Setting("Split digits", "split", methods=NO_MOMENTUM, **DIGITS),
}
