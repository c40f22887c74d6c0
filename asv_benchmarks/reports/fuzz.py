"""``make fuzz``: a million tiny degenerate integer problems against exact rational arithmetic.

Small integers make repeated, opposite, dependent and zero rows, ties and multipliers that are zero
together with their constraint: all that active-set methods cycle or stop early on. Right-hand sides and
equalities are drawn, too: an error has to say that no x meets them exactly if none does.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.progress import track

import gemproj
from gemproj import Exact, combine, gram, project, solve_dual
from gemproj._tspace import normalise
from gemproj.methods._active_set import solve_active_set
from gemproj.methods._faces import Factorisation, Tableau
from tests.problems import rational_feasible, rational_projection, small_integers

CHUNK = 2000
WRONG = 1e-9  # of |x - x*| / |g|
UNMET = 1e-6  # of the optimality conditions, with a right-hand side


def integers(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw up to six rows with up to four columns; g is not zero."""
    t, d = rng.integers(1, 7), rng.integers(1, 5)
    while True:
        G, g = rng.integers(-2, 3, (t, d)).astype(float), rng.integers(-3, 4, d).astype(float)
        if g.any():
            return G, g


def answers(G: np.ndarray, g: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Project as users do, and by each form of the method for large t on its own."""
    yield "project", project(G, g)
    K, b, _ = gram(G, g)
    yield "Exact on K and b", combine(G, g, Exact()(K, b))
    unit = normalise(K, b, None, None, None)
    lam, _, _ = solve_active_set(Tableau(unit.K, unit.b), None, None, None)
    yield "active set, tableau", combine(G, g, lam * unit.scale)
    n = np.linalg.norm(G, axis=1)
    rows = n > 0
    lam = np.zeros(len(G))
    if rows.any():
        lam[rows], _, _ = solve_active_set(Factorisation(G[rows].T / n[rows], g), None, None, None)
        lam[rows] /= n[rows]
    yield "active set, factorisation", combine(G, g, lam)


def run(seed: int) -> tuple[Counter[str], dict[str, float], list[str]]:
    """Return the number of wrong answers and the worst error by way, and the problems that went wrong."""
    rng = np.random.default_rng(seed)
    wrong: Counter[str] = Counter()
    worst: dict[str, float] = {}
    failures = []

    def judge(way: str, error: float, most: float, *problem: np.ndarray) -> None:
        worst[way] = max(worst.get(way, 0.0), error)
        wrong[way] += not error < most
        if not error < most:
            failures.append(f"{way}: {[array.tolist() for array in problem]}, off by {error:.1e}")

    for _ in range(CHUNK):
        G, g = integers(rng)
        expected = np.array(rational_projection(G, g), dtype=float)
        for way, x in answers(G, g):
            judge(way, float(np.linalg.norm(x - expected) / np.linalg.norm(g)), WRONG, G, g)
        G, g, h, equality = small_integers(rng)
        try:
            found = float(solve_dual(G, g, h=h, equality=equality).kkt_residual())
            answered = True
        except ValueError:
            found, answered = 0.0, False
        error = max(found, float(answered != rational_feasible(G, h, equality)))
        judge("right-hand sides: residual", error, UNMET, G, g, h, equality)
    return wrong, worst, failures


def main(
    problems: Annotated[int, typer.Option(help="Number of problems.")] = 1_000_000,
    workers: Annotated[int, typer.Option(help="Processes.")] = os.cpu_count() or 1,
    out: Annotated[Path | None, typer.Option(help="Also write the result to this Markdown file.")] = None,
) -> None:
    """Project random degenerate integer problems and compare with exact rational arithmetic."""
    seeds, start = range(-(-problems // CHUNK)), time.perf_counter()
    wrong: Counter[str] = Counter()
    worst: dict[str, float] = {}
    with ProcessPoolExecutor(workers) as pool:
        for counts, errors, failures in track(pool.map(run, seeds), "problems", total=len(seeds)):
            wrong.update(counts)
            worst = {way: max(worst.get(way, 0.0), error) for way, error in errors.items()}
            print("\n".join(failures), end="\n" if failures else "")
    minutes = (time.perf_counter() - start) / 60
    lines = [
        f"{len(seeds) * CHUNK:,} problems, seeds 0 to {len(seeds) - 1}, in {minutes:.0f} minutes "
        f"on {workers} processes; gemproj {gemproj.__version__}, NumPy {np.__version__}.",
        "",
        "| way | wrong | largest error of x, over the norm of g |",
        "|:--|--:|--:|",
        *(f"| {way} | {wrong[way]} | {error:.0e} |" for way, error in worst.items()),
    ]
    print("\n".join(lines))
    if out is not None:
        out.write_text("\n".join(lines) + "\n")
    raise typer.Exit(code=int(bool(wrong.total())))


if __name__ == "__main__":
    typer.run(main)
