"""``python -m asv_benchmarks.reports.avalanche_plugin``: Avalanche's GEM plugin, and ours in its place.

The data are the permuted digits of `asv_benchmarks.reports.gem_script`, one experience for each permutation.
"""

import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import torch
import typer

from asv_benchmarks.reports.gem_script import STRENGTH, permuted_digits
from asv_benchmarks.reports.machine import load, one_thread, processor, versions
from asv_benchmarks.reports.options import Page
from asv_benchmarks.reports.tables import Table, digits, publish
from gemproj import GEM2017

PATTERNS = 64  # kept of each experience


def plugins() -> dict[str, Callable[[], Any]]:
    """Return functions that make the plugins, by name."""
    try:
        from avalanche.training.plugins import GEMPlugin
    except ImportError:
        raise typer.BadParameter("Avalanche is needed: pip install avalanche-lib") from None

    from gemproj.integrations.avalanche import KeeperPlugin
    from gemproj.torch import Promise

    def ours(promise: Promise, **options: Any) -> Callable[[], Any]:
        return lambda: KeeperPlugin(promise, limit=PATTERNS, on="gradient", **options)

    return {
        "Avalanche, GEMPlugin": lambda: GEMPlugin(PATTERNS, STRENGTH),
        "gemproj, method GEM2017": ours(Promise(examples=None), method=GEM2017(STRENGTH)),
        "gemproj, exact": ours(Promise(examples=None, weight=STRENGTH)),
    }


def learn(plugin: Any, tasks: int, seed: int) -> tuple[float, float]:
    """Learn all experiences, one after the other; return the final accuracy and the CPU time in seconds."""
    from avalanche.benchmarks import tensors_benchmark
    from avalanche.training.supervised import Naive

    trained, tested = permuted_digits(tasks)
    pairs = ([(x, y) for _, x, y in part] for part in (trained, tested))
    benchmark = tensors_benchmark(*pairs, task_labels=[0] * tasks)
    torch.manual_seed(seed)
    layers = torch.nn.Linear(64, 100), torch.nn.ReLU(), torch.nn.Linear(100, 100), torch.nn.ReLU()
    model = torch.nn.Sequential(*layers, torch.nn.Linear(100, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"train_mb_size": 10, "train_epochs": 1, "plugins": [plugin], "evaluator": None}
    strategy = Naive(model=model, optimizer=optimizer, criterion=torch.nn.CrossEntropyLoss(), **options)
    start = time.process_time()
    for experience in benchmark.train_stream:
        strategy.train(experience)
    spent = time.process_time() - start
    with torch.no_grad():
        right = [(model.eval()(x).argmax(1) == y).float().mean().item() for _, x, y in tested]
    return float(np.mean(right)), spent


@one_thread()
def main(
    tasks: Annotated[int, typer.Option(min=1, help="Number of permutations.")] = 5,
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs of each plugin.")] = 3,
    out: Page = None,
) -> None:
    """Run each plugin, in turn."""
    makers = plugins()
    learn(makers["gemproj, exact"](), 2, 0)  # compiled loops are loaded
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
    for seed in range(seeds):
        for name, make in makers.items():
            found[name].append(learn(make(), tasks, seed))
    table = Table(
        f"{tasks} tasks, {seeds} runs", ["plugin", "final accuracy", "lowest", "highest", "CPU time, s"]
    )
    for name, runs in found.items():
        accuracy, seconds = zip(*runs, strict=True)
        numbers = np.mean(accuracy), min(accuracy), max(accuracy)
        table.rows.append([name, *(f"{a:.4f}" for a in numbers), digits(float(np.mean(seconds)))])
    packages = ["gemproj", "avalanche-lib", "qpsolvers", "quadprog", "torch", "numpy"]
    publish([f"{processor()}, one thread{load()}. {versions(packages)}.\n", table], out)


if __name__ == "__main__":
    typer.run(main)
