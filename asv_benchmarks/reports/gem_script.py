"""``python -m asv_benchmarks.reports.gem_script FOLDER``: GEM's own script, with its projection and ours.

FOLDER is a checkout of github.com/facebookresearch/GradientEpisodicMemory, of which nothing is changed: its
``main.py`` runs as it is, once for each projection in place of `project2cone2`. The data are permuted digits
of scikit-learn, in the format of the script's own data sets.
"""

import contextlib
import io
import runpy
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer

from asv_benchmarks.reports.machine import load, one_thread, processor, versions
from asv_benchmarks.reports.options import Page
from asv_benchmarks.reports.tables import Table, digits, publish
from gemproj import GEM2017, project

TRAINED = 1200  # digits of a task, of 1,797; the others test
STRENGTH = 0.5  # the margin
# Those of the script for permutations of MNIST, but for the number of memories, 256 there.
SETTINGS: dict[str, Any] = {"model": "gem", "n_layers": 2, "n_hiddens": 100, "batch_size": 10, "lr": 0.1}
SETTINGS |= {"n_memories": 64, "memory_strength": STRENGTH, "cuda": "no", "data_file": "digits.pt"}
Projection = Callable[..., None]


def ours(method: Any, strength: bool) -> Projection:
    """Return a projection with the arguments of the script's own: gradient (p, 1), memories (p, t)."""

    def run(gradient: torch.Tensor, memories: torch.Tensor, margin: float = 0.5) -> None:
        x = project(
            memories.T, gradient[:, 0].contiguous(), method=method, margin=margin if strength else 0.0
        )
        gradient.copy_(x[:, None])

    return run


def permuted_digits(tasks: int) -> list[list[list[Any]]]:
    """Return all tasks, to train and to test: a name, images and labels; each permutes the pixels."""
    from sklearn.datasets import load_digits

    x, y = (torch.from_numpy(a) for a in load_digits(return_X_y=True))
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(len(x), generator=generator)
    x, y = (x[order] / 16.0).float(), y[order].long()
    pixels = [torch.randperm(x.shape[1], generator=generator) for _ in range(tasks)]
    parts = slice(TRAINED), slice(TRAINED, None)
    return [[["digits", x[part][:, p], y[part]] for p in pixels] for part in parts]


def learn(script: Path, projection: Projection | None, data: Path, seed: int) -> list[float]:
    """Return accuracy, its change and the CPU time of a run, and milliseconds and number of projections."""
    gem, spent = sys.modules["model.gem"], list[float]()
    theirs: Projection = gem.project2cone2
    used = theirs if projection is None else projection

    def timed(*given: Any) -> None:
        start = time.process_time()
        used(*given)
        spent.append(time.process_time() - start)

    options = {**SETTINGS, "seed": seed, "data_path": str(data), "save_path": str(data)}
    gem.__dict__["project2cone2"] = timed
    before, sys.argv = sys.argv, [str(script), *(f"--{k}={v}" for k, v in options.items())]
    start = time.process_time()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            left = runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv, gem.__dict__["project2cone2"] = before, theirs
    seconds, (accuracy, change, _) = time.process_time() - start, left["stats"]
    return [float(accuracy), float(change), seconds, 1e3 * float(np.mean(spent)), len(spent)]


@one_thread()
def main(
    folder: Path,
    tasks: Annotated[int, typer.Option(min=1, help="Number of permutations.")] = 10,
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs of each projection.")] = 3,
    out: Page = None,
) -> None:
    """Run the script with each projection, in turn."""
    if not (folder / "main.py").is_file():
        raise typer.BadParameter(f"{folder} is no checkout of the script: there is no main.py")
    sys.path.insert(0, str(folder))
    __import__("model.gem")
    projections = {
        "project2cone2": None,
        "gemproj, method GEM2017": ours(GEM2017(STRENGTH), strength=False),
        "gemproj, exact": ours("exact", strength=True),
    }
    for projection in projections.values():  # compiled loops are loaded
        if projection is not None:
            projection(torch.ones(4, 1), -torch.ones(4, 2))
    found: dict[str, list[list[float]]] = {name: [] for name in projections}
    with tempfile.TemporaryDirectory() as data:
        torch.save(permuted_digits(tasks), Path(data) / SETTINGS["data_file"])
        for seed in range(seeds):
            for name, projection in projections.items():
                found[name].append(learn(folder / "main.py", projection, Path(data), seed))
    head = ["projection", "final accuracy", "change of accuracy", "CPU time, s", "projections", "ms for each"]
    table = Table(f"{tasks} tasks, mean of {seeds} runs", head)
    for name, runs in found.items():
        accuracy, change, seconds, ms, count = np.mean(runs, axis=0)
        cells = [f"{accuracy:.4f}", f"{change:+.4f}", digits(seconds), f"{count:,.0f}", digits(ms)]
        table.rows.append([name, *cells])
    basis = (
        f"{processor()}, one thread{load()}. {versions(['gemproj', 'numpy', 'torch', 'quadprog', 'numba'])}."
    )
    publish([basis + "\n", table], out)


if __name__ == "__main__":
    typer.run(main)
