"""``python -m asv_benchmarks.reports.maros_meszaros FOLDER``: the Maros-Meszaros programs.

FOLDER holds the files ``*.mat`` of the set ``maros_meszaros_qpbenchmark``: P, q and rows ``l <= A x <= u``.
The last n rows are the variables themselves, and 1e20 stands for infinity.
"""

from enum import Enum
from pathlib import Path
from typing import Annotated

import numpy as np
import scipy.io
import typer
from qpsolvers import Problem

from asv_benchmarks.reports.boards import Programs, run
from asv_benchmarks.reports.options import Page

LARGEST = 1000  # variables, and constraints
EQUAL, INFINITE = 1e-10, 9e19  # the difference of bounds that makes an equality, and a bound that is none


class Subset(Enum):
    """The programs of a folder that are solved."""

    posdef = "positive definite"
    dense = "dense"
    all = "all"


def read(path: Path) -> Problem:
    """Return the program of a file."""
    given = scipy.io.loadmat(path)
    P, A = (given[name].toarray().astype(float) for name in "PA")
    q, low, high = (given[name].ravel().astype(float) for name in "qlu")
    low, high = np.where(low < -INFINITE, -np.inf, low), np.where(high > INFINITE, np.inf, high)
    C, lower, upper = (a[: -len(q)] for a in (A, low, high))
    equal = upper - lower < EQUAL
    G, h = np.concatenate([C[~equal], -C[~equal]]), np.concatenate([upper[~equal], -lower[~equal]])
    given_rows = (G[h < np.inf], h[h < np.inf]), (C[equal], upper[equal])
    rows = [a if len(v) else None for M, v in given_rows for a in (M, v)]
    return Problem(P, q, *rows, low[-len(q) :], high[-len(q) :])


def chosen(problem: Problem, subset: Subset) -> bool:
    """Return whether a program is in a subset; the published ones go by these sizes and eigenvalues."""
    rows = sum(len(v) for v in (problem.lb, problem.h, problem.b) if v is not None)
    if subset is Subset.all or max(len(problem.q), rows) > LARGEST:
        return subset is Subset.all
    return subset is Subset.dense or bool((np.linalg.eigvals(problem.P) > 0).all())


def main(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False)],
    subset: Annotated[Subset, typer.Option(help="Which of the programs.")] = Subset.posdef,
    peers: Annotated[bool, typer.Option(help="Beside the other solvers that are installed.")] = False,
    out: Page = None,
) -> None:
    """Solve the programs of a folder; the exit status is 1 if gemproj falls short of 1e-9 in one."""
    every = {path.stem: read(path) for path in sorted(folder.glob("*.mat"))}
    programs: Programs = {name: problem for name, problem in every.items() if chosen(problem, subset)}
    raise typer.Exit(run(f"Maros-Meszaros, {subset.value}", programs, peers, out))


if __name__ == "__main__":
    typer.run(main)
