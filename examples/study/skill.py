"""A language model that keeps a skill: ``python -m examples.study.skill``.

A GPT-2 of one layer is pretrained on the language X and fine-tuned on Y; a few stored sequences of X are the
reference. Fine-tuning takes 150 steps or 600, on all weights or on LoRA adapters, with 48 references or 12.
Rates are chosen on the tuning seeds at each method's middle knob, by the sum of the losses on X and on Y, and
then knobs at the best rate.
"""

import copy
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console

from examples.common import command
from examples.common.metrics import Record, grouped, paired
from examples.common.origin import digest, origin
from examples.common.results import Results, rounded
from examples.common.tables import Cell, mean_of, table
from examples.lora_agnews.backbone import GPT2_LAYERS, LORA

from .__main__ import parser
from .language import KL, TEXT, learn, losses, network, texts_of
from .runs import AnyRun, Point, results_of
from .settings import SEEDS

CAPTION = (
    "Test losses in nats, mean ± sample standard deviation over the seeds; none can be below 1.208, the "
    "entropy of both languages. Reference: the loss on the stored texts. KL: the divergence from what the "
    "model said about them before. Chosen: the knob with the lowest X + Y on the tuning seeds. X + Y above "
    "replay of KL at its chosen weight: paired over the seeds, 95 % interval of Student's t. Seconds of "
    "fine-tuning on one core, with other work on the machine."
)
PRETRAINING, RATE = 600, 3e-2  # steps, learning rate
ADAPTERS: dict[str, Any] = LORA | {"target_modules": GPT2_LAYERS, "fan_in_fan_out": True}
ADAPTERS |= {"modules_to_save": None, "lora_dropout": 0.0}
RATES = (3e-3, 1e-2, 3e-2, 1e-1)


@dataclass(frozen=True)
class Method:
    """How X is kept: a kind and a loss of `language.learn`, with three values of its weight or tolerance."""

    title: str
    kind: str
    loss: Any = None
    knob: str = ""
    grid: tuple[float, ...] = (0.0,)
    like: ClassVar[str] = ""  # no other method's setting is taken


@dataclass(frozen=True)
class Setting:
    """The fine-tuned weights, the number of references, and the number of steps.

    `tuned` names the setting whose learning rates and knobs are taken; if empty, the setting has its own.
    """

    title: str
    adapters: bool = False
    reference: int = 48
    steps: int = 150
    tuned: str = ""
    fixed: ClassVar[Mapping[str, Point]] = {}
    seeds: ClassVar[Sequence[int]] = SEEDS


METHODS = {
    "plain": Method("Fine-tuning", "plain"),
    "text": Method("Replay of text", "replay", TEXT, "weight", (0.1, 0.3, 1.0)),
    "kl": Method("Replay of KL", "replay", KL, "weight", (1.0, 3.0, 10.0)),
    "gem": Method("GEM on text", "GEM", TEXT),
    "text-held": Method("Text held", "held", TEXT, "tolerance", (0.0, 0.03, 0.1)),
    "kl-held": Method("KL held", "held", KL, "tolerance", (0.0, 0.03, 0.1)),
}
SETTINGS = {
    "full": Setting("All weights, 48 references, 150 steps"),
    "lora": Setting("LoRA, 48 references, 150 steps", adapters=True),
    "few": Setting("All weights, 12 references, 150 steps", reference=12, tuned="full"),
    "long": Setting("All weights, 48 references, 600 steps", steps=600, tuned="full"),
}
COLUMNS: dict[str, Callable[[Record], float]] = {
    "X": lambda run: run["loss"]["x"],
    "Y": lambda run: run["loss"]["y"],
    "X + Y": lambda run: run["loss"]["x"] + run["loss"]["y"],
    "Reference": lambda run: run["loss"]["reference"],
    "KL of reference": lambda run: run["loss"]["kl"],
}


class Run(AnyRun):
    """One method in one setting."""

    kind, places, methods, every_knob = "setting", SETTINGS, METHODS, True
    brief = "loss on X {loss[x]:.3f}, on Y {loss[y]:.3f}"
    space = staticmethod(lambda setting, name: (RATES, METHODS[name].grid))
    score = staticmethod(lambda record: -COLUMNS["X + Y"](record))

    @property
    def key(self) -> str:
        """A unique name of the run."""
        setting = SETTINGS[self.where]
        shaping = [setting.adapters, setting.reference, setting.steps, METHODS[self.method].kind]
        return f"{self.where}-{self.name(shaping)}"

    def __call__(self) -> dict[str, Any]:
        """Pretrain, fine-tune, and return the losses."""
        torch.set_num_threads(1)
        setting, method = SETTINGS[self.where], METHODS[self.method]
        model, texts = copy.deepcopy(pretrained(self.seed)), texts_of(self.seed, setting.reference)
        said = KL.outputs(model, texts["reference"])
        before = losses(model, texts, said)["x"]
        if setting.adapters:
            torch.manual_seed(self.seed)
            model = get_peft_model(model, LoraConfig(**ADAPTERS))
        value = self.knob if method.knob else None
        how = (self.rate, method.kind, method.loss, value, texts["reference"])
        start = time.perf_counter()
        learn(model, texts["tune"], setting.steps, self.seed, *how)
        seconds = time.perf_counter() - start
        about = origin("study", "lora_agnews", data=digest(texts_of(0)["y"].tolist()))
        return {"loss": {"before": before} | losses(model, texts, said), "seconds": seconds, "about": about}

    def record(self, result: Mapping[str, Any]) -> Record:
        """Return the record of a result."""
        return self.named() | rounded({name: result[name] for name in ("loss", "seconds")})


@cache
def pretrained(seed: int) -> Any:
    """Return a model that is pretrained on X."""
    torch.manual_seed(seed)
    model = network()
    learn(model, texts_of(seed)["pretrain"], PRETRAINING, seed, RATE)
    return model


def todo(results: Results, settings: Sequence[str] = ()) -> list[Run]:
    """Return the missing runs that are known already, by seed, because each seed pretrains one model."""
    runs = (run for setting in settings or SETTINGS for run in Run.todo(setting, METHODS, results))
    return sorted(results.missing(runs), key=lambda run: run.seed)


def page(results: Results) -> str:
    """Return a table for each setting whose runs are all finished; an empty text if there is none."""
    parts = []
    for setting in SETTINGS:
        runs = [Run.wanted(setting, name, results) for name in METHODS]
        keys = [run.key for found in runs for run in found]
        if all(runs) and all(key in results for key in keys):
            parts.append(losses_of(setting, [results.records[key] for key in keys], results))
    return "\n\n".join([CAPTION, *parts]) + "\n" if parts else ""


def losses_of(setting: str, records: Sequence[Record], results: Results) -> str:
    """Return the table of losses by method and knob, with X + Y minus that of replay of KL."""
    points = {name: Run.chosen(setting, name, results) or (0.0, 0.0) for name in METHODS}
    groups = grouped(lambda run: (run["method"], run["knob"]), records)
    base = groups["kl", points["kl"][1]]

    def above(found: Sequence[Record]) -> str:
        difference = paired(found, base, COLUMNS["X + Y"]) if found is not base else None
        return f"{difference.mean:+.3f} ± {difference.half:.3f}" if difference else "-"

    rows = []
    for (name, knob), found in groups.items():
        method, star = METHODS[name], " (chosen)" if knob == points[name][1] else ""
        what = f"{method.title}, {method.knob} {knob:g}{star}" if method.knob else method.title
        rows.append((what, found))
    columns: dict[str, Cell] = {"Learning rate": lambda found: f"{found[0]['lr']:g}"}
    columns |= {head: mean_of(measure, 1, 3) for head, measure in COLUMNS.items()}
    columns |= {"X + Y above replay of KL": above, "Seconds": mean_of(lambda run: run["seconds"], 1, 1)}
    return f"**{SETTINGS[setting].title}**, {len(base)} seeds.\n\n{table(rows, columns)}"


@command.finishing
def main(arguments: Sequence[str] | None, console: Console) -> list[Path]:
    """Execute the missing runs, then write the tables."""
    given = parser("python -m examples.study.skill", __doc__).parse_args(arguments)
    command.check_known("setting", given.names, SETTINGS)
    results = results_of("skill", given.out)
    while not given.report and (waiting := todo(results, given.names)):
        results.complete("skill", waiting, given.jobs, console)
    text = page(results)
    if not text:
        raise command.SetupError(f"{results.path} has no setting with all its runs")
    (given.out / "skill.md").write_text(text, encoding="utf-8")
    return [given.out / "skill.md"]


if __name__ == "__main__":
    sys.exit(main())
