"""The settings of an experiment, and its presets."""

import math
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..common.command import SetupError, check_known

METHODS = ("plain", "agem", "gem", "igem", "gem-step", "replay", "gem-few", "replay-few")
CLASSES = ("World", "Sports", "Business", "Sci/Tech")


def setting(default: Any, text: str) -> Any:
    """Return a field that is also an option of the command line."""
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Config:
    """All settings. The defaults are the paper's; it does not state `rows` and `dominant_share`."""

    preset: str = "paper"
    methods: tuple[str, ...] = setting(
        ("plain", "agem", "gem", "igem", "gem-step", "replay"),
        f"separated by commas, or all: {', '.join(METHODS)}",
    )
    seeds: tuple[int, ...] = setting(
        (0, 2, 5, 7, 11), "seeds of the order of experiences and batches, adapters, head and memory"
    )
    epochs: int = setting(1, "passes over each experience")
    lr: float = setting(1e-3, "learning rate of AdamW")
    batch_size: int = setting(32, "rows in a training batch")
    eval_batch_size: int = setting(50, "rows in an evaluation batch")
    microbatch: int = setting(32, "most rows in one forward pass of training; larger batches are split")
    margin: float = setting(0.3, "memory strength of GEM and I-GEM")
    pgd_steps: int = setting(3, "iterations of I-GEM")
    dropout: bool = setting(True, "whether the model has dropout during training")
    per_task: int = setting(100, "rows kept of each finished experience")
    sample_size: int = setting(150, "rows drawn from all memories for A-GEM and replay")
    few: int = setting(16, "rows of each experience that gem-few and replay-few take at a step")
    weight: float = setting(2.0, "weight of each past experience for gem-few (margin) and replay-few")
    experiences: int = setting(3, "number of experiences")
    rows: int = setting(6_000, "rows of an experience, four fifths of them for training")
    dominant_share: float = setting(0.9, "share of the class that dominates an experience")
    backbone: str = setting(
        "gpt2-medium", "small (pretrained here), smollm2 (from PyPI), a model on the hub, or a folder"
    )
    last_layers: int = setting(
        1_000,
        "most layers that are trained; a model like Llama's runs the others once in each job, which then "
        "holds their outputs: choose a small --max-length",
    )
    max_length: int = setting(512, "tokens of an article that the model sees")
    small_layers: int = setting(2, "layers of the small GPT-2")
    small_width: int = setting(128, "width of the small GPT-2, a multiple of 32 if above 32")
    small_vocabulary: int = 4_000
    small_steps: int = setting(300, "pretraining steps of the small GPT-2")
    device: str = setting("auto", "cpu, cuda, cuda:1, mps or auto")
    eval_interval: int = setting(25, "steps between two points of the accuracy curves")
    eval_rows: int = setting(400, "test rows of a task for each point of the curves")
    probe_interval: int = setting(10, "steps between two measurements of violated constraints")

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise SetupError(f"{name} must be at least 1, got {value}")
            if isinstance(value, tuple) and (not value or len(set(value)) < len(value)):
                raise SetupError(f"{name} must be given, each once, got {value}")
        check_known("methods", self.methods, METHODS)
        for name, holds, rule in (
            ("seeds", min(self.seeds) >= 0, "not be negative"),
            ("experiences", self.experiences > 1, "be at least 2: nothing can be forgotten in one"),
            ("dominant_share", 0 < self.dominant_share < 1, "lie between 0 and 1"),
            ("lr", 0 < self.lr < math.inf, "be positive and finite"),
            ("margin", 0 <= self.margin < math.inf, "be finite, and not negative"),
            ("small_width", self.small_width <= 32 or self.small_width % 32 == 0, "be a multiple of 32"),
            (
                "last_layers",
                self.backbone != "small" or self.last_layers >= self.small_layers,
                f"be at least {self.small_layers} for backbone small: all its layers are trained",
            ),
            ("weight", 0 <= self.weight < math.inf, "be finite, and not negative"),
        ):
            if not holds:
                raise SetupError(f"{name} must {rule}, got {getattr(self, name)}")


PAPER = Config()
QUICK = replace(PAPER, preset="quick", seeds=(0, 2), rows=1_600, backbone="small", max_length=32)
QUICK = replace(QUICK, microbatch=1_000, eval_interval=20, eval_rows=120, probe_interval=20)
# With 300 pretraining steps methods end as with 200; with 100 GEM ends at 36 % with seed 2, instead of 61 %.
QUICK = replace(QUICK, small_steps=200)
# Without the two that take longest and end like others: GEM on the step, and replay of 150 examples.
QUICK = replace(QUICK, methods=(*PAPER.methods[:-2], "gem-few", "replay-few"))
MINI = replace(
    QUICK, preset="mini", seeds=(0, 1), methods=("plain", "gem"), rows=60, batch_size=8, device="cpu"
)
MINI = replace(MINI, per_task=12, sample_size=12, max_length=24, eval_interval=3, probe_interval=2)
MINI = replace(MINI, small_layers=1, small_width=32, small_vocabulary=400, small_steps=8)
PRESETS = {config.preset: config for config in (QUICK, PAPER, MINI)}
