"""``python -m asv_benchmarks.reports.mpc FOLDER``: programs of model predictive control.

FOLDER holds the files ``*.npz`` of the set ``mpc_qpbenchmark``, or others that `qpsolvers.Problem` has saved.
"""

from pathlib import Path
from typing import Annotated

import typer
from qpsolvers import Problem

from asv_benchmarks.reports.boards import Programs, run
from asv_benchmarks.reports.options import Page


def read(folder: Path) -> Programs:
    """Return the programs of a folder by name."""
    return {path.stem: Problem.load(str(path)) for path in sorted(folder.glob("*.npz"))}


def main(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False)],
    peers: Annotated[bool, typer.Option(help="Beside the other solvers that are installed.")] = False,
    out: Page = None,
) -> None:
    """Solve the programs of a folder; the exit status is 1 if gemproj falls short of 1e-9 in one."""
    raise typer.Exit(run("Model predictive control", read(folder), peers, out))


if __name__ == "__main__":
    typer.run(main)
