"""Each method against its formula, its theorem or its source."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import assert_close, known, skip_without

from gemproj import AGEM, FISTA, OSQP, PGD, Exact, Quadprog, Status, gram, project, solve_dual
from gemproj.methods import METHODS, Method, Outcome
from gemproj.methods.pgd import largest_eigenvalue_bound


def objective(K, b, lam):
    return 0.5 * lam @ K @ lam + b @ lam


@given(known(max_t=8), st.booleans())
def test_pgd_and_fista_keep_their_rates_at_every_step(problem, warm):
    rows = problem.G[np.linalg.norm(problem.G, axis=1) > 0]
    if not len(rows):
        return
    rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    K, b, _ = gram(rows, problem.g)
    best = Exact()(K, b)
    start = np.random.default_rng(0).random(len(b)) if warm else np.zeros(len(b))
    L, apart, optimum = largest_eigenvalue_bound(K)[0], np.sum((start - best) ** 2), objective(K, b, best)
    assert np.linalg.eigvalsh(K)[-1] * (1 - 1e-12) <= L
    slack = 1e-12 * (1 + abs(optimum) + abs(objective(K, b, start)))
    most = objective(K, b, start) - optimum  # no method is worse than its start
    for k in (1, 2, 5, 29):
        pgd = PGD(steps=k, normalize=False)(K, b, start)
        assert objective(K, b, pgd) - optimum <= min(most, L * apart / (2 * k)) + slack
        fista = FISTA(steps=k, restart=False, normalize=False)(K, b, start)
        assert objective(K, b, fista) - optimum <= min(most, 2 * L * apart / (k + 1) ** 2) + slack
        for method in (PGD(steps=k), FISTA(steps=k), Exact()):
            assert objective(K, b, method(K, b, start)) - optimum <= most + slack


def test_power_step_is_c_over_the_rayleigh_quotient(rng):
    G, g, lam0 = rng.random((4, 9)), rng.standard_normal(9), rng.random(4)
    K, b = G @ G.T, G @ g
    for c, iterations in [(0.5, 1), (0.9, 3)]:
        v = np.ones(4)
        for _ in range(iterations):
            v = K @ v / np.linalg.norm(K @ v)
        lam = np.maximum(0.0, lam0 - c / (v @ K @ v) * (K @ lam0 + b))
        method = PGD(steps=1, step_size="power", c=c, power_iterations=iterations, normalize=False)
        assert_close(method(K, b, lam0), lam, atol=1e-13)


@pytest.mark.parametrize(
    "method", [PGD(steps=200), PGD(steps=200, normalize=False), FISTA(), Exact()], ids=repr
)
@pytest.mark.parametrize("t", [3, 12])
def test_warm_starts_may_be_anything(xp, t, method, rng):
    """What is negative or not finite is moved into the bounds."""
    G, g = rng.standard_normal((t, 60)) - 0.2, rng.standard_normal(60) + 0.2
    odd = xp.array(np.tile([np.nan, -1.0, np.inf], t // 3))
    x = xp.project(G, g, method=method, warm_start=odd)
    assert_close(x, project(G, g, method=method), atol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int64])
@pytest.mark.parametrize("columns", [False, True])
def test_a_method_may_return_any_dtype(dtype, columns, rng):
    @dataclass(frozen=True)
    class Rounded(Method):
        def solve(self, K, b, lower=None, upper=None, warm_start=None):
            return Outcome((1.0 + np.arange(b.shape[-1])).astype(dtype), 0, int(Status.APPROXIMATE))

    G, g = rng.standard_normal((9, 640)), rng.standard_normal(640)
    expected = g + np.arange(1.0, 10.0) @ G
    sol = solve_dual(G, g, method=Rounded())
    assert sol.multipliers.dtype == np.float64
    assert_close(project(G.T.copy().T if columns else G, g, method=Rounded()), expected, rtol=1e-12)


def test_a_method_takes_no_integers_and_its_own_array_stays_its_own():
    with pytest.raises(TypeError, match="b must have a real floating-point dtype; found int64"):
        Exact()(np.eye(2), np.array([-1, -3]))
    own = np.zeros(1)

    def method(K, b, warm_start):
        own[...] = -b / K[0]
        return own

    first, second = (solve_dual(np.eye(1), np.array([-n]), method=method) for n in (1.0, 5.0))
    assert (float(first.multipliers[0]), float(second.multipliers[0])) == (1.0, 5.0)


def test_pgd_is_algorithm_1_of_the_paper(rng):
    """Three steps in the space of the parameters, on normalised rows, warm started."""
    G, g = rng.standard_normal((4, 50)) * 10.0 ** rng.uniform(-2, 2, (4, 1)), rng.standard_normal(50)
    norms = np.linalg.norm(G, axis=1)
    unit, lam0 = G / norms[:, None], rng.random(4)
    eta = 1.0 / largest_eigenvalue_bound(unit @ unit.T)[0]
    lam = lam0 * norms
    for _ in range(3):
        lam = np.maximum(0.0, lam - eta * (unit @ (unit.T @ lam) + unit @ g))
    sol = solve_dual(G, g, method=PGD(steps=3), warm_start=lam0)
    assert_close(sol.multipliers * norms, lam, rtol=1e-12, atol=1e-14)
    assert int(sol.status) == Status.APPROXIMATE
    assert sol.iterations == 3


@pytest.mark.parametrize("restart", [False, True])
def test_fista_is_the_published_iteration(restart, rng):
    """With restarts: where the last move points uphill, the next one begins with the momentum of the first."""
    G, g = rng.standard_normal((4, 9)) + 1.0, rng.standard_normal(9) - 1.0
    K, b = G @ G.T, G @ g
    lam = y = np.zeros(4)
    momentum, restarts = 1.0, 0
    for _ in range(25):
        before, lam = lam, np.maximum(0.0, y - (K @ y + b) / largest_eigenvalue_bound(K))
        if restart and (y - lam) @ (lam - before) > 0:
            y, momentum, restarts = lam, 1.0, restarts + 1
        else:
            faster = (1.0 + np.sqrt(1.0 + 4.0 * momentum**2)) / 2.0
            y, momentum = lam + (momentum - 1.0) / faster * (lam - before), faster
    assert restarts > 1 or not restart
    assert_close(FISTA(steps=25, restart=restart, normalize=False)(K, b), lam, atol=1e-12)


def test_agem_is_the_published_formula(xp, rng):
    for sign in (-1.0, 1.0):
        G, g = rng.standard_normal((5, 40)) + 0.5, sign * np.ones(40)
        r = G.mean(0)
        expected = g - min(0.0, g @ r / (r @ r)) * r
        assert_close(xp.project(G, g, method=AGEM()), expected, rtol=1e-12, atol=1e-13)
        bounded = solve_dual(xp.array(G), xp.array(g), method=AGEM(), penalty=0.01)
        # Of 0.3, where it is violated.
        assert xp.numpy(bounded.multipliers) == pytest.approx(0.01 * (sign < 0))


def test_osqp_gives_up_at_its_start_not_at_infinity():
    pytest.importorskip("osqp")
    from asv_benchmarks.reports.families import FAMILIES

    gave_up = 0
    for family in ("conflicting", "opposite, tilt 1e-5", "Hilbert, random signs"):
        for G, g in FAMILIES[family].problems(4, 30):
            sol = solve_dual(G, g, method="osqp")
            gave_up += int(sol.status) == Status.STALLED and not np.any(sol.multipliers)
            assert np.linalg.norm(project(G, g, method="osqp")) < 2 * np.linalg.norm(g)
    assert gave_up


def test_osqp_starts_warm(rng):
    pytest.importorskip("osqp")
    G, g = rng.standard_normal((30, 40)) - 0.1, rng.standard_normal(40)
    warm = solve_dual(G, g, method=OSQP(), warm_start=solve_dual(G, g).multipliers)
    assert int(warm.iterations) < int(solve_dual(G, g, method=OSQP()).iterations)


@pytest.mark.parametrize("method", [*METHODS.values(), PGD(step_size="power")], ids=repr)
@pytest.mark.parametrize("t", [3, 12])
def test_a_batch_is_its_problems_one_by_one(method, t, xp, rng):
    """Of one G for many gradients, and of one for each; with all options. Outside solvers find the exact x."""
    skip_without(method)
    G, gs = rng.standard_normal((2, 3, t, 40)) - 0.2, rng.standard_normal((2, 3, 40)) + 0.2
    margin, h = rng.random((2, 3, t)) * 0.05, rng.standard_normal((2, 3, t))
    options = {"h": h, "margin": margin, "equality": np.arange(t) % 3 == 1, "metric": rng.random(40) + 0.5}
    for rows, more in ((G, {}), (G[0, 0], options), (G, options | {"penalty": margin + 0.1})):
        more = {name: value for name, value in more.items() if name in (*method.accepts, "metric")}
        there = {name: value if name == "equality" else xp.array(value) for name, value in more.items()}
        sol = solve_dual(xp.array(rows), xp.array(gs), method=method, **there)
        assert tuple(sol.gram.K.shape) == (*rows.shape[:-2], t, t)  # one G is measured once
        assert tuple(sol.status.shape) == (2, 3)
        X = xp.project(rows, gs, method=method, **there)
        for i in np.ndindex(2, 3):
            one = {name: value[i] if value.ndim > 1 else value for name, value in more.items()}
            problem = np.broadcast_to(rows, G.shape)[i], gs[i]
            lam = solve_dual(*problem, method=method, **one).multipliers
            assert_close(xp.numpy(sol.multipliers)[i], lam, atol=1e-12)
            assert_close(X[i], project(*problem, method=method, **one), atol=1e-12)
            if isinstance(method, (Quadprog, OSQP)):
                accuracy = 1e-10 if isinstance(method, Quadprog) else 1e-6
                assert_close(X[i], project(*problem, **one), atol=accuracy)


@pytest.mark.parametrize(
    "method", [*METHODS.values(), PGD(normalize=False), FISTA(normalize=False)], ids=repr
)
def test_a_row_of_norm_zero_allows_for_nothing(method, xp, rng):
    """A negative h of such a row changes no x, also where a method adds the rows up."""
    skip_without(method)
    G, h = rng.standard_normal((3, 9)), np.array([0.1, -0.1, -99.0])
    G[2], g = 0.0, -G.sum(0)
    if "h" in method.accepts:
        x = xp.project(G, g, h=xp.array(h), method=method)
        assert_close(x, project(G[:2], g, h=h[:2], method=method), atol=1e-12)


def test_nicknames_are_default_objects():
    assert set(METHODS) == {"exact", "pgd", "fista", "agem", "quadprog", "osqp", "gem2017"}
    for name, method in METHODS.items():
        skip_without(name)
        claims = int(solve_dual(np.eye(2), -np.ones(2), method=name).status)
        assert claims == (Status.OPTIMAL if name in ("exact", "quadprog") else Status.APPROXIMATE)
        assert method == type(method)()
        assert repr(method).startswith(type(method).__name__)
        assert len({method, type(method)()}) == 1


def test_a_class_derived_from_exact_is_not_trusted(xp, rng):
    """Its multipliers may be others; then they are not called optimal, and x is what they say."""

    class Halved(Exact):
        def solve(self, *problem):
            found = super().solve(*problem)
            return found._replace(multipliers=0.5 * found.multipliers)

    G, g = rng.standard_normal((4, 9)), rng.standard_normal(9)
    half = solve_dual(xp.array(G), xp.array(g), method=Halved())
    assert int(half.status) == Status.STALLED
    assert_close(xp.project(G, g, method=Halved()), g + G.T @ xp.numpy(half.multipliers), atol=1e-13)


def test_what_a_ridge_misses_is_stalled():
    """Rows opposite up to 1e-6 have multipliers of 1e6, which a ridge of 1e-12 shortens."""
    skip_without("quadprog")
    G, g = np.array([[1.0, 0.0], [-1.0, 1e-6]]), np.array([-1.0, -1.0])
    assert int(solve_dual(G, g, method="quadprog").status) == Status.STALLED
