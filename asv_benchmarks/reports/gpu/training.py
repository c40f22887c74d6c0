"""Part 3: a training step of GPT-2 medium with LoRA, and what it costs to keep past tasks."""

import sys
import time
from collections.abc import Callable, Iterable
from statistics import median
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from asv_benchmarks.reports.gpu.device import DEVICE
from asv_benchmarks.reports.gpu.model import Classifier, Shape
from asv_benchmarks.reports.gpu.printing import Running, say
from gemproj.torch import EpisodicMemory, GradientProjector

SHAPE = Shape()
TEXTS, TOKENS, TASKS, STORED = 32, 128, (3, 10, 20), 100
ROUNDS = 5
STAGES = ["batch", "constraint gradients", "projection", "optimizer", "in all"]
# Of the optimality conditions, free of scale.
BOUND = 1e-6

Batch = dict[str, torch.Tensor]
Batches = Callable[[EpisodicMemory], Iterable[Any]]
WAYS: dict[str, Batches | None] = {
    "no constraints": None,
    f"A-GEM, {TEXTS} texts": lambda memory: [memory.sample(TEXTS)],
    "GEM, 16 texts a task": lambda memory: memory.batches(n=16),
    "GEM, 16 texts a task, a pass each": lambda memory: list(memory.batches(n=16)),
    "GEM, 4 texts a task": lambda memory: memory.batches(n=4),
    "GEM, 4 texts a task, a pass each": lambda memory: list(memory.batches(n=4)),
    f"GEM, {STORED} texts a task": EpisodicMemory.batches,
}


def draw(n: int) -> Batch:
    """Draw random texts with random labels."""
    tokens = torch.randint(SHAPE.words, (n, TOKENS), device=DEVICE)
    return {"tokens": tokens, "labels": torch.randint(SHAPE.classes, (n,), device=DEVICE)}


def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the loss of each text, as a loop with autocast computes it."""
    with torch.autocast(DEVICE.type, torch.bfloat16):
        logits = model(batch["tokens"])
    return cross_entropy(logits.float(), batch["labels"], reduction="none")


class Loop:
    """A model, an optimizer and a projector. Of the projections, `wrong` were not optimal."""

    def __init__(self) -> None:
        with DEVICE:
            self.model, self.wrong = Classifier(SHAPE), 0
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=1e-4)
        self.projector = GradientProjector(self.parameters)

    def step(self, memory: EpisodicMemory, batches: Batches | None) -> dict[str, float]:
        """Make a step, with the gradients of `batches` as constraints; return milliseconds by stage."""
        batch, projector = draw(TEXTS), self.projector
        self.optimizer.zero_grad()
        times = {STAGES[0]: _timed(lambda: loss(self.model, batch).mean().backward())}
        if batches is not None:
            times[STAGES[1]] = _timed(lambda: projector.recall(self.model, batches(memory), loss))
            times[STAGES[2]] = _timed(projector.project_)
            assert projector.last
            assert projector.last.solution
            self.wrong += not float(projector.last.solution.kkt_residual()) < BOUND
        times[STAGES[3]] = _timed(self.optimizer.step)
        return times | {STAGES[4]: sum(times.values())}


def _timed(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


def main(seconds: float) -> int:
    """Print a table for each number of past tasks; return 1 if a projection was not optimal."""
    end = time.monotonic() + seconds
    torch.manual_seed(20171208)
    loop = Loop()
    weights = sum(p.numel() for p in loop.parameters)
    say(f"{SHAPE}: {weights:,} trained weights; {TEXTS} texts of {TOKENS} tokens, autocast to bfloat16.")
    for tasks in TASKS:
        start, memory = time.monotonic(), EpisodicMemory(per_task=STORED)
        for task in range(tasks):
            memory.add(draw(STORED), task)
        table = Running(f"{tasks} past tasks; milliseconds, medians of {ROUNDS} steps", ["", *STAGES])
        for name, batches in WAYS.items():
            loop.projector.reset()
            steps = [loop.step(memory, batches) for _ in range(ROUNDS + 1)][1:]
            medians = {stage: f"{median(step[stage] for step in steps):.2f}" for stage in steps[0]}
            table.row(name, *(medians.get(stage, "") for stage in STAGES))
        if 4 * (time.monotonic() - start) > end - time.monotonic():
            break  # a table of more tasks would take about so long
    return int(bool(loop.wrong))


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
