"""The derivative of the projection: against finite differences, and against what it must not do."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gemproj import PGD, project, solve_dual  # noqa: E402


def problem(t, d, *batch):
    generator = torch.Generator().manual_seed(t * d)
    G = torch.randn(*batch, t, d, generator=generator, dtype=torch.float64) - 0.3
    g = torch.randn(*batch, d, generator=generator, dtype=torch.float64) + 0.4
    return G.requires_grad_(), g.requires_grad_()


@pytest.mark.parametrize("options", [{}, {"margin": 0.1}, {"penalty": 0.2}, {"margin": 0.05, "penalty": 0.2}])
@pytest.mark.parametrize("shape", [(1, 4), (3, 7), (12, 20), (2, 5, 3)])
def test_gradcheck(shape, options):
    G, g = problem(*shape)
    w = torch.rand(g.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.5
    w.requires_grad_()
    assert torch.any(solve_dual(G, g, **options).multipliers > 0)
    assert torch.autograd.gradcheck(lambda G, g: project(G, g, **options), (G, g))
    assert torch.autograd.gradcheck(lambda G, g, w: project(G, g, metric=w, **options), (G, g, w))


def test_blocks_and_mappings():
    G, g = problem(3, 7)

    def blocks(G, g):
        x = project([G[:, :4].reshape(3, 2, 2), G[:, 4:]], [g[:4].reshape(2, 2), g[4:]])
        return torch.cat([x[0].ravel(), x[1]])

    def mapping(G, g):
        x = project({"a": G[:, :4], "b": G[:, 4:]}, {"b": g[4:], "a": g[:4]})
        return torch.cat([x["a"], x["b"]])

    assert torch.autograd.gradcheck(blocks, (G, g))
    assert torch.autograd.gradcheck(mapping, (G, g))


@pytest.mark.parametrize("scale", [1e-160, 1e160])
def test_gradients_at_any_magnitude(scale):
    G, g = problem(3, 7)
    v = torch.ones(7, dtype=torch.float64)
    expected = torch.autograd.grad(project(G, g) @ v, (G, g))
    G2 = (scale * G.detach()).requires_grad_()
    found = torch.autograd.grad(project(G2, g) @ v, (G2, g))
    torch.testing.assert_close(found[0] * scale, expected[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-12)


def test_gradients_have_the_dtype_of_their_array():
    G, g = (a.detach().float().requires_grad_() for a in problem(3, 7))
    project(G, g).sum().backward()
    assert G.grad.dtype == g.grad.dtype == torch.float32
    wide = [a.detach().double().requires_grad_() for a in (G, g)]
    project(*wide).sum().backward()
    torch.testing.assert_close(G.grad.double(), wide[0].grad, rtol=0, atol=1e-5)


def test_without_violation_the_derivative_is_the_identity():
    G, g = torch.tensor([[1.0, 0.0]], requires_grad=True), torch.tensor([1.0, 2.0], requires_grad=True)
    x = project(G, g)
    assert x.data_ptr() != g.data_ptr()
    x.backward(torch.tensor([3.0, 5.0]))
    assert g.grad.tolist() == [3.0, 5.0]
    assert G.grad.tolist() == [[0.0, 0.0]]


def test_dependent_rows_have_a_derivative():
    G, g = problem(2, 6)
    v = torch.arange(6, dtype=torch.float64)
    expected = torch.autograd.grad(project(G, g) @ v, g)[0]
    again = torch.cat([G, G]).detach()
    found = torch.autograd.grad(project(again, g) @ v, g)[0]
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


def test_rows_left_out_do_not_spoil_the_others():
    G, g = problem(3, 7)
    v = torch.arange(7, dtype=torch.float64)
    expected = torch.autograd.grad(project(G, g, margin=0.1) @ v, (G, g))
    bad = torch.cat([G.detach(), torch.full((1, 7), torch.nan, dtype=torch.float64)]).requires_grad_()
    found = torch.autograd.grad(project(bad, g, margin=0.1, check=False) @ v, (bad, g))
    torch.testing.assert_close(found[0][:3], expected[0], rtol=0, atol=1e-13)
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-13)


def test_learning_a_memory_by_gradient_descent():
    """What derivatives are for: choose a row of G so that its projection ends up where it should."""
    target, g = torch.tensor([0.0, 2.0, 1.0]), torch.tensor([-1.0, 2.0, 1.0])
    G = torch.tensor([[1.0, 0.5, -0.5]], requires_grad=True)
    optimizer = torch.optim.SGD([G], lr=0.1)
    for _ in range(300):
        optimizer.zero_grad()
        loss = (project(G, g) - target).square().sum()
        loss.backward()
        optimizer.step()
    assert loss < 1e-3


@pytest.mark.parametrize("shape", [(0, 5), (0, 2, 5), (2, 0)])
def test_empty_problems_have_derivatives(shape):
    G, g = torch.ones(shape, requires_grad=True), torch.ones(shape[:-2] + shape[-1:], requires_grad=True)
    project(G, g).sum().backward()
    assert G.grad.shape == G.shape
    assert torch.equal(g.grad, torch.ones_like(g))


def test_what_has_no_derivative_says_so():
    G, g = problem(3, 7)
    with pytest.raises(ValueError, match=r"method 'exact' only; method is PGD"):
        project(G, g, method=PGD())
    with pytest.raises(ValueError, match="out cannot be written while G, g or metric requires a gradient"):
        project(G, g, out=g.detach().clone())
    with pytest.raises(ValueError, match="out requires a gradient and cannot be written"):
        project(G.detach(), g.detach(), out=torch.zeros(7, dtype=torch.float64, requires_grad=True))
    with torch.no_grad():
        project(G, g, method=PGD(), out=g.detach().clone())
    x = project(G, g)
    gradient = torch.autograd.grad(x.sum(), g, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(gradient.sum(), g)


def test_changing_the_input_afterwards_is_an_error_not_a_wrong_gradient():
    G, g = problem(3, 7)
    rows = G * 1.0
    x = project(rows, g)
    rows.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()


def test_nothing_is_recorded_without_need():
    G, g = (a.detach() for a in problem(3, 7))
    assert not project(G, g).requires_grad
    assert project(G, g.clone().requires_grad_()).requires_grad
    np.testing.assert_array_equal(project(G, g), project(G, g.clone().requires_grad_()).detach())
