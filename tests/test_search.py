"""The active-set search with right-hand sides, equalities and dependent rows, portable and compiled."""

import numpy as np
import problems
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemproj import Exact, Status, solve_gram
from gemproj._tspace import Standard
from gemproj.backends.numba import installed
from gemproj.methods import _active_set
from gemproj.methods._active_set import solve_active_set
from gemproj.methods._faces import Factorisation, Tableau


def by_products(G, g, h, lower, upper, start):
    return solve_active_set(Tableau(G @ G.T, G @ g - h), lower, upper, start)[0]


def by_rows(G, g, h, lower, upper, start):
    return solve_active_set(Factorisation(G.T, g, h), lower, upper, start)[0]


def compiled(G, g, h, lower, upper, start):
    if not installed():
        pytest.skip("numba is missing or switched off")
    from gemproj.backends.numba.backend import solve

    return solve(Exact(), Standard(G @ G.T, G @ g - h, lower, upper), start)[0]


KINDS = ["generic", "integers", "parallel", "repeated", "opposite", "more rows than columns"]


def draw(rng, kind, t, d, equalities):
    """Draw rows of norm one, a gradient, and right-hand sides that a point x meets; b is at most one."""
    G = rng.standard_normal((t, d)) if kind == "generic" else problems.draw(rng, kind, t, max(2, d)).G
    if kind == "integers":
        G = rng.integers(-2, 3, (t, d)).astype(float)
        G[:, 0] += ~G.any(axis=1)
    G /= np.linalg.norm(G, axis=1, keepdims=True)
    x, g = rng.standard_normal((2, G.shape[1]))
    equal = rng.random(t) < (0.3 if equalities else 0.0)
    h = G @ x - np.where(equal, 0.0, rng.random(t) * (rng.random(t) < 0.5))
    size = max(1e-3, float(np.abs(G @ g - h).max()))
    return G, g / size, h / size, np.where(equal, -np.inf, 0.0)


def drawn_bounds(rng, lower, free):
    """Draw upper bounds, of which some are finite, and a start between the bounds."""
    upper = np.where(rng.random(len(lower)) < 0.5, rng.random(len(lower)), np.inf)
    return upper, np.clip(rng.standard_normal(len(lower)) * (rng.random(len(lower)) < free), lower, upper)


@pytest.mark.parametrize("solve", [by_products, by_rows, compiled])
@pytest.mark.parametrize("bounded", [False, True])
@given(st.sampled_from(KINDS), st.integers(1, 9), st.integers(1, 6), st.booleans(), st.integers(0, 2**32))
def test_the_optimality_conditions_are_met(solve, bounded, kind, t, d, equalities, seed):
    """With feasible right-hand sides; with bounds on both sides and a start, or neither."""
    rng = np.random.default_rng(seed)
    G, g, h, lower = draw(rng, kind, t, d, equalities)
    upper, start = drawn_bounds(rng, lower, 0.7) if bounded else (None, None)
    lam = solve(G, g, h, lower, upper, start)
    assert problems.kkt(G, g, h, lower, upper if bounded else np.inf, lam) <= 1e-9


def recorded(monkeypatch, K, b, lower, upper, start):
    """Return which rows the compiled search moves in and out of the free set, from its loops run by Python."""
    from gemproj.backends.numba import search, tableau
    from gemproj.backends.numba.backend import _search

    pivots, names = [], {}
    for module in (search, tableau):
        loops = {name: f.py_func for name, f in vars(module).items() if hasattr(f, "py_func")}
        names |= loops
        for name, loop in loops.items():
            monkeypatch.setattr(module, name, loop)

    def pivot(T, free, k):
        pivots.append(k)
        names["pivot"](T, free, k)

    monkeypatch.setattr(search, "pivot", pivot)
    none, ended = np.empty((0, 0)), np.empty((2, 1), int)
    given = [none if a is None else a[None] for a in (K, b, lower, upper, start)]
    lam = np.empty((1, len(b)))
    search.solve_active_set(0, 1, *given, lam, np.empty(1), ended, *_search(len(b)))
    monkeypatch.undo()
    return lam[0], pivots


class Recorded(Tableau):
    """A tableau that lists its pivots, but for those of the first set, which the portable form frees at once."""

    def __init__(self, K, b):
        self.pivots = []
        super().__init__(K, b)

    def set_free(self, free, first):
        before = len(self.pivots)
        super().set_free(free, first)
        del self.pivots[before:]

    def pivot(self, j):
        self.pivots.append(j)
        super().pivot(j)


@pytest.mark.skipif(not installed(), reason="needs numba")
@pytest.mark.parametrize("bounded", [False, True])
def test_the_twins_take_the_same_pivots(bounded, monkeypatch, rng):
    """Without ties, which rounding would decide: up to 9 rows in 2 to 11 dimensions, or with a start in enough."""
    lengths = []
    for _ in range(500):
        t = int(rng.integers(1, 10))
        G, g, h, lower = draw(rng, "generic", t, int(rng.integers(t if bounded else 2, 12)), bounded)
        upper, start = drawn_bounds(rng, lower, 0.5) if bounded else (None, None)
        K, b = G @ G.T, G @ g - h
        tableau = Recorded(K, b)
        expected = solve_active_set(tableau, lower, upper, start)[0]
        lam, pivots = recorded(monkeypatch, K, b, lower, upper, start)
        assert pivots == tableau.pivots
        np.testing.assert_allclose(G.T @ lam, G.T @ expected, rtol=0, atol=1e-9)
        lengths.append(len(pivots))
    assert max(lengths) >= 5


@pytest.mark.parametrize("make", [Tableau, Factorisation])
def test_past_its_budget_the_search_takes_the_first_violated_row(make, rng):
    G, g = rng.standard_normal((30, 40)) - 0.3, rng.standard_normal(40) + 0.3
    G /= np.linalg.norm(G, axis=1, keepdims=True)
    b = G @ g

    def first_entered(spent):
        faces, entered = make(*((G @ G.T, b) if make is Tableau else (G.T, g))), []
        pivot = faces.pivot
        faces.pivot = lambda j: (entered.append(int(j)), pivot(j))
        search = _active_set._Search(faces, np.zeros(30), np.full(30, np.inf), np.zeros(30))
        search.pivots = spent
        search.run(budget=99)
        return entered[0]

    assert first_entered(0) == int(np.argmin(b))
    assert first_entered(100) == int(np.flatnonzero(b < 0)[0]) != first_entered(0)


@pytest.mark.parametrize("backend", ["portable", "numba"])
@pytest.mark.parametrize("t", [2, 12])
def test_what_no_point_meets_ends(backend, t, monkeypatch):
    if backend == "numba" and not installed():
        pytest.skip("numba is missing or switched off")
    monkeypatch.setattr("gemproj.backends.wanted", backend)
    signs = (-1.0) ** np.arange(t)
    K, b = np.outer(signs, signs), -np.ones(t)  # x >= 1 and -x >= 1
    sol = solve_gram(K, b)
    assert sol.status & Status.STALLED
    assert np.isfinite(sol.multipliers).all()
    assert sol.iterations < 25 * t
    np.testing.assert_allclose(solve_gram(K, b, penalty=3.0).multipliers, 3.0)  # there is always a solution
