"""Part 3: a training step of GPT-2 medium with LoRA, and the cost of keeping past tasks."""

import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from asv_benchmarks.reports.gpu.device import DEVICE
from asv_benchmarks.reports.gpu.model import Classifier, Shape
from asv_benchmarks.reports.gpu.printing import Running, Targets, say
from gemproj.torch import EpisodicMemory, GradientProjector

SHAPE = Shape()
TEXTS, TOKENS, TASKS, STORED = 32, 128, (3, 10, 20), 100
ROUNDS = 5
PRECISIONS = ("bfloat16", "TF32", "float32")  # by autocast; of matrix products; neither
STAGES = ["batch", "constraint gradients", "projection", "optimizer", "in all"]
HEAD = ["", *STAGES, "plain steps"]
# Of the optimality conditions, free of scale.
BOUND = 1e-6
# Targets with 16 texts of each of 3 tasks and shared passes: share of a step, and time in plain steps.
MOST_PROJECTION, MOST_STEPS, JUDGED = 0.01, 1.6, "GEM, 16 texts a task"

Batch = dict[str, torch.Tensor]
Rows = Callable[[EpisodicMemory], Iterable[Any]]
# By name: texts of each past task in the batch, and the batches of rows of G.
WAYS: dict[str, tuple[int, Rows | None]] = {
    "plain": (0, None),
    "replay, 16 texts a task": (16, None),
    "replay, 4 texts a task": (4, None),
    f"A-GEM, {TEXTS} texts": (0, lambda memory: [memory.sample(TEXTS)]),
    JUDGED: (0, lambda memory: memory.batches(n=16)),
    f"{JUDGED}, a pass each": (0, lambda memory: list(memory.batches(n=16))),
    "GEM, 4 texts a task": (0, lambda memory: memory.batches(n=4)),
    "GEM, 4 texts a task, a pass each": (0, lambda memory: list(memory.batches(n=4))),
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
    """A model, an optimizer and a projector; `wrong` counts projections that were not optimal."""

    def __init__(self) -> None:
        with DEVICE:
            self.model, self.wrong = Classifier(SHAPE), 0
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4)
        self.projector = GradientProjector(self.parameters)

    def step(self, memory: EpisodicMemory, replayed: int, rows: Rows | None) -> dict[str, float]:
        """Make a step; return milliseconds by stage."""
        batch, projector = draw(TEXTS), self.projector
        if replayed:
            past: Any = memory.sample(replayed * len(memory.tasks))
            batch = {name: torch.cat([batch[name], past[name]]) for name in batch}
        self.optimizer.zero_grad()
        times = {STAGES[0]: _timed(lambda: self.loss(self.model, batch).mean().backward())}
        if rows is not None:
            times[STAGES[1]] = _timed(lambda: projector.recall(self.model, rows(memory), self.loss))
            times[STAGES[2]] = _timed(projector.project_)
            assert projector.last
            assert projector.last.solution
            self.wrong += not float(projector.last.solution.kkt_residual()) < BOUND
        times[STAGES[3]] = _timed(self.optimizer.step)
        return times | {STAGES[4]: sum(times.values())}

    def tabulate(self, precision: str, memory: EpisodicMemory) -> dict[str, dict[str, float]]:
        """Print a table of all ways, and return the medians of each."""
        torch.backends.cuda.matmul.fp32_precision = "tf32" if precision == "TF32" else "ieee"
        # One function for all steps, because each new function is checked for whether rows can share a pass.
        self.loss = partial(loss, precision == "bfloat16")
        title = f"{precision}, {len(memory.tasks)} past tasks"
        table, found = Running(f"{title}; milliseconds, medians of {ROUNDS} steps", HEAD), {}
        for name, (replayed, rows) in WAYS.items():
            self.projector.reset()
            try:
                steps = [self.step(memory, replayed, rows) for _ in range(ROUNDS + 1)][1:]
            except torch.cuda.OutOfMemoryError:
                table.row(name, *[""] * len(STAGES), "out of memory")
                continue
            found[name] = {stage: median(step[stage] for step in steps) for stage in steps[0]}
            cells = [f"{found[name][stage]:.2f}" if stage in found[name] else "" for stage in STAGES]
            plain = found["plain"][STAGES[4]]
            table.row(name, *cells, f"{found[name][STAGES[4]] / plain:.2f}")
            if rows is not None and "each" not in name and self.projector.why_row_by_row:
                print(f"{title}, {name}: {self.projector.why_row_by_row}", file=sys.stderr)
        return found


def _timed(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def main(seconds: float) -> int:
    """Print a table for each precision and number of past tasks; return 1 if a projection was not optimal."""
    end, judged = time.monotonic() + seconds, {}
    torch.manual_seed(20171208)
    loop = Loop()
    weights = sum(p.numel() for p in loop.parameters)
    say(f"{SHAPE}: {weights:,} trained weights; {TEXTS} texts of {TOKENS} tokens.")
    for tasks, precision in product(TASKS, PRECISIONS):
        start, memory = time.monotonic(), EpisodicMemory(per_task=STORED)
        for task in range(tasks):
            memory.add(draw(STORED), task)
        found = loop.tabulate(precision, memory)
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
