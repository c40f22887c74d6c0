"""Certificates: free of scale, zero at the solution, and never below the truth."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import KINDS, arbitrary, assert_close, draw, exactly, rational_projection

from gemproj import FISTA, OSQP, PGD, Exact, Status, combine, gram, project, solve_dual, solve_gram


def judged(G, g, lam):
    """The certificates of any multipliers."""
    return solve_dual(G, g, method=lambda K, b, start: np.array(lam, dtype=float))


def test_residual_and_gap_are_their_definitions(rng):
    for _ in range(20):
        G, g, lam = rng.standard_normal((4, 9)), rng.standard_normal(9), rng.standard_normal(4)
        K, b, gg = gram(G, g)
        x, n, sol = g + G.T @ lam, np.linalg.norm(G, axis=1), judged(G, g, lam)
        s, size = G @ x, np.sqrt(gg)
        parts = 0.0, (-s / n).max() / size, (-lam * n).max() / size, np.abs(lam * s).max() / gg
        assert float(sol.kkt_residual()) == pytest.approx(max(parts), rel=1e-12)
        primal, dual = 0.5 * np.sum((x - g) ** 2), -(0.5 * lam @ K @ lam + b @ lam)
        assert float(sol.duality_gap()) == pytest.approx((primal - dual) / gg)
        hinge = 2.0 * np.sum(np.maximum(0.0, -s))
        soft = replace(solve_dual(G, g, penalty=2.0, method="pgd"), multipliers=lam)
        assert float(soft.duality_gap()) == pytest.approx((primal + hinge - dual) / gg)


@given(arbitrary(), st.floats(1e-6, 1e6), st.integers(0, 2**32 - 1))
def test_scale_free(problem, factor, seed):
    G, g = problem
    rng = np.random.default_rng(seed)
    lam, rows = rng.standard_normal(len(G)), 10.0 ** rng.uniform(-6, 6, len(G))
    for certificate in ("kkt_residual", "duality_gap"):
        value = float(getattr(judged(G, g, lam), certificate)())
        scaled = float(getattr(judged(rows[:, None] * G, factor * g, factor * lam / rows), certificate)())
        assert scaled == pytest.approx(value, rel=1e-8, abs=1e-10)


def true_error(G, g, lam):
    """|g + G'lam - x*| / |g| in exact arithmetic."""
    apart = exactly(g) + exactly(lam) @ exactly(G) - rational_projection(G, g)
    return float(apart @ apart / (exactly(g) @ exactly(g))) ** 0.5


@st.composite
def dependent(draw_from):
    """Few rows that are repeated, opposite, combinations of each other, or any of these up to a tilt."""
    rng = np.random.default_rng(draw_from(st.integers(0, 2**32 - 1)))
    t, d = draw_from(st.integers(1, 5)), draw_from(st.integers(1, 5))
    tilt = draw_from(st.sampled_from([0.0, 0.0, 1e-1, 1e-3, 1e-5, 1e-7, 1e-8, 1e-9, 1e-11]))
    if draw_from(st.booleans()):
        G, g = rng.integers(-2, 3, (t, d)).astype(float), rng.integers(-3, 4, d).astype(float)
    else:
        rank = draw_from(st.integers(1, 3))
        digits = draw_from(st.integers(0, 4))
        G = rng.integers(-1, 2, (t, rank)) @ rng.standard_normal((rank, d)).round(digits)
        g = rng.standard_normal(d) if draw_from(st.booleans()) else -rng.random(t) @ G
    return G + tilt * rng.standard_normal((t, d)), g


METHODS = ["exact", 1e-10, 1e-4, 10.0, PGD(steps=3), FISTA(steps=30), lambda K, b, start: np.maximum(-b, 0.0)]
METHODS += [lambda K, b, start: -1.0 - np.arange(len(b))]  # multipliers that no method would return


@given(dependent(), st.sampled_from(METHODS), st.sampled_from([0.0, 0.5]))
def test_error_bound_holds_whatever_the_rank(problem, method, margin):
    """Against exact arithmetic: with nearly dependent rows K cannot tell, and then the bound says so."""
    G, g = problem
    shifted = g + margin * G.sum(0)
    if not np.any(shifted):
        return
    if isinstance(method, float):  # the solution, moved by so much
        K, b, _ = gram(G, shifted)
        lam = np.maximum(Exact()(K, b) + method * np.random.default_rng(0).standard_normal(len(G)), 0.0)
        method = lambda K, b, start: lam  # noqa: E731
    sol = solve_dual(G, g, method=method, margin=margin)
    error = true_error(G, shifted, sol.multipliers - margin)
    bound = float(sol.error_bound())
    lost = 1e-15 * margin * np.abs(G).sum() / np.linalg.norm(shifted)  # by the sum itself, above
    assert error <= bound * (1 + 1e-12) + lost
    # Tight at the solution, unless only rounding makes rows dependent: then there may be another one.
    if method == "exact" and int(sol.status) == Status.OPTIMAL:
        size = np.abs(sol.multipliers * np.linalg.norm(G, axis=1)).sum() / np.linalg.norm(shifted)
        assert bound <= 1e4 * error + 1e-11 * (1 + size**2)


@pytest.mark.parametrize(
    ("rows", "start", "method"),
    [
        ([1.0, -0.7], [1e12, 1.3e12], "pgd"),
        ([1.0, -0.7], [1e8, 1.3e8], "pgd"),
        ([0.3, -0.7], [1e15, 4.28571428571e14], "fista"),
    ],
)
def test_multipliers_that_cancel_keep_their_rounding(rows, start, method):
    """What a warm start has in the null space of G' no gradient step takes away; bounds count its rounding."""
    G, g = np.array(rows)[:, None], np.array([-1.0])
    sol = solve_dual(G, g, method=method, warm_start=np.array(start))
    error = true_error(G, g, sol.multipliers)
    assert 1e-9 < error <= min(float(sol.error_bound()), float(sol.kkt_residual()))
    assert error**2 <= abs(float(sol.duality_gap()))  # negative if rounding has made x infeasible


def test_rows_that_only_an_exact_method_takes_for_active():
    """Multipliers of quadprog are 1e-10 above their bounds, which says nothing of the slack of these rows."""
    pytest.importorskip("quadprog")
    G, g = np.array([[0.3, 0.1], [0.7, 0.2], [1.0, 0.0]]), np.array([-5.0, 1.0])
    sol = solve_dual(G, g, method="quadprog")
    assert_close(sol.slack(), [0.1, 0.2, 0.0], atol=1e-9)
    assert float(sol.kkt_residual()) < 1e-9
    pytest.importorskip("osqp")
    stalled = solve_dual(G, g, method=OSQP(max_iter=1))
    assert_close(stalled.slack(), G @ combine(G, g, stalled.multipliers), atol=1e-12)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_error_bound_of_a_gram_matrix_that_has_lost_digits(dtype, rng):
    """The rounding of K counts against the smallest eigenvalue, not against the angle of rows."""
    for tilt in 10.0 ** rng.uniform(-1 if dtype == "float16" else -7, 0, 60):  # its squares must be in range
        t = int(rng.integers(2, 5))
        G = rng.integers(-2, 3, (t, 1)) * rng.standard_normal(4) + tilt * rng.standard_normal((t, 4))
        g = -rng.random(t) @ G
        sol = solve_gram(*(a.astype(dtype) for a in gram(G, g)))
        assert true_error(G, g, sol.multipliers) <= float(sol.error_bound())


@pytest.mark.parametrize(("dtype", "tilt", "known"), [("float64", 2e-9, False), ("float32", 1e-7, True)])
def test_error_bound_of_rows_that_a_gram_matrix_takes_for_opposite(dtype, tilt, known, rng):
    """Whether they oppose g is below the rounding of K, or in the part of g that its lower bound leaves out."""
    for _ in range(60):
        u, v, g = rng.standard_normal((3, 3))
        G = np.array([u, -u + tilt * v])
        K, b, gg = gram(G, g)
        sol = solve_gram(K.astype(dtype), b.astype(dtype), np.asarray(gg) if known else None)
        assert true_error(G, g, sol.multipliers) <= float(sol.error_bound())


@pytest.mark.parametrize(
    ("k", "b", "gg", "found"), [(1.0, -3.0, 0.0, 9.0), (1.0, -3.0, 1.0, 9.0), (1e200, -1e160, 1e120, 1e120)]
)
def test_a_squared_norm_is_at_least_its_lower_bound(k, b, gg, found):
    """Below that it has underflowed; and the bound itself does not overflow."""
    sol = solve_gram(k * np.eye(2), np.array([b, 1.0]), np.array(gg))
    assert_close(sol.multipliers, [-b / k, 0.0], rtol=1e-14)
    assert sol.gram.gg == found


@pytest.mark.parametrize("digits", [1, 16])
def test_error_bound_where_nothing_moves(digits, rng):
    """h = G g, with two equal rows: x is g, and every row is active."""
    for _ in range(20):
        G, g = rng.standard_normal((4, 6)).round(digits), rng.standard_normal(6)
        G[-1] = 2.0 * G[0]
        sol = solve_dual(G, g, h=G @ g)
        assert_close(combine(G, g, sol.multipliers), g, atol=1e-14)
        assert float(sol.error_bound()) < 1e-10


def test_error_bound_sees_what_a_dependent_row_misses():
    """With h, rows that depend on active ones are not satisfied together with them."""
    G, g, h = np.array([[1.0, 0], [1, 0], [-1, 1e-4]]), np.array([-1.0, 0]), np.array([0, 5e-10, 0])
    sol = solve_dual(G, g, h=h, method=lambda K, b, start: np.array([1.0, 0, 0]))  # x = 0
    assert float(sol.error_bound()) >= 5e-6
    # Rows that ask for x >= 1 and x <= 1 - 1e-10: too close for a proof, but there is no x.
    sol = solve_dual(np.array([[1.0, 0], [-1, 0]]), np.array([-1.0, 2]), h=np.array([1.0, -1 + 1e-10]))
    assert sol.error_bound() == np.inf


@pytest.mark.parametrize("missed", [3e-14, 8e-14, 1e-12])
def test_error_bound_of_a_dependent_row_that_misses_its_h(missed):
    """Row 2 takes the place of row 1, in which it weighs a thousandth: x* is a thousand times as far."""
    G, h = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1e-3]]), np.array([0.0, 0.0, missed])
    sol = solve_dual(G, -np.ones(2), h=h, equality=np.array([True, False, False]))
    x = combine(G, -np.ones(2), sol.multipliers)
    error = np.linalg.norm(x - [0.0, missed / 1e-3]) / 2**0.5
    assert error <= float(sol.error_bound()) < 1e-9


@pytest.mark.parametrize("seed", [23, 124, 254])
def test_error_bound_of_rows_in_a_space_of_few_dimensions(seed):
    """Which rows are independent shows only to rounding times the weights of those chosen before."""
    rng = np.random.default_rng(seed)
    t, d, rank = 36, 50, 14
    G = rng.standard_normal((t, rank)) @ rng.standard_normal((rank, d))
    sol = solve_dual(G * 10.0 ** rng.uniform(-6, 6, (t, 1)), rng.standard_normal(d))
    assert int(sol.status) == Status.OPTIMAL
    assert float(sol.error_bound()) < 1e-7


@pytest.mark.parametrize("options", [{}, {"margin": 0.2}, {"penalty": 0.1}, {"margin": 0.05, "penalty": 0.1}])
@pytest.mark.parametrize("kind", KINDS)
def test_error_bound_is_tight(kind, options, rng):
    for t in (3, 20):
        G, g, *_ = draw(rng, kind, t, 2 * t)
        if kind == "mixed norms" and options:
            G /= np.linalg.norm(G, axis=1, keepdims=True)
        sol = solve_dual(G, g, method=PGD(steps=2), **options)
        size = np.linalg.norm(g + options.get("margin", 0.0) * G.sum(0))
        error = np.linalg.norm(combine(G, g, sol.multipliers) - project(G, g, **options)) / size
        bound = float(sol.error_bound())
        assert error <= bound * (1 + 1e-9) + 1e-13
        assert bound <= 1.01 * error + 1e-6
        assert float(solve_dual(G, g, **options).error_bound()) < 1e-6


@pytest.mark.parametrize("lam", [[5.0, 0.0], [0.02, 0.0]])
def test_where_the_projected_gradient_is_zero(lam):
    """Nothing can be relative to it: x is zero, or infinitely wrong."""
    G, g = np.array([[1.0, 0.0], [-1.0, 0.0]]), np.zeros(2)
    # Of equal multipliers the rows cancel.
    for sol, expected in ((judged(G, g, lam), np.inf), (judged(G, g, [lam[0]] * 2), 0.0)):
        assert [sol.kkt_residual(), sol.duality_gap(), sol.error_bound()] == [expected] * 3
    # Of these multipliers K shows no digit of x, but G does.
    near = judged(np.array([[1.0, 0.0], [-1.0, 1e-9]]), g, [1.0, 1.0])
    assert [near.kkt_residual(), near.duality_gap(), near.error_bound()] == [np.inf] * 3


@pytest.mark.parametrize("left", [1e-6, 1e-8, 1e-10, 0.0])
def test_a_margin_that_cancels_g(left, rng):
    """What is left of g has the rounding of g; measures are relative to at least the root of that."""
    G, m = rng.standard_normal((2, 8)), 0.7
    g = left * rng.standard_normal(8) - m * G.sum(0)
    sol = solve_dual(G, g, margin=m, penalty=m)
    x = [Fraction(v) + Fraction(m) * sum(map(Fraction, column)) for v, column in zip(g, G.T, strict=True)]
    error = np.array(x - np.array([Fraction(v) for v in combine(G, g, sol)]), float)
    assert abs(sol.size() - np.linalg.norm(np.array(x, float))) < 1e-7 * np.linalg.norm(g)
    assert sol.size() >= 1e-8 * np.linalg.norm(g)
    assert np.linalg.norm(error) <= sol.error_bound() * sol.size() <= 1e-11
    assert sol.kkt_residual() < 1e-7


def test_error_bound_of_nearly_dependent_rows_does_not_depend_on_the_size_of_g(rng):
    G, g = rng.standard_normal(12) + 1e-6 * rng.standard_normal((10, 12)), rng.standard_normal(12)
    small, large = (solve_dual(G, scale * g).error_bound() for scale in (1.0, 1e153))
    assert small / 2 < large < 2 * small


@pytest.mark.parametrize("most", [[0.0, 0.0], [0.0, 1.0], [0.5, 1.0]])
def test_error_bound_where_bounds_leave_no_choice(most):
    sol = solve_dual(np.eye(2), np.ones(2), margin=np.array([most[0], 0.0]), penalty=np.array(most))
    other = replace(sol, multipliers=np.array([5.0, 0.0]))
    assert 5.0 - most[0] <= other.error_bound() * other.size() < 5.001
    with np.errstate(over="ignore"):
        assert replace(sol, multipliers=np.array([1e300, 0.0])).error_bound() == np.inf


@pytest.mark.parametrize("method", ["exact", "pgd", "agem", lambda K, b, start: b * 0.0])
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_certificates_have_the_shape_of_the_batch(xp, method, batch, rng):
    G, g = (xp.array(rng.standard_normal((*batch, *shape))) for shape in ((4, 9), (9,)))
    sol = solve_dual(G, g, method=method)
    certificates = sol.kkt_residual(), sol.duality_gap(), sol.error_bound(), sol.cosine(), sol.size()
    for value in (*certificates, sol.status, sol.iterations, sol.optimal, sol.refined):
        assert type(value) is type(sol.gram.K) or not batch  # NumPy may return a number
        assert tuple(value.shape) == batch
    assert tuple(sol.active.shape) == tuple(sol.violated.shape) == (*batch, 4)


def test_cosine_is_between_g_and_x(xp, rng):
    G, g = rng.standard_normal((3, 9)) - 0.5, rng.standard_normal(9) + 0.5
    x = project(G, g)
    expected = g @ x / np.linalg.norm(g) / np.linalg.norm(x)
    assert float(solve_dual(xp.array(G), xp.array(g)).cosine()) == pytest.approx(expected)
    assert float(solve_dual(xp.array(G), xp.array(0 * g)).cosine()) == 1.0
    for tilt in (1e-5, 1e-7):  # K has lost the digits of x
        opposite = xp.array(np.array([[1.0, 0, 0], [-1, tilt, 0]]))
        found = solve_dual(opposite, xp.array(np.array([1.0, -1, 3]))).cosine()
        assert float(found) == pytest.approx(3 / np.sqrt(11))
    for _ in range(10):  # x* is zero, and what is computed is rounding, which has a cosine by chance
        rows = rng.standard_normal((3, 3))
        both, vector = xp.array(np.concatenate([rows, -rows])), xp.array(rng.standard_normal(3))
        assert float(solve_dual(both, vector).cosine()) == 0.0


@pytest.mark.parametrize("size", [1e-139, 1.0, 1e139])
def test_certificates_do_not_overflow(size, rng):
    """Warnings are errors here."""
    G = rng.standard_normal((2, 4)) * np.array([[1e-139], [1e139]])
    sol = solve_dual(G, -size * np.ones(4))
    assert float(sol.kkt_residual()) < 1e-14
    assert float(sol.duality_gap()) < 1e-14
    assert float(sol.error_bound()) < 1e-11
    with np.errstate(all="raise"):
        assert solve_dual(G, -size * np.ones(4), margin=1e-300).kkt_residual() < 1e-14


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_solution_with_other_multipliers_is_measured_anew(kind):
    library = pytest.importorskip(kind)
    G, g = library.asarray(np.eye(2)), library.asarray([-1.0, -1.0])
    sol = solve_dual(G, g)
    other = replace(sol, multipliers=0.0 * sol.multipliers)
    assert combine(G, g, other).tolist() == [-1.0, -1.0]
    assert other.active.tolist() == [False, False]
    assert type(other.slack()) is type(g)
    assert sol.to(np.asarray).multipliers.tolist() == [1.0, 1.0]
