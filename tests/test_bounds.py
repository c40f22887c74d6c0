"""Every variant of the problem: right-hand sides, equalities, penalties and margins, one by one and mixed."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import KINDS, arbitrary, assert_close, draw

from gemproj import FISTA, PGD, Status, combine, gram, project, solve_dual, solve_gram


@given(arbitrary(max_t=5, max_d=7), st.floats(1e-3, 10.0))
def test_penalty_is_soft_gem(problem, c):
    """min 1/2 |x - g|^2 + c sum max(0, -g_i.x): the best point of all ways to bend at the hinges."""
    G, g = problem

    def objective(x):
        return 0.5 * np.sum((x - g) ** 2) + c * np.sum(np.maximum(0.0, -(G @ x)))

    best = g
    for states in product((0, 1, 2), repeat=len(G)):  # a row is satisfied, at its hinge, or violated
        at, over = (np.array(states) == k for k in (1, 2))
        x = g + c * G[over].sum(0)
        best = min(best, x - np.linalg.pinv(G[at]) @ (G[at] @ x), key=objective)
    x = project(G, g, penalty=c)
    scale = 1.0 + np.linalg.norm(g)
    assert objective(x) <= objective(best) + 1e-10 * scale**2
    assert_close(x, best, atol=1e-5 * scale)  # what 1e-10 of the objective leaves open
    assert abs(float(solve_dual(G, g, penalty=c).duality_gap())) < 1e-11


@st.composite
def mixed(draw_from):
    """Rows of all kinds with a right-hand side that some x satisfies, equalities, margins and penalties."""
    rng = np.random.default_rng(draw_from(st.integers(0, 2**32 - 1)))
    t, d = draw_from(st.integers(1, 12)), draw_from(st.integers(2, 16))
    G = draw(rng, draw_from(st.sampled_from(KINDS)), t, d).G
    d = G.shape[1]
    inside, n = rng.standard_normal(d), np.linalg.norm(G, axis=1)
    equality = rng.random(t) < draw_from(st.sampled_from([0.0, 0.3]))
    h = G @ inside - np.where(equality | (rng.random(t) < 0.3), 0.0, n * rng.random(t))
    per_norm = np.where(n > 0, 1.0 / np.where(n > 0, n, 1.0), 1.0)
    options = {"h": h, "equality": equality}
    if draw_from(st.booleans()):
        options["margin"] = 0.3 * rng.random(t) * per_norm
    if draw_from(st.booleans()):
        options["penalty"] = np.where(rng.random(t) < 0.5, np.inf, (0.3 + rng.random(t)) * per_norm)
    if draw_from(st.booleans()):
        options["warm_start"] = rng.standard_normal(t) * per_norm
    return G, rng.standard_normal(d), options


@given(mixed())
def test_optimality_of_mixed_problems(xp, problem):
    G, g, options = problem
    options = {name: a if name == "equality" else xp.array(a) for name, a in options.items()}
    sol = solve_dual(xp.array(G), xp.array(g), **options)
    h, lam, lower, upper = (xp.numpy(a) for a in (options["h"], sol.multipliers, sol.lower, sol.upper))
    assert np.all((lam >= lower) & (lam <= upper))
    assert int(sol.status) & Status.STALLED == 0
    if int(sol.status) == Status.OPTIMAL:
        assert float(sol.kkt_residual()) < 1e-9
        # Stationarity by definition, from x itself: the sign of a slack fits the place of its multiplier.
        x = xp.numpy(combine(xp.array(G), xp.array(g), sol.multipliers))
        n = np.linalg.norm(G, axis=1)
        size = np.linalg.norm(g) + np.linalg.norm(x) + np.sum(np.abs(lam) * n)
        s = (G @ x - h) / np.where(n > 0, n, 1.0) / size
        assert np.all(s[(lam < upper) & (n > 0)] > -1e-9)
        assert np.all(s[(lam > lower) & (n > 0)] < 1e-9)


@given(mixed(), st.sampled_from([PGD(steps=3), FISTA(steps=30)]))
def test_certificates_of_mixed_problems(problem, method):
    G, g, options = problem
    exact = solve_dual(G, g, **options)
    if int(exact.status) != Status.OPTIMAL:
        return
    x, rough = project(G, g, **options), solve_dual(G, g, method=method, **options)
    n = np.linalg.norm(G, axis=1)
    base = g + G.T @ np.where(options["equality"], 0.0, options.get("margin", np.zeros(len(G))))
    demand = np.where(options["equality"], np.abs(options["h"]), np.maximum(options["h"], 0.0))
    size = max(np.linalg.norm(base), np.max(demand / np.where(n > 0, n, 1.0)))
    error = np.linalg.norm(combine(G, g, rough.multipliers) - x) / size
    rounding = 1e-13 * (1.0 + np.sum(np.abs(rough.multipliers) * n) / size) + 1e-9 * bool(exact.refined)
    assert error <= float(rough.error_bound()) + float(exact.error_bound()) + rounding
    if not np.any(options["equality"]) and np.all(rough.slack() >= 0):
        assert error**2 <= float(rough.duality_gap()) + 1e-12


TILT = 2.0**-12
# Rows that depend on each other, with an h that differs by more than their rounding: G, g, h, options, x.
TOGETHER = [
    ([[1, 0], [1, 0], [-1, 1e-4]], [-1, 0], [0, 5e-10, 0], {"warm_start": [1, 0, 0]}, [5e-10, 5e-6]),
    ([[-2, 2 * TILT], [2 + TILT, -2 * TILT], [4 - TILT, TILT]], [1, -3], [TILT, -TILT, -TILT], {}, [0, 0.5]),
    ([[1, -2], [-2, 1], [-2, -1]], [-2, 2], [0, 0, -1], {"metric": [0.01, 1e6]}, [0, 0]),
    ([[-1, 0], [1, 0], [1, 0]], [1, 2], [0, 1 / 3, 1 / 6], {"penalty": [3e6, 1e6, 4e6]}, [1 / 6, 2]),
]


@pytest.mark.parametrize(("G", "g", "h", "options", "x"), TOGETHER)
def test_right_hand_sides_of_dependent_rows_differ(host, G, g, h, options, x):
    options = {name: host.array(a) for name, a in options.items()}
    sol = solve_dual(host.array(G), host.array(g), h=host.array(h), **options)
    assert bool(sol.optimal)
    assert float(sol.error_bound()) < 1e-5  # often from weak duality, the root of the gap
    assert_close(host.project(G, g, h=host.array(h), **options), x, rtol=1e-9, atol=1e-12)


def test_more_rows_than_parameters_and_a_right_hand_side():
    """Always feasible, since h is not positive; one row of many depends on those that are active."""
    for seed in (97, 98, 99):
        rng = np.random.default_rng(seed)
        G, g = rng.standard_normal((100, 30)), 3 * rng.standard_normal(30)
        h = -np.abs(rng.standard_normal(100)) * rng.choice([0, 1], 100)
        assert solve_dual(G, g, h=h).optimal
        assert np.min(G @ project(G, g, h=h) - h) > -1e-11


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_equality_is_the_null_space(xp, kind, dtype):
    for seed, t, d in [(0, 1, 9), (1, 3, 20), (2, 8, 30), (3, 12, 40), (4, 30, 100)]:
        problem = draw(np.random.default_rng(seed), kind, t, d)
        arrays = xp.array(problem.G, dtype), xp.array(problem.g, dtype)
        G, g = map(xp.numpy, arrays)
        n, size = np.linalg.norm(G, axis=1, keepdims=True), np.linalg.norm(g)
        _, found, V = np.linalg.svd(G / np.where(n > 0, n, 1.0), full_matrices=False)
        V = V[found > 1e-10]
        expected = g - V.T @ (V @ g)
        expected -= V.T @ (V @ expected)
        sol = solve_dual(*arrays, equality=True)
        x = xp.numpy(project(*arrays, equality=True))
        assert_close(x, expected, atol=size * (1e-11 if dtype == "float64" else 2e-6))
        assert float(sol.kkt_residual()) < 1e-10
        assert abs(float(sol.duality_gap())) < 1e-10
        if int(sol.status) == Status.OPTIMAL:
            exact = g + G.T @ xp.numpy(sol.multipliers)
            assert np.linalg.norm(exact - expected) <= (float(sol.error_bound()) + 1e-12) * size
            assert float(sol.error_bound()) < 1e-7


@pytest.mark.parametrize("d", [40, 140_000])
@pytest.mark.parametrize("tilt", [1e-2, 1e-4, 1e-6])
def test_equality_of_nearly_dependent_rows(tilt, d, rng):
    u, w, g = rng.standard_normal((3, d))
    G = np.stack([u, tilt * w - u])
    Q = np.linalg.qr(np.stack([u, w]).T)[0]
    expected, size = g - Q @ (Q.T @ g), np.linalg.norm(g)
    sol, x = solve_dual(G, g, equality=True), project(G, g, equality=True)
    assert int(sol.status) == Status.OPTIMAL
    assert np.linalg.norm(x - expected) / size <= 1e-14 / tilt
    assert np.max(np.abs(G @ x) / np.linalg.norm(G, axis=1)) <= 1e-14 * size


def test_equalities_among_inequalities_are_rows_of_both_signs(xp, rng):
    for t in (3, 12):
        G, g, mask = rng.standard_normal((t, 30)), rng.standard_normal(30), np.arange(t) % 2 == 0
        both = np.concatenate([G, -G[mask]])
        assert_close(xp.project(G, g, equality=mask), project(both, g), atol=1e-11)
        sol = solve_dual(xp.array(G), xp.array(g), equality=mask)
        assert np.all(xp.numpy(sol.violated)[mask])
        # A penalised equality is |G x| on both sides.
        expected = project(both, g, penalty=np.full(len(both), 0.2))
        assert_close(xp.project(G, g, equality=mask, penalty=0.2), expected, atol=1e-11)


def test_active_and_violated_equalities(xp):
    """Whether their multipliers are bounded by a penalty or not."""
    G = xp.array([[1.0, 0.0], [0.0, 1.0]])
    for penalty, lam in ((None, [-5.0, 0.0]), (2.0, [-2.0, 0.0]), (9.0, [-5.0, 0.0])):
        sol = solve_dual(G, xp.array([5.0, 0.0]), equality=True, penalty=penalty)
        assert xp.numpy(sol.multipliers).tolist() == lam
        assert xp.numpy(sol.active).tolist() == xp.numpy(sol.violated).tolist() == [True, False]
        assert bool(sol.optimal)
        assert not bool(solve_dual(G, xp.array([5.0, 0.0]), method="pgd").optimal)


def test_margin_and_penalty_per_row(xp, rng):
    for t in (4, 12):
        G, g = rng.standard_normal((t, 30)) - 0.2, rng.standard_normal(30) + 0.2
        margin = rng.random(t)
        assert_close(xp.project(G, g, margin=xp.array(margin)), project(G, g + margin @ G), atol=1e-11)
        exact = solve_dual(xp.array(G), xp.array(g), margin=xp.array(margin)).multipliers
        once = solve_dual(xp.array(G), xp.array(g), margin=xp.array(margin), method=PGD(1), warm_start=exact)
        assert_close(xp.numpy(once.multipliers), xp.numpy(exact), atol=1e-12)  # it starts from the solution
        hard = np.where(np.arange(t) < 2, np.inf, 0.0)
        assert_close(xp.project(G, g, penalty=xp.array(hard)), project(G[:2], g), atol=1e-12)


def test_options_in_batches_blocks_and_a_metric(xp, rng):
    G, g, h = rng.standard_normal((3, 4, 20)), rng.standard_normal((3, 20)), rng.standard_normal((3, 4))
    margin, equality = rng.random(4), np.array([True, False, False, False])
    options = {"margin": margin, "equality": equality}
    x = xp.project(G, g, h=xp.array(h), **options)
    for i in range(3):
        assert_close(x[i], project(G[i], g[i], h=h[i], **options), atol=1e-13)
    rows, vector = ([xp.array(a[0, ..., :7]), xp.array(a[0, ..., 7:])] for a in (G, g))
    parts = project(rows, vector, h=h[0], **options)
    assert_close(np.concatenate([xp.numpy(p) for p in parts]), x[0], atol=1e-13)
    w = rng.random(20) + 0.5
    root = np.sqrt(w)
    expected = project(G[0] / root, g[0] * root, h=h[0], **options) / root
    assert_close(xp.project(G[0], g[0], h=h[0], metric=xp.array(w), **options), expected, atol=1e-12)


@pytest.mark.parametrize(("t", "d", "m"), [(2, 7, (2, 3)), (4, 300, (2, 3)), (12, 140_000, (3,))])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_many_gradients_on_one_G(xp, t, d, m, dtype, rng):
    G = xp.array(rng.standard_normal((t, d)) - 0.1, dtype)
    gs = xp.array(rng.standard_normal((*m, d)) + 0.1, dtype)
    K, b, gg = gram(G, gs)
    assert tuple(K.shape) == (t, t)
    assert tuple(b.shape) == (*m, t)
    assert tuple(gg.shape) == m
    h = rng.standard_normal((*m, t))
    tolerance = 1e-11 if dtype == "float64" else 3e-6
    for options in ({}, {"h": h}, {"penalty": 0.1}, {"metric": xp.array(rng.random(d) + 0.5, dtype)}):
        X = xp.numpy(project(G, gs, **options))
        sol = solve_dual(G, gs, **options)
        again = combine(G, gs, sol.multipliers, metric=options.get("metric"))
        assert_close(xp.numpy(again), X, atol=tolerance)
        assert np.all(xp.numpy(sol.kkt_residual()) < 1e-6)
        for i in np.ndindex(m):
            one = options | ({"h": h[i]} if "h" in options else {})
            assert_close(X[i], xp.numpy(project(G, gs[(*i, ...)], **one)), atol=tolerance)


def test_leading_dimensions_broadcast(xp, rng):
    G, g = rng.standard_normal((3, 2, 4, 9)), rng.standard_normal(9)
    x = xp.project(G, g)
    assert x.shape == (3, 2, 9)
    assert_close(x[1, 1], project(G[1, 1], g), atol=1e-14)
    assert xp.project(G[0], rng.standard_normal((3, 1, 9))).shape == (3, 2, 9)


def test_solve_gram_starts_from_t_space_numbers(xp, rng):
    G, g = rng.standard_normal((2, 5, 30)) - 0.1, rng.standard_normal((2, 30)) + 0.1
    K, b, gg = gram(G, g)
    sol, expected = solve_gram(xp.array(K), xp.array(b), xp.array(gg)), solve_dual(G, g)
    assert_close(xp.numpy(sol.multipliers), expected.multipliers, atol=1e-14)
    assert_close(xp.numpy(sol.error_bound()), expected.error_bound(), atol=1e-10)
    # Without |g| certificates are relative to a number that is not above it: the most that a row asks for.
    default = np.max(b**2 / np.diagonal(K, axis1=-2, axis2=-1), axis=-1)
    assert_close(xp.numpy(solve_gram(xp.array(K), xp.array(b)).gram.gg), default, rtol=1e-12)
    assert np.all(xp.numpy(solve_gram(xp.array(K), xp.array(b)).error_bound()) < 1e-9)
    loose = solve_gram(xp.array(K), xp.array(b), method="agem")
    exact = solve_gram(xp.array(K), xp.array(b), xp.array(gg), method="agem")
    assert np.all(xp.numpy(loose.kkt_residual()) >= xp.numpy(exact.kkt_residual()))
    h = np.full(5, 0.1)
    many = solve_gram(xp.array(K[0]), xp.array(b), h=xp.array(h), penalty=1.0, warm_start=xp.array(b * 0))
    for i in range(2):
        one = solve_gram(K[0], b[i], h=h, penalty=1.0)
        assert_close(xp.numpy(many.multipliers)[i], one.multipliers, atol=1e-14)
