"""Every variant of the problem: right-hand sides, equalities, penalties and margins, one by one and mixed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import KINDS, assert_close, draw, enumerate_projection, kkt, lengths, mixed

from gemproj import FISTA, PGD, Status, combine, gram, project, solve_dual, solve_gram


@given(mixed())
def test_optimality_of_mixed_problems(xp, problem):
    G, g, options = problem
    metric = options.get("metric", np.ones(len(g)))
    A, a = G / np.sqrt(metric), g * np.sqrt(metric)
    given = {name: value if name == "equality" else xp.array(value) for name, value in options.items()}
    sol, x = solve_dual(xp.array(G), xp.array(g), **given), xp.project(G, g, **given)
    lam, lower, upper = (xp.numpy(found) for found in (sol.multipliers, sol.lower, sol.upper))
    assert np.all((lam >= lower) & (lam <= upper))
    assert int(sol.status) & Status.STALLED == 0
    size = np.linalg.norm(g) + np.linalg.norm(x)
    if int(sol.status) == Status.OPTIMAL:
        assert float(sol.kkt_residual()) < 1e-10
        assert abs(float(sol.duality_gap())) < 1e-10
        assert kkt(A, a, options.get("h", 0.0), lower, upper, lam) < 1e-13
        whole = size + np.abs(lam * lengths(G)).sum()
        assert_close(x, g + G.T @ lam / metric, atol=1e-13 * whole)
        rounding = 1e-9 * whole  # of K, where rows are nearly dependent
        cut = {**given, "metric": [xp.array(metric[:1]), xp.array(metric[1:])]}
        blocks = project(*([xp.array(v[..., :1]), xp.array(v[..., 1:])] for v in (G, g)), **cut)
        assert_close(np.concatenate([xp.numpy(block) for block in blocks]), x, atol=rounding)
    if xp.on_cpu and len(G) <= 4:
        options.pop("warm_start", None)
        assert_close(x, enumerate_projection(G, g, **options), atol=1e-9 * size)


@given(mixed(), st.sampled_from([PGD(steps=3), FISTA(steps=30)]))
def test_certificates_of_mixed_problems(problem, method):
    G, g, options = problem
    exact = solve_dual(G, g, **options)
    if int(exact.status) != Status.OPTIMAL:
        return
    rough = solve_dual(G, g, method=method, **options)
    there = solve_dual(G, g, method=PGD(1), **options | {"warm_start": exact.multipliers}).multipliers
    root = np.sqrt(options.pop("metric", np.ones(len(g))))
    A, a, n = G / root, g * root, lengths(G / root)
    h, equality = (options.get(name, np.zeros(len(G))) for name in ("h", "equality"))
    base = a + A.T @ np.where(equality, 0.0, options.get("margin", 0.0))
    size = max(np.linalg.norm(base), np.max(np.where(equality, np.abs(h), np.maximum(h, 0.0)) / n))
    error = np.linalg.norm(combine(A, a, rough.multipliers) - project(A, a, **options)) / size
    rounding = 1e-13 * (1.0 + np.sum(np.abs(rough.multipliers) * n) / size) + 1e-9 * bool(exact.refined)
    assert error <= float(rough.error_bound()) + float(exact.error_bound()) + rounding
    moved = np.abs((there - exact.multipliers) * n).max()  # by one step from the solution
    assert moved <= 1e-10 * (size + np.sum(np.abs(exact.multipliers) * n)) + rounding * size
    if not np.any(equality) and np.all(rough.slack() >= 0):
        assert error**2 <= float(rough.duality_gap()) + 1e-12


def test_options_in_bfloat16():
    """Which NumPy does not have."""
    torch = pytest.importorskip("torch")
    G, g = torch.eye(3)[:2], torch.tensor([-3.0, 1.0, 1.0])
    low = torch.tensor([0.5, 0.25], dtype=torch.bfloat16)
    for name in ("h", "margin", "penalty", "warm_start"):
        assert torch.equal(project(G, g, **{name: low}), project(G, g, **{name: low.double()}))


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
@pytest.mark.parametrize("weighted", [False, True])
def test_equality_of_nearly_dependent_rows(weighted, tilt, d, rng):
    u, w, g = rng.standard_normal((3, d))
    G = np.stack([u, tilt * w - u])
    Q = np.linalg.qr(np.stack([u, w]).T)[0]
    expected, size = g - Q @ (Q.T @ g), np.linalg.norm(g)
    root = 2.0 ** (rng.integers(-3, 4, d) * weighted)  # columns scaled together with a metric
    given, options = (G * root, g / root), {"equality": True, "metric": root * root if weighted else None}
    sol, x = solve_dual(*given, **options), root * project(*given, **options)
    assert int(sol.status) == Status.OPTIMAL
    assert np.linalg.norm(x - expected) / size <= 1e-14 / tilt
    assert np.max(np.abs(G @ x) / np.linalg.norm(G, axis=1)) <= 1e-14 * size


def test_active_and_violated_equalities(xp):
    """Whether their multipliers are bounded by a penalty or not."""
    G, g = xp.array(np.eye(2)), xp.array([5.0, 0.0])
    for penalty, lam in ((None, [-5.0, 0.0]), (2.0, [-2.0, 0.0]), (9.0, [-5.0, 0.0])):
        sol = solve_dual(G, g, equality=True, penalty=penalty)
        assert xp.numpy(sol.multipliers).tolist() == lam
        assert xp.numpy(sol.active).tolist() == xp.numpy(sol.violated).tolist() == [True, False]
        assert bool(sol.optimal)
        assert not bool(solve_dual(G, g, method="pgd").optimal)


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
    longer = [a.astype(np.longdouble) for a in (K, b, gg)]  # which are computed with in float64
    assert_close(solve_gram(*longer).error_bound(), solve_gram(K, b, gg).error_bound(), atol=0)
    h = np.full(5, 0.1)
    many = solve_gram(xp.array(K[0]), xp.array(b), h=xp.array(h), penalty=1.0, warm_start=xp.array(b * 0))
    for i in range(2):
        one = solve_gram(K[0], b[i], h=h, penalty=1.0)
        assert_close(xp.numpy(many.multipliers)[i], one.multipliers, atol=1e-14)


@pytest.mark.parametrize("name", ["h", "margin", "penalty", "equality"])
def test_options_of_no_rows_may_be_empty_lists(name):
    assert project(np.zeros((0, 2)), np.ones(2), **{name: []}).tolist() == [1.0, 1.0]
