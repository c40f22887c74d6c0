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
from itertools import product
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

from examples.common import command
from examples.common.metrics import Record, grouped, mean_std
from examples.common.results import rounded
from examples.common.tables import markdown_table, plus_minus
from examples.common.workers import origin, work
from examples.lora_agnews.backbone import GPT2_LAYERS, LORA

from . import compare, digest, plan
from .__main__ import parser
from .language import KL, LENGTH, TEXT, WIDTH, WORDS, learn, losses, texts_of
from .plan import Point
from .results import AnyRun, Results, results_of
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

    kind = "setting"
    methods = METHODS

    @property
    def key(self) -> str:
        """A unique name of the run."""
        setting = SETTINGS[self.where]
        shaping = [setting.adapters, setting.reference, setting.steps, METHODS[self.method].kind]
        return f"{self.where}-{self.name(shaping)}"

    @staticmethod
    def space(setting: str, name: str) -> tuple[Sequence[float], Sequence[float]]:
        """Return the learning rates and the knobs to try."""
        return RATES, METHODS[name].grid

    @staticmethod
    def score(record: Record) -> float:
        """Return the score: higher is better."""
        return -COLUMNS["X + Y"](record)

    @staticmethod
    def brief(result: Mapping[str, Any]) -> str:
        """Summarize a result in a few words."""
        return f"loss on X {result['loss']['x']:.3f}, on Y {result['loss']['y']:.3f}"

    def __call__(self) -> dict[str, Any]:
        """Pretrain, fine-tune, and return the losses."""
        torch.set_num_threads(1)
        setting, method = SETTINGS[self.where], METHODS[self.method]
        model, texts = copy.deepcopy(pretrained(self.seed)), texts_of(self.seed, setting.reference)
        said = KL.outputs(model, texts["reference"])
        before = losses(model, texts, said)["x"]
        if setting.adapters:
            torch.manual_seed(self.seed)
            model.gpt = get_peft_model(model.gpt, LoraConfig(**ADAPTERS))
        value = self.knob if method.knob else None
        how = (self.rate, method.kind, method.loss, value, texts["reference"])
        start = time.perf_counter()
        learn(model, texts["tune"], setting.steps, self.seed, *how)
        seconds = time.perf_counter() - start
        about = origin({"data": digest.of_values(texts_of(0)["y"].tolist())})
        return {"loss": {"before": before} | losses(model, texts, said), "seconds": seconds, "about": about}

    def record(self, result: Mapping[str, Any]) -> Record:
        """Return the record of a result."""
        return self.named(self.key) | rounded({name: result[name] for name in ("loss", "seconds")})


class GPT(nn.Module):
    """A GPT-2 of one layer that returns logits."""

    def __init__(self) -> None:
        super().__init__()
        shape: Any = {"vocab_size": WORDS + 2, "n_positions": LENGTH}
        shape |= {"n_embd": WIDTH, "n_layer": 1, "n_head": 4}
        shape |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        shape |= {"bos_token_id": None, "eos_token_id": None, "use_cache": False}
        self.gpt: nn.Module = GPT2LMHeadModel(GPT2Config(**shape))

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of each next word."""
        return self.gpt(input_ids=text).logits[..., :WORDS]


@cache
def pretrained(seed: int) -> GPT:
    """Return a model that is pretrained on X."""
    torch.manual_seed(seed)
    model = GPT()
    learn(model, texts_of(seed)["pretrain"], PRETRAINING, seed, RATE)
    return model


def chosen(setting: str, name: str, results: Results) -> Point | None:
    """Return the learning rate and knob with which a method is reported; None until they are chosen."""
    return plan.tune(Run, SETTINGS[setting].tuned or setting, name, results)[1]


def wanted(setting: str, name: str, results: Results) -> list[Run]:
    """Return the runs to report: at every knob if the setting is tuned, otherwise at the chosen knob."""
    point = chosen(setting, name, results)
    if point is None:
        return []
    knobs = [point[1]] if SETTINGS[setting].tuned else METHODS[name].grid
    return [Run(setting, name, point[0], knob, seed, "report") for knob in knobs for seed in SEEDS]


def todo(results: Results, settings: Sequence[str] = ()) -> list[Run]:
    """Return the missing runs that are known already, by seed, because each seed pretrains one model."""
    runs: list[Run] = []
    for setting, name in product(settings or SETTINGS, METHODS):
        if not SETTINGS[setting].tuned:
            runs += plan.tune(Run, setting, name, results)[0]
        runs += wanted(setting, name, results)
    return sorted(results.missing(runs), key=lambda run: run.seed)


def page(results: Results) -> str:
    """Return a table for each complete setting; an empty text if there is none."""
    found = {setting: reported(setting, results) for setting in SETTINGS}
    parts = [table(setting, records, results) for setting, records in found.items() if records]
    return "\n\n".join([CAPTION, *parts]) + "\n" if parts else ""


def reported(setting: str, results: Results) -> list[Record]:
    """Return the reported runs of a setting; none unless all are finished."""
    runs = [wanted(setting, name, results) for name in METHODS]
    keys = [run.key for found in runs for run in found]
    complete = all(runs) and all(key in results for key in keys)
    return [results.records[key] for key in keys] if complete else []


def table(setting: str, records: Sequence[Record], results: Results) -> str:
    """Return the table of losses by method and knob, with X + Y minus that of replay of KL."""
    groups = {
        (name, knob): runs
        for name, found in grouped("method", records).items()
        for knob, runs in grouped("knob", found).items()
    }
    point = chosen(setting, "kl", results)
    base = groups["kl", point[1] if point else None]
    rows = []
    for (name, knob), runs in groups.items():
        method, found = METHODS[name], compare.one_setting(runs)
        selected = chosen(setting, name, results)
        star = " (chosen)" if method.knob and selected and knob == selected[1] else ""
        what = f"{method.title}, {method.knob} {knob:g}{star}" if method.knob else method.title
        cells = [plus_minus(mean_std(map(column, found)), 1, 3) for column in COLUMNS.values()]
        difference = compare.paired(found, base, COLUMNS["X + Y"]) if runs is not base else None
        above = f"{difference.mean:+.3f} ± {difference.half:.3f}" if difference else "-"
        seconds = plus_minus(mean_std(run["seconds"] for run in found), 1, 1)
        rows.append([what, f"{found[0]['lr']:g}", *cells, above, seconds])
    head = ["Method", "Learning rate", *COLUMNS, "X + Y above replay of KL", "Seconds"]
    return f"**{SETTINGS[setting].title}**, {len(base)} seeds.\n\n{markdown_table(head, rows)}"


@command.finishing
def main(arguments: Sequence[str] | None, console: Console) -> None:
    """Execute the missing runs, then write the tables."""
    given = parser("python -m examples.study.skill", __doc__).parse_args(arguments)
    command.check_known("setting", given.names, SETTINGS)
    results = results_of("skill", given.out)
    while not given.report and (waiting := todo(results, given.names)):
        console.print(f"[bold]skill[/]  {len(waiting)} runs")
        work(waiting, results.keep, given.jobs, console)
    text = page(results)
    if not text:
        raise command.SetupError(f"{results.path} has no setting with all its runs")
    (given.out / "skill.md").write_text(text, encoding="utf-8")
    console.print(f"[bold]written[/]   {given.out / 'skill.md'}")


if __name__ == "__main__":
    sys.exit(main())
