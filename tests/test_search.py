"""The active-set search with right-hand sides, equalities and dependent rows, portable and compiled."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemproj import Exact, Status
from gemproj._tspace import Standard
from gemproj.backends.numba import installed
from gemproj.methods import _active_set
from gemproj.methods._active_set import solve_active_set
from gemproj.methods._faces import Factorisation, Tableau


def portable(K, b, lower, upper, start):
    return solve_active_set(Tableau(K, b), lower, upper, start)


def compiled(K, b, lower, upper, start):
    if not installed():
        pytest.skip("numba is missing or switched off")
    from gemproj.backends.numba.backend import solve

    lam, pivots, status, _ = solve(Exact(), Standard(K, b, lower, upper), start)
    return lam, int(pivots), int(status) & int(Status.STALLED)


FORMS = pytest.mark.parametrize("solve", [portable, compiled], ids=["portable", "compiled"])
KINDS = ["generic", "integers", "repeated", "opposite", "dependent"]


def draw(rng, kind, t, d, equalities):
    """Draw rows of norm one, a gradient, and right-hand sides that a point x meets; b is at most one."""
    G = rng.standard_normal((t, d))
    if kind == "integers":
        G = rng.integers(-2, 3, (t, d)).astype(float)
        G[:, 0] += ~G.any(axis=1)
    if kind == "repeated":
        G[t // 2 :] = G[: t - t // 2]
    if kind == "opposite":
        G[t // 2 :] = -G[: t - t // 2]
    if kind == "dependent":
        G = rng.standard_normal((t, max(1, t // 2))) @ rng.standard_normal((max(1, t // 2), d))
    G /= np.linalg.norm(G, axis=1, keepdims=True)
    x, g = rng.standard_normal(d), rng.standard_normal(d)
    equal = rng.random(t) < (0.3 if equalities else 0.0)
    h = G @ x - np.where(equal, 0.0, rng.random(t) * (rng.random(t) < 0.5))
    size = max(1e-3, float(np.abs(G @ g - h).max()))
    return G, g / size, h / size, np.where(equal, -np.inf, 0.0)


def kkt(G, g, h, lower, upper, lam):
    """Return the largest violation of the optimality conditions of the projection, by rows of norm one."""
    s = G @ (g + G.T @ lam) - h
    return np.max(np.abs(lam - np.clip(lam - s, lower, upper)))


def drawn_bounds(rng, lower, free):
    """Draw upper bounds, of which some are finite, and a start between the bounds."""
    upper = np.where(rng.random(len(lower)) < 0.5, rng.random(len(lower)), np.inf)
    return upper, np.clip(rng.standard_normal(len(lower)) * (rng.random(len(lower)) < free), lower, upper)


@FORMS
@pytest.mark.parametrize("bounded", [False, True])
@given(st.sampled_from(KINDS), st.integers(1, 9), st.integers(1, 6), st.booleans(), st.integers(0, 2**32))
def test_the_optimality_conditions_are_met(solve, bounded, kind, t, d, equalities, seed):
    """With feasible right-hand sides; with bounds on both sides and a start, or neither."""
    rng = np.random.default_rng(seed)
    G, g, h, lower = draw(rng, kind, t, d, equalities)
    upper, start = drawn_bounds(rng, lower, 0.7) if bounded else (None, None)
    lam = solve(G @ G.T, G @ g - h, lower, upper, start)[0]
    assert kkt(G, g, h, lower, upper if bounded else np.inf, lam) <= 1e-9 * (1 + np.abs(lam).sum())


@pytest.mark.parametrize("bounded", [False, True])
def test_the_twins_take_as_many_pivots(bounded, rng):
    """Without ties, which rounding would decide: up to 9 rows in 2 to 11 dimensions, or with a start in enough."""
    counts = []
    for _ in range(500):
        t = int(rng.integers(1, 10))
        G, g, h, lower = draw(rng, "generic", t, int(rng.integers(t if bounded else 2, 12)), bounded)
        upper, start = drawn_bounds(rng, lower, 0.5) if bounded else (None, None)
        given = G @ G.T, G @ g - h, lower, upper, start
        (expected, pivots, _), (lam, count, _) = portable(*given), compiled(*given)
        assert count == pivots
        np.testing.assert_allclose(G.T @ lam, G.T @ expected, rtol=0, atol=1e-9)
        counts.append(count)
    assert max(counts) >= 5


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


@FORMS
def test_what_no_point_meets_ends(solve):
    K = np.array([[1.0, -1.0], [-1.0, 1.0]])  # x >= 1 and -x >= 1
    lam, pivots, verdict = solve(K, np.array([-1.0, -1.0]), None, None, None)
    assert np.isfinite(lam).all()
    assert pivots < 50
    assert verdict > 0.5  # the status STALLED, or the residual
    bounded = solve(K, np.array([-1.0, -1.0]), None, np.full(2, 3.0), None)[0]
    np.testing.assert_allclose(bounded, 3.0)  # with a penalty there is always a solution


@given(st.integers(1, 7), st.integers(1, 5), st.integers(0, 2**32))
def test_rows_themselves_find_what_their_products_find(t, d, seed):
    """Without right-hand sides; equalities among inequalities."""
    rng = np.random.default_rng(seed)
    G, g, _, lower = draw(rng, "integers", t, d, True)
    lam = solve_active_set(Factorisation(G.T, g), lower, None, None)[0]
    same = solve_active_set(Tableau(G @ G.T, G @ g), lower, None, None)[0]
    np.testing.assert_allclose(g + G.T @ lam, g + G.T @ same, rtol=0, atol=1e-10 * (1 + np.abs(g).max()))
    assert kkt(G, g, 0.0, lower, np.inf, lam) <= 1e-9 * (1 + np.abs(lam).sum())
