"""``python -m asv_benchmarks.reports.maros_meszaros FOLDER``: the Maros-Meszaros programs of moderate size.

FOLDER holds the files ``*.mat`` of the set ``maros_meszaros_qpbenchmark``: P, q and rows ``l <= A x <= u``, of
which the last n are the variables themselves; 1e20 stands for infinity.
"""

from enum import Enum
from pathlib import Path
from typing import Annotated

import numpy as np
import scipy.io
import typer
from qpsolvers import Problem

from asv_benchmarks.reports.boards import Programs, run

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
    q, l, u = (given[name].ravel().astype(float) for name in "qlu")
    l, u = np.where(l < -INFINITE, -np.inf, l), np.where(u > INFINITE, np.inf, u)
    n = len(q)
    (C, low, high), (lb, ub) = (A[:-n], l[:-n], u[:-n]), (l[-n:], u[-n:])
    equal = high - low < EQUAL
    G, h = np.concatenate([C[~equal], -C[~equal]]), np.concatenate([high[~equal], -low[~equal]])
    G, h = G[h < np.inf], h[h < np.inf]
    pairs = ((M, v) if len(v) else (None, None) for M, v in ((G, h), (C[equal], high[equal])))
    (G, h), (A, b) = pairs
    return Problem(P, q, G, h, A, b, lb, ub)


def chosen(problem: Problem, subset: Subset) -> bool:
    """Return whether a program is in a subset; the published ones go by these sizes and eigenvalues."""
    rows = len(problem.lb) + sum(len(v) for v in (problem.h, problem.b) if v is not None)
    small = len(problem.q) <= LARGEST and rows <= LARGEST
    posdef = subset is Subset.posdef and small
    return subset is Subset.all or (small and (not posdef or bool((np.linalg.eigvals(problem.P) > 0).all())))


def main(
    folder: Path,
    subset: Annotated[Subset, typer.Option(help="Which of the programs.")] = Subset.posdef,
    peers: Annotated[bool, typer.Option(help="Beside the other solvers that are installed.")] = False,
    out: Annotated[Path | None, typer.Option(help="Also write the tables to this Markdown file.")] = None,
) -> None:
    """Solve the programs of a folder; the exit status is 1 if gemproj falls short of 1e-9 in one."""
    every = {path.stem: read(path) for path in sorted(folder.glob("*.mat"))}
    programs: Programs = {name: problem for name, problem in every.items() if chosen(problem, subset)}
    raise typer.Exit(run(f"Maros-Meszaros, {subset.value}", programs, peers, out))


if __name__ == "__main__":
    typer.run(main)
