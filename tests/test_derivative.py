"""The derivatives of the projection: against finite differences, and against what they must not do."""

import re
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from devices import DEVICE
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import gemproj
from gemproj import PGD, combine, gram, project, solve_dual, solve_gram

jacobian, on_devices = torch.autograd.functional.jacobian, pytest.mark.parametrize("device", {"cpu", DEVICE})
close = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
OPTIONS = [{}, {"margin": 0.1}, {"penalty": 0.2}, {"margin": 0.05, "penalty": 0.2}, {"equality": True}]


def problem(t, d, *batch, device="cpu"):
    generator = torch.Generator().manual_seed(t * d)
    G = torch.randn(*batch, t, d, generator=generator, dtype=torch.float64) - 0.3
    g = torch.randn(*batch, d, generator=generator, dtype=torch.float64) + 0.4
    return G.to(device).requires_grad_(), g.to(device).requires_grad_()


def check(function, arguments):
    """First derivatives entry by entry, or for some entries along random directions; second ones along these."""
    assert gradcheck(function, arguments, check_forward_ad=True, fast_mode=arguments[0].numel() > 20)
    assert gradgradcheck(function, arguments, check_fwd_over_rev=True, fast_mode=True)


@on_devices
@pytest.mark.parametrize(
    ("shape", "options"),
    [*product([(3, 7)], OPTIONS), *product([(1, 4), (12, 20), (2, 5, 3)], [OPTIONS[0], *OPTIONS[3:]])],
)
def test_derivatives_in_G_g_and_the_metric(shape, options, device):
    G, g = problem(*shape, device=device)
    w = torch.rand(g.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.5
    assert torch.any(solve_dual(G, g, **options).multipliers != 0)
    assert gradcheck(lambda G, g: project(G, g, **options), (G, g), fast_mode=True)
    check(lambda G, g, w: project(G, g, metric=w, **options), (G, g, w.to(device).requires_grad_()))


def blocks(G, g):
    x = project([G[:, :4].reshape(4, 2, 2), G[:, 4:]], [g[..., :4].reshape(*g.shape[:-1], 2, 2), g[..., 4:]])
    return torch.cat([x[0].mul_(2.0).flatten(-2), x[1]], -1)  # blocks of x are arrays of their own


def mapping(G, g):
    x = project({"a": G[:, :4], "b": G[:, 4:]}, {"b": g[..., 4:], "a": g[..., :4]})
    return torch.cat([x["a"], x["b"]], -1)


@on_devices
def test_derivatives_of_many_gradients_blocks_and_mappings(device):
    (G, g), (_, gs) = problem(4, 9, device=device), problem(4, 9, 3, device=device)
    w = torch.linspace(0.5, 1.5, 9, dtype=torch.float64, device=device).requires_grad_()
    check(lambda G, g, w: project(G, g, metric=w), (G, gs, w))
    for function in (blocks, mapping):
        check(function, (G, g))
        check(function, (G, gs))
        each = torch.stack([function(G, one) for one in gs])
        close(vmap(function, (None, 0))(G, gs), each)


@on_devices
@pytest.mark.parametrize(
    ("equality", "h", "c"),
    [
        *[(False, h, [0.3, 0.15, 2, 0.3]) for h in ([0.5, 0.2, -0.1, 0], [0.5, 0.2, -np.inf, 0])],
        *[(True, h, [0.05, 0.2, 5, 0.1]) for h in ([0.5, -4, -0.1, 0], [-np.inf, -4, -0.1, 0])],
    ],
)
def test_derivatives_in_bounds_and_right_hand_side(equality, h, c, device):
    """With multipliers between their bounds, and at both of them; also with a row that is switched off."""

    def bounds(h, m, c):
        return {"h": h, "margin": m, "penalty": c, "equality": equality}

    given = [torch.tensor(a, dtype=torch.float64, device=device) for a in (h, [0.1, 0.1, 0.9, 0.1], c)]
    sol = solve_dual(*problem(4, 9, device=device), **bounds(*given))
    assert all(a.any() for a in (sol.multipliers == sol.lower, sol.multipliers == sol.upper, sol.free))
    expected = project(*(a.detach() for a in problem(4, 9, device=device)), **bounds(*given))
    given = *problem(4, 9, device=device), *(a.requires_grad_() for a in given)
    assert torch.equal(project(*given[:2], **bounds(*given[2:])), expected)
    check(lambda G, g, *given: project(G, g, **bounds(*given)), given)


DOUBLE, SINGLE = torch.float64, torch.float32


@pytest.mark.parametrize(
    ("by", "dtype", "atol"), [(1e-120, DOUBLE, 1e-12), (1e120, DOUBLE, 1e-12), (1, SINGLE, 1e-5)]
)
def test_gradients_at_any_magnitude(by, dtype, atol):
    """A gradient has the dtype of its array."""
    G, g = problem(3, 7)
    arrays = [(G.detach() * by).to(dtype).requires_grad_(), g.detach().to(dtype).requires_grad_()]
    x = project(*arrays)
    assert torch.equal(x, project(*(a.detach() for a in arrays)))
    found, expected = torch.autograd.grad(x.sum(), arrays), torch.autograd.grad(project(G, g).sum(), (G, g))
    assert x.dtype == found[0].dtype == found[1].dtype == dtype
    close(found[0].double() * by, expected[0], atol=atol)
    close(found[1].double(), expected[1], atol=atol)


def test_large_arrays_are_differentiated_in_pieces():
    (G, g), w = problem(3, 200_000), torch.linspace(0.5, 2.0, 200_000, dtype=torch.float64)
    lam = solve_dual(G, g, equality=True, metric=w).multipliers
    found = torch.autograd.grad(project(G, g, equality=True, metric=w), (G, g), w.cos())
    z = torch.linalg.solve(G / w @ G.mT, G / w @ w.cos())
    p, x = w.cos() - z @ G, g + lam @ (G / w)
    close(found[1], p)
    close(found[0], torch.outer(lam, p / w) - torch.outer(z, x))


@pytest.mark.parametrize("by", [1.0, -1.0])
def test_repeated_and_opposite_rows_have_a_derivative(by):
    """Two opposite rows make an equality."""
    G, g = (a.detach() for a in problem(2, 6))
    expected = jacobian(partial(project, G, equality=by < 0), g)
    close(jacobian(partial(project, torch.cat([G, by * G])), g), expected)


@pytest.mark.parametrize("tilt", [1e-3, 1e-5, 1e-7])
def test_nearly_dependent_rows_have_the_derivative_of_their_span(tilt):
    u, w, g = torch.randn(3, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    G, g = torch.stack([u, tilt * w - u]), -torch.sign(g @ w) * g
    Q = torch.linalg.qr(torch.stack([u, w]).T)[0]
    backward, forward = jacobian(partial(project, G), g), jacfwd(partial(project, G))(g)
    for found in (backward, forward):
        close(found, torch.eye(6).double() - Q @ Q.T, atol=1e-15 / tilt)
    # What flows back lies in the tangent space to rounding, not only to that of large multipliers.
    assert torch.all(torch.abs(backward @ G.T) <= 1e-14 * G.norm(dim=1))


SAME = [{"penalty": 0.0}, {"margin": 0}, {"equality": np.array([True, False, False])}]
SAME += [{"h": np.array([0.1, -0.1, 0.0])}, {"h": [0.1, -0.1, 0.0]}]  # a list has numbers of float64
SAME += [{"metric": torch.linspace(0.5, 1.5, 14, dtype=torch.float64).reshape(2, 7)}]


@pytest.mark.parametrize("options", SAME, ids=str)
def test_options_mean_what_they_mean_without_autograd(options):
    G, g = problem(3, 7)
    expected = project(G.detach(), g.detach(), **options)
    assert not expected.requires_grad
    assert torch.equal(project(G, g, **options), expected)
    compiled = torch.compile(project, backend="aot_eager")
    assert torch.equal(compiled(G.detach(), g.detach(), **options), expected)


ONE, TWO = torch.eye(3, 7, dtype=torch.float64), torch.ones(7, dtype=torch.float64)
WRONG = [{"G": [ONE, ONE]}, {"G": {"a": ONE, "b": ONE}}, {"G": ONE.numpy()}, {"metric": [TWO, TWO]}]
WRONG += [{"equality": np.array([0, 1, 0])}, {"equality": None}, {"margin": True}, {"margin": None}]
WRONG += [{"margin": -1.0}, {"h": ["a", "b", "c"]}, {"unknown": 1.5}, {"warm_start": np.zeros(3)}]
WRONG += [{"warm_start": [0.0] * 3}, {"warm_start": torch.zeros(2)}, {"method": PGD, "margin": 0.1}]
WRONG += [{"out": np.zeros(7)}, {"G": ONE.to_sparse()}]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_arguments_are_checked_as_without_autograd(wrong):
    """A list of G once stood for its first block."""

    def told(call, g):
        with pytest.raises((TypeError, ValueError)) as found:
            call(g)
        return found.type, str(found.value)

    def call(g):
        return project(g=g, **{"G": ONE, **wrong})

    assert told(call, -TWO) == told(call, (-TWO).requires_grad_()) == told(vmap(call), -TWO.expand(2, 7))


def check_vmap(function, dims, *arrays):
    """Compare a mapped function with its calls one by one."""
    pairs = [[(a if d is None else a[i]) for a, d in zip(arrays, dims, strict=True)] for i in range(4)]
    each = [function(*pair) for pair in pairs]
    close(vmap(function, dims)(*arrays), torch.stack(each))


def test_vmap():
    (G, g), (Gs, gs) = ([a.detach() for a in problem(3, 7, *batch)] for batch in ((), (4,)))
    h = torch.rand(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for dims, arrays in (((None, 0), (G, gs)), ((0, None), (Gs, g)), ((0, 0), (Gs, gs))):
        for function in (project, jacrev(project), jacrev(project, 1), jacfwd(project), jacfwd(project, 1)):
            check_vmap(function, dims, *arrays)
    check_vmap(lambda h: project(G, g, h=h), (0,), torch.where(h < h.median(), h, -torch.inf))
    check_vmap(lambda g: project(Gs, g), (0,), gs)  # a batch in a batch
    for dims, start in ((None, h[0]), (0, h)):
        check_vmap(lambda g, start: project(G, g, warm_start=start), (0, dims), gs, start)
    check_vmap(hessian(lambda v, G: project(G, v).pow(3).sum()), (0, None), gs, G)
    for name in ("h", "margin", "penalty"):  # a number for each problem
        call = partial(lambda name, one, G: project(G, g, **{name: one}), name)
        loss = partial(lambda call, one, G: call(one, G).square().sum(), call)
        check_vmap(call, (0, 0), h[:, 0], Gs)
        check_vmap(grad(loss), (0, 0), h[:, 0], Gs)
        numbers = h[:, 0].clone().requires_grad_()
        found = torch.autograd.grad(vmap(call)(numbers, Gs).square().sum(), numbers)[0]
        close(found, vmap(grad(loss))(h[:, 0], Gs))
    with pytest.raises(ValueError, match="Only method 'exact' supports gradients"):
        vmap(partial(project, method="pgd"))(Gs, gs)
    others = gram, solve_dual, partial(combine, multipliers=h[0]), lambda G, v: solve_gram(G[:, :3], v[:3])
    for call in others:
        with pytest.raises(TypeError, match=r"Only gemproj.project supports torch.func"):
            vmap(partial(call, G))(gs)


def test_forward_mode_and_second_derivatives():
    G, g = (a.detach() for a in problem(3, 7))
    A, v, loss = G.flip(0), g.flip(0), lambda G, g: project(G, g).pow(3).sum()
    of_G, of_g = jacobian(project, (G, g))
    of_G, of_g = torch.tensordot(of_G, A, 2), of_g @ v
    close(jvp(project, (G, g), (A, v))[1], of_G + of_g)
    with forward_ad.dual_level():  # only one argument has a tangent
        assert forward_ad.unpack_dual(project(G, g)).tangent is None
        close(forward_ad.unpack_dual(project(forward_ad.make_dual(G, A), g)).tangent, of_G)
        close(forward_ad.unpack_dual(project([G], [forward_ad.make_dual(g, v)])[0]).tangent, of_g)
        x = project(G, forward_ad.make_dual(torch.linalg.pinv(G).sum(1), v))  # nothing is violated
        assert torch.equal(forward_ad.unpack_dual(x).tangent, v)
    whole = torch.autograd.functional.hessian(loss, (G, g))
    for outer in (jacfwd, jacrev):
        for inner in (jacfwd, jacrev):
            close(outer(inner(loss, 0), 0)(G, g), whole[0][0])
            close(outer(inner(loss, 1), 0)(G, g), whole[1][0])


@pytest.mark.parametrize(
    ("of_G", "of_g"), [((0, 5), (5,)), ((0, 2, 5), (0, 5)), ((2, 0), (0,)), ((1, 3), (3,)), ((2, 3), (0, 3))]
)
def test_without_rows_gradients_or_violations_the_derivative_is_the_identity(of_G, of_g):
    G, g = torch.ones(of_G, requires_grad=True), torch.ones(of_g, requires_grad=True)
    x = project([G], [g])[0] if len(of_g) == len(of_G) else project(G, g)  # no gradients, in blocks
    assert x.shape == of_g
    assert not x.numel() or x.data_ptr() != g.data_ptr()
    x.sum().backward()
    assert torch.equal(G.grad, torch.zeros_like(G))
    assert torch.equal(g.grad, torch.ones_like(g))


def test_a_start_that_is_also_an_option_is_a_constant_there_only():
    G, g = (a.detach() for a in problem(3, 7))
    penalty, other = (torch.full((3,), 0.1, dtype=torch.float64, requires_grad=True) for _ in range(2))
    project([G], [g], penalty=penalty, warm_start=penalty)[0].sum().backward()
    project([G], [g], penalty=other)[0].sum().backward()
    assert torch.equal(penalty.grad, other.grad)


def test_what_has_no_derivative_says_so():
    (G, g), out = problem(3, 7), torch.zeros(7, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"Only method 'exact' supports .*; method is PGD"):
        project(G, g, method=PGD())
    for record in (torch.jit.trace, lambda call, given: make_fx(call)(*given)):
        with pytest.raises(ValueError, match=r"Only method 'exact' supports .*traces; method is AGEM"):
            record(lambda G, g: project(G, g, method="agem"), (G.detach(), g.detach()))
    with forward_ad.dual_level():  # of the start alone, which does not change the solution
        start = forward_ad.make_dual(torch.ones(3).double(), torch.ones(3).double())
        x = project(G.detach(), g.detach(), method="agem", warm_start=start)
    assert torch.equal(x, project(G.detach(), g.detach(), method="agem"))
    with pytest.raises(ValueError, match=r"out cannot be written under torch\.func, or while an"):
        project(G, g, out=out)
    with torch.no_grad():
        project(G, g, method=PGD(), out=out)
    with pytest.raises(ValueError, match="out requires a gradient and cannot be written"):
        project(G.detach(), g.detach(), out=out.requires_grad_())
    rows = G * 1.0
    x = project(rows, g)
    rows.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # not a wrong gradient
        x.sum().backward()


def test_no_private_name_of_torch_is_used(monkeypatch):
    for path in Path(gemproj.__file__).parent.glob("*.py"):
        assert not re.findall(r"\b(?:torch|forward_ad)[\w.]*\._\w+", path.read_text("utf-8")), path.name
    G, g = (a.detach() for a in problem(3, 7))
    expected = project(G, g)
    for name in ("_functorch", "_get_dispatch_mode", "_TorchDispatchModeKey"):
        monkeypatch.delattr(torch._C, name)
    assert torch.equal(project(G, g), expected)
