"""One run: a method teaches the model a skill, and what it says elsewhere is measured."""

import copy
import itertools
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from gemproj.torch import Keeper, Promise
from gemproj.torch.data import PerExample, moved
from gemproj.torch.losses import Distillation, model_logits

from ..common.memory import seed_draws
from ..common.metrics import spread
from ..common.origin import origin
from ..common.results import rounded
from .model import Example, adapted, answer_losses, collate, load, upper
from .prepared import FORMS, OUTPUTS, Form, Prepared, read

# By kind: the method, and what its value means.
KINDS = {
    "before": "Before",
    "plain": "Fine-tuning",
    "average": "Weights averaged with those before",
    "intruder": "PEFT's reduce_intruder_dimension",
    "osf": "PEFT's OSF",
    "text": "Replayed texts, weight",
    "outputs": "Replayed outputs (KL), weight",
    "own": "KL on the new inputs, weight",
    "promise": "Promise, tolerance",
    "auto": 'Promise, look="auto", tolerance',
    "trainer": "Promise in the Trainer, tolerance",
    "promise-own": "Promise about the new inputs, tolerance",
}
WITHOUT_VALUE = ("before", "plain", "intruder", "osf")


def method(kind: str, value: float, kept: int = 0, sets: int = 1) -> str:
    """Return the name of a method with its value, and what it does not do by default."""
    name = KINDS[kind] if kind in WITHOUT_VALUE else f"{KINDS[kind]} {value:g}"
    return name + (f", {kept} texts" if kept else "") + (f", {sets} sets" if sets > 1 else "")


@dataclass(frozen=True)
class Run:
    """One method, with its value, in one skill with one seed."""

    form: str
    model: str
    prepared: Path
    skill: str
    kind: str
    value: float
    rate: float
    adapters: str
    seed: int
    kept: int = 0  # texts that the method may use; 0 for all
    sets: int = 1  # in which they are kept, each with a promise
    device: str = "cpu"
    brief: ClassVar[str] = "new {new:.3f}, divergence held out {held_out:.4f}"

    @property
    def title(self) -> str:
        """Name on the screen."""
        name = method(self.kind, self.value, self.kept, self.sets)
        return f"{self.skill}, {name}, rate {self.rate:g}, {self.adapters}, seed {self.seed}"

    @property
    def key(self) -> str:
        """A unique name of the run."""
        named = (self.form, self.skill, self.kind, f"{self.value:g}", f"{self.rate:g}", self.adapters)
        texts = (f"-kept{self.kept}" if self.kept else "") + (f"-sets{self.sets}" if self.sets > 1 else "")
        return "-".join(named) + f"{texts}-seed{self.seed}"

    def record(self, result: dict[str, Any]) -> dict[str, Any]:
        """Return the record of a result."""
        named = {"key": self.key} | asdict(self) | {"form": asdict(FORMS[self.form])}
        of_a_machine = "prepared", "model", "about"
        return rounded({name: part for name, part in (named | result).items() if name not in of_a_machine})

    def fresh(self) -> Any:
        """Return a copy of the model before training."""
        return copy.deepcopy(_original(self.model, FORMS[self.form].layers, self.device))

    def __call__(self) -> dict[str, Any]:
        """Train, and return the measurements."""
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("high")
        form, data = FORMS[self.form], read(self.prepared)
        torch.manual_seed(self.seed)
        model = adapted(self.fresh(), self.adapters)
        found = {} if self.kind == "before" else learn(model, self, form, data)
        if self.kind == "average":  # between the weights before, at 0, and those after training, at 1
            for module in model.modules():
                if isinstance(module, LoraLayer):
                    module.scale_layer(self.value)
        if self.kind == "intruder":
            from peft.tuners.lora.intruders import reduce_intruder_dimension  # in new versions only

            reduce_intruder_dimension(model, logging_sink=None)
        about = origin("keep_chat", texts=self.prepared.stem)  # of this model
        return found | measured(model, self.fresh(), data, self.skill) | {"about": about}


@lru_cache(maxsize=1)
def _original(model: str, layers: int, device: str) -> Any:
    found, _ = load(model, device)
    return upper(found, layers) if layers else found


def learn(model: Any, run: Run, form: Form, data: Prepared) -> dict[str, Any]:
    """Train by the method; return losses, times and the report of a promise."""
    if run.kind == "trainer":
        return through_trainer(model, run, form, data)
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=run.rate, weight_decay=0.0)
    plan = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / (0.1 * form.steps), 1 - step / form.steps)
    )
    examples = data.train[run.skill]
    batches = drawn(examples, form.batch, run.seed, shuffled=run.skill != "sequence")
    start, losses = spent(run.device), []
    keeper, added = None, None
    kept = data.kept[: run.kept or None]
    if run.kind in ("promise", "auto", "promise-own"):
        promise = Promise(OUTPUTS, tolerance=run.value, examples=form.drawn)
        keeper = Keeper(model, optimizer, promise, look="auto" if run.kind == "auto" else 1)
        seed_draws(keeper, run.seed)
        held = examples if run.kind == "promise-own" else kept
        for k in range(run.sets):
            keeper.keep(held[k :: run.sets], name=f"kept {k}", collate=collate)
    elif run.kind in ("text", "outputs", "own"):
        added = penalty(model, run, form, kept)
    stored = spent(run.device) - start
    model.train()
    for _ in range(form.steps):
        optimizer.zero_grad()
        batch = together(next(batches), run.device)
        loss = answer_loss(model, batch)
        losses.append(float(loss.detach()))
        if added is not None:
            loss = loss + run.value * added(batch)
        loss.backward()
        if keeper is None:
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
        else:
            keeper.clip_grad_norm_(1.0)
        optimizer.step()
        plan.step()
    step = (spent(run.device) - start - stored) / form.steps
    found: dict[str, Any] = {"losses": losses, "step": step, "store": stored}
    if keeper is not None:
        found |= reported(keeper.report())
        keeper.remove()
    return found


def spent(device: str) -> float:
    """Return the seconds until now: of a CPU its own, which other work does not lengthen, or of the clock."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def reported(report: Mapping[Any, Any]) -> dict[str, float]:
    """Return the numbers of a keeper's report: of the worst set, and the mean share of looks."""
    lines = report.values()
    names = {"last": "now", "worst": "worst", "above": "broke"}
    found = {name: max(getattr(line, of) for line in lines) for name, of in names.items()}
    return found | {"looks": mean(line.looks / line.steps for line in lines)}


def through_trainer(model: Any, run: Run, form: Form, data: Prepared) -> dict[str, Any]:
    """Train in the Trainer with a callback; its verdict is about a fifth of the kept texts, held out."""
    from transformers import Trainer, TrainingArguments

    from gemproj.integrations.transformers import KeeperCallback

    promise = Promise(OUTPUTS, tolerance=run.value, examples=form.drawn)
    keeper = KeeperCallback(data.kept[: run.kept or None], promise, name="kept", hold_out=0.2)
    start = spent(run.device)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=form.steps,
            per_device_train_batch_size=form.batch,
            learning_rate=run.rate,
            warmup_steps=form.steps // 10,
            seed=run.seed,
            use_cpu=run.device == "cpu",
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            remove_unused_columns=False,
        )
        examples: Any = data.train[run.skill]
        Trainer(model, arguments, train_dataset=examples, data_collator=collate, callbacks=[keeper]).train()
    step = (spent(run.device) - start) / form.steps  # with what is stored, and the verdict
    report = keeper.report()
    held_out = report["kept"].held_out
    assert held_out is not None
    verdict = dict(zip(("verdict", "low", "high"), held_out, strict=True))
    return {"step": step} | reported(report) | verdict


def answer_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean loss of all labelled tokens."""
    values, counts = answer_losses(model, batch)
    return values.sum() / counts.sum()


def penalty(
    model: Any, run: Run, form: Form, kept: Sequence[Example]
) -> Callable[[dict[str, Tensor]], Tensor]:
    """Return what a method adds to the loss of a batch: of kept texts, of outputs, or on the new inputs."""
    model.eval()
    if run.kind == "own":
        before = run.fresh()
        return lambda batch: OUTPUTS(model, batch, OUTPUTS.outputs(before, batch)).mean()
    if run.kind == "text":
        batches = drawn(kept, form.drawn, run.seed)
        return lambda _: answer_loss(model, together(next(batches), run.device))
    stored = [(one, OUTPUTS.outputs(model, together([one], run.device))[0]) for one in kept]
    pairs = drawn(stored, form.drawn, run.seed)

    def outputs(_: dict[str, Tensor]) -> Tensor:
        examples, said = zip(*next(pairs), strict=True)
        return OUTPUTS(model, together(examples, run.device), PerExample(said)).mean()

    return outputs


def drawn(examples: Sequence[Any], size: int, seed: int, shuffled: bool = True) -> Iterator[list[Any]]:
    """Yield examples, `size` at a time; nothing is drawn again before all have been drawn."""
    draw, n = random.Random(seed), len(examples)
    passes = (draw.sample(examples, n) if shuffled else examples for _ in itertools.count())
    one_by_one = itertools.chain.from_iterable(passes)
    while True:
        yield list(itertools.islice(one_by_one, size))


def together(examples: Sequence[Example], device: str) -> dict[str, Tensor]:
    """Return a batch of examples on a device."""
    return moved(collate(examples), device)


def in_batches(examples: Sequence[Example], device: str, size: int = 16) -> Iterator[dict[str, Tensor]]:
    """Yield all examples in their order."""
    for start in range(0, len(examples), size):
        yield together(examples[start : start + size], device)


@torch.inference_mode()
def measured(model: Any, before: Any, data: Prepared, skill: str) -> dict[str, Any]:
    """Return loss and accuracy of the skill, divergence on unseen texts over all words, and right answers."""
    model.eval()
    device = model.device
    total = count = right = 0.0
    tests, first = data.test[skill], torch.tensor(data.labels.get(skill, []), device=device)
    for batch in in_batches(tests, device):
        values, counts = answer_losses(model, batch)
        total, count = total + float(values.sum()), count + int(counts.sum())
        if len(first):
            right += _right(model, batch, first)
    apart, divergence = [], Distillation(top=before.config.vocab_size, dtype=torch.float32)
    before.eval()
    for batch in in_batches(data.apart, device, 4):  # what is compared is large
        apart += divergence(model, batch, divergence.outputs(before, batch)).tolist()
    drift = spread(apart)
    found: dict[str, Any] = {"new": total / count, "held_out": drift.mean, "half": drift.half}
    if len(first):
        found["accuracy"] = right / len(tests)
    return found | {"abilities": abilities(model, data)}


def _right(model: Any, batch: dict[str, Tensor], first: Tensor) -> int:
    """Count the examples whose answer's first token is the likeliest of the possible ones."""
    at = (batch["labels"] != -100).int().argmax(1)
    said = model_logits(model, batch)[torch.arange(len(at)), at - 1]
    return int((first[said[:, first].argmax(1)] == batch["labels"][torch.arange(len(at)), at]).sum())


@torch.inference_mode()
def abilities(model: Any, data: Prepared) -> dict[str, float]:
    """Return, by task, the share of questions whose right answer is the likeliest, per token."""
    found: dict[str, list[bool]] = {}
    for task, answers in data.questions:
        values, counts = answer_losses(model, together(answers, model.device))
        found.setdefault(task, []).append(int((values.sum(1) / counts.sum(1)).argmin()) == 0)
    return {task: mean(answers) for task, answers in found.items()}
