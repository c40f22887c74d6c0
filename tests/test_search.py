"""The search of `gemproj._search`, run by Python and compiled, in coordinates from K and from G."""

import numpy as np
import problems
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemproj import Status, _search, solve_gram
from gemproj._search import GRAM_RESOLVES
from gemproj._tspace import Dual
from gemproj.backends import portable
from gemproj.backends.numba import installed

KINDS = ["generic", "integers", "parallel", "repeated", "opposite", "more rows than columns", "zero row"]
FORMS = {"python": portable.solve}
if installed():
    from gemproj.backends.numba.search import solve

    FORMS["compiled"] = solve

forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
sources = pytest.mark.parametrize("of_gram", [True, False], ids=["K", "rows"])


def run(form, of_gram, G, g, h, lower=None, upper=None, start=None, trust=0.0):
    """Solve a batch: rows (n, t, d), or (1, t, d) for all, g (n, d) and the rest (n, t).

    Return the multipliers, and status and number of pivots (n, 2).
    """
    rows, linear = (G @ G.swapaxes(1, 2), np.sum(G * g[:, None], axis=2)) if of_gram else (G, g)
    lam, status, pivots, _ = form(
        Dual(GRAM_RESOLVES if of_gram else 0.0, trust, rows, linear, h, lower, upper, start)
    )
    return lam, np.stack([status, pivots], axis=1)


def run_one(form, of_gram, *arrays, **trust):
    lam, found = run(form, of_gram, *(a if a is None else a[None] for a in arrays), **trust)
    return lam[0], found[0]


def draw(rng, kind, t, d, equalities=False):
    """Draw rows, a gradient, right-hand sides that a point x meets, and lower bounds."""
    G = rng.standard_normal((t, d)) if kind == "generic" else problems.draw(rng, kind, t, max(2, d)).G
    if kind == "integers":
        G = rng.integers(-2, 3, (t, d)).astype(float)
    x, g = rng.standard_normal((2, G.shape[1]))
    equal = rng.random(t) < 0.3 * equalities
    room = np.where(equal, 0.0, rng.random(t) * (rng.random(t) < 0.5))
    return G, g, G @ x - room * problems.lengths(G), np.where(equal, -np.inf, 0.0)


def drawn_bounds(rng, G, lower):
    """Draw upper bounds, of which some are finite, and a start, of which some entries are not."""
    t, n = len(lower), problems.lengths(G)
    upper, start = np.where(rng.random(t) < 0.5, rng.random(t) / n, np.inf), rng.standard_normal(t) / n
    return upper, np.where(rng.random(t) < 0.3, rng.choice([0.0, np.nan, np.inf], t), start)


@forms
@sources
@pytest.mark.parametrize("bounded", [False, True])
@given(st.sampled_from(KINDS), st.integers(1, 9), st.integers(1, 6), st.booleans(), st.integers(0, 2**32))
def test_the_optimality_conditions_are_met(form, of_gram, bounded, kind, t, d, equalities, seed):
    """With feasible right-hand sides; with bounds on both sides and a start, or neither."""
    rng = np.random.default_rng(seed)
    G, g, h, lower = draw(rng, kind, t, d, equalities)
    G, h = (G.T * (scale := 10.0 ** rng.uniform(-3, 3, t))).T, h * scale
    upper, start = drawn_bounds(rng, G, lower) if bounded else (None, None)
    lam, found = run_one(form, of_gram, G, g, h, lower, upper, start)
    upper = np.full(t, np.inf) if upper is None else upper
    assert found[0] == _search.OPTIMAL
    assert np.all((lam >= lower) & (lam <= upper))
    assert problems.kkt(G, g, h, lower, upper, lam) <= (1e-9 if of_gram else 1e-12)


@forms
@sources
@given(st.integers(1, 8), st.integers(1, 6), st.booleans(), st.integers(0, 2**32))
def test_contradictions_have_a_ray(form, of_gram, t, d, equalities, seed):
    """By Farkas' lemma no x satisfies the rows of its nonzero entries: for unit rows, G'ray = 0 and h'ray > 0."""
    rng = np.random.default_rng(seed)
    G, g, h, lower = draw(rng, "generic", t, d, equalities)
    weights = np.where(lower < 0, rng.standard_normal(t), rng.random(t))
    G, lower = np.vstack([G, -weights @ G]), np.append(lower, 0.0)  # the weighted sum of all rows is zero
    h = np.append(h, np.linalg.norm(G[-1]) * rng.uniform(0.01, 1.0) - weights @ h)
    ray, found = run_one(form, of_gram, G, g, h, lower)
    G, h = (G.T / problems.lengths(G)).T, h / problems.lengths(G)
    assert found[0] == _search.INFEASIBLE
    assert np.all((ray >= 0) | (lower < 0))
    assert np.linalg.norm(ray @ G) <= (1e-6 if of_gram else 1e-12) * np.abs(ray).sum()
    assert ray @ h > 0
    assert np.count_nonzero(ray) <= np.linalg.matrix_rank(G) + 1  # no more rows than it takes


@forms
@sources
@pytest.mark.parametrize("tilt", [1e-1, 1e-3, 1e-6, 1e-9, 1e-12, 0.0])
def test_the_angle_of_dependent_rows_is_found(form, of_gram, tilt):
    """Rows u and -u + tilt v, that both are active: the distance of each from the span of the other."""
    G, g = np.array([[1.0, 0.0, 0.0], [-1.0, tilt, 0.0]]), np.array([-1.0, -1.0, 1.0])
    lam, found = run_one(form, of_gram, G, g, np.zeros(2))
    assert found[0] == _search.OPTIMAL
    _, mistrusted = run_one(form, of_gram, G, g, np.zeros(2), trust=max(1.01 * tilt, 2e-15))
    assert mistrusted[0] == _search.UNRESOLVED
    if tilt > (1e-7 if of_gram else 1e-13):
        _, trusted = run_one(form, of_gram, G, g, np.zeros(2), trust=0.99 * tilt)
        assert trusted[0] == _search.OPTIMAL
        assert g + lam @ G == pytest.approx([0.0, 0.0, 1.0], abs=1e-15 / tilt ** (1 + of_gram))


@forms
@sources
def test_problems_of_a_batch_stay_apart(form, of_gram, rng):
    """Any number of problems, with one G or several, the same bits; scales of two change only the exponents."""
    G, g, h, lower = (np.stack(a) for a in zip(*(draw(rng, "opposite", 5, 7) for _ in range(6)), strict=True))
    h[2, :] = np.abs(h[2]) + 1.0  # the opposite rows contradict each other
    for rows in (G, G[:1]):
        lam, found = run(form, of_gram, rows, g, h, lower)
        assert found[2, 0] == _search.INFEASIBLE
        for i in range(6):
            alone = run_one(form, of_gram, rows[i % len(rows)], g[i], h[i], lower[i])
            np.testing.assert_array_equal(lam[i], alone[0])
            np.testing.assert_array_equal(found[i], alone[1])
    lam, found = run(form, of_gram, G, g, h, lower)
    by_row, size = 2.0 ** rng.integers(-40, 40, (6, 5)), 2.0 ** rng.integers(-40, 40, (6, 1))
    scaled, same = run(form, of_gram, G * by_row[..., None], g * size, h * by_row * size, lower)
    np.testing.assert_array_equal(found, same)
    ended = found[:, 0] != _search.INFEASIBLE  # a ray is one of unit rows
    np.testing.assert_array_equal(scaled[ended] * by_row[ended], (lam * size)[ended])


@pytest.mark.skipif(not installed(), reason="needs numba")
@sources
@pytest.mark.parametrize("bounded", [False, True])
def test_both_forms_take_the_same_pivots(of_gram, bounded, rng):
    """Without ties, which rounding would decide: up to 9 rows in 2 to 11 dimensions, or with a start in enough."""
    longest = 0
    for _ in range(250):
        t = int(rng.integers(1, 10))
        G, g, h, lower = draw(rng, "generic", t, int(rng.integers(t if bounded else 2, 12)), bounded)
        bounds = (lower, *drawn_bounds(rng, G, lower)) if bounded else ()
        (lam, found), (other, there) = (run_one(f, of_gram, G, g, h, *bounds) for f in FORMS.values())
        assert found.tolist() == there.tolist()
        np.testing.assert_allclose(lam @ G, other @ G, rtol=0, atol=1e-9)
        np.testing.assert_array_equal(lam == 0.0, other == 0.0)
        longest = max(longest, found[1])
    assert longest >= 5


@pytest.mark.parametrize("t", [2, 12])
def test_b_of_no_gradient_is_stalled(t):
    signs = (-1.0) ** np.arange(t)
    K, b = np.outer(signs, signs), -np.ones(t)  # x >= 1 and -x >= 1
    sol = solve_gram(K, b)
    assert sol.status & Status.STALLED
    assert np.isfinite(sol.multipliers).all()
    assert sol.iterations < 25 * t
    np.testing.assert_allclose(solve_gram(K, b, penalty=3.0).multipliers, 3.0)  # there is always a solution


@sources
@pytest.mark.parametrize("kind", KINDS)
def test_where_x_moves_to_is_the_minimum_over_the_free_multipliers(kind, of_gram, monkeypatch):
    move, moves = _search.move, []

    def compared(state, far, q):
        move(state, far, q)
        found = state.x.copy(), state.slack.copy(), state.R[: state.count[0], -2].copy()
        moves.append(state.count[2])
        _search.minimum(state)
        for a, b in zip(found, (state.x, state.slack, state.R[: state.count[0], -2]), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)

    monkeypatch.setattr(_search, "move", compared)
    monkeypatch.setattr(_search, "FEW", 0)
    for seed in range(5):
        rng = np.random.default_rng(seed)
        G, g, h, lower = draw(rng, kind, 14, 18, equalities=True)
        run_one(portable.solve, of_gram, G, 9.0 * g, 9.0 * h, lower, *drawn_bounds(rng, G, lower))
    assert any(moves)
