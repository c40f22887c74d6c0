"""The three stages on every library: shapes, dtypes, blocks, out, margin, penalty, metric, edge cases."""

from functools import partial

import numpy as np
import pytest
from problems import assert_close, skip_without

from gemproj import PGD, combine, gram, project, solve_dual
from gemproj.methods import METHODS

# Rounding of a result to its dtype, and of the input before it.
TOLERANCE = {"float64": 1e-12, "float32": 1e-6, "bfloat16": 2e-2, "float16": 3e-3}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("shape", [(1, 7), (3, 50), (2, 4, 33), (0, 5), (3, 1), (2, 0, 4), (6, 4097)])
def test_gram_and_combine_against_numpy(xp, dtype, shape, rng):
    arrays = [xp.array(rng.standard_normal(s), dtype) for s in (shape, shape[:-2] + shape[-1:])]
    G, g = map(xp.numpy, arrays)
    K, b, gg = gram(*arrays)
    assert_close(xp.numpy(K), G @ np.swapaxes(G, -1, -2), rtol=1e-12, atol=1e-11)
    assert_close(xp.numpy(b), np.einsum("...td,...d->...t", G, g), rtol=1e-12, atol=1e-11)
    assert_close(xp.numpy(gg), np.sum(g**2, -1), rtol=1e-12)
    lam = rng.random(shape[:-1])
    x, expected = combine(*arrays, xp.array(lam)), g + np.einsum("...td,...t->...d", G, lam)
    assert_close(xp.numpy(x), expected, atol=1e-5 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_result_has_the_library_dtype_and_shape_of_g(xp, dtype, rng):
    if (dtype == "bfloat16" and xp.name != "torch") or (dtype == "float16" and xp.name == "array_api_strict"):
        pytest.skip(f"{xp.name} has no {dtype}")
    G, g = xp.array(rng.standard_normal((4, 64)) - 0.3, dtype), xp.array(np.full(64, 0.3), dtype)
    x = project(G, g)
    assert type(x) is type(g)
    assert x.dtype == g.dtype
    assert tuple(x.shape) == (64,)
    assert_close(xp.numpy(x), project(xp.numpy(G), xp.numpy(g)), atol=TOLERANCE[dtype])


def blocks_of(xp, G, g, shapes=((4, 5), (), (3, 13)), dtype="float64"):
    """Cut columns into parameters of these shapes."""
    cuts = np.cumsum([int(np.prod(s)) for s in shapes])[:-1]

    def cut(a):
        parts = zip(np.split(a, cuts, axis=-1), shapes, strict=True)
        return [xp.array(part.reshape((*a.shape[:-1], *s)), dtype) for part, s in parts]

    return cut(G), cut(g)


def flat(xp, blocks):
    return np.concatenate([xp.numpy(b).ravel() for b in blocks])


def test_blocks_are_one_problem(xp, rng):
    G, g = rng.standard_normal((3, 60)) - 0.2, rng.standard_normal(60) + 0.2
    expected = project(G, g)
    Gs, gs = blocks_of(xp, G, g)
    x = project(Gs, gs)
    assert isinstance(x, list)
    assert [tuple(b.shape) for b in x] == [(4, 5), (), (3, 13)]
    assert_close(flat(xp, x), expected, atol=1e-13)
    assert isinstance(project(tuple(Gs), tuple(gs)), tuple)
    names = ["w", "s", "v"]
    # The order of g, whatever that of G is.
    x = project(dict(zip(reversed(names), reversed(Gs), strict=True)), dict(zip(names, gs, strict=True)))
    assert list(x) == names
    assert_close(flat(xp, x.values()), expected, atol=1e-13)


def test_large_float32_problems_need_no_conversion(xp, rng):
    """Products in float32, sums in float64: several tiles, a remainder, blocks of any shape."""
    t, d = 3, 700_001
    G, g = rng.standard_normal((t, d), dtype=np.float32) - 0.1, rng.standard_normal(d, dtype=np.float32) + 0.1
    G64, g64 = G.astype(float), g.astype(float)
    exact_K, exact_b, expected = G64 @ G64.T, G64 @ g64, project(G64, g64)
    blocks = blocks_of(xp, G, g, [(4, 150_000), (), (100, 1, 1000)], "float32")
    for problem in [(xp.array(G, "float32"), xp.array(g, "float32")), blocks]:
        K, b, _ = gram(*problem)
        scale = np.sqrt(np.outer(np.diagonal(exact_K), np.diagonal(exact_K)))
        assert np.max(np.abs(xp.numpy(K) - exact_K) / scale) < 1e-7
        assert np.max(np.abs(xp.numpy(b) - exact_b)) < 1e-7 * d
        x = project(*problem)
        x = flat(xp, x) if isinstance(x, list) else xp.numpy(x)
        # x is g + G'lam, each entry rounded on its own; G x >= 0 holds to the rounding of K and b, above.
        lam = xp.numpy(solve_dual(*problem).multipliers)
        assert np.max(np.abs(G64 @ (x - combine(G64, g64, lam)))) < 1e-9 * d
        assert np.max(-(G64 @ x)) < 2e-7 * d
        assert_close(x, expected, atol=2e-6)


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1e25])
def test_float32_far_from_one(xp, scale, rng):
    d = 150_000
    G, g = rng.standard_normal((2, d)) - 0.2, rng.standard_normal(d) + 0.2
    x = project(xp.array(scale * G, "float32"), xp.array(g, "float32"))
    assert_close(xp.numpy(x), project(G, g), atol=2e-6)
    x = project(xp.array(G, "float32"), xp.array(scale * g, "float32"))
    assert_close(xp.numpy(x) / scale, project(G, g), atol=2e-6)
    x = project(xp.array(G, "float32"), xp.array(scale * g))
    assert x.dtype == xp.array(g).dtype
    assert_close(xp.numpy(x) / scale, project(G, g), atol=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("t", "d", "batch"), [(3, 60, ()), (3, 60, (2, 2)), (12, 20_000, (2, 2))])
def test_out_is_written_in_place(xp, t, d, batch, weighted, rng):
    """To g or to another array, to blocks, and for many gradients on one G."""
    G, g = rng.standard_normal((t, d)) - 0.2, rng.standard_normal((*batch, d)) + 0.2
    w = rng.random(d) + 0.5 if weighted else np.ones(d)
    metric, some = xp.array(w) if weighted else None, rng.random((*batch, t))
    for call, lam in (
        (partial(combine, multipliers=xp.array(some)), some),
        (project, xp.numpy(solve_dual(xp.array(G), xp.array(g), metric=metric).multipliers)),
    ):
        expected = g + lam @ G / w
        own, new = xp.array(g), xp.array(0 * g)
        for out in (new, own):
            assert call(xp.array(G), own, metric=metric, out=out) is out
            assert_close(xp.numpy(out), expected, atol=1e-11)
        if not batch:
            (Gs, gs), (_, ws) = blocks_of(xp, G, g), blocks_of(xp, G, w)
            assert call(Gs, gs, metric=ws if weighted else None, out=gs) is gs
            assert_close(flat(xp, gs), expected, atol=1e-13)


def test_without_a_violation_x_is_g(xp):
    """Also where many sets of active rows give g: rows that just meet their constraint, and are repeated."""
    G = np.eye(8, 9)
    G[5], G[6], G[7] = G[0], G[1] + G[2], 0.0
    G, g, out = xp.array(G), xp.array([0.0, -0.0, 0.0, 1.0, 0.3, -0.7, 2.0, -4.0, 0.1]), xp.array(np.ones(9))
    x = project(G, g)
    np.testing.assert_array_equal(xp.numpy(x), xp.numpy(g))
    assert not np.any(xp.numpy(solve_dual(G, g).multipliers))
    x[...] = 5.0  # a copy
    assert float(g[3]) == 1.0
    assert project(G, g, out=out) is out
    np.testing.assert_array_equal(xp.numpy(out), xp.numpy(g))


@pytest.mark.parametrize("method", METHODS)
def test_nothing_to_do(xp, method):
    skip_without(method)
    g = xp.array([1.0, -2.0])
    for G, v in [
        (xp.array(np.zeros((0, 2))), g),  # no constraint
        (xp.array(np.zeros((2, 2))), g),  # rows that constrain nothing
        (xp.array(np.eye(2)), 0.0 * g),  # nothing to project
    ]:
        sol = solve_dual(G, v, method=method)
        np.testing.assert_array_equal(xp.numpy(sol.multipliers), np.zeros(G.shape[0]))
        np.testing.assert_array_equal(xp.numpy(project(G, v, method=method)), xp.numpy(v))
        assert float(sol.kkt_residual()) == float(sol.duality_gap()) == 0.0
        assert float(sol.error_bound()) < 1e-14


@pytest.mark.parametrize(
    "shape", [(0, 200_000), (0, 2, 5), (0, 12, 5), (3, 0), (2, 3, 0), (2, 0, 200_000), (0, 2, 200_000)]
)
def test_empty_problems(xp, shape):
    g = xp.array(np.ones(shape[:-2] + shape[-1:]))
    x = project(xp.array(np.ones(shape)), g)
    np.testing.assert_array_equal(xp.numpy(x), xp.numpy(g))
    sol = solve_dual(xp.array(np.ones(shape)), g)
    assert tuple(sol.error_bound().shape) == tuple(sol.kkt_residual().shape) == shape[:-2]


def test_penalty_limits(rng):
    G, g = rng.standard_normal((2, 200, 205)) - 0.2, rng.standard_normal((2, 205)) + 0.2
    sol = solve_dual(G, g, penalty=0.05)
    assert np.all(sol.kkt_residual() < 1e-12)
    assert np.any(sol.multipliers == 0.05)
    assert np.any((sol.multipliers > 0) & (sol.multipliers < 0.05))
    G, g = rng.standard_normal((12, 20)) - 0.3, rng.standard_normal(20) + 0.3
    np.testing.assert_array_equal(project(G, g, penalty=0.0), g)
    assert_close(project(G, g, penalty=1e6), project(G, g), atol=1e-12)
    sol = solve_dual(G, g, penalty=0.5, margin=0.5)
    np.testing.assert_array_equal(sol.multipliers, np.full(12, 0.5))


@pytest.mark.parametrize("d", [20, 140_000])
def test_gram_in_a_metric(xp, d, rng):
    """K = G diag(1/w) G', b = G g, gg = g' diag(w) g: products in the coordinates of the metric."""
    G, g, w = rng.standard_normal((3, d)), rng.standard_normal(d), rng.random(d) + 0.5
    expected = (G / w) @ G.T, G @ g, w @ g**2
    cut = [slice(0, d // 3), slice(d // 3, d)]
    for dtype, tolerance in (("float64", 1e-13), ("float32", 1e-6)):
        arrays = [xp.array(a, dtype) for a in (G, g, w)]
        blocks = [[a[..., at] for at in cut] for a in arrays]
        for rows, vector, weight in (arrays, blocks):
            for found, exact in zip(gram(rows, vector, metric=weight), expected, strict=True):
                assert_close(xp.numpy(found), exact, atol=tolerance * d)
        many = gram(arrays[0], xp.array(np.stack([g, -g]), dtype), metric=arrays[2])
        assert_close(xp.numpy(many.b), np.stack([expected[1], -expected[1]]), atol=tolerance * d)
        assert_close(xp.numpy(many.gg), np.full(2, expected[2]), atol=tolerance * d)


def test_any_callable_is_a_method(xp, rng):
    """It may change its arguments, which changes neither the solution nor the arrays of the caller."""
    given = rng.standard_normal((3, 10)), rng.standard_normal(10), np.array([1.0, 0.0, 2.0])
    G, g, start = map(xp.array, given)

    def halfway(K, b, warm_start):
        assert type(K) is type(b) is type(warm_start) is type(G)
        lam = PGD(steps=1)(K, b, warm_start) * 0.5
        for a in (K, b, warm_start):
            a[...] = 7.0
        return lam

    sol = solve_dual(G, g, method=halfway, warm_start=start)
    expected = solve_dual(G, g, method=PGD(steps=1), warm_start=start).multipliers
    assert_close(xp.numpy(sol.multipliers), 0.5 * xp.numpy(expected), rtol=1e-14)
    assert_close(xp.numpy(sol.gram.b), given[0] @ given[1], atol=1e-14)
    assert_close(xp.numpy(sol.gram.K), given[0] @ given[0].T, atol=1e-14)
    for before, after in zip(given, (G, g, start), strict=True):
        np.testing.assert_array_equal(xp.numpy(after), before)


def test_tensors_that_are_negated_lazily_are_read():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    G, g, lam = (torch.from_numpy(rng.standard_normal(shape)) for shape in ((3, 7), (7,), (3,)))
    lazy = torch._neg_view(-G), torch._neg_view(-g)
    torch.testing.assert_close(project(*lazy), project(G, g))
    torch.testing.assert_close(combine(*lazy, torch._neg_view(-lam)), combine(G, g, lam))
    h = -lam.abs()
    torch.testing.assert_close(project(G, g, h=torch._neg_view(-h)), project(G, g, h=h))
