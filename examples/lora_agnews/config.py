"""What an experiment is: every number that shapes it, and the presets that fill them in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

METHODS = ("plain", "agem", "sgem", "gem", "igem", "gem-step", "softgem", "mega1", "mega2", "replay")
CLASSES = ("World", "Sports", "Business", "Sci/Tech")


class SetupError(ValueError):
    """The experiment cannot start as it was asked for; the message says what to change."""


@dataclass(frozen=True)
class Config:
    """All settings of an experiment. The defaults are the paper's own, or say so where it gives none.

    Parameters
    ----------
    seeds, methods
        One run for each pair. A seed decides the order of the experiences, the initial adapters and head, the
        order of the batches, and what the memory keeps.
    experiences, rows, dominant_share
        The stream: how many experiences, articles in each (train and test together), and the share of an
        experience's dominant class. The paper states neither of the last two.
    epochs, batch_size, eval_batch_size, lr
        The training loop; the optimizer is AdamW.
    per_task, sample_size
        Memory: rows kept of each finished experience, and rows drawn from all of them for A-GEM's reference
        gradient and for replay.
    margin, pgd_steps, projection_interval
        Memory strength of GEM and I-GEM, I-GEM's budget, and how many steps lie between two projections.
    on, metric
        What ``gem-step`` projects, the step that AdamW applies (``update``) or first the gradient
        (``both``), and in which distance: see `gemproj.torch.GradientProjector`.
    penalty
        What SOFT-GEM's hinges weigh.
    dropout
        Whether the model drops out while it learns. Without it, the number of processes does not matter.
    backbone, max_length
        A model name on the hub, a local folder, or ``small`` (pretrained here on the stream's training text).
    small_layers, small_width, small_vocabulary, small_steps
        Shape of the ``small`` backbone, and its language-modelling steps.
    eval_interval, eval_rows, probe_interval
        Steps between two points of the accuracy curves, test rows of each task behind such a point (the
        accuracy matrix always uses all), and steps between two measurements of the guarantee.
    device
        ``cpu``, ``cuda``, ``cuda:1``, ``mps``, or ``auto``.
    """

    preset: str = "paper"
    seeds: tuple[int, ...] = (0, 2, 5, 7, 11)
    methods: tuple[str, ...] = ("plain", "agem", "gem", "igem", "gem-step", "replay")
    experiences: int = 3
    rows: int = 6_000
    dominant_share: float = 0.9
    epochs: int = 1
    batch_size: int = 32
    eval_batch_size: int = 50
    lr: float = 1e-3
    per_task: int = 100
    sample_size: int = 150
    margin: float = 0.3
    pgd_steps: int = 3
    projection_interval: int = 1
    on: str = "both"
    metric: str = "adam"
    penalty: float = 1.0
    dropout: bool = True
    backbone: str = "gpt2-medium"
    max_length: int = 512
    small_layers: int = 2
    small_width: int = 128
    small_vocabulary: int = 4_000
    small_steps: int = 300
    eval_interval: int = 25
    eval_rows: int = 400
    probe_interval: int = 10
    device: str = "auto"

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
        if self.on not in ("gradient", "update", "both") or self.metric not in ("euclidean", "adam"):
            raise SetupError(
                "on must be gradient, update or both and metric euclidean or adam, "
                f"got {self.on} and {self.metric}"
            )
        if self.penalty <= 0:
            raise SetupError(f"penalty must be positive, got {self.penalty}")
        if self.lr <= 0 or self.margin < 0:
            raise SetupError(f"lr must be positive and margin not negative, got {self.lr} and {self.margin}")


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


def configure(preset: str, overrides: Mapping[str, Any]) -> Config:
    """Return a preset with every override that is not None applied.

    Raises
    ------
    SetupError
        For an unknown preset, or a value that a `Config` refuses.
    """
    if preset not in PRESETS:
        raise SetupError(f"unknown preset {preset!r}; choose from {', '.join(PRESETS)}")
    return replace(PRESETS[preset], **{key: value for key, value in overrides.items() if value is not None})
