"""Which right-hand sides some x meets, and what is said where none does."""

from contextlib import nullcontext

import numpy as np
import pytest
from problems import assert_close, rational_feasible, skip_without, small_integers

from gemproj import Status, gram, project, solve_dual, solve_gram

CORNER = np.array([[1.0, 0], [-1, 0], [0, 1], [0, -1], [1, 1], [-1, -1]])
# Rows, right-hand side and equalities that no x meets; and what is said of some.
CONTRADICTIONS = {
    "more pairs than parameters": (CORNER, np.ones(6), False),
    "one column": ([[1], [1], [1], [-1], [1], [-1]], [3, 2, 1, 3, 1, 2], False),
    "equality": ([[-3], [3], [5], [8], [4]], [1, -9, -2, 5, 3], [False, False, False, False, True]),
    "loose row": ([[1, 0], [-1, 0], [0, 1]], [1, 1, -1e9], False),
    "small weight": ([[-92, -7], [91, 7], [41, 57], [7, -42]], [-4, 95, -47, -3], False),
    "no angle is lost": ([[20, -82], [32, -37], [4, 1], [22, -62]], [42, 39, -80, 17], [1, 1, 0, 1]),
    "close to none": ([[1, 0], [-1, 0]], [1, -1 + 1e-8], False),
    "row of norm zero": ([[-3], [0], [8], [4]], [1, 0, 5, 3], [0, 1, 0, 1], r" in rows 0, 3 at once\. Lower"),
    "of norm zero": ([[-3], [0], [8], [4]], [-9, -1, 5, 3], [0, 1, 0, 1], r" in row 1\. Lower h there"),
    "norm zero": ([[0, 0], [1, 0]], [1, 0], False),
    "counts as zero": ([[1e-145, 0], [1, 0]], [1, 0], False, r" in row 0\. Lower"),
    "long and switched off": ([[1e16, 0], [1, 0], [-1, 0]], [-np.inf, 1, 1], False, " in rows 1, 2 at once"),
    "switched off": ([[1, 0], [-1, 0], [1, 0]], [-np.inf, 0, 1e-7], [0, 0, 1], r" in rows 1, 2 at once\. L"),
}


@pytest.mark.parametrize("slope", [0.0, 1.0])
@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_are_errors(host, case, slope):
    G, h, equality, *said = CONTRADICTIONS[case]
    G, h = np.asarray(G, dtype=float), np.asarray(h, dtype=float)
    mask = np.broadcast_to(np.asarray(equality, dtype=bool), h.shape)
    on = np.isfinite(h)
    assert not rational_feasible(np.where(abs(G) < 1e-140, 0.0, G)[on], h[on], mask[on])
    g, options = slope * np.ones(G.shape[1]), {"h": h, "equality": mask}
    with pytest.raises(ValueError, match=f"h is infeasible: .*{''.join(said)}"):
        host.project(G, g, **options)
    assert np.all(np.isfinite(host.project(G, g, penalty=2.0, **options)))


@pytest.mark.parametrize("scale", [1e-5, 1.0, 1e8])
@pytest.mark.parametrize("t", [2, 12])
def test_contradicting_rows_are_named_at_any_scale(host, t, scale, rng):
    G, g, h = rng.standard_normal((2, t, 40)), rng.standard_normal((2, 40)), np.ones(t + 1)
    G, h[t] = np.concatenate([G, -2.0 * G[:, 1:2]], axis=1), -1.0
    G, g, h = host.array(G), host.array(g), host.array(scale * np.stack([h, h]))
    with pytest.raises(ValueError, match=f"h is infeasible: .* in rows 1, {t} at once.*penalty"):
        project(G[1, ...], g[1, ...], h=h[1, ...])
    if scale >= 1.0:  # K has half of the digits
        with pytest.raises(ValueError, match="h is infeasible"):
            solve_gram(*gram(G[1, ...], g[1, ...]), h=h[1, ...])
    assert int(solve_dual(G[1, ...], g[1, ...], h=h[1, ...], penalty=2.0).status) == Status.OPTIMAL
    h[0, 1] *= 0.4
    assert int(solve_dual(G[0, ...], g[0, ...], h=h[0, ...]).status) == Status.OPTIMAL
    with pytest.raises(ValueError, match=f"rows 1, {t} of problem 1 at once"):
        project(G, g, h=h)


@pytest.mark.parametrize(("t", "d"), [(120, 40), (12, 3), (39, 3)])
def test_contradictions_of_many_rows(t, d, rng):
    with pytest.raises(ValueError, match="h is infeasible"):
        project(rng.standard_normal((t, d)), np.zeros(d), h=rng.uniform(0.2, 1.0, t))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_contradiction_is_one_beyond_the_rounding_of_the_coordinates(scale):
    """Of x >= 1 and x <= 1 - gap. K has half of the digits of G; within the rounding, x is what comes closest."""
    G, g = np.array([[1.0, 0, 0], [-1, 0, 0]]), np.zeros(3)
    for gap, by_K, by_G in ((1e-5, True, True), (1e-7, False, True), (1e-10, False, False)):
        for solve, given, refused in ((solve_gram, gram(G, g), by_K), (solve_dual, (G, g), by_G)):
            with pytest.raises(ValueError, match="rows 0, 1 at once") if refused else nullcontext():
                sol = solve(*given, h=scale * np.array([1.0, gap - 1.0]))
                assert float(sol.kkt_residual()) < 1.01 * gap


def test_small_integers_as_exact_arithmetic_says():
    rng, said = np.random.default_rng(7), []
    for _ in range(80):
        G, g, h, equality = small_integers(rng)
        said.append(rational_feasible(G, h, equality))
        with nullcontext() if said[-1] else pytest.raises(ValueError, match="h is infeasible"):
            sol = solve_dual(G, g, h=h, equality=equality)
            assert sol.optimal
            assert float(sol.kkt_residual()) < 1e-6
    assert 20 < sum(said) < 70


def test_nearly_dependent_rows_are_not_refused():
    """Some x meets these rows, and so no error is raised."""
    rng = np.random.default_rng(8)
    for _ in range(80):
        t, d = rng.integers(2, 14, 2)
        G = rng.standard_normal((t, d)) @ (10.0 ** -rng.uniform(0, rng.choice([3, 8, 12]), d) * np.eye(d))
        G *= 10.0 ** rng.uniform(-3, 3, (t, 1))
        equality, x = rng.random(t) < 0.2, rng.standard_normal(d)
        h = G @ x - np.where(equality, 0.0, rng.random(t) * rng.integers(2) * np.linalg.norm(G, axis=1))
        solve_dual(G, rng.standard_normal(d), h=h, equality=equality)
    # A long answer that is right is no warning: multipliers of 1e18 are rounded, and x is exact.
    for length in (1e3, 1e7, 1e9):
        x = project(np.array([[1.0, 0], [-1, 1 / length]]), np.zeros(2), h=np.array([1.0, 0.0]))
        np.testing.assert_allclose(x, [1.0, length], rtol=1e-9)


@pytest.mark.parametrize("kind", ["numpy", "autograd", "equality from below", "equality from above"])
def test_an_answer_that_misses_its_conditions_is_one_warning(kind):
    """These rows meet at a distance of 1e12, of which float64 has four digits less than x needs.

    The warning is about the caller's line. It is not about rows with a penalty.
    """
    G, g, h = np.array([[0.6, 0.8], [-0.6, -0.8 + 1e-12]]), np.array([-1.0, 0.5]), np.array([1.0, -0.3])
    options = {}
    if kind.startswith("equality"):
        options = {"equality": np.array([True, False]), "penalty": np.array([np.inf, 1e30])}
        G[0], h[0] = (G[0], h[0]) if "below" in kind else (-G[0], -h[0])
    if kind == "autograd":
        torch = pytest.importorskip("torch")
        G, g, h = torch.tensor(G, requires_grad=True), torch.tensor(g), torch.tensor(h)

    def run():
        x = project(G, g, h=h, **options)
        if kind == "autograd":
            x.sum().backward()

    with pytest.warns(RuntimeWarning, match="violates its .*conditions.*nearly contradict") as seen:
        run()
    assert [one.filename for one in seen] == [__file__]


# Options of `project` and the exact x, of problems whose scale some rows must not set: G, g, h.
SCALES = [
    ([[1, 0], [1, 1]], [0, 0], [-1, -5], {"equality": [True, False]}, [-1, 0]),
    ([[1, 0], [1, 1]], [0, 1e-8], [-1, -5], {"equality": [True, False]}, [-1, 1e-8]),
    (np.eye(2), [-2e-8, 1], [0, -1e9], {}, [0, 1]),
    (np.eye(2), [-1, -1e-3], [1e12, 0], {"penalty": [1, np.inf]}, [0, 0]),
    (np.eye(3), [-1, -2, 1], [1, -1e15, -1e300], {"penalty": [np.inf, 1, 7]}, [1, -2, 1]),
    ([[1, 0], [-1, 0.01], [0, -1]], [0, 0], [1, 0, -200], {}, [1, 100]),
    (np.eye(2), [0, 300], [1, -2], {"penalty": [np.inf, 1]}, [1, 300]),
    # A row of norm zero that asks for something: its multiplier is the penalty, or the gap is not zero.
    ([[0, 0], [1, 0]], [-1, 1], [1, 0], {"penalty": [2, np.inf]}, [0, 1]),
    ([[0, 0], [1, 0]], [-1, 1], [-1, 0], {"penalty": [2, np.inf], "equality": [True, False]}, [0, 1]),
    *(([[0, 0]], [1, 1], [h], {"penalty": [2], "equality": h < 0}, [1, 1]) for h in (1, -1)),
]
TILT = 2.0**-12
# Rows that depend on each other, with an h that differs by more than their rounding.
TOGETHER = [
    ([[1, 0], [1, 0], [-1, 1e-4]], [-1, 0], [0, 5e-10, 0], {"warm_start": [1, 0, 0]}, [5e-10, 5e-6]),
    ([[-2, 2 * TILT], [2 + TILT, -2 * TILT], [4 - TILT, TILT]], [1, -3], [TILT, -TILT, -TILT], {}, [0, 0.5]),
    ([[1, -2], [-2, 1], [-2, -1]], [-2, 2], [0, 0, -1], {"metric": [0.01, 1e6]}, [0, 0]),
    ([[-1, 0], [1, 0], [1, 0]], [1, 2], [0, 1 / 3, 1 / 6], {"penalty": [3e6, 1e6, 4e6]}, [1 / 6, 2]),
]


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize(("G", "g", "h", "options", "x"), [*SCALES, *TOGETHER])
def test_x_is_known_where_h_is_small_or_large(xp, G, g, h, options, x, warm):
    together = any(h is case[2] for case in TOGETHER)
    if together and not xp.on_cpu:
        pytest.skip("on a device K alone does not tell these rows apart")
    if warm:
        options = {"warm_start": np.linspace(1.0, 0.3, len(h))} | options
    options = {name: a if name == "equality" else xp.array(a) for name, a in options.items()}
    found, largest = xp.project(G, g, h=xp.array(h), **options), np.max(x, initial=1.0)
    # Large penalties are large multipliers, with their rounding; nearly opposite rows, a hundred roundings.
    rounding = {"rtol": 1e-9, "atol": 1e-12} if together else {"atol": 1e-14 * largest**2}
    assert_close(found, x, **rounding)
    sol = solve_dual(xp.array(G), xp.array(g), h=xp.array(h), **options)
    assert int(sol.status) == Status.OPTIMAL
    assert float(sol.kkt_residual()) < (1e-8 if together else 1e-9)
    assert abs(float(sol.duality_gap())) < 1e-9
    assert not together or float(sol.error_bound()) < 1e-5  # often from weak duality, the root of the gap


def test_what_g_x_always_exceeds_is_minus_infinity(host):
    """Some write the largest number for infinity."""
    G, g = host.array([[1e-10, 0.0], [1.0, 0.0]]), host.array([-1.0, 2.0])
    sols = [solve_dual(G, g, h=host.array([low, 0.0])) for low in (-np.inf, -np.finfo(float).max)]
    assert len({(float(s.error_bound()), float(s.kkt_residual()), float(s.slack()[0])) for s in sols}) == 1
    # An equality is no bound from below.
    equal = project(host.array(np.eye(2)), g, h=host.array([-1e290, 0.0]), equality=[True, False])
    assert float(equal[0]) == -1e290


def test_a_multiplier_that_overflows_is_not_optimal(host):
    G, g, h = host.array([[1e-20, 0.0], [1.0, 0.0]]), host.array([-1.0, 2.0]), host.array([1e279, 0.0])
    with np.errstate(all="ignore"):
        assert int(solve_dual(G, g, h=h).status) == Status.STALLED
        with pytest.warns(RuntimeWarning, match="The projection violates"):
            project(G, g, h=h)


@pytest.mark.parametrize("penalty", [1e3, 1e6, 1e9, 1e12])
def test_equalities_with_a_large_penalty_lose_no_digits(xp, penalty, rng):
    G, g, mask = rng.standard_normal((4, 10)), rng.standard_normal(10), np.array([True, False, True, False])
    sol = solve_dual(xp.array(G), xp.array(g), equality=mask, penalty=penalty)
    x = g + G.T @ xp.numpy(sol.multipliers)
    assert np.linalg.norm(x - project(G, g, equality=mask)) < 1e-14 * np.linalg.norm(g)
    assert bool(sol.optimal)
    assert float(sol.kkt_residual()) < 1e-14


@pytest.mark.parametrize("equality", [False, True])
@pytest.mark.parametrize("norm", [0.0, 1e-145, 1e-17])
def test_rows_at_the_rounding_of_the_others_contradict_nothing(host, equality, norm):
    """In norm and in h, where G g has a rounding, too; a batch may have them in some of its problems."""
    G, g = np.array([[-norm, 0.0], [1.0, 0.0]]), np.array([-1.0, 1.0])
    for h in ([1e-17, 100.0], [-1e-17, 100.0], [1e-14, 100.0], [1e-17, 0.0]):
        options = {"h": host.array(h), "equality": np.array([equality, False])}
        assert_close(host.project(G, g, **options), [h[1], 1.0], atol=1e-13)
        sol = solve_dual(host.array(G), host.array(g), **options)
        assert bool(sol.optimal)
        assert float(sol.multipliers[0]) == 0.0
    both, h = np.stack([np.eye(2), G]), np.array([[3.0, 2.0], [1e-17, 100.0]])
    x = host.project(both, np.stack([g, g]), h=host.array(h), equality=np.array([equality, False]))
    assert_close(x, [[3.0, 2.0], [100.0, 1.0]], atol=1e-13)
    # Far above the rounding of the other h.
    with pytest.raises(ValueError, match=r"h is infeasible: .* in row"):
        host.project(G, g, h=host.array([1e-9, 100.0] if norm < 1e-17 else [1e-9, 0.0]), equality=equality)


@pytest.mark.parametrize("method", ["exact", "pgd", "quadprog"])
@pytest.mark.parametrize("options", [{}, {"margin": 0.2}, {"penalty": 3.0}, {"equality": True}], ids=str)
def test_a_row_is_switched_off_by_minus_infinity(xp, method, options, rng):
    """As if it were not there: for any option, beside problems of a batch in which it is there."""
    skip_without(method)
    G, g, h = rng.standard_normal((2, 4, 9)), rng.standard_normal((2, 9)) - 0.3, rng.random((2, 4)) - 0.5
    h[0, 1] = h[1, 3] = -np.inf
    sol = solve_dual(xp.array(G), xp.array(g), h=xp.array(h), method=method, **options)
    x = xp.project(G, g, h=xp.array(h), method=method, **options)
    assert xp.numpy(sol.multipliers)[h == -np.inf].tolist() == [0.0, 0.0]
    assert xp.numpy(sol.slack())[h == -np.inf].tolist() == [np.inf, np.inf]
    assert np.all(np.isfinite(xp.numpy(sol.kkt_residual())))
    for i, off in enumerate((1, 3)):
        rows, rest = np.delete(G[i], off, 0), np.delete(h[i], off)
        assert_close(x[i], project(rows, g[i], h=rest, method=method, **options), atol=1e-12)
    assert_close(xp.project(G[0], g[0], h=-np.inf, method=method), g[0], atol=0)


def test_the_size_of_a_problem_is_at_most_what_its_soft_rows_can_ask_for(host):
    """A row that asks for much, and whose penalty cannot move x, hides no contradiction of other rows."""
    G, g, penalty = np.array([[1.0], [-1.0], [1.0]]), np.zeros(1), host.array([np.inf, np.inf, 1e-7])
    options = {"equality": np.array([True, False, False]), "penalty": penalty}
    with pytest.raises(ValueError, match=r"in rows 0, 1 at once\."):
        host.project(G, g, h=host.array([1.9e-7, 0.0, 6.6e5]), **options)
    sol = solve_dual(host.array(G), host.array(g), h=host.array([1.9e-7, -1.0, 6.6e5]), **options)
    assert float(sol.size()) == 1.9e-7
    assert bool(sol.optimal)
    # Of a penalty the margin takes its part: what is left moves x by a quarter.
    G, options = np.array([[1.0, 0.0]]), {"h": host.array([1e9]), "margin": 1.0, "penalty": 1.25}
    assert float(solve_dual(host.array(G), host.array([-1.0, 0.0]), **options).size()) == 0.25
