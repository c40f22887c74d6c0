"""The exact projection: optimality conditions and the properties that define a projection."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import KINDS, arbitrary, assert_close, draw, kkt, known

from gemproj import Status, combine, project, solve_dual


def relative(error, g):
    return np.linalg.norm(error) / np.linalg.norm(g)


# Square random matrices are now and then nearly singular; float64 Gram matrices then lose digits.
LOOSE = 1e-8


@given(known())
def test_known_projection_is_found(xp, problem):
    sol = solve_dual(xp.array(problem.G), xp.array(problem.g))
    x = xp.numpy(combine(xp.array(problem.G), xp.array(problem.g), sol.multipliers))
    assert relative(x - problem.x, problem.g) < 1e-9
    assert kkt(problem.G, problem.g, 0.0, 0.0, np.inf, xp.numpy(sol.multipliers)) < 1e-12
    assert float(sol.kkt_residual()) < 1e-12
    assert np.all(xp.numpy(sol.multipliers) >= 0)
    assert not np.any(xp.numpy(sol.multipliers)[~problem.G.any(axis=1)])
    # Rows that were made orthogonal to x may be dependent to rounding, but not exactly.
    assert int(sol.status) in (Status.OPTIMAL, Status.UNRESOLVED)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("t", [2, 8, 9, 40, 120, 200])
def test_every_size_and_family(kind, t, rng):
    for _ in range(3 if t < 100 else 1):
        problem = draw(rng, kind, t, 2 * t)
        sol = solve_dual(problem.G, problem.g)
        assert float(sol.kkt_residual()) < 1e-12
        assert relative(combine(problem.G, problem.g, sol.multipliers) - problem.x, problem.g) < 1e-9


@settings(max_examples=settings.default.max_examples // 2)
@given(arbitrary(), st.floats(1e-8, 1e8), st.randoms(use_true_random=False))
def test_what_defines_a_projection_onto_a_cone(xp, problem, factor, random):
    G, g = problem
    x, tolerance = xp.project(G, g), LOOSE * (1 + np.linalg.norm(g))
    lam, gg = xp.numpy(solve_dual(xp.array(G), xp.array(g)).multipliers), max(g @ g, 1.0)
    assert np.max(np.abs(lam * (G @ x)), initial=0) <= LOOSE * gg
    # |g|^2 = |x|^2 + |G'lam|^2: g splits into the cone and its polar.
    assert abs(g @ g - x @ x - np.sum((G.T @ lam) ** 2)) <= LOOSE * gg
    assert np.linalg.norm(xp.project(G, x) - x) <= tolerance
    assert_close(xp.project(G, factor * g) / factor, x, atol=tolerance)
    other = g + np.array([random.uniform(-2, 2) for _ in g])
    assert np.linalg.norm(x - xp.project(G, other)) <= np.linalg.norm(g - other) + LOOSE
    # Order, scale and repetition of rows do not matter.
    order = random.sample(range(len(G)), len(G))
    scale = np.array([[10.0 ** random.uniform(-6, 6)] for _ in G])
    for rows in (G[order], scale * G, np.concatenate([G, 2.0 * G])):
        assert_close(xp.project(rows, g), x, atol=tolerance)


def test_the_search_ends_on_degenerate_problems_of_any_size(rng):
    for _ in range(40):
        t, d = int(rng.integers(20, 60)), int(rng.integers(2, 6))
        G, g = rng.integers(-1, 2, (t, d)).astype(float), rng.integers(-2, 3, d).astype(float)
        sol = solve_dual(G, g)
        assert float(sol.kkt_residual()) < 1e-12
        assert int(sol.iterations) <= 6 * t


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize(("t", "d"), [(1, 40), (3, 1000), (20, 3000), (3, 140_000), (9, 140_000)])
def test_same_input_same_bits_whatever_the_batch(xp, t, d, dtype, rng):
    """Also beside a problem whose squares leave the range of float32, and beside a zero."""
    if dtype == "bfloat16" and xp.name != "torch":
        pytest.skip(f"{xp.name} has no bfloat16")
    given = rng.standard_normal((3, t, d)) - 0.2, rng.standard_normal((3, d)) + 0.2
    G, g = (xp.array(a, dtype) for a in given)
    x = xp.numpy(project(G, g))
    np.testing.assert_array_equal(xp.numpy(project(G, g)), x)
    for odd, which in product((0.0, 1e100 if dtype == "float64" else 1e18), (0, 1)):
        changed = [a.copy() for a in given]
        changed[which][1][..., :3] = odd
        beside = xp.numpy(project(*(xp.array(a, dtype) for a in changed)))
        np.testing.assert_array_equal(beside[[0, 2]], x[[0, 2]])
    if not xp.on_cpu:  # where the size of a batch decides how sums are shared out
        return
    np.testing.assert_array_equal(xp.numpy(project(G[1:3, ...], g[1:3, ...])), x[1:3])
    for i in (0, 2):
        np.testing.assert_array_equal(xp.numpy(project(G[i, ...], g[i, ...])), x[i])


SIZES = [(2, 1000, ()), (9, 30_000, ()), (4, 140_000, ()), (12, 500_000, ())]
SHARED = [(3, 1000, (7,)), (9, 3000, (7, 13)), (10, 140_000, (6,)), (30, 300, (70,))]


@pytest.mark.parametrize("host", ["numpy", "torch"], indirect=True)
@pytest.mark.parametrize(("t", "d", "m"), [*SIZES, *SHARED])
def test_same_bits_whatever_the_number_of_threads(
    t, d, m, host, rng, monkeypatch, one_thread, any_size_in_threads
):
    G, g = (host.array(rng.standard_normal(shape), "float32") for shape in ((t, d), (*m, d)))
    results = []
    for threads in (1, 2, 3, 7):
        monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
        pytest.importorskip("torch").set_num_threads(threads)
        results.append(project(G - 0.2, g + 0.2))
    for x in results[1:]:
        np.testing.assert_array_equal(x, results[0])
