"""What an experiment is: every number that shapes it, and the presets that fill them in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

METHODS = ("plain", "agem", "sgem", "gem", "igem", "gem-step", "softgem", "mega1", "mega2", "replay")
CLASSES = ("World", "Sports", "Business", "Sci/Tech")


class SetupError(ValueError):
    """The experiment cannot start as it was asked for; the message says what to change."""


def setting(default: Any, group: str, text: str) -> Any:
    """Return a field that is an option of the command line, too."""
    return field(default=default, metadata={"group": group, "help": text})


@dataclass(frozen=True)
class Config:
    """All settings of an experiment, described where they stand.

    The defaults are the paper's own. It gives neither the number of rows nor the dominant share.
    """

    preset: str = "paper"
    methods: tuple[str, ...] = setting(
        ("plain", "agem", "gem", "igem", "gem-step", "replay"),
        "learning",
        f"methods to compare, with commas between: {', '.join(METHODS)}",
    )
    seeds: tuple[int, ...] = setting(
        (0, 2, 5, 7, 11),
        "learning",
        "with commas between; a seed decides the order of the experiences, the initial adapters and head, the "
        "order of the batches and what the memory keeps",
    )
    epochs: int = setting(1, "learning", "passes over each experience")
    lr: float = setting(1e-3, "learning", "learning rate of AdamW")
    batch_size: int = setting(32, "learning", "rows in a training batch")
    eval_batch_size: int = setting(50, "learning", "rows in an evaluation batch")
    margin: float = setting(0.3, "learning", "memory strength of GEM and I-GEM")
    pgd_steps: int = setting(3, "learning", "iterations of I-GEM")
    projection_interval: int = setting(1, "learning", "project every that many steps")
    on: str = setting(
        "both", "learning", "what gem-step projects: gradient, update (the applied step) or both"
    )
    metric: str = setting("adam", "learning", "distance between steps for gem-step: euclidean or adam")
    penalty: float = setting(1.0, "learning", "weight of SOFT-GEM's hinges")
    dropout: bool = setting(True, "learning", "whether the model drops out while it learns")
    per_task: int = setting(100, "learning", "rows kept of each finished experience")
    sample_size: int = setting(150, "learning", "rows drawn from all memories for A-GEM, MEGA and replay")
    experiences: int = setting(3, "stream", "number of experiences")
    rows: int = setting(6_000, "stream", "rows of an experience, 80 %% of them for training")
    dominant_share: float = setting(0.9, "stream", "share of the class that dominates an experience")
    backbone: str = setting(
        "gpt2-medium",
        "model",
        "small (pretrained here on the training text), a GPT-2 on the hub such as gpt2-medium, or a folder",
    )
    max_length: int = setting(512, "model", "tokens of an article that the model sees")
    small_layers: int = 2
    small_width: int = 128
    small_vocabulary: int = 4_000
    small_steps: int = setting(300, "model", "pretraining steps of the small GPT-2")
    device: str = setting("auto", "model", "cpu, cuda, cuda:1, mps or auto")
    eval_interval: int = setting(25, "running", "steps between two points of the accuracy curves")
    eval_rows: int = setting(400, "running", "test rows of a task behind such a point")
    probe_interval: int = setting(10, "running", "steps between two measurements of violated constraints")

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise SetupError(f"{name} must be at least 1, got {value}")
        if unknown := set(self.methods) - set(METHODS):
            raise SetupError(f"unknown methods {sorted(unknown)}; choose from {', '.join(METHODS)}")
        if min(self.seeds, default=0) < 0:
            raise SetupError(f"seeds must not be negative, got {self.seeds}")
        for name in ("seeds", "methods"):
            chosen = getattr(self, name)
            if not chosen or len(set(chosen)) < len(chosen):
                raise SetupError(f"{name} must be given, each once, got {chosen}")
        if self.experiences < 2:
            raise SetupError("experiences must be at least 2: nothing can be forgotten in one")
        if not 0 < self.dominant_share < 1:
            raise SetupError(f"dominant_share must lie between 0 and 1, got {self.dominant_share}")
        if self.on not in ("gradient", "update", "both"):
            raise SetupError(f"on must be gradient, update or both, got {self.on}")
        if self.metric not in ("euclidean", "adam"):
            raise SetupError(f"metric must be euclidean or adam, got {self.metric}")
        if self.penalty <= 0 or self.lr <= 0 or self.margin < 0:
            raise SetupError(
                "penalty and lr must be positive and margin not negative, "
                f"got {self.penalty}, {self.lr} and {self.margin}"
            )


PAPER = Config()
QUICK = replace(
    PAPER,
    preset="quick",
    seeds=(0, 2, 5),
    rows=1_600,
    backbone="small",
    max_length=48,
    eval_interval=10,
    eval_rows=160,
    probe_interval=4,
)
MINI = replace(
    QUICK,
    preset="mini",
    seeds=(0, 1),
    methods=("plain", "gem"),
    rows=60,
    batch_size=8,
    per_task=12,
    sample_size=12,
    max_length=24,
    small_layers=1,
    small_width=32,
    small_vocabulary=400,
    small_steps=8,
    eval_interval=3,
    probe_interval=2,
    device="cpu",
)
PRESETS: Mapping[str, Config] = MappingProxyType({"quick": QUICK, "paper": PAPER, "mini": MINI})
