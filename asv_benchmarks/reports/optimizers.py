"""Steps of many optimizers: ``python -m asv_benchmarks.reports.optimizers --out docs/results/optimizers.md``.

First install the libraries: ``pip install pytorch_optimizer torchao bitsandbytes``. Each optimizer trains
the same small network without gemproj, with ``project=False`` and with projected steps. In the table,
"unchanged" says whether the first two give the same weights to the bit; a violation is minus the smallest
cosine of a step with the constraint; "rounding" is the rounding of the weights over the length of the
shortest step. Optimizers that need other arguments than parameters and a learning rate are left out.
"""

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
import typer
from torch import Tensor, nn

from asv_benchmarks.reports.machine import describe
from asv_benchmarks.reports.options import Page
from asv_benchmarks.reports.soak import Batch, loss
from asv_benchmarks.reports.tables import markdown, power, publish
from gemproj.torch import Keeper, Promise

STEPS, RATE = 25, 1e-3


def known() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the optimizers of the installed libraries, and their names."""
    for module in ("torch.optim", "torchao.optim", "bitsandbytes.optim", "pytorch_optimizer"):
        with suppress(ImportError):
            for name, kind in vars(import_module(module)).items():
                if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and name[0].isupper():
                    yield f"{module.removesuffix('.optim')} {name}", kind


def train(
    start: nn.Module, make: Callable[..., Any], stream: list[Batch], kept: Batch, project: bool | None = None
) -> tuple[Tensor, float, float]:
    """Train; return the weights, the largest violation of a step, and the rounding of the shortest step."""
    torch.manual_seed(0)
    model = copy.deepcopy(start)
    optimizer = make(list(model.parameters()), lr=RATE)
    keeper = None
    if project is not None:
        keeper = Keeper(model, optimizer, Promise(loss, examples=None), project=project)
        keeper.keep([kept])
    violation, rounding = 0.0, 0.0
    after = nn.utils.parameters_to_vector(model.parameters()).detach()
    for batch in stream:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
        before, after = after, nn.utils.parameters_to_vector(model.parameters()).detach()
        if keeper is not None and keeper.last is not None and (length := float((after - before).norm())):
            violation = max(violation, -keeper.last.worst_cosine)
            rounding = max(rounding, torch.finfo(after.dtype).eps * float(after.norm()) / length)
    return after, violation, rounding


def main(
    out: Page = None,
) -> None:
    """Train with every optimizer, and print a table."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    x = torch.randn(STEPS + 8, 32, 16)
    batches = [(one, one[:, :4].argmax(1)) for one in x[:8]]
    kept = torch.cat([a for a, _ in batches]), torch.cat([b for _, b in batches])
    stream = [(one + 1.0, one[:, 4:8].argmax(1)) for one in x[8:]]
    start = nn.Sequential(nn.Linear(16, 96), nn.ReLU(), nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 4))
    first = torch.optim.AdamW(start.parameters(), lr=1e-2)
    for batch in 20 * batches:
        first.zero_grad()
        loss(start, batch).backward()
        first.step()
    rows = []
    for name, make in known():
        try:
            alone, *_ = train(start, make, stream, kept)
        except Exception:
            continue
        try:
            watched, violation, _ = train(start, make, stream, kept, project=False)
            _, projected, rounding = train(start, make, stream, kept, project=True)
        except Exception as error:
            rows.append([name, f"{type(error).__name__}: {error}".partition(". ")[0], "", "", ""])
            continue
        same = "yes" if torch.equal(alone, watched) else "no"
        rows.append([name, same, *map(power, (violation, projected, rounding))])
    head = ["optimizer", "unchanged", "violation without projection", "with projection", "rounding"]
    publish([f"{len(rows)} optimizers. {describe()}", "", "\n".join(markdown(head, rows))], out)


if __name__ == "__main__":
    typer.run(main)
