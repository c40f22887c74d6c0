"""The same properties on every backend: which one runs must not be seen from outside."""

import os
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from gemproj import Exact, combine, gram, project, solve_dual  # noqa: E402
from gemproj._problem import check_problem  # noqa: E402
from gemproj.backends import select  # noqa: E402
from gemproj.backends.numba import installed  # noqa: E402


@pytest.fixture(params=["portable", "numba"])
def backend(request, monkeypatch):
    """Return a context in which a backend serves tensors on the CPU."""
    if request.param == "numba" and not installed():
        pytest.skip("numba is missing or switched off")

    @contextmanager
    def context():
        with monkeypatch.context() as patch:
            patch.setattr("gemproj.backends.wanted", request.param)
            yield request.param

    return context


def draw(t, d, dtype=torch.float64, batch=()):
    generator = torch.Generator().manual_seed(t * d)
    G = torch.randn(*batch, t, d, generator=generator, dtype=torch.float64) - 0.2
    g = torch.randn(*batch, d, generator=generator, dtype=torch.float64) + 0.2
    return G.to(dtype), g.to(dtype)


@pytest.mark.parametrize(
    ("t", "d", "dtype"), [(1, 5, torch.float64), (3, 200, torch.float32), (9, 70, torch.bfloat16)]
)
@pytest.mark.parametrize("layout", ["rows", "columns", "blocks", "batch"])
def test_stages_are_their_formulas(backend, layout, dtype, t, d):
    G, g = draw(t, d, dtype, (2,) if layout == "batch" else ())
    rows, vector, lam = (
        G.double(),
        g.double(),
        torch.linspace(0.1, 0.9, t, dtype=torch.float64).expand(*g.shape[:-1], t),
    )
    if layout == "columns":
        G = G.mT.contiguous().mT
    given = ([G[:, :3], G[:, 3:]], [g[:3], g[3:]]) if layout == "blocks" else (G, g)
    with backend() as name:
        assert select(check_problem(*given)).name == name
        K, b, gg = gram(*given)
        x = combine(*given, lam)
    n, size = torch.linalg.norm(rows, dim=-1), torch.linalg.norm(vector, dim=-1)
    assert torch.all(torch.abs(K - rows @ rows.mT) <= 1e-13 * n[..., :, None] * n[..., None, :])
    assert torch.all(torch.abs(b - (rows @ vector[..., None])[..., 0]) <= 1e-13 * n * size[..., None])
    torch.testing.assert_close(gg, size**2, rtol=1e-12, atol=0)
    x = torch.cat(x) if isinstance(x, list) else x
    assert x.dtype == dtype
    expected = vector + (lam[..., None, :] @ rows)[..., 0, :]
    unit = torch.finfo(dtype).eps * 0.51  # rounded once
    assert torch.all(torch.abs(x.double() - expected) <= unit * torch.abs(expected) + 1e-12)


@pytest.mark.parametrize("t", [3, 9])
@pytest.mark.parametrize(
    "options",
    [{}, {"margin": 0.1}, {"penalty": 0.05}, {"equality": True}, {"h": 0.1}, {"h": 0.1, "penalty": 0.05}],
    ids=str,
)
def test_the_answer_meets_the_optimality_conditions(backend, options, t):
    G, g = draw(t, 60)
    options = options | ({"h": torch.full((t,), 0.1, dtype=torch.float64)} if "h" in options else {})
    with backend():
        sol, x = solve_dual(G, g, **options), project(G, g, **options)
        residual, lower, upper = sol.kkt_residual(), sol.lower, sol.upper
    assert float(residual) < 1e-12
    lam, s = sol.multipliers, G @ x - options.get("h", 0.0)
    assert torch.all((lam >= lower) & (lam <= upper))
    assert torch.all(s[lam < upper] > -1e-11)
    assert torch.all(s[lam > lower] < 1e-11)
    torch.testing.assert_close(x, g + lam @ G, rtol=0, atol=1e-12)


def test_dependent_rows_and_a_batch_with_one_odd_problem(backend):
    G, g = draw(6, 40, batch=(3,))
    G[1, 3:] = -G[1, :3]
    with backend():
        x = project(G, g)
        alone = project(G[2], g[2])
    assert torch.all((G @ x[..., None])[..., 0] > -1e-9)
    torch.testing.assert_close(x[2], alone, rtol=0, atol=1e-13)


def test_the_environment_chooses_the_backend():
    code = "import numpy as np, gemproj._problem as p, gemproj.backends as b; "
    code += "print(b.select(p.check_problem(np.ones((1, 2)), np.ones(2))).name)"
    environment = os.environ | {"GEMPROJ_BACKEND": "portable"}
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert found.stdout.strip() == "portable", found.stderr


def test_a_backend_that_does_not_exist_is_an_error(monkeypatch):
    monkeypatch.setattr("gemproj.backends.wanted", "cuda")
    with pytest.raises(ValueError, match="portable or numba; found 'cuda'"):
        project(*draw(2, 5))


def test_a_method_of_the_user_sees_the_same_problem(backend):
    G, g = draw(4, 50)
    with backend():
        found = solve_dual(G, g, method=lambda K, b, start: Exact()(K, b, start)).multipliers
    np.testing.assert_allclose(found, solve_dual(G, g).multipliers, rtol=0, atol=1e-12)
