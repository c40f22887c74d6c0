"""``make soak``: ten thousand training steps, in which memory must not grow.

A small network keeps two kinds of promises about three sets, with gradient and step projected. Every thousand
steps a checkpoint is saved and loaded, the report is read, and one set is forgotten and kept again.
"""

import gc
import io
from typing import Annotated

import torch
import typer
from torch.nn.functional import cross_entropy

from asv_benchmarks.benchmarks.peaks import status
from asv_benchmarks.reports.machine import describe
from asv_benchmarks.reports.options import Page
from asv_benchmarks.reports.tables import markdown, publish
from gemproj.torch import Keeper, Promise
from gemproj.torch.losses import Distillation

EACH = 1000
WARM = 2  # the first rows of the table, in which caches and the history fill
ROOM = 2.0  # MB by which memory may grow after them

Batch = tuple[torch.Tensor, torch.Tensor]


def batches(task: int, count: int) -> list[Batch]:
    """Draw batches of a task whose labels contradict those of other tasks."""
    random = torch.Generator().manual_seed(task)
    drawn = [torch.randn(16, 20, generator=random) for _ in range(count)]
    return [(x, (x[:, :6].argmax(1) + task) % 6) for x in drawn]


def loss(model: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean loss on a batch."""
    return cross_entropy(model(batch[0]), batch[1])


def main(
    steps: Annotated[int, typer.Option(min=(WARM + 1) * EACH, help="Training steps.")] = 10_000,
    out: Page = None,
) -> None:
    """Train, print resident memory and the number of objects, and exit with 1 if memory grows."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.Tanh(), torch.nn.Linear(64, 6))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    keeper = Keeper(model, optimizer)
    said = Promise(Distillation(lambda model, batch: model(batch[0])), examples=8, tolerance=0.05)
    for k, promise in enumerate(
        (Promise(loss, weight=0.5, examples=8), Promise(loss, None, penalty=2.0), said)
    ):
        keeper.keep(batches(k, 4), promise, name=k)
    stream, rows, active = batches(3, 64), [], 0
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        loss(model, stream[step % len(stream)]).backward()
        optimizer.step()
        active += bool(keeper.last and keeper.last.num_active)
        if step % EACH == 0:
            for kept in (keeper, optimizer):
                file = io.BytesIO()
                torch.save(kept.state_dict(), file)
                file.seek(0)
                kept.load_state_dict(torch.load(file, weights_only=True))
            keeper.forget(2)
            keeper.keep(batches(2, 4), said, name=2)
            assert sum(line.examples > 0 for line in keeper.report().values()) == 3  # and the forgotten set
            del file
            gc.collect()
            tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
            rows.append((step, status("VmRSS") / 1e6, len(gc.get_objects()), tensors))
            print(*rows[-1], flush=True)
    growth = rows[-1][1] - rows[WARM - 1][1]
    lines = [
        f"{steps:,} steps, {active:,} of them with an active constraint. {describe()}",
        "",
        f"Resident memory grew by {growth:.1f} MB from step {rows[WARM - 1][0]:,} to the end.",
        "",
        *markdown(
            ["step", "resident memory, MB", "objects of Python", "tensors"],
            [[f"{at:,}", f"{size:.1f}", f"{n:,}", f"{tensors:,}"] for at, size, n, tensors in rows],
        ),
    ]
    publish(["\n".join(lines)], out)
    raise typer.Exit(code=int(growth > ROOM))


if __name__ == "__main__":
    typer.run(main)
