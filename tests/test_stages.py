"""The three stages on every library: shapes, dtypes, blocks, out, margin, penalty, metric, edge cases."""

import math
from functools import partial

import numpy as np
import pytest
from problems import assert_close, skip_without

from gemproj import PGD, combine, gram, project, solve_dual
from gemproj.methods import METHODS

# Rounding of a result to its dtype, and of the input before it.
TOLERANCE = {"float64": 1e-12, "float32": 1e-6, "bfloat16": 2e-2, "float16": 3e-3}


def blocks_of(xp, a, dtype, shapes):
    """Cut columns into parameters of these shapes."""
    parts = np.split(a, np.cumsum([math.prod(s) for s in shapes])[:-1], axis=-1)
    return [xp.array(part.reshape((*a.shape[:-1], *s)), dtype) for part, s in zip(parts, shapes, strict=True)]


def whole(xp, x):
    """Return an array, or flat blocks, as one NumPy array."""
    return np.concatenate([xp.numpy(b).ravel() for b in x]) if isinstance(x, list) else xp.numpy(x)


# Shapes of G and g: one problem, batches, many gradients on one G, and leading dimensions that broadcast.
SHAPES = [((1, 7), (7,)), ((0, 5), (5,)), ((3, 1), (1,)), ((6, 4097), (4097,)), ((3, 200_001), (200_001,))]
SHAPES += [((2, 4, 33), (2, 33)), ((2, 0, 4), (2, 4)), ((4, 30), (2, 3, 30)), ((12, 140_000), (3, 140_000))]
SHAPES += [((3, 2, 4, 9), (9,)), ((2, 4, 9), (3, 1, 9)), ((0, 3), (2, 3))]
SHAPES += [((9, 6), (6,)), ((2, 5, 4), (2, 4)), ((6, 4), (3, 4))]  # no more columns than rows


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("of_G", "of_g"), SHAPES)
def test_stages_against_numpy(xp, dtype, of_G, of_g, weighted, rng):
    """K = G diag(1/w) G', b = G g, gg = g' diag(w) g, x = g + diag(1/w) G'lam: also in blocks and in place."""
    (t, d), eps = of_G[-2:], np.finfo(dtype).eps
    given = rng.standard_normal(of_G) - 0.2, rng.standard_normal(of_g) + 0.2, rng.random(d) + 0.5
    G, g, w = (a.astype(dtype).astype(float) if a is not given[2] or weighted else np.ones(d) for a in given)
    squares, gg = np.sum(G * G / w, axis=-1), np.sum(w * g * g, axis=-1)
    units = np.sqrt(squares[..., :, None] * squares[..., None, :]), np.sqrt(squares * gg[..., None]), gg
    products = (G / w) @ np.swapaxes(G, -1, -2), np.einsum("...td,...d->...t", G, g), gg
    parameters = [(4, 40_000), (), (40, 1, 1000)] if d == 200_001 else [(d // 3,), (d - d // 3, 1)]
    for shapes in (None, parameters) if g.ndim == 1 and G.ndim == 2 else (None,):

        def made(a, shapes=shapes):
            return xp.array(a, dtype) if shapes is None else blocks_of(xp, a, dtype, shapes)

        rows, vector, metric = made(G), made(g), made(w) if weighted else None
        measured = [xp.numpy(a) for a in gram(rows, vector, metric=metric)]
        for found, exact, unit in zip(measured, products, units, strict=True):
            # Sums are in float64; torch's are less accurate on the CPU in the place of a device.
            accuracy = 1e-13 if xp.on_cpu or dtype == "float64" else 1e-12
            assert np.all(np.abs(found - exact) <= accuracy * unit)
        some, sol = rng.random(measured[1].shape), solve_dual(rows, vector, metric=metric)
        for call, lam in (
            (partial(combine, multipliers=xp.array(some)), some),
            (project, xp.numpy(sol.multipliers)),  # last, because it may write to g
        ):
            expected = g + np.einsum("...t,...td->...d", lam, G) / w
            lengths = np.abs(g) + np.einsum("...t,...td->...d", lam, np.abs(G)) / w
            place = made(0.0 * expected) if call is not project or expected.shape != g.shape else vector
            for out in (None, place):
                x = call(rows, vector, metric=metric, out=out)
                assert out is None or x is out
                off = np.abs(whole(xp, x) - expected)
                assert np.all(off <= eps * np.abs(expected) + (t + 2) * 2.0**-52 * lengths)


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


@pytest.mark.parametrize("count", [(), (5,), (2, 3), (0,)])
@pytest.mark.parametrize("container", [list, tuple, dict])
def test_one_and_many_gradients_in_blocks(xp, container, count, rng):
    """As g in one array: one K for all gradients. With `out`, options, and each stage alone."""
    shapes = [(4, 5), (), (3, 13)]

    def cut(a):
        blocks = blocks_of(xp, a, "float64", shapes)
        return dict(zip("abc", blocks, strict=True)) if container is dict else container(blocks)

    def joined(blocks):
        assert type(blocks) is container
        parts = [xp.numpy(b) for b in (blocks.values() if container is dict else blocks)]
        return np.concatenate([b.reshape((*count, math.prod(b.shape[len(count) :]))) for b in parts], axis=-1)

    G, g, metric = rng.standard_normal((4, 60)) - 0.2, rng.standard_normal((*count, 60)), rng.random(60) + 0.5
    Gs, gs = cut(G), cut(g)
    for options, more in (({}, {}), ({"margin": 0.1}, {}), ({"penalty": 0.3}, {"metric": metric})):
        expected = project(G, g, **options, **more)
        options |= {name: cut(a) for name, a in more.items()}
        assert_close(joined(project(Gs, gs, **options)), expected, atol=1e-13)
        out = cut(np.zeros_like(g))
        assert project(Gs, gs, out=out, **options) is out
        assert_close(joined(out), expected, atol=1e-13)
        sol = solve_dual(Gs, gs, **options)
        assert tuple(sol.multipliers.shape) == (*count, 4)
        x = combine(Gs, gs, sol.multipliers, metric=options.get("metric"))
        assert_close(joined(x), expected, atol=1e-13)
    K, b, gg = map(xp.numpy, gram(Gs, gs))
    assert_close(K, G @ G.T, atol=1e-13)
    assert_close(b, g @ G.T, atol=1e-13)
    assert_close(gg, np.sum(g * g, axis=-1), atol=1e-12)
    own = cut(g)
    project(Gs, own, out=own)
    assert_close(joined(own), project(G, g), atol=1e-13)
    if container is not dict:  # in the container of g
        assert type(project({list: tuple, tuple: list}[container](Gs), cut(g))) is container
    else:  # in the order of g
        turned = dict(reversed(Gs.items()))
        assert list(project(turned, cut(g))) == list(own)
        assert_close(joined(project(turned, cut(g))), project(G, g), atol=1e-13)


def test_conflicting_tasks_in_blocks(xp, rng):
    """Each row of J onto the cone of all: what UPGrad averages; rows that are nearly opposite are read again."""
    J = rng.standard_normal((4, 29))
    J[1] = 1e-6 * J[1] - J[0]
    blocks = blocks_of(xp, J, "float64", [(3, 3), (4, 5)])
    found = np.concatenate([xp.numpy(b).reshape(4, -1) for b in project(blocks, blocks)], axis=1)
    # A device has only K for few rows, whose rounding is divided by the square of the angle.
    assert_close(found, xp.project(J, J), atol=1e-9 if xp.on_cpu else 1e-3)


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1e25])
def test_float32_far_from_one(xp, scale, rng):
    G, g = rng.standard_normal((2, 150_000)) - 0.2, rng.standard_normal(150_000) + 0.2
    for of_G, of_g, dtype in ((scale, 1.0, "float32"), (1.0, scale, "float32"), (1.0, scale, "float64")):
        vector = xp.array(of_g * g, dtype)
        x = project(xp.array(of_G * G, "float32"), vector)
        assert x.dtype == vector.dtype
        assert_close(xp.numpy(x) / of_g, project(G, g), atol=2e-6)


def test_what_rounds_to_less_than_a_normal_number_raises_nothing(rng):
    G, g = rng.standard_normal((3, 50)), np.float16(1e-4 * rng.standard_normal(50))
    with np.errstate(all="raise"):
        assert project(np.float16(G), g).any()


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


NO_ROWS = [(0, 2), (0, 200_000), (0, 2, 5), (0, 12, 5), (2, 0, 200_000), (0, 2, 200_000)]
NOTHING = {f"no entries: {shape}": (np.ones(shape), 1.0) for shape in [*NO_ROWS, (3, 0), (2, 3, 0)]}
NOTHING |= {"rows that constrain nothing": (np.zeros((2, 2)), 1.0), "nothing to project": (np.eye(2), 0.0)}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("case", NOTHING)
def test_nothing_to_do(xp, method, case):
    skip_without(method)
    rows, size = NOTHING[case]
    G, g = xp.array(rows), xp.array(np.full(rows.shape[:-2] + rows.shape[-1:], -size))
    sol = solve_dual(G, g, method=method)
    assert not np.any(xp.numpy(sol.multipliers))
    assert METHODS[method](*gram(G, g)[:2]).shape == sol.multipliers.shape
    np.testing.assert_array_equal(xp.numpy(project(G, g, method=method)), xp.numpy(g))
    for certificate in (sol.kkt_residual(), sol.duality_gap(), sol.error_bound()):
        assert certificate.shape == rows.shape[:-2]
        assert np.all(np.abs(xp.numpy(certificate)) < 1e-14)


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


def test_tensors_without_memory_of_their_own():
    """Tensors that are negated by a flag, zero without memory, or fake."""
    torch = pytest.importorskip("torch")
    from torch._subclasses.fake_tensor import FakeTensorMode

    rng = np.random.default_rng(0)
    G, g, lam, out = (torch.from_numpy(rng.standard_normal(shape)) for shape in ((3, 7), 7, 3, 7))
    lazy = torch._neg_view(-G), torch._neg_view(-g)
    torch.testing.assert_close(project(*lazy), project(G, g))
    torch.testing.assert_close(project([G, lazy[0]], [g, lazy[1]]), project([G, G], [g, g]))  # one block
    torch.testing.assert_close(combine(*lazy, torch._neg_view(-lam)), combine(G, g, lam))
    h = -lam.abs()
    torch.testing.assert_close(project(G, g, h=torch._neg_view(-h)), project(G, g, h=h))
    torch.testing.assert_close(project(G, g, out=torch._neg_view(out)), project(G, g))
    nothing = torch._efficientzerotensor((7,), dtype=torch.float64)
    assert torch.equal(project(G, nothing), torch.zeros(7, dtype=torch.float64))
    with pytest.raises(RuntimeError, match="immutable"):
        project(G, g, out=nothing)
    with FakeTensorMode():
        assert project(torch.eye(4), -torch.ones(4)).shape == (4,)
