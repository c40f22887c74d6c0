"""Part 4: constraint gradients of small models, with a pass each and in shared passes."""

import sys
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from asv_benchmarks.reports.gpu.device import DEVICE, Clock
from asv_benchmarks.reports.gpu.model import Classifier, Shape
from asv_benchmarks.reports.gpu.printing import Running
from asv_benchmarks.reports.tables import digits
from gemproj.torch import EpisodicMemory, GradientProjector

SMALL = Shape(layers=12, width=768, heads=12)
TINY = Shape(layers=2, width=128, heads=4, words=5000, positions=64)
TOKENS, PIXELS = 64, 784
# By model: examples of a row, and rows.
CASES = {"MLP": [(10, 2), (10, 10), (10, 20), (100, 10)]}
CASES["GPT-2 of 2 layers of 128, LoRA"] = [(1, 48), (4, 10), (4, 20), (16, 10)]
CASES["GPT-2 small, LoRA"] = [(1, 48), (4, 10), (4, 20), (16, 3), (16, 10)]
PRECISIONS = {"float32": "ieee", "TF32": "tf32"}
# Relative to its norm, how much a row may differ between the ways.
APART = {"float32": 1e-4, "TF32": 1e-2}
HEAD = ["examples of a row", "rows", "a pass each", "shared", "ratio", "MB, a pass each", "MB, shared"]


def make(name: str) -> nn.Module:
    """Return a model of this name, on the device."""
    with DEVICE:
        if name != "MLP":
            return Classifier(SMALL if "small" in name else TINY)
        sizes = [(PIXELS, 100), (100, 100), (100, 10)]
        layers = [layer for size in sizes for layer in (nn.Linear(*size), nn.ReLU())]
        return nn.Sequential(*layers[:-1])


def draw(name: str, n: int) -> dict[str, torch.Tensor]:
    """Draw random examples."""
    x = torch.randn(n, PIXELS) if name == "MLP" else torch.randint(5000, (n, TOKENS))
    return {"x": x.to(DEVICE), "y": torch.randint(4, (n,), device=DEVICE)}


def loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the loss of each example."""
    return cross_entropy(model(batch["x"]), batch["y"], reduction="none")


class Case:
    """Rows of G of one model, computed in both ways."""

    def __init__(self, name: str, n: int, t: int) -> None:
        self.model, self.memory = make(name), EpisodicMemory(per_task=n)
        for task in range(t):
            self.memory.add(draw(name, n), task)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.projectors = [GradientProjector(trained) for _ in range(2)]

    def run(self, shared: bool) -> None:
        """Compute all rows."""
        batches: Iterable[Any] = self.memory.batches()
        self.projectors[shared].recall(self.model, batches if shared else list(batches), loss)

    def peak(self, shared: bool) -> float:
        """Return by how many megabytes the memory of the device grows meanwhile."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.run(shared)
        return (torch.cuda.max_memory_allocated() - before) / 1e6

    def apart(self) -> float:
        """Return the largest difference of a row, over its norm."""
        one, other = (projector.constraints for projector in self.projectors)
        return float(((one - other).norm(dim=1) / one.norm(dim=1)).max())


def main(seconds: float) -> int:
    """Print a table for each model and precision; return 1 if rows differ."""
    wrong, clock = 0, Clock()
    each = seconds / (8 * sum(map(len, CASES.values())))
    torch.manual_seed(20171208)
    for precision, setting in PRECISIONS.items():
        torch.backends.cuda.matmul.fp32_precision = setting
        # With TF32 only the last model, whose products are large enough.
        for name, cases in list(CASES.items())[-1 if setting == "tf32" else 0 :]:
            table = Running(f"{name}, {precision}; milliseconds", HEAD)
            for n, t in cases:
                case = Case(name, n, t)
                for shared in (False, True, True, True):  # rows are compared in the first passes
                    case.run(shared)
                wrong += not case.apart() <= APART[precision]
                peaks = [case.peak(shared) for shared in (False, True)]
                slow, fast = (clock.cold(partial(case.run, way), each) / 1e3 for way in (False, True))
                cells = [digits(slow), digits(fast), digits(slow / fast), *map(digits, peaks)]
                table.row(str(n), str(t), *cells)
                if reason := case.projectors[True].why_row_by_row:
                    print(f"{name}, {n} examples, {t} rows: {reason}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
