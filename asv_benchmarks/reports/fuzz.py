"""``make fuzz``: a million tiny degenerate integer problems of each kind against exact rational arithmetic.

Small integers make repeated, opposite, dependent and zero rows, ties, and multipliers that are zero together
with their constraint; on these, active-set methods cycle or stop early. Right-hand sides and equalities are
also drawn: an error has to be raised exactly if no x satisfies them. A third family has all options at once
(h, equality, penalty, margin, metric, batches with one G or several). It is compared on both backends with an
enumeration of all active sets of the dual problem in rational arithmetic.
"""

import os
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import numpy as np
import typer
from gemproj.methods._active_set import solve_active_set
from gemproj.methods._faces import Factorisation, Tableau
from rich.progress import track

import gemproj
from asv_benchmarks.reports.tables import markdown, publish
from gemproj import Exact, backends, combine, gram, project, solve_dual
from gemproj._tspace import normalise
from gemproj.backends.numba import installed
from tests.problems import exactly, rational_feasible, rational_solution, small_integers

CHUNK = 2000
WRONG = 1e-9  # of |x - x*| / |g|
UNMET = 1e-6  # of the optimality conditions, with a right-hand side


def integers(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw up to six rows with up to four columns, and g other than zero."""
    t, d = rng.integers(1, 7), rng.integers(1, 5)
    while True:
        G, g = rng.integers(-2, 3, (t, d)).astype(float), rng.integers(-3, 4, d).astype(float)
        if g.any():
            return G, g


def draw_options(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Draw G, g and some of the options; two of three problems are batches, with one G or several."""
    t, d, m = int(rng.integers(1, 5)), int(rng.integers(1, 4)), int(rng.choice([1, 2, 4]))
    lead = () if m == 1 else (m,)
    G = rng.integers(-2, 3, (*lead * int(rng.integers(2)), t, d)).astype(float)
    g = rng.integers(-3, 4, (*lead, d)).astype(float)
    equality = rng.random((*lead, t)) < 0.3
    penalty = rng.choice([0.5, 1.0, 2.0, np.inf], (*lead, t))
    margin = np.minimum(rng.choice([0.0, 0.25, 1.0], (*lead, t)), penalty)
    metric = rng.choice([0.25, 0.5, 1.0, 3.0], d if rng.integers(2) else g.shape)
    options = {"equality": equality, "penalty": penalty, "margin": margin, "metric": metric}
    options = {name: value for name, value in options.items() if rng.random() < 0.5}
    if rng.random() < 0.6:
        options["h"] = rng.integers(-2, 3, (*lead, t)) / rng.choice([1.0, 4.0])
    return G, g, options


def enumerate_exactly(
    G: np.ndarray,
    g: np.ndarray,
    h: Any = 0.0,
    equality: Any = False,
    penalty: Any = np.inf,
    margin: Any = 0.0,
    metric: Any = 1.0,
) -> np.ndarray | None:
    """Return the projection of one problem, None if h is infeasible: all active sets, in rational arithmetic.

    A multiplier is at a bound or free. That of an equality without a penalty has no bound, and may be zero if
    its row depends on free rows. Floats are rationals, so only the result is rounded.
    """
    t = len(G)
    h, equality, upper, margin = (np.broadcast_to(a, t) for a in (h, equality, penalty, margin))
    lower = np.where(equality, -upper, margin)
    A, a, w, hs = (exactly(np.asarray(v, float)) for v in (G, g, np.broadcast_to(metric, g.shape), h))
    K, s0 = (A / w) @ A.T, A @ a - hs
    values: list[list[Any]] = []
    for i in range(t):
        held = [Fraction(float(v)) for v in {lower[i], upper[i]} if np.isfinite(v)]
        values.append([*(held or [Fraction(0)]), None])
    for state in _likeliest_first(list(product(*values)), K, s0, lower, upper):
        free = [i for i in range(t) if state[i] is None]
        lam = np.array([Fraction(0) if v is None else v for v in state], dtype=object)
        if free:
            solved = rational_solution(K[np.ix_(free, free)], -(s0 + K @ lam)[free])
            if solved is None:
                continue
            lam[free] = solved
        s = s0 + K @ lam
        if all(
            low <= v <= up and (r >= 0 or v == up) and (r <= 0 or v == low)
            for v, r, low, up in zip(lam, s, lower.tolist(), upper.tolist(), strict=True)
        ):
            return np.asarray(a + (A.T @ lam) / w, dtype=float)
    return None


def _likeliest_first(
    states: list[tuple[Any, ...]], K: np.ndarray, s0: np.ndarray, lower: np.ndarray, upper: np.ndarray
) -> list[tuple[Any, ...]]:
    """Return the active sets, sorted by the error of their multipliers in float64."""
    K, s0 = K.astype(float), s0.astype(float)
    free = np.array([[value is None for value in state] for state in states])
    lam = np.array([[value or 0 for value in state] for state in states], dtype=float)
    A = np.where(free[:, :, None] & free[:, None, :], K, 0.0)
    A += np.eye(len(K)) * np.where(free, 1e-9, 1.0)[:, :, None]  # a ridge for dependent rows
    lam = np.linalg.solve(A, np.where(free, -(s0 + lam @ K), lam)[..., None])[..., 0]
    off = np.abs(lam - np.clip(lam - s0 - lam @ K, lower, upper)).max(1)
    return [states[i] for i in np.argsort(off, kind="stable")]


def options_error(
    G: np.ndarray, g: np.ndarray, options: dict[str, Any], expected: list[np.ndarray | None], backend: str
) -> float:
    """Return the largest error of x over the size of the problem; infinity for wrong feasibility."""
    infeasible = any(e is None for e in expected)
    try:
        with patch.object(backends, "wanted", backend), warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            x = project(G, g, **options).reshape(-1, g.shape[-1])
    except RuntimeWarning:  # none of these problems justifies a warning
        return np.inf
    except ValueError as error:
        if "infeasible" not in str(error):
            raise
        return 0.0 if infeasible else np.inf
    if infeasible:
        return np.inf
    size = 1.0 + float(np.abs(g).max()) + float(np.abs(options.get("h", 0.0)).max())
    return float(np.abs(x - np.array(expected)).max()) / size


def answers(G: np.ndarray, g: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Project by the public functions, and by each form of the active-set method alone."""
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


class Verdict(NamedTuple):
    """The error of one way to answer, the number of problems, and the problems if the error is too large."""

    way: str
    error: float
    problems: int
    failure: str


def judge(way: str, error: float, most: float, problems: int = 1, **given: np.ndarray) -> Verdict:
    """Judge the largest error of some problems, which must be less than `most`."""
    failure = ""
    if not error < most:
        failure = f"{way}: { {name: array.tolist() for name, array in given.items()} }, off by {error:.1e}"
    return Verdict(way, error, problems, failure)


def cones(rng: np.random.Generator) -> Iterator[Verdict]:
    """Judge each way to project onto a cone by the error of x, relative to the norm of g."""
    G, g = integers(rng)
    expected = enumerate_exactly(G, g)
    for way, x in answers(G, g):
        yield judge(way, float(np.linalg.norm(x - expected) / np.linalg.norm(g)), WRONG, G=G, g=g)


def right_hand_sides(rng: np.random.Generator) -> Iterator[Verdict]:
    """Judge whether an infeasible h raises an error, and otherwise the optimality conditions."""
    G, g, h, equality = small_integers(rng)
    try:
        found, answered = float(solve_dual(G, g, h=h, equality=equality).kkt_residual()), True
    except ValueError:
        found, answered = 0.0, False
    error = max(found, float(answered != rational_feasible(G, h, equality)))
    yield judge("right-hand sides: residual", error, UNMET, G=G, g=g, h=h, equality=equality)


def all_options(rng: np.random.Generator) -> Iterator[Verdict]:
    """Judge x with some of the options on each backend, relative to the size of the problem."""
    G, g, options = draw_options(rng)
    given = {"G": G, "g": g, **options}
    count = g.size // g.shape[-1]
    # Split into problems: arrays that a batch shares are repeated.
    each = {
        name: np.broadcast_to(a, (count, *a.shape[-2 if name == "G" else -1 :])) for name, a in given.items()
    }
    expected = [enumerate_exactly(**{name: a[k] for name, a in each.items()}) for k in range(count)]
    for backend in ("portable", "numba") if installed() else ("portable",):
        error = options_error(G, g, options, expected, backend)
        yield judge(f"all options, {backend}", error, WRONG, count, **given)


FAMILIES = {"cones": cones, "right-hand-sides": right_hand_sides, "all-options": all_options}


def run(seed: int, families: Sequence[str] = tuple(FAMILIES)) -> list[Verdict]:
    """Draw and judge a chunk of problems of each family."""
    rng = np.random.default_rng(seed)
    return [verdict for _ in range(CHUNK) for name in families for verdict in FAMILIES[name](rng)]


def main(
    problems: Annotated[int, typer.Option(min=1, help="Number of draws from each family.")] = 1_000_000,
    families: Annotated[str, typer.Option(help="Families, separated by commas.")] = ",".join(FAMILIES),
    workers: Annotated[int, typer.Option(min=1, help="Number of processes.")] = os.cpu_count() or 1,
    out: Annotated[Path | None, typer.Option(help="Also write the result to this Markdown file.")] = None,
) -> None:
    """Project random degenerate integer problems and compare with exact rational arithmetic."""
    seeds, start = range(-(-problems // CHUNK)), time.perf_counter()
    asked = families.split(",")
    if unknown := sorted(set(asked) - set(FAMILIES)):
        raise typer.BadParameter(f"no such families: {unknown}; there are {', '.join(FAMILIES)}")
    count, wrong, worst = Counter[str](), Counter[str](), dict[str, float]()  # by way
    with ProcessPoolExecutor(workers) as pool:
        chunks = track(pool.map(partial(run, families=asked), seeds), "problems", total=len(seeds))
        for verdict in chain.from_iterable(chunks):
            count[verdict.way] += verdict.problems
            worst[verdict.way] = max(worst.get(verdict.way, 0.0), verdict.error)
            if verdict.failure:
                wrong[verdict.way] += 1
                print(verdict.failure, flush=True)
    minutes = (time.perf_counter() - start) / 60
    parts = [
        f"{len(seeds) * CHUNK:,} draws of {' and of '.join(asked)}, seeds 0 to {len(seeds) - 1}, in "
        f"{minutes:.0f} minutes, processes: {workers}; gemproj {gemproj.__version__}, NumPy {np.__version__}."
        " A draw of all-options is a batch of one to four problems.\n",
        *markdown(
            ["way", "problems", "wrong", "largest error of x, over the norm of g"],
            [[way, f"{count[way]:,}", str(wrong[way]), f"{error:.0e}"] for way, error in worst.items()],
        ),
    ]
    publish(["\n".join(parts)], out)
    raise typer.Exit(code=int(bool(wrong)))


if __name__ == "__main__":
    typer.run(main)
