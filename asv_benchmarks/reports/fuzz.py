"""``make fuzz``: a million tiny degenerate integer problems of each kind against exact rational arithmetic.

Small integers make repeated, opposite, dependent and zero rows, ties, and multipliers that are zero together
with their constraint; on these, active-set methods cycle or stop early. Right-hand sides and equalities are
also drawn: an error has to be raised exactly if no x satisfies them. A third family has all options at once
(h, equality, penalty, margin, metric, batches with one G or several), on both backends. The active set that a
solver finds is a guess: rational arithmetic solves the problem on it and checks the optimality conditions. If
they do not hold, all active sets are tried. The same holds for the contradiction of an infeasible h.
"""

import math
import os
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from functools import partial
from itertools import chain, product
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import numpy as np
import typer
from rich.progress import track

import gemproj
from asv_benchmarks.reports.options import Page
from asv_benchmarks.reports.tables import markdown, publish
from gemproj import Exact, _search, backends, combine, gram, project, solve_dual
from gemproj._search import GRAM_RESOLVES
from gemproj._tspace import Dual
from gemproj.backends import portable
from gemproj.backends.numba import installed
from tests.problems import small_integers

CHUNK = 2000
WRONG = 1e-9  # of the error of x, relative to the size of the problem
BACKENDS = ("portable", "numba") if installed() else ("portable",)


class Problem(NamedTuple):
    """One problem; options are arrays (t,), and the metric is (d,)."""

    G: np.ndarray
    g: np.ndarray
    h: Any = 0.0
    equality: Any = False
    penalty: Any = np.inf
    margin: Any = 0.0
    metric: Any = 1.0


def integers(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw up to six rows with up to four columns, and g other than zero."""
    t, d = rng.integers(1, 7), rng.integers(1, 5)
    while True:
        G, g = rng.integers(-2, 3, (t, d)).astype(float), rng.integers(-3, 4, d).astype(float)
        if g.any():
            return G, g


def draw_options(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Draw G, g and some of the options; most problems are in batches, with one G or several."""
    t, d, m = int(rng.integers(1, 5)), int(rng.integers(1, 4)), int(rng.choice([1, 3, 32]))
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


class Rational:
    """A problem in rational arithmetic: integers where numbers are integers, fractions elsewhere."""

    def __init__(self, problem: Problem) -> None:
        t, d = problem.G.shape
        h, equality, upper, margin = (np.broadcast_to(a, t).tolist() for a in problem[2:6])
        self.G, self.g, self.h = [rational(row) for row in problem.G], rational(problem.g), rational(h)
        self.per_weight = [
            1 / Fraction(w) if w != 1 else 1 for w in np.broadcast_to(problem.metric, d).tolist()
        ]
        self.upper = [v if v == math.inf else Fraction(v) for v in upper]
        self.lower = [-u if e else Fraction(m) for e, u, m in zip(equality, self.upper, margin, strict=True)]
        lifted = [[a * w for a, w in zip(row, self.per_weight, strict=True)] for row in self.G]
        self.K = [[inner(a, b) for b in self.G] for a in lifted]
        self.s = [inner(row, self.g) - r for row, r in zip(self.G, self.h, strict=True)]

    def solve(self, state: Sequence[Any]) -> np.ndarray | None:
        """Return x with multipliers at given values, or free (None); None if this is not optimal."""
        free = [i for i, value in enumerate(state) if value is None]
        lam = [Fraction(0) if value is None else value for value in state]
        s = [r + inner(row, lam) for r, row in zip(self.s, self.K, strict=True)] if any(lam) else self.s
        found = solution([[self.K[i][j] for j in free] for i in free], [-s[i] for i in free])
        for i, value in zip(free, found, strict=True):
            lam[i] = value
        s = [r + inner(row, lam) for r, row in zip(self.s, self.K, strict=True)]
        for v, r, low, up in zip(lam, s, self.lower, self.upper, strict=True):
            if not (low <= v <= up and (r >= 0 or v == up) and (r <= 0 or v == low)):
                return None
        step = [inner(column, lam) for column in zip(*self.G, strict=True)]
        return np.array([float(a + w * v) for a, w, v in zip(self.g, self.per_weight, step, strict=True)])

    def contradicts(self, ray: Sequence[float]) -> bool:
        """Return whether the rows of the nonzero entries of a ray contradict each other, by Farkas' lemma."""
        *rest, last = rows = [i for i, v in enumerate(ray) if abs(v) > 1e-9] or [0]
        weights = solution([[self.K[i][j] for j in rest] for i in rest], [-self.K[i][last] for i in rest])
        d: list[Any] = [*weights, 1] if ray[last] > 0 else [*(-w for w in weights), -1]
        hard = all(self.upper[i] == math.inf for i in rows)
        signs = all(v >= 0 or self.lower[i] == -math.inf for v, i in zip(d, rows, strict=True))
        zero = not any(inner(d, [self.G[i][k] for i in rows]) for k in range(len(self.g)))
        return hard and signs and zero and inner(d, [self.h[i] for i in rows]) > 0

    def states(self) -> Iterator[tuple[Any, ...]]:
        """Yield all active sets: a multiplier is at a bound or free (None).

        That of an equality without a penalty has no bound, and may be zero if its row depends on free rows.
        """
        bounds = zip(self.lower, self.upper, strict=True)
        yield from product(*[[None, *({v for v in b if abs(v) < math.inf} or [Fraction(0)])] for b in bounds])


def rational(values: Any) -> list[Any]:
    return [int(v) if v == int(v) else Fraction(v) for v in map(float, values)]


def inner(u: Sequence[Any], v: Sequence[Any]) -> Any:
    return sum(a * b for a, b in zip(u, v, strict=True) if a and b)


def solution(A: list[list[Any]], b: list[Any]) -> list[Fraction]:
    """Solve a positive semidefinite system by elimination in integers; dependent unknowns are zero."""
    table, last, done = [], 1, []
    for row, right in zip(A, b, strict=True):
        scale = math.lcm(*(v.denominator for v in (*row, right)))
        table.append([int(v * scale) for v in (*row, right)])
    for k, row in enumerate(table):
        if row[k]:
            for i, other in enumerate(table):
                if i != k:
                    f, p = other[k], row[k]
                    table[i] = [(p * v - f * r) // last for v, r in zip(other, row, strict=True)]
            last, row = row[k], table[k]
            done.append(k)
    return [Fraction(table[k][-1], table[k][k]) if k in done else Fraction(0) for k in range(len(table))]


def searched(problems: list[Problem], search: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the multipliers that a search finds for problems of one shape, and whether it refuses their h.

    If it does, a ray takes the place of the multipliers, see `gemproj._search`.
    """
    t, d = problems[0].G.shape
    shapes = [(t, d), (d,), (t,), (t,), (t,), (t,), (d,)]
    each = zip(*problems, shapes, strict=True)
    G, g, h, equality, upper, margin, metric = (
        np.array([np.broadcast_to(v, shape) for v in values]) for *values, shape in each
    )
    lower, rows = np.where(equality, -upper, margin), G / np.sqrt(metric)[:, None]
    lam, status, *_ = search(Dual(0.0, 0.0, rows, g * np.sqrt(metric), h, lower, upper))
    void = ~G.any(axis=2) & np.where(equality, h != 0, h > 0) & np.isinf(upper)  # rows of norm zero
    lam = np.where(void.any(axis=1)[:, None], void * np.sign(h) * (void.cumsum(axis=1) == 1), lam)
    return lam, (status >= 16) | void.any(axis=1)


def expected(problem: Problem, lam: np.ndarray, refused: bool) -> np.ndarray | None:
    """Return the projection; None if h is infeasible. What a search has found is a guess."""
    exact = Rational(problem)
    if refused:
        if exact.contradicts(lam.tolist()):
            return None
    else:
        bounds = zip(lam.tolist(), exact.lower, exact.upper, strict=True)
        guess = [low if v <= low else up if v >= up else None for v, low, up in bounds]
        if (x := exact.solve(guess)) is not None:
            return x
    return next((x for state in exact.states() if (x := exact.solve(state)) is not None), None)


class Verdict(NamedTuple):
    """The errors of one way to answer some problems, and a text for each error that is too large."""

    way: str
    problems: int
    error: float
    failures: list[str]


def judge(way: str, errors: np.ndarray, given: Sequence[Any]) -> Verdict:
    """Judge the error of each problem."""
    failures = [f"{way}: {given[int(i)]}, off by {errors[i]:.1e}" for i in np.flatnonzero(~(errors < WRONG))]
    return Verdict(way, len(errors), float(errors.max()), failures)


def by_shape(problems: list[Any]) -> list[list[Any]]:
    shapes = dict.fromkeys(p[0].shape for p in problems)
    return [[p for p in problems if p[0].shape == shape] for shape in shapes]


def forms() -> dict[str, Any]:
    """Return the search run by Python, and compiled."""
    return {"Python": portable.solve} | ({"compiled": backends.search} if installed() else {})


def distance(x: np.ndarray, exact: np.ndarray | None, size: float) -> float:
    """Return the error of x relative to the size of the problem; infinity if only one is missing (NaN)."""
    if exact is None:
        return 0.0 if np.isnan(x).all() else math.inf
    return math.inf if np.isnan(x).any() else float(np.linalg.norm(x - exact)) / size


def cones(rng: np.random.Generator) -> Iterator[Verdict]:
    """Judge each way to project onto a cone; problems of one shape are one batch."""
    for members in by_shape([Problem(*integers(rng)) for _ in range(CHUNK)]):
        G, g = (np.stack([p[k] for p in members]) for k in (0, 1))
        sol, (K, b, _) = solve_dual(G, g), gram(G, g)
        found: Any = [expected(p, lam, False) for p, lam in zip(members, sol.multipliers, strict=True)]
        exact = np.stack(found)
        answers = {"project": project(G, g), "Exact on K and b": combine(G, g, Exact()(K, b))}
        for form, search in forms().items():
            for source, given in (("K", (GRAM_RESOLVES, 0.0, K, b)), ("rows", (0.0, 0.0, G, g))):
                lam = search(Dual(*given))[0]
                answers[f"search from {source}, {form}"] = g + np.einsum("nt,ntd->nd", lam, G)
        size = np.linalg.norm(g, axis=1)
        for way, x in answers.items():
            yield judge(way, np.linalg.norm(x - exact, axis=1) / size, members)


def right_hand_sides(rng: np.random.Generator) -> Iterator[Verdict]:
    """Judge whether an infeasible h raises an error, and otherwise x."""
    for members in by_shape([Problem(*small_integers(rng)) for _ in range(CHUNK)]):
        exact: list[Any] = []
        for form, search in forms().items():
            lam, refused = searched(members, search)
            exact = exact or list(map(expected, members, lam, refused))
            size = [1.0 + math.hypot(*([] if e is None else e)) for e in exact]
            x = [p.g + (np.nan if no else v @ p.G) for p, v, no in zip(members, lam, refused, strict=True)]
            errors = np.array(list(map(distance, x, exact, size)))
            yield judge(f"right-hand sides, search from rows, {form}", errors, members)
        given = {name: np.stack([getattr(p, name) for p in members]) for name in ("G", "g", "h", "equality")}
        yield from judge_batch("right-hand sides, project", given, exact, size, BACKENDS[-1])


def judge_batch(
    way: str, given: dict[str, Any], exact: list[Any], size: Any, backend: str
) -> Iterator[Verdict]:
    """Judge a batch: each infeasible problem has to be refused, and all others solved."""

    def answer(which: Any) -> np.ndarray | None:
        own = {name: a.ndim > (2 if name == "G" else 1) for name, a in given.items()}  # others are shared
        return answered({name: a[which] if own[name] else a for name, a in given.items()}, backend)

    good, errors = np.array([e is not None for e in exact]), np.zeros(len(exact))
    for i in np.flatnonzero(~good):
        errors[i] = 0.0 if answer(i) is None else math.inf
    if good.any():
        x = answer(good)
        apart = math.inf if x is None else np.linalg.norm(x - [e for e in exact if e is not None], axis=-1)
        errors[good] = apart / np.broadcast_to(size, good.shape)[good]
    yield judge(way, errors, [{name: a.tolist() for name, a in given.items()}] * len(exact))


def answered(given: dict[str, Any], backend: str) -> np.ndarray | None:
    """Return x of the problems of a batch (..., d); None for an infeasible h. A warning is infinity."""
    with patch.object(backends, "wanted", backend), warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        try:
            return project(**given)
        except RuntimeWarning:  # none of these problems justifies a warning
            return np.full(given["g"].shape, np.inf)
        except ValueError as error:
            if "infeasible" not in str(error):
                raise
            return None


def all_options(rng: np.random.Generator) -> Iterator[Verdict]:
    """Judge x with some of the options on each backend."""
    for _ in range(CHUNK // 12):  # as many problems as in the other families
        G, g, options = draw_options(rng)
        given, (t, d), count = {"G": G, "g": g, **options}, G.shape[-2:], g.size // g.shape[-1]
        shapes = {"G": (t, d), "g": (d,), "metric": (d,)}
        each = {name: np.broadcast_to(a, (count, *shapes.get(name, (t,)))) for name, a in given.items()}
        problems = [Problem(**{name: a[k] for name, a in each.items()}) for k in range(count)]
        exact = list(map(expected, problems, *searched(problems, backends.search)))
        size = 1.0 + float(np.abs(g).max()) + float(np.abs(options.get("h", 0.0)).max())
        for backend in BACKENDS:
            yield from judge_batch(f"all options, {backend}", given, exact, size, backend)


FAMILIES = {"cones": cones, "right-hand-sides": right_hand_sides, "all-options": all_options}


def run(seed: int, families: Sequence[str] = tuple(FAMILIES)) -> list[Verdict]:
    """Draw and judge a chunk of problems of each family; return one verdict for each way."""
    rng, verdicts = np.random.default_rng(seed), dict[str, Verdict]()
    # Run by Python, the search moves x here as it does where many rows are free.
    with patch.object(_search, "FEW", 0):
        for way, count, error, failures in chain.from_iterable(FAMILIES[name](rng) for name in families):
            _, n, worst, before = verdicts.get(way, Verdict(way, 0, 0.0, []))
            verdicts[way] = Verdict(way, n + count, max(worst, error), before + failures)
    return list(verdicts.values())


def main(
    problems: Annotated[int, typer.Option(min=1, help="Number of problems of each family.")] = 1_000_000,
    families: Annotated[str, typer.Option(help="Families, separated by commas.")] = ",".join(FAMILIES),
    workers: Annotated[int, typer.Option(min=1, help="Number of processes.")] = os.cpu_count() or 1,
    out: Page = None,
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
            wrong[verdict.way] += len(verdict.failures)
            for failure in verdict.failures:
                print(failure, flush=True)
    seconds = time.perf_counter() - start
    parts = [
        f"{len(seeds) * CHUNK:,} problems of {' and of '.join(asked)}, seeds 0 to {len(seeds) - 1}, in "
        f"{seconds / 60:.0f} minutes, {count.total() / seconds:,.0f} answers a second, processes: {workers}; "
        f"gemproj {gemproj.__version__}, NumPy {np.__version__}.\n",
        *markdown(
            ["way", "problems", "wrong", "largest error of x, over the size of the problem"],
            [[way, f"{count[way]:,}", str(wrong[way]), f"{error:.0e}"] for way, error in worst.items()],
        ),
    ]
    publish(["\n".join(parts)], out)
    raise typer.Exit(code=int(wrong.total() > 0))


if __name__ == "__main__":
    typer.run(main)
