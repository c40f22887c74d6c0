"""``python -m asv_benchmarks.reports.gradient_cones FOLDER``: our own families as quadratic programs.

Writes ``min 1/2 |x - g|^2, G x >= 0`` in the format of `qpsolvers.Problem`, one file each, with the right x
under the key ``x``: from 100 digits, see `asv_benchmarks.reports.judge`. Then solves them all.

The families of ``make accuracy`` that differ only in scale are left out, because boards judge by absolute
residuals. For the same reason g and the longest row of G have norm one; this moves neither the cone nor the
direction of x.
"""

from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from qpsolvers import Problem

from asv_benchmarks.reports.boards import run
from asv_benchmarks.reports.families import FAMILIES
from asv_benchmarks.reports.judge import project_precisely
from asv_benchmarks.reports.options import Page

OF_SCALE = ("all times", "gradient norms")  # beginnings of names
LARGEST, REPEATS = 30, 1


def write(folder: Path, repeats: int = REPEATS, largest: int = LARGEST) -> None:
    """Write the programs to a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, family in FAMILIES.items():
        if name.startswith(OF_SCALE):
            continue
        word = "".join(c if c.isalnum() else "-" for c in name.replace(",", "").replace(" ", "_"))
        for number, (G, g) in enumerate(family.problems(repeats, largest)):
            G, g = G / (np.linalg.norm(G, axis=1).max() or 1.0), g / np.linalg.norm(g)
            x, none = project_precisely(G, g), np.array(None)  # as `Problem.save` writes it
            path, P, h = folder / f"{word}-{number:02}-t{len(G)}.npz", np.eye(len(g)), np.zeros(len(G))
            np.savez_compressed(path, P=P, q=-g, G=-G, h=h, A=none, b=none, lb=none, ub=none, x=x)


def main(
    folder: Annotated[Path, typer.Argument(file_okay=False)],
    repeats: Annotated[int, typer.Option(min=1, help="Programs of each size.")] = REPEATS,
    largest: Annotated[int, typer.Option(min=2, help="Most constraints.")] = LARGEST,
    peers: Annotated[bool, typer.Option(help="Beside the other solvers that are installed.")] = False,
    out: Page = None,
) -> None:
    """Write the programs and solve them; the exit status is 1 if gemproj falls short of 1e-9 in one."""
    write(folder, repeats, largest)
    paths = sorted(folder.glob("*.npz"))
    right = {path.stem: np.load(path)["x"] for path in paths}
    programs = {path.stem: Problem.load(str(path)) for path in paths}
    raise typer.Exit(run("Gradient cones", programs, peers, out, right))


if __name__ == "__main__":
    typer.run(main)
