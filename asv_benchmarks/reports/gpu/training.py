"""Part 3: a training step of GPT-2 medium with LoRA, and the cost of keeping past tasks."""

import sys
import time
from collections import defaultdict
from functools import partial
from itertools import product
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from asv_benchmarks.reports.gpu.device import DEVICE
from asv_benchmarks.reports.gpu.model import Classifier, Shape
from asv_benchmarks.reports.gpu.printing import Running, Targets, say
from gemproj.torch import Keeper, Promise

SHAPE = Shape()
TEXTS, TOKENS, TASKS, STORED = 32, 128, (3, 10, 20), 32
WARM, ROUNDS = 3, 5  # the first steps of a way are slower
PRECISIONS = ("bfloat16", "TF32", "float32")  # by autocast; of matrix products; neither
STAGES = ["batch", "constraint gradients", "projection", "optimizer", "in all"]
HEAD = ["", *STAGES, "plain steps"]
# Of the optimality conditions, free of scale.
BOUND = 1e-6
# Targets with 16 texts of each of 3 tasks and shared passes: share of a step, and time in plain steps.
MOST_PROJECTION, MOST_STEPS, JUDGED = 0.01, 1.6, "GEM, 16 texts a task"

Batch = dict[str, torch.Tensor]
# By name: texts of each past task in the batch, and texts of a row of G; None: no projection.
WAYS: dict[str, tuple[int, int | None]] = {
    "plain": (0, None),
    "replay, 16 texts a task": (16, None),
    "replay, 4 texts a task": (4, None),
    f"A-GEM, {TEXTS} texts": (0, TEXTS),
    JUDGED: (0, 16),
    f"{JUDGED}, a pass each": (0, 16),
    "GEM, 4 texts a task": (0, 4),
    "GEM, 4 texts a task, a pass each": (0, 4),
}


def draw(n: int) -> Batch:
    """Draw random texts with random labels."""
    tokens = torch.randint(SHAPE.words, (n, TOKENS), device=DEVICE)
    return {"tokens": tokens, "labels": torch.randint(SHAPE.classes, (n,), device=DEVICE)}


def loss(half: bool, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss of each text, with or without autocast to bfloat16."""
    with torch.autocast(DEVICE.type, torch.bfloat16, enabled=half):
        logits = model(batch["tokens"])
    return cross_entropy(logits.float(), batch["labels"], reduction="none")


class Loop:
    """A model, an optimizer and a keeper; `wrong` counts projections that were not optimal."""

    def __init__(self) -> None:
        with DEVICE:
            self.model, self.wrong = Classifier(SHAPE), 0
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4)
        self.keeper: Keeper | None = None
        self.times, self.stage, self.since = defaultdict[str, float](float), "", 0.0
        # Before the hook of a keeper, as hooks run in order.
        self.optimizer.register_step_post_hook(lambda *_: self.turn(STAGES[2 if self.keeper else 3]))

    def turn(self, stage: str) -> None:
        """Synchronise the device, and begin to time a stage."""
        torch.cuda.synchronize()
        now = time.perf_counter()
        if self.stage:
            self.times[self.stage] += 1e3 * (now - self.since)
        self.stage, self.since = stage, now

    def attach(self, name: str, stored: list[Batch], half: bool) -> None:
        """Keep the stored texts of each task, or of all tasks together, in one of the ways."""
        promise = Promise(partial(loss, half), examples=WAYS[name][1])
        options: dict[str, Any] = {"method": "agem"} if name.startswith("A-GEM") else {}
        if "each" in name:
            options["microbatch"] = WAYS[name][1]  # no room for a second row
        keeper = self.keeper = Keeper(self.model, self.optimizer, promise, on="gradient", **options)
        for k, batch in enumerate(stored):
            keeper.keep([batch], name="past" if "method" in options else k)
        rows: Any = keeper.rows
        fill = rows.fill

        def timed(*given: Any, **named: Any) -> None:
            self.turn(STAGES[1])
            fill(*given, **named)
            self.turn(STAGES[2])

        rows.fill = timed
        self.hook = self.optimizer.register_step_pre_hook(lambda *_: self.turn(STAGES[3]))

    def detach(self) -> None:
        """Detach the keeper."""
        if self.keeper:
            self.keeper.remove()
            self.hook.remove()
            self.keeper = None

    def step(self, half: bool, past: list[Batch]) -> dict[str, float]:
        """Make a step, also on past texts; return milliseconds by stage."""
        batch = draw(TEXTS)
        batch = {name: torch.cat([batch[name], *(one[name] for one in past)]) for name in batch}
        self.optimizer.zero_grad()
        self.times.clear()
        self.turn(STAGES[0])
        loss(half, self.model, batch).mean().backward()
        self.turn(STAGES[2 if self.keeper else 3])
        self.optimizer.step()
        self.turn("")
        if self.keeper:
            assert self.keeper.last
            assert self.keeper.last.solution
            self.wrong += not float(self.keeper.last.solution.kkt_residual()) < BOUND
        return self.times | {STAGES[4]: sum(self.times.values())}

    def tabulate(self, precision: str, stored: list[Batch]) -> dict[str, dict[str, float]]:
        """Print a table of all ways, and return the least of each."""
        torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "TF32" else "ieee"
        title, half = f"{precision}, {len(stored)} past tasks", precision == "bfloat16"
        table, found = Running(f"{title}; milliseconds, least of {ROUNDS} steps", HEAD), {}
        for name, (replayed, examples) in WAYS.items():
            past = [{key: part[:replayed] for key, part in batch.items()} for batch in stored]
            try:
                if examples:
                    self.attach(name, stored, half)
                steps = [self.step(half, past) for _ in range(WARM + ROUNDS)][WARM:]
                training = self.keeper and self.keeper._training
                reason = training and training.joint.reason
            except torch.cuda.OutOfMemoryError:
                table.row(name, *[""] * len(STAGES), "out of memory")
                self.stage = ""
                continue
            finally:
                self.detach()
            found[name] = {stage: min(step[stage] for step in steps) for stage in steps[0]}
            cells = [f"{found[name][stage]:.2f}" if stage in found[name] else "" for stage in STAGES]
            plain = found["plain"][STAGES[4]]
            table.row(name, *cells, f"{found[name][STAGES[4]] / plain:.2f}")
            if reason and "each" not in name:
                print(f"{title}, {name}: {reason}", file=sys.stderr)
        return found


def main(seconds: float) -> int:
    """Print a table for each precision and number of past tasks; return 1 if a projection was not optimal."""
    end, judged = time.monotonic() + seconds, {}
    torch.manual_seed(20171208)
    loop = Loop()
    weights = sum(p.numel() for p in loop.parameters)
    say(f"{SHAPE}: {weights:,} trained weights; {TEXTS} texts of {TOKENS} tokens.")
    for tasks, precision in product(TASKS, PRECISIONS):
        start = time.monotonic()
        found = loop.tabulate(precision, [draw(STORED) for _ in range(tasks)])
        if tasks == TASKS[0] and JUDGED in found:
            judged[precision] = found
        if 2.5 * (time.monotonic() - start) > end - time.monotonic():
            break  # the next table may take 2.5 times as long
    table = Targets(f"Targets: {TASKS[0]} past tasks, {JUDGED}")
    for precision, found in judged.items():
        step = found[JUDGED]
        part, steps = step[STAGES[2]] / step[STAGES[4]], step[STAGES[4]] / found["plain"][STAGES[4]]
        table.add(f"{precision}, projection, of the step", part, MOST_PROJECTION, "{:.1%}".format)
        table.add(f"{precision}, plain steps", steps, MOST_STEPS, "{:.2f}".format)
    return int(bool(loop.wrong))
