"""Part 4: constraint gradients of small models, with a pass each and in shared passes."""

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

from asv_benchmarks.benchmarks.peaks import peak_on_device
from asv_benchmarks.reports.gpu.device import DEVICE, Clock
from asv_benchmarks.reports.gpu.model import Classifier, Shape
from asv_benchmarks.reports.gpu.printing import Running
from asv_benchmarks.reports.tables import digits
from gemproj.torch.data import divided, owned
from gemproj.torch.joint import SharedPasses
from gemproj.torch.memory import Draw, KeptSet
from gemproj.torch.promise import Promise
from gemproj.torch.rows import Rows
from gemproj.torch.vector import ParameterVector

SMALL = Shape(layers=12, width=768, heads=12)
TINY = Shape(layers=2, width=128, heads=4, words=5000, positions=64)
TOKENS, PIXELS, WORDS, LABELS = 64, 784, 5000, 4
# By model: examples of a row, and rows.
CASES = {"MLP": [(10, 2), (10, 10), (10, 20), (100, 10)]}
CASES["GPT-2 of 2 layers of 128, LoRA"] = [(1, 48), (4, 10), (4, 20), (16, 10)]
CASES["GPT-2 small, LoRA"] = [(1, 48), (4, 10), (4, 20), (16, 3), (16, 10)]
PRECISIONS = {"float32": "ieee", "TF32": "tf32"}
# The largest right difference of a row between the two ways, relative to its norm.
APART = {"float32": 1e-4, "TF32": 1e-2}
WAYS = ("a pass each", "shared")
HEAD = ["examples of a row", "rows", *WAYS, "ratio", *(f"MB, {way}" for way in WAYS)]


def perceptron() -> nn.Sequential:
    """Return an MLP 784-100-100-10."""
    sizes = [(PIXELS, 100), (100, 100), (100, 10)]
    layers = [layer for size in sizes for layer in (nn.Linear(*size), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def make(name: str) -> nn.Module:
    """Return the model of this name, on the device."""
    with DEVICE:
        return perceptron() if name == "MLP" else Classifier(SMALL if "small" in name else TINY)


def draw(pixels: bool, tokens: int, n: int) -> dict[str, Tensor]:
    """Draw random examples: pixels, or tokens other than 0, which is padding."""
    x = torch.randn(n, PIXELS) if pixels else torch.randint(1, WORDS, (n, tokens))
    return {"x": x, "y": torch.randint(LABELS, (n,))}


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Return the loss of each example."""
    out = model(batch["x"])
    return cross_entropy(getattr(out, "logits", out), batch["y"], reduction="none")


class Case:
    """The rows of G of a model, of a loss on each batch, computed in both ways."""

    def __init__(self, model: nn.Module, batches: Sequence[Any], loss: Any = loss) -> None:
        vector, promise = ParameterVector(model.named_parameters()), Promise(loss)
        self.model, self.rows, self.joint = model, [Rows(vector) for _ in WAYS], SharedPasses()
        self.draws = []
        for k, batch in enumerate(batches):
            n = len(next(iter(batch.values())))
            examples = owned(divided({name: part.to(vector.device) for name, part in batch.items()}))
            losses = torch.zeros(n, dtype=torch.float64)
            kept = KeptSet(k, promise, examples, default_collate, [], losses)
            self.draws.append(Draw(kept, list(range(n)), loss, k))

    def run(self, shared: bool) -> None:
        """Compute all rows."""
        joint = self.joint if shared else None
        self.rows[shared].fill(self.model, self.draws, range(len(self.draws)), joint=joint)

    def apart(self) -> float:
        """Return the largest difference of a row, over its norm."""
        one, other = (rows.G for rows in self.rows)
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
                case = Case(make(name), [draw(name == "MLP", TOKENS, n) for _ in range(t)])
                for shared in (False, True, True, True):  # rows are compared in the first passes
                    case.run(shared)
                wrong += not case.apart() <= APART[precision]
                peaks = [peak_on_device(partial(case.run, way), torch) / 1e6 for way in (False, True)]
                slow, fast = (clock.cold(partial(case.run, way), each) / 1e3 for way in (False, True))
                cells = [digits(slow), digits(fast), digits(slow / fast), *map(digits, peaks)]
                table.row(str(n), str(t), *cells)
                if reason := case.joint.reason:
                    print(f"{name}, {n} examples, {t} rows: {reason}", file=sys.stderr)
    return int(bool(wrong))
