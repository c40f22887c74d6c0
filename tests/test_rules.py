"""Rules that weigh, draw or forbid instead of projecting on the cone: each against its published formula."""

import copy
import pickle
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from problems import KINDS, arbitrary, assert_close, draw

from gemproj import AGEM, MEGA1, MEGA2, SGEM, Equality, Status, combine, project, solve_dual
from gemproj.methods import NAMES

# Of results in the dtype, and of its inputs.
ACCURACY = {"float64": 1e-12, "float32": 2e-6}


def drawn(rng, *shape):
    """A problem whose rows violate and hold in about equal parts."""
    return rng.standard_normal(shape) + 0.2, rng.standard_normal((*shape[:-2], shape[-1]))


def rounded(xp, a, dtype):
    return xp.numpy(xp.array(a, dtype))


# --- S-GEM --------------------------------------------------------------------------------------


def sgem(G, g, row):
    return g - min(0.0, G[row] @ g / (G[row] @ G[row])) * G[row]


@pytest.mark.parametrize("dtype", ACCURACY)
def test_sgem_projects_on_the_row_that_it_draws(xp, dtype, rng):
    G, g = drawn(rng, 4, 30)
    G, g = rounded(xp, G, dtype), rounded(xp, g, dtype)
    rows, method = np.random.default_rng(5), SGEM(seed=5)
    seen = set()
    for _ in range(12):
        row = int(rows.integers(4))
        seen.add(row)
        x = project(xp.array(G, dtype), xp.array(g, dtype), method=method)
        assert_close(xp.numpy(x), sgem(G, g, row), atol=ACCURACY[dtype])
    assert seen == {0, 1, 2, 3}


def test_sgem_draws_a_row_for_each_problem(xp, rng):
    G, g = drawn(rng, 2, 40, 3, 7)
    sol = solve_dual(xp.array(G), xp.array(g), method=SGEM(seed=2))
    rows = np.random.default_rng(2).integers(3, size=(2, 40))
    x = xp.numpy(combine(xp.array(G), xp.array(g), sol.multipliers))
    for i in np.ndindex(2, 40):
        assert_close(x[i], sgem(G[i], g[i], rows[i]), atol=1e-13)
    assert np.all(xp.numpy(sol.status) == Status.APPROXIMATE)


def test_sgem_is_uniform():
    method, counts = SGEM(), np.zeros(5)
    for _ in range(2000):
        counts += solve_dual(np.eye(5), -np.ones(5), method=method).multipliers
    assert counts.sum() == 2000
    assert np.all(np.abs(counts - 400) < 4.5 * np.sqrt(2000 * 0.2 * 0.8))


def test_sgem_sequences_belong_to_objects():
    def rows(method, n=20):
        return [int(np.argmax(method(np.eye(9), -np.ones(9)))) for _ in range(n)]

    method = SGEM(seed=3)
    assert rows(method) == rows(SGEM(seed=3)) != rows(SGEM(seed=4))
    later = [copy.copy(method), copy.deepcopy(method), pickle.loads(pickle.dumps(method))]
    expected = rows(method)  # goes on where it was, and copies do not follow
    assert all(rows(other) == expected for other in later)
    assert method == SGEM(seed=3) != SGEM(seed=4)
    assert len({method, SGEM(seed=3)}) == 1
    assert repr(method) == "SGEM(seed=3)"
    with pytest.raises(ValueError, match="seed must be at least 0; found -1"):
        SGEM(seed=-1)
    with pytest.raises(TypeError, match="seed must be an integer"):
        SGEM(seed=0.5)


def test_sgem_with_one_row_or_none(xp, rng):
    G, g = drawn(rng, 1, 9)
    for sign in (1.0, -1.0):
        assert_close(xp.project(G, sign * g, method="sgem"), xp.project(G, sign * g), atol=1e-14)
        assert_close(
            xp.project(G, sign * g, method="sgem"), xp.project(G, sign * g, method=AGEM()), atol=1e-14
        )
    np.testing.assert_array_equal(xp.project(np.zeros((0, 9)), g, method="sgem"), g)
    np.testing.assert_array_equal(xp.project(np.zeros((2, 9)), g, method="sgem"), g)


def test_sgem_does_not_depend_on_scale(rng):
    G, g = drawn(rng, 4, 9)
    sizes = 10.0 ** rng.uniform(-6, 6, (4, 1))
    for seed in range(6):
        x = project(G, g, method=SGEM(seed))
        assert_close(project(sizes * G, 1e-3 * g, method=SGEM(seed)), 1e-3 * x, atol=1e-15)


# --- MEGA ---------------------------------------------------------------------------------------


def mega1(G, g, loss, reference, sensitivity=1e-3):
    r = G.mean(0)
    return g + reference / loss * r if loss > sensitivity else r


def mega2(G, g, loss, reference):
    """Rotate in the plane of g and r, as published."""
    r = G.mean(0)
    e, size = g / np.linalg.norm(g), np.linalg.norm(g)
    across = r - r @ e * e
    f = across / np.linalg.norm(across)
    angle = np.arctan2(r @ f, r @ e)
    turn = np.clip(np.arctan2(reference * np.sin(angle), loss + reference * np.cos(angle)), 0.0, np.pi / 2)
    return size * (np.cos(turn) * e + np.sin(turn) * f)


LOSSES = [(0.3, 1.2), (1.2, 0.3), (1e-4, 0.5), (0.0, 0.7), (0.7, 0.0), (1e-3, 1.0)]


@pytest.mark.parametrize("dtype", ACCURACY)
@pytest.mark.parametrize("losses", LOSSES)
@pytest.mark.parametrize(("method", "formula"), [(MEGA1, mega1), (MEGA2, mega2)])
def test_mega_is_the_published_formula(xp, dtype, losses, method, formula, rng):
    for t, sign in [(1, 1.0), (1, -1.0), (5, 1.0), (5, -1.0)]:
        G, _ = drawn(rng, t, 30)
        G = rounded(xp, G, dtype)
        # On both sides of a right angle to r, so that the rotation is clipped as well.
        g = rounded(xp, sign * G.mean(0) + 0.5 * rng.standard_normal(30), dtype)
        expected = formula(G, g, *losses)
        x = project(xp.array(G, dtype), xp.array(g, dtype), method=method(*losses))
        assert type(x) is type(xp.array(g, dtype))
        assert x.dtype == xp.array(g, dtype).dtype
        assert_close(xp.numpy(x), expected, atol=ACCURACY[dtype] * (1 + np.abs(expected).max()))


@pytest.mark.parametrize("method", [MEGA1(0.3, 1.2), MEGA2(0.3, 1.2), MEGA2(0.0, 1.0), MEGA1(0.0, 1.0)])
def test_mega_in_batches_blocks_metric_and_out(xp, method, rng):
    G, g = drawn(rng, 2, 3, 4, 12)
    whole = xp.project(G, g, method=method)
    for i in np.ndindex(2, 3):
        assert_close(whole[i], project(G[i], g[i], method=method), atol=1e-13)
    G, g = G[0, 0], g[0, 0]
    expected = project(G, g, method=method)
    out = xp.array(g)
    assert project(xp.array(G), out, out=out, method=method) is out
    assert_close(xp.numpy(out), expected, atol=1e-14)
    x = project([xp.array(G[:, :5]), xp.array(G[:, 5:])], [xp.array(g[:5]), xp.array(g[5:])], method=method)
    assert_close(np.concatenate([xp.numpy(v) for v in x]), expected, atol=1e-14)
    w = rng.random(12) + 0.1
    root = np.sqrt(w)
    expected = project(G / root, g * root, method=method) / root
    x = project(xp.array(G), xp.array(g), metric=xp.array(w), method=method)
    assert_close(xp.numpy(x), expected, atol=1e-13)


@given(arbitrary(), st.floats(0.0, 3.0), st.floats(0.0, 3.0))
def test_mega2_keeps_the_length_and_turns_towards_the_past(problem, loss, reference):
    G, g = problem
    r = G.mean(0)
    sol = solve_dual(G, g, method=MEGA2(loss, reference))
    x = project(G, g, method=MEGA2(loss, reference))
    lengths = np.linalg.norm(x), np.linalg.norm(g)
    cosine = r @ g / np.linalg.norm(r) / lengths[1] if r.any() and g.any() else 1.0
    if abs(cosine) > 1.0 - 1e-6:  # no plane to turn in, see below
        return
    assert lengths[0] == pytest.approx(lengths[1], rel=1e-9)
    assert x @ r >= g @ r - 1e-9 * lengths[1] * np.linalg.norm(r)
    assert x @ g >= -1e-9 * lengths[1] ** 2
    assert float(sol.cosine()) == pytest.approx(x @ g / lengths[0] / lengths[1], abs=1e-9)


def test_mega2_scales(rng):
    G, g = drawn(rng, 4, 9)
    x = project(G, g, method=MEGA2(0.3, 1.2))
    assert_close(project(1e-5 * G, 1e3 * g, method=MEGA2(0.3, 1.2)), 1e3 * x, atol=1e-10)
    assert_close(project(G, g, method=MEGA2(0.3e200, 1.2e200)), x, atol=1e-13)
    assert_close(project(G, g, method=MEGA2(0.3e-200, 1.2e-200)), x, atol=1e-13)


def test_mega_without_an_angle(xp, rng):
    G, g = drawn(rng, 3, 9)
    zero, opposite = np.zeros_like(g), -2.0 * g[None]

    def same(a, b):
        assert_close(a, b, atol=1e-13)

    for losses in LOSSES:
        method = MEGA2(*losses)
        same(xp.project(G, zero, method=method), zero)
        same(xp.project(0.0 * G, g, method=method), g)
        same(xp.project(np.stack([G[0], -G[0]]), g, method=method), g)
        same(xp.project(2.0 * g[None], g, method=method), g)
        same(xp.project(opposite, g, method=method), g if losses[0] >= losses[1] else zero)
        same(xp.project(G[:0], g, method=method), g)
        same(xp.project(G[:0], g, method=MEGA1(*losses)), g)
    same(xp.project(opposite, g, method=MEGA2(0.5, 0.5)), g)
    same(xp.project(G, g, method=MEGA2(0.0, 0.0)), g)
    same(xp.project(G, g, method=MEGA1(0.0, 0.0)), G.mean(0))
    same(xp.project(0.0 * G, g, method=MEGA1(0.0, 1.0)), zero)
    same(xp.project(0.0 * G, g, method=MEGA1(1.0, 1.0)), g)


def test_sensitivity_decides_when_a_batch_is_learned(rng):
    G, g = drawn(rng, 3, 9)
    assert_close(project(G, g, method=MEGA1(0.5, 1.0, sensitivity=0.6)), G.mean(0), atol=1e-14)
    assert_close(project(G, g, method=MEGA1(0.5, 1.0, sensitivity=0.4)), g + 2.0 * G.mean(0), atol=1e-14)


def test_losses_may_be_arrays(xp, rng):
    G, g = drawn(rng, 3, 9)
    for method in (MEGA1, MEGA2):
        given = method(xp.array(0.25), xp.array(1.5))
        assert given == method(0.25, 1.5)
        assert hash(given) == hash(method(0.25, 1.5))
        assert_close(xp.project(G, g, method=given), project(G, g, method=method(0.25, 1.5)), atol=1e-13)
    torch = pytest.importorskip("torch")
    assert MEGA1(torch.tensor(0.25, requires_grad=True), np.float32(1.5)) == MEGA1(0.25, 1.5)


def test_losses_on_a_device_are_not_looked_at():
    torch = pytest.importorskip("torch")
    with torch.device("meta"):  # where looking at a value is an error
        loss, K, b = torch.empty(()), torch.empty(2, 3, 3), torch.empty(2, 3)
        for method in (MEGA1(loss, loss), MEGA2(loss, 1.0)):
            found = method.solve(K, b, gg=torch.empty(2))
            assert found.multipliers.shape == (2, 3)
            assert found.keep.shape == (2,)
        assert SGEM().solve(K[0], b[0]).multipliers.shape == (3,)
        assert SGEM().solve(K, b).multipliers.device.type == "meta"


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: project(np.eye(2), -np.ones(2), method="mega1"), ValueError, r"MEGA1 needs the two losses.*MEGA1\(loss="),
        (lambda: project(np.eye(2), -np.ones(2), method=MEGA2(loss=1.0)), ValueError, "MEGA2 needs the two losses"),
        (lambda: MEGA1(loss=-0.1), ValueError, "loss must be finite and at least 0; found -0.1"),
        (lambda: MEGA2(1.0, np.nan), ValueError, "reference_loss must be finite and at least 0; found nan"),
        (lambda: MEGA2(np.inf), ValueError, "loss must be finite"),
        (lambda: MEGA2(np.ones(2)), ValueError, r"loss must be a number or an array of shape \(\); found \(2,\)"),
        (lambda: MEGA2("much"), TypeError, "loss must be a number; found 'much'"),
        (lambda: MEGA1(1.0, 1.0, -1.0), ValueError, "sensitivity must be finite and at least 0"),
        (lambda: MEGA2(1.0, 1.0)(np.eye(2), np.ones(2)), TypeError, "MEGA2 needs gg"),
        (lambda: project(1e200 * np.eye(2), np.ones(2), method=MEGA1(1.0, 1.0)), ValueError, "beyond the range of method MEGA1"),
        *(
            (lambda m=m, o=o: project(np.eye(2), -np.ones(2), method=m, **{o: 1}), ValueError, f"{o} cannot be combined")
            for m in (MEGA1(1.0, 1.0), MEGA2(1.0, 1.0))
            for o in ("margin", "penalty", "refine")
        ),
        *(
            (lambda o=o: project(np.eye(2), -np.ones(2), method="equality", **{o: 1}), ValueError, f"{o} cannot be combined")
            for o in ("margin", "penalty")
        ),
    ],
)  # fmt: skip
def test_errors_say_what_to_do(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_what_is_no_projection_has_no_certificate(xp, rng):
    G, g = drawn(rng, 3, 9)
    sol = solve_dual(xp.array(G), xp.array(g), method=MEGA1(0.0, 1.0))
    for certificate in ("kkt_residual", "duality_gap", "error_bound"):
        with pytest.raises(ValueError, match=f"There is no {certificate}: x is keep"):
            getattr(sol, certificate)()
    x = xp.numpy(sol.keep) * g + G.T @ xp.numpy(sol.multipliers)
    assert_close(x, G.mean(0), atol=1e-14)
    assert float(sol.cosine()) == pytest.approx(x @ g / np.linalg.norm(x) / np.linalg.norm(g), abs=1e-13)


@pytest.mark.parametrize("method", [MEGA1(0.3, 1.2), MEGA1(0.0, 1.2), MEGA2(0.3, 1.2), MEGA2(0.0, 1.2)])
def test_mega_on_large_problems(xp, method, rng):
    G, g = drawn(rng, 3, 140_000)
    for dtype in ACCURACY:
        a, b = rounded(xp, G, dtype), rounded(xp, g, dtype)
        formula = mega1 if isinstance(method, MEGA1) else mega2
        x = project(xp.array(a, dtype), xp.array(b, dtype), method=method)
        assert_close(
            xp.numpy(x), formula(a, b, method.loss, method.reference_loss), atol=10 * ACCURACY[dtype]
        )


def test_the_projector_keeps_what_a_rule_keeps(rng):
    torch = pytest.importorskip("torch")
    from gemproj.torch import GradientProjector

    G, g = drawn(rng, 3, 6)
    for method in (MEGA1(0.0, 1.2), MEGA2(0.3, 1.2), Equality(), SGEM(1)):
        p = torch.nn.Parameter(torch.zeros(6, dtype=torch.float64))
        projector = GradientProjector([p], method=method)
        projector.constrain(p @ torch.from_numpy(row) for row in G)
        p.grad = torch.from_numpy(g).clone()
        stats = projector.project_()
        again = SGEM(1) if isinstance(method, SGEM) else method
        assert_close(p.grad.numpy(), project(G, g, method=again), atol=1e-14)
        assert stats.cosine == pytest.approx(p.grad.numpy() @ g / np.linalg.norm(p.grad) / np.linalg.norm(g))


def test_the_projector_keeps_nothing_of_a_gradient_that_is_outweighed():
    torch = pytest.importorskip("torch")
    from gemproj.torch import GradientProjector

    p = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    projector = GradientProjector([p], method="mega2")
    projector.constrain([p.sum() + 2.0])  # opposite to the gradient: multipliers are zero, and so is x
    p.grad = -torch.ones_like(p)
    projector.project_(1.0)
    assert not p.grad.any()


def test_no_kernel_claims_them():
    pytest.importorskip("triton")
    from gemproj.kernels.stages import solves

    assert solves(NAMES["exact"], 3)
    assert not any(solves(NAMES[name], 3) for name in ("sgem", "mega1", "mega2", "equality"))


@pytest.mark.filterwarnings("ignore:Dynamo detected")
def test_compiled_graphs_refuse_what_changes_from_call_to_call(rng):
    torch = pytest.importorskip("torch")
    G, g = (torch.from_numpy(a) for a in drawn(rng, 3, 9))
    for method in ("sgem", SGEM(3), MEGA1(1.0, 1.0), "mega2"):
        compiled = torch.compile(
            lambda G, g, method=method: project(G * 1.0, g * 1.0, method=method), backend="aot_eager"
        )
        with pytest.raises(ValueError, match="cannot be part of a compiled graph"):
            compiled(G, g)
    compiled = torch.compile(
        lambda G, g: project(G * 1.0, g * 1.0, method="equality"), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(G, g), project(G, g, method="equality"))


# --- SOFT-GEM -----------------------------------------------------------------------------------


def soft_gem(G, g, c):
    """min 1/2 |x - g|^2 + c sum max(0, -g_i.x): the best point of all ways to bend at the hinges."""

    def objective(x):
        return 0.5 * np.sum((x - g) ** 2) + c * np.sum(np.maximum(0.0, -(G @ x)))

    best = g
    for states in product((0, 1, 2), repeat=len(G)):  # a row is satisfied, at its hinge, or violated
        at, over = (np.array(states) == k for k in (1, 2))
        x = g + c * G[over].sum(0)
        A = G[at]
        x = x - np.linalg.pinv(A) @ (A @ x) if at.any() else x
        best = min(best, x, key=objective)
    return best, objective


@given(arbitrary(max_t=5, max_d=7), st.floats(1e-3, 10.0))
def test_penalty_is_soft_gem(problem, c):
    G, g = problem
    best, objective = soft_gem(G, g, c)
    x = project(G, g, penalty=c)
    scale = 1.0 + np.linalg.norm(g)
    assert objective(x) <= objective(best) + 1e-10 * scale**2
    assert_close(x, best, atol=1e-5 * scale)  # what 1e-10 of the objective leaves open


# --- G x = 0 ------------------------------------------------------------------------------------


def null_space(G, g):
    """Take the span of the rows out of g."""
    n = np.linalg.norm(G, axis=-1, keepdims=True)
    _, sizes, V = np.linalg.svd(G / np.where(n > 0, n, 1.0), full_matrices=False)
    V = V[sizes > 1e-10]
    for _ in range(2):
        g = g - V.T @ (V @ g)
    return g


@pytest.mark.parametrize("dtype", ACCURACY)
@pytest.mark.parametrize("kind", KINDS)
def test_equality_is_the_null_space(xp, kind, dtype):
    for seed, t, d in [(0, 1, 9), (1, 3, 20), (2, 8, 30), (3, 12, 40)]:
        problem = draw(np.random.default_rng(seed), kind, t, d)
        G, g = rounded(xp, problem.G, dtype), rounded(xp, problem.g, dtype)
        n, size = np.linalg.norm(G, axis=1), np.linalg.norm(g)
        n[n == 0] = 1.0
        expected = null_space(G, g)
        sol = solve_dual(xp.array(G, dtype), xp.array(g, dtype), method="equality")
        x = xp.numpy(project(xp.array(G, dtype), xp.array(g, dtype), method=Equality()))
        assert_close(x, expected, atol=ACCURACY[dtype] * size)
        assert sol.equality
        if int(sol.status) == Status.OPTIMAL:
            exact = g + G.T @ xp.numpy(sol.multipliers)
            assert np.linalg.norm(exact - expected) <= (float(sol.error_bound()) + 1e-13) * size
            assert float(sol.error_bound()) < 1e-8
        # Rows that float32 has rounded may be dependent to rounding and not exactly.
        assert int(sol.status) in (
            (0,) if dtype == "float64" and kind != "more rows than columns" else (0, 8)
        )
        assert float(sol.kkt_residual()) < 1e-10
        assert abs(float(sol.duality_gap())) < 1e-10


def test_equality_holds_rows_that_g_does_not_violate(xp):
    G, g = np.array([[1.0, 0.0, 0.0], [0.0, -2.0, 0.0]]), np.array([3.0, 1.0, 5.0])
    sol = solve_dual(xp.array(G), xp.array(g), method="equality")
    assert_close(xp.numpy(sol.multipliers), [-3.0, 0.5], atol=1e-14)
    assert_close(xp.project(G, g, method="equality"), [0.0, 0.0, 5.0], atol=1e-14)
    assert [bool(v) for v in sol.active] == [bool(v) for v in sol.violated] == [True, True]
    assert_close(xp.project(G, g, method="equality", warm_start=xp.array([1.0, 1.0])), [0, 0, 5], atol=1e-14)
    again = combine(xp.array(G), xp.array(g), sol.multipliers)
    assert_close(xp.numpy(again), [0.0, 0.0, 5.0], atol=1e-14)


def test_multipliers_of_repeated_rows_are_shared(xp):
    G, g = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 0.0]]), np.array([4.0, 1.0])
    lam = xp.numpy(solve_dual(xp.array(G), xp.array(g), method="equality").multipliers)
    assert_close(lam, [-2.0, -2.0, 0.0], atol=1e-13)


def test_equality_in_batches_and_empty(xp, rng):
    G, g = drawn(rng, 2, 3, 4, 12)
    G[0, 1, 2] = G[0, 1, 0]
    x = xp.project(G, g, method="equality")
    for i in np.ndindex(2, 3):
        assert_close(x[i], null_space(G[i], g[i]), atol=1e-13)
    status = xp.numpy(solve_dual(xp.array(G), xp.array(g), method="equality").status)
    np.testing.assert_array_equal(status, np.zeros((2, 3)))
    np.testing.assert_array_equal(xp.project(G[:, :, :0], g, method="equality"), g)
    assert xp.project(G[:0], g[:0], method="equality").shape == (0, 3, 12)
    sol = solve_dual(xp.array(G[0, 0]), xp.array(np.zeros(12)), method="equality")
    assert not xp.numpy(sol.multipliers).any()


@given(arbitrary(), st.integers(0, 2**32 - 1))
def test_equality_does_not_depend_on_scale(problem, seed):
    G, g = problem
    rows = 10.0 ** np.random.default_rng(seed).uniform(-6, 6, (len(G), 1))
    x = project(G, g, method="equality")
    assert_close(project(rows * G, 1e4 * g, method="equality"), 1e4 * x, atol=1e-7 * (1 + np.linalg.norm(g)))
    assert_close(project(-G, g, method="equality"), x, atol=1e-10 * (1 + np.linalg.norm(g)))


@pytest.mark.parametrize("d", [40, 140_000])
@pytest.mark.parametrize("tilt", [1e-2, 1e-4, 1e-6, 1e-8, 1e-10, 1e-14])
def test_equality_of_nearly_dependent_rows(tilt, d, rng):
    u, w, g = rng.standard_normal((3, d))
    G = np.stack([u, tilt * w - u])
    Q = np.linalg.qr(np.stack([u, w]).T)[0]
    expected, size = g - Q @ (Q.T @ g), np.linalg.norm(g)
    sol, x = solve_dual(G, g, method="equality"), project(G, g, method="equality")
    error = np.linalg.norm(x - expected) / size
    # Entries of G are rounded: the plane is known to that over the tilt.
    assert error <= float(sol.error_bound()) + 1e-16 / tilt
    if int(sol.status) == Status.OPTIMAL:
        assert error <= 1e-15 / tilt
        assert float(sol.error_bound()) < 1e-3
    assert (int(sol.status) == Status.OPTIMAL) == (tilt >= 1e-6)
    assert np.max(np.abs(G @ x) / np.linalg.norm(G, axis=1)) <= (1e-15 if tilt >= 1e-6 else 1e-9) * size


def test_equality_refined_from_the_rows_on_any_device(xp, rng):
    u, w, g = rng.standard_normal((3, 40))
    G = np.stack([u, 1e-5 * w - u, 3.0 * u, 0.0 * u])
    Q = np.linalg.qr(np.stack([u, w]).T)[0]
    errors = [
        np.linalg.norm(xp.project(G, g, method="equality", refine=k) - (g - Q @ (Q.T @ g))) for k in (0, 1)
    ]
    assert errors[1] < 1e-10
    assert errors[1] < 1e-3 * errors[0]


def test_the_bound_of_wrong_multipliers(rng):
    for kind in KINDS:
        problem = draw(rng, kind, 6, 12)
        sol = solve_dual(problem.G, problem.g, method="equality")
        for size in (1e-10, 1e-3, 1.0):
            lam = sol.multipliers * (1.0 + size * rng.standard_normal(6))
            off = replace(sol, multipliers=lam)
            error = np.linalg.norm(problem.g + problem.G.T @ lam - null_space(problem.G, problem.g))
            assert error <= (float(off.error_bound()) + 1e-13) * np.linalg.norm(problem.g)
        s = problem.G @ (problem.g + problem.G.T @ lam)
        n = np.linalg.norm(problem.G, axis=1) * np.linalg.norm(problem.g)
        expected = np.max(np.abs(s) / np.where(n > 0, n, 1.0))
        if not bool(sol.refined):
            assert float(off.kkt_residual()) == pytest.approx(expected, rel=1e-8, abs=1e-13)


def test_equality_beyond_the_range_of_squares():
    G, g = np.array([[1e-160, 1e-160, 0.0], [0.0, 1e160, 0.0]]), np.array([1.0, 2.0, 3.0])
    assert_close(project(G, g, method="equality"), [0.0, 0.0, 3.0], atol=1e-14)


def test_rows_left_out_do_not_constrain():
    G, g = np.array([[np.nan, 1.0, 0.0], [0.0, 1.0, 0.0]]), np.array([1.0, 2.0, 3.0])
    assert_close(project(G, g, method="equality", check=False), [1.0, 0.0, 3.0], atol=1e-14)


def test_gradients_do_not_flow_through_rules():
    torch = pytest.importorskip("torch")
    G, g = torch.eye(2), torch.ones(2).neg().requires_grad_()
    for method in ("equality", "sgem", MEGA1(1.0, 1.0)):
        with pytest.raises(ValueError, match="method 'exact' only"):
            project(G, g, method=method)
