"""The committed settings: streams, methods, and seeds for tuning and for the report."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from gemproj import PGD

from ..common import colours
from . import learners
from .gpm import Subspaces
from .learners import Learner, Setup
from .mega import Balanced, mega1, mega2
from .penalties import EWC, SI

TUNING_SEEDS = (100, 101, 102, 103, 104)
SEEDS = tuple(range(10))  # for the report; not used for tuning
TIMED = 2  # steps are timed with so many of them, the first ones


@dataclass(frozen=True)
class Method:
    """A method, and its tuned setting."""

    title: str
    family: str  # methods of one family are drawn alike
    colour: str
    learner: Callable[[Setup], Learner]
    knob: str = ""  # name of the main setting; empty if there is none
    grid: tuple[float, ...] = ()  # its three values, from small to large
    like: str = ""  # the method whose learning rate and knob it takes, instead of tuning its own
    changes: Mapping[str, Any] = field(default_factory=dict)  # replaced settings of the stream
    joint: bool = False  # whether all tasks are learned at once


@dataclass(frozen=True)
class Setting:
    """A stream, and the settings of training on it."""

    title: str
    kind: str  # as in `streams.load`, and so are its options
    optimizer: str
    rates: tuple[float, ...]  # five, from small to large; with a knob, the three in the middle are tried
    per_task: int  # stored examples of each task; methods that store outputs, too, get as many bytes
    examples: int  # stored examples of each past task that take part in a step
    options: Mapping[str, Any] = field(default_factory=dict)
    methods: tuple[str, ...] = ()
    # Learning rate and knob of methods that are not tuned on this stream.
    fixed: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    seeds: tuple[int, ...] = SEEDS
    policy: str = "reservoir"  # which examples are stored, as in `common.memory`
    batch_size: int = 10
    epochs: int = 1
    eval_batch_size: int = 512
    eval_rows: int = 200
    eval_interval: int = 50
    probe_interval: int = 20
    device: str = "cpu"
    tuned: ClassVar[str] = ""  # on no other stream


ALL = 10**9  # examples
WEIGHTS = (0.1, 0.5, 2.0)  # of the past, in the loss or in the promise


def gem(**options: Any) -> Callable[[Setup], Learner]:
    """Return the constructor of `Projected` with these options."""
    return partial(learners.Projected, **options)


def weighted(title: str, learner: Callable[[Setup], Learner]) -> Method:
    """Return a variant of GEM with a weight for past tasks."""
    return Method(title, "GEM + weight", colours.GEM_WEIGHTED, learner, "weight", WEIGHTS)


METHODS = {
    "plain": Method("Fine-tuning", "reference", colours.FINE_TUNING, Learner),
    "joint": Method("Joint", "reference", colours.JOINT, Learner, joint=True),
    "replay": Method("Replay", "replay", colours.REPLAY, learners.Replay, "weight", WEIGHTS),
    "der": Method(
        "Replay + KL", "replay", colours.REPLAY_OF_OUTPUTS, learners.DistilledReplay, "weight", WEIGHTS
    ),
    "ewc": Method("EWC", "no examples", colours.NO_EXAMPLES, EWC, "strength", (1.0, 10.0, 100.0)),
    "si": Method("SI", "no examples", colours.NO_EXAMPLES, SI, "strength", (0.1, 1.0, 10.0)),
    "gpm": Method("GPM", "no examples", colours.NO_EXAMPLES, Subspaces, "threshold", (0.8, 0.9, 0.95)),
    "agem": Method("A-GEM", "one constraint", colours.AGEM, gem(per="all", method="agem")),
    "sgem": Method("S-GEM", "one constraint", colours.AGEM, learners.OneTask),
    "mega1": Method("MEGA-I", "one constraint", colours.AGEM, partial(Balanced, weights=mega1)),
    "mega2": Method("MEGA-II", "one constraint", colours.AGEM, partial(Balanced, weights=mega2)),
    "gem": Method("GEM", "GEM", colours.GEM, gem()),
    "gem-all": Method("GEM, all examples", "GEM", colours.GEM, gem(), like="gem", changes={"examples": ALL}),
    "igem1": Method("I-GEM, 1 step", "GEM", colours.IGEM, gem(method=PGD(1)), like="gem"),
    "igem3": Method("I-GEM, 3 steps", "GEM", colours.IGEM, gem(method=PGD(3)), like="gem"),
    "igem10": Method("I-GEM, 10 steps", "GEM", colours.IGEM, gem(method=PGD(10)), like="gem"),
    "gem-step": Method("GEM, step", "GEM", colours.GEM_STEP, gem(on="both")),
    "softgem": Method("SOFT-GEM", "GEM", colours.GEM, gem(knob="penalty"), "penalty", WEIGHTS),
    "gem-tolerance": Method(
        "GEM, tolerance", "GEM", colours.GEM, gem(tolerance=0.0, knob="repair"), "repair", (0.1, 0.3, 1.0)
    ),
    "gem-weight": weighted("GEM, weight", gem(knob="weight")),
    "gem-label": weighted("GEM, weight, labels", gem(per="label", knob="weight")),
    "gem-kl": weighted("GEM, weight, KL", gem(distilled=True, knob="weight")),
}
BASIC = tuple(METHODS)


def variant(
    name: str, title: str, learner: Callable[[Setup], Learner] | None = None, **changes: Any
) -> Method:
    """Return a method that differs from another one in settings that are not tuned."""
    method = METHODS[name]
    return replace(method, title=title, learner=learner or method.learner, like=name, changes=changes)


EVERY_2ND = gem(knob="weight", every=2)
# Variants in the number of examples and in the age of rows.
CHEAPER = {
    "replay-1": variant("replay", "Replay, 1 example", examples=1),
    "replay-4": variant("replay", "Replay, 4 examples", examples=4),
    "gem-weight-1": variant("gem-weight", "GEM, weight, 1 example", examples=1),
    "gem-weight-4": variant("gem-weight", "GEM, weight, 4 examples", examples=4),
    "gem-weight-2nd": variant("gem-weight", "GEM, weight, every 2nd", EVERY_2ND),
    "gem-weight-3rd": variant("gem-weight", "GEM, weight, every 3rd", gem(knob="weight", every=3)),
    "gem-weight-4th": variant("gem-weight", "GEM, weight, every 4th", gem(knob="weight", every=4)),
    "gem-weight-4-2nd": variant("gem-weight", "GEM, weight, 4 examples, every 2nd", EVERY_2ND, examples=4),
}
# Policies of the memory, and examples of each task.
KEPT = [(policy, size) for policy in ("reservoir", "balanced") for size in (20, 100, 400)] + [("ring", 100)]
MEMORIES = {
    f"{name}-{policy}-{size}": variant(
        name, f"{METHODS[name].title}, {policy} {size}", policy=policy, per_task=size
    )
    for name in ("replay", "gem")
    for policy, size in KEPT
    if (policy, size) != ("reservoir", 100)  # the default
}
# Shows the part of a difference that is due to different rates, if tuning has chosen those.
SAME = {"replay-same": replace(METHODS["replay"], title="Replay, settings of GEM", like="gem-weight")}
METHODS |= CHEAPER | MEMORIES | SAME
# No gem-step: steps of SGD are gradients. No gem-label: ten tasks of ten labels have a hundred constraints.
ON_DIGITS = (*(name for name in BASIC if name not in ("gem-step", "gem-label")), *SAME)
DIGITS: dict[str, Any] = {
    "methods": ON_DIGITS,
    "optimizer": "sgd",
    "rates": (0.01, 0.03, 0.1, 0.3, 1.0),
    "per_task": 50,
    "examples": 10,
}
NEWS: dict[str, Any] = {
    "optimizer": "adamw",
    "rates": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2),
    "per_task": 100,
    "examples": 16,
    "batch_size": 32,
    "eval_batch_size": 50,
    "eval_rows": 100,
    "eval_interval": 20,
    "probe_interval": 16,
}
# Longer streams of articles show the cost of a step, and whether exactness matters. A run with twenty tasks
# takes minutes: it shows the cost alone, with the settings of ten tasks.
LONGEST = ("plain", "replay", "replay-4", "gem-weight", "gem-weight-4", "gem-weight-4-2nd")
LONGER = (*LONGEST[:3], "agem", "gem", "igem1", "igem3", *LONGEST[3:])
OF_TEN_TASKS = {"plain": (1e-4, 0.0), "replay": (1e-3, 0.5), "gem-weight": (1e-3, 0.5)}

# With three tasks tuning chose the larger of two rates, also for GEM. It decides how old rows may be.
AT_LOWER_RATE = ("plain", "replay", "gem-weight", *(name for name in CHEAPER if name != "replay-1"))
LOWER_RATE = {"plain": (3e-4, 0.0), "replay": (1e-3, 2.0), "gem-weight": (1e-3, 2.0)}


def news(tasks: int, methods: tuple[str, ...], title: str = "", **changes: Any) -> Setting:
    """Return the setting of a stream of articles, short enough for a thousand runs."""
    options = {"tasks": tasks, "rows": 1_000, "max_length": 24, "dropout": False}
    title = title or f"AG News, {tasks} tasks"
    return Setting(title, "agnews", methods=methods, options=options, **NEWS, **changes)


STREAMS = {
    "permuted": Setting(
        "Permuted digits",
        "permuted",
        options={"tasks": 10, "rows": 500},
        **DIGITS | {"methods": (*ON_DIGITS, *CHEAPER)},
    ),
    "rotated": Setting("Rotated digits", "rotated", options={"tasks": 10, "rows": 500}, **DIGITS),
    "split": Setting(
        "Split digits", "split", options={"tasks": 5}, **DIGITS | {"rates": (0.003, 0.01, 0.03, 0.1, 0.3)}
    ),
    "mnist1d": Setting("Permuted MNIST-1D", "mnist1d", options={"tasks": 10, "rows": 1_000}, **DIGITS),
    "agnews3": news(3, tuple(METHODS)),
    "agnews3-lower-rate": news(3, AT_LOWER_RATE, title="AG News, 3 tasks, lower rate", fixed=LOWER_RATE),
    "agnews5": news(5, (*LONGER, "der", "gem-label")),
    "agnews10": news(10, LONGER),
    "agnews20": news(20, LONGEST, fixed=OF_TEN_TASKS),
}
