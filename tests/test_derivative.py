"""The derivative of the projection: against finite differences, and against what it must not do."""

from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from devices import DEVICE  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402

from gemproj import PGD, combine, gram, project, solve_dual, solve_gram  # noqa: E402

DEVICES = sorted({"cpu", DEVICE})


def problem(t, d, *batch, device="cpu"):
    generator = torch.Generator().manual_seed(t * d)
    G = torch.randn(*batch, t, d, generator=generator, dtype=torch.float64) - 0.3
    g = torch.randn(*batch, d, generator=generator, dtype=torch.float64) + 0.4
    return G.to(device).requires_grad_(), g.to(device).requires_grad_()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "options", [{}, {"margin": 0.1}, {"penalty": 0.2}, {"margin": 0.05, "penalty": 0.2}, {"equality": True}]
)
@pytest.mark.parametrize("shape", [(1, 4), (3, 7), (12, 20), (2, 5, 3)])
def test_gradcheck(shape, options, device):
    G, g = problem(*shape, device=device)
    w = torch.rand(g.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.5
    w = w.to(device).requires_grad_()
    assert torch.any(solve_dual(G, g, **options).multipliers != 0)
    # Entry by entry, or for many entries along random directions.
    check = partial(torch.autograd.gradcheck, fast_mode=G.numel() > 100)
    assert check(lambda G, g: project(G, g, **options), (G, g))
    assert check(lambda G, g, w: project(G, g, metric=w, **options), (G, g, w))


@pytest.mark.parametrize("device", DEVICES)
def test_gradcheck_of_many_gradients_blocks_and_mappings(device):
    (G, g), (_, gs) = problem(4, 9, device=device), problem(4, 9, 3, device=device)
    w = torch.linspace(0.5, 1.5, 9, dtype=torch.float64, device=device).requires_grad_()

    def blocks(G, g):
        x = project([G[:, :4].reshape(4, 2, 2), G[:, 4:]], [g[:4].reshape(2, 2), g[4:]])
        return torch.cat([x[0].ravel(), x[1]])

    def mapping(G, g):
        x = project({"a": G[:, :4], "b": G[:, 4:]}, {"b": g[4:], "a": g[:4]})
        return torch.cat([x["a"], x["b"]])

    assert torch.autograd.gradcheck(lambda G, g, w: project(G, g, metric=w), (G, gs, w))
    assert torch.autograd.gradcheck(project, (G, gs))
    for function in (blocks, mapping):
        assert torch.autograd.gradcheck(function, (G, g))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("equality", "h", "penalty"),
    [
        (False, [0.5, 0.2, -0.1, 0.0], [0.3, 0.15, 2.0, 0.3]),
        (True, [0.5, -4.0, -0.1, 0.0], [0.05, 0.2, 5.0, 0.1]),
    ],
)
def test_gradcheck_of_bounds_and_right_hand_side(equality, h, penalty, device):
    """With multipliers between their bounds, and at both of them."""
    G, g = problem(4, 9, device=device)
    given = {"h": h, "margin": [0.1, 0.1, 0.9, 0.1], "penalty": penalty}
    tensors = [
        torch.tensor(a, dtype=torch.float64, device=device, requires_grad=True) for a in given.values()
    ]
    sol = solve_dual(G, g, equality=equality, **dict(zip(given, tensors, strict=True)))
    lam = sol.multipliers
    assert (lam == sol.lower).any()
    assert (lam == sol.upper).any()
    assert sol.free.any()

    def call(G, g, h, margin, penalty):
        return project(G, g, h=h, margin=margin, penalty=penalty, equality=equality)

    assert torch.autograd.gradcheck(call, (G, g, *tensors))


@pytest.mark.parametrize(
    ("scale", "dtype", "atol"),
    [(1e-120, torch.float64, 1e-12), (1e120, torch.float64, 1e-12), (1.0, torch.float32, 1e-5)],
)
def test_gradients_at_any_magnitude(scale, dtype, atol):
    """A gradient has the dtype of its array."""
    G, g = problem(3, 7)
    expected = torch.autograd.grad(project(G, g).sum(), (G, g))
    scaled, vector = ((a.detach() * by).to(dtype).requires_grad_() for a, by in ((G, scale), (g, 1.0)))
    found = torch.autograd.grad(project(scaled, vector).sum(), (scaled, vector))
    assert found[0].dtype == found[1].dtype == dtype
    torch.testing.assert_close(found[0].double() * scale, expected[0], rtol=0, atol=atol)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=0, atol=atol)


def test_repeated_rows_have_a_derivative():
    G, g = problem(2, 6)
    expected, found = (
        torch.autograd.grad(project(a, g).sum(), g)[0] for a in (G, torch.cat([G, G]).detach())
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("tilt", [1e-3, 1e-5, 1e-7])
def test_nearly_dependent_rows_have_the_derivative_of_their_span(tilt):
    generator = torch.Generator().manual_seed(3)
    u, w, g = torch.randn(3, 6, dtype=torch.float64, generator=generator)
    G, g = torch.stack([u, tilt * w - u]), -torch.sign(g @ w) * g
    Q = torch.linalg.qr(torch.stack([u, w]).T)[0]
    jacobian = torch.autograd.functional.jacobian(lambda v: project(G, v), g)
    expected = torch.eye(6, dtype=torch.float64) - Q @ Q.T
    torch.testing.assert_close(jacobian, expected, rtol=0, atol=1e-15 / tilt)
    # What flows back lies in the tangent space to rounding, not only to that of large multipliers.
    assert torch.all(torch.abs(jacobian @ G.T) <= 1e-14 * G.norm(dim=1))


@pytest.mark.parametrize(
    "options",
    [
        {"penalty": 0.0},
        {"margin": 0},
        {"equality": np.array([True, False, False])},
        {"h": np.array([0.1, -0.1, 0.0])},
        {"metric": torch.linspace(0.5, 1.5, 14, dtype=torch.float64).reshape(2, 7)},
    ],
)
def test_options_mean_what_they_mean_without_autograd(options):
    G, g = problem(3, 7)
    expected = project(G.detach(), g.detach(), **options)
    assert not expected.requires_grad
    assert torch.equal(project(G, g, **options), expected)
    if "h" in options:  # a list holds numbers of float64
        assert torch.equal(project(G, g, h=options["h"].tolist()), expected)
    compiled = torch.compile(lambda G, g: project(G, g, **options), backend="aot_eager")
    assert torch.equal(compiled(G.detach(), g.detach()), expected)


ONE, TWO = torch.eye(3, 7, dtype=torch.float64), torch.ones(7, dtype=torch.float64)


@pytest.mark.parametrize(
    "wrong",
    [
        {"G": [ONE, ONE]},
        {"G": {"a": ONE, "b": ONE}},
        {"G": ONE.numpy()},
        {"metric": [TWO, TWO]},
        {"equality": np.array([0, 1, 0])},
        {"equality": None},
        {"margin": True},
        {"margin": None},
        {"margin": -1.0},
        {"h": ["a", "b", "c"]},
        {"refine": 1.5},
        {"warm_start": np.zeros(3)},
        {"warm_start": [0.0] * 3},
        {"warm_start": torch.zeros(2)},
        {"method": PGD, "margin": 0.1},
        {"out": np.zeros(7)},
    ],
    ids=lambda wrong: "-".join(f"{k}={type(v).__name__}" for k, v in wrong.items()),
)
def test_arguments_are_checked_as_without_autograd(wrong):
    """A list of G once stood for its first block."""
    arguments = {"G": ONE, **wrong}

    def told(call, g):
        with pytest.raises((TypeError, ValueError)) as found:
            call(g)
        return found.type, str(found.value)

    def call(g):
        return project(g=g, **arguments)

    expected = told(call, -TWO)
    assert told(call, (-TWO).requires_grad_()) == expected
    assert told(torch.func.vmap(call), -TWO.expand(2, 7)) == expected


def check_vmap(function, dims, *arrays):
    """Compare a mapped function with its calls one by one."""
    found = torch.func.vmap(function, dims)(*arrays)
    each = [
        function(*(a if d is None else a[i] for a, d in zip(arrays, dims, strict=True))) for i in range(4)
    ]
    torch.testing.assert_close(found, torch.stack(each), rtol=0, atol=1e-13)


def test_transforms_of_torch_func():
    G, g = (a.detach() for a in problem(3, 7))
    Gs, gs = (a.detach() for a in problem(3, 7, 4))
    h = torch.rand(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    jacobian = torch.autograd.functional.jacobian(lambda v: project(G, v), g)
    found = torch.func.grad(lambda v: project(G, v).sum())(g)
    torch.testing.assert_close(found, jacobian.sum(0), rtol=0, atol=1e-14)
    torch.testing.assert_close(torch.func.jacrev(lambda v: project(G, v))(g), jacobian, rtol=0, atol=1e-15)
    for dims, arrays in (((None, 0), (G, gs)), ((0, None), (Gs, g)), ((0, 0), (Gs, gs))):
        check_vmap(project, dims, *arrays)
    check_vmap(lambda h: project(G, g, h=h), (0,), h)
    for dims, start in ((None, h[0]), (0, h)):
        check_vmap(lambda g, start: project(G, g, warm_start=start), (0, dims), gs, start)
    check_vmap(torch.func.grad(lambda v, G: project(G, v).square().sum()), (0, None), gs, Gs)
    for name in ("h", "margin", "penalty"):  # a number for each problem

        def call(one, G, name=name):
            return project(G, g, **{name: one})

        check_vmap(call, (0, 0), h[:, 0], Gs)
        check_vmap(torch.func.grad(lambda one, G: call(one, G).square().sum()), (0, 0), h[:, 0], Gs)
        numbers = h[:, 0].clone().requires_grad_()
        found = torch.func.vmap(call)(numbers, Gs).square().sum()
        expected = sum(call(one, G).square().sum() for one, G in zip(numbers, Gs, strict=True))
        found, expected = (torch.autograd.grad(value, numbers)[0] for value in (found, expected))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda v: project(G, v), (g,), (g,))
    with forward_ad.dual_level():
        assert project(G, g).shape == g.shape
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            project(G, forward_ad.make_dual(g, g))
    with pytest.raises(ValueError, match="Only method 'exact' supports gradients"):
        torch.func.vmap(partial(project, method="pgd"))(Gs, gs)
    with pytest.raises(ValueError, match="vmap over a projection of blocks is not supported"):
        torch.func.vmap(lambda v: project([G], [v])[0])(gs)
    for function, *more in ((gram,), (solve_dual,), (combine, h[0])):
        with pytest.raises(TypeError, match=r"Only gemproj.project supports torch.func"):
            torch.func.vmap(lambda v, function=function, more=more: function(G, v, *more))(gs)
    with pytest.raises(TypeError, match=r"Only gemproj.project supports torch.func"):
        torch.func.vmap(lambda b: solve_gram(G[:, :3], b))(h)


@pytest.mark.parametrize("shape", [(0, 5), (0, 2, 5), (2, 0), (1, 3)])
def test_without_rows_or_violations_the_derivative_is_the_identity(shape):
    G, g = torch.ones(shape, requires_grad=True), torch.ones(shape[:-2] + shape[-1:], requires_grad=True)
    x = project(G, g)
    assert not x.numel() or x.data_ptr() != g.data_ptr()
    x.sum().backward()
    assert torch.equal(G.grad, torch.zeros_like(G))
    assert torch.equal(g.grad, torch.ones_like(g))


def test_what_has_no_derivative_says_so():
    G, g = problem(3, 7)
    with pytest.raises(ValueError, match=r"Only method 'exact' supports .*; method is PGD"):
        project(G, g, method=PGD())
    with pytest.raises(ValueError, match=r"out cannot be written under torch\.func, or while an"):
        project(G, g, out=g.detach().clone())
    with pytest.raises(ValueError, match="out requires a gradient and cannot be written"):
        project(G.detach(), g.detach(), out=torch.zeros(7, dtype=torch.float64, requires_grad=True))
    with torch.no_grad():
        project(G, g, method=PGD(), out=g.detach().clone())
    x = project(G, g)
    gradient = torch.autograd.grad(x.sum(), g, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(gradient.sum(), g)


def test_changing_the_input_afterwards_is_an_error():
    """The error comes instead of a wrong gradient."""
    G, g = problem(3, 7)
    rows = G * 1.0
    x = project(rows, g)
    rows.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()
