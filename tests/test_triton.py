"""Triton's kernels against the portable operations, in Triton's interpreter; `make bench-gpu` runs them on a GPU."""

from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
import torch
from devices import DEVICE, make_device
from problems import assert_close

from asv_benchmarks.reports.families import FAMILIES
from gemproj import Status, backends, combine, gram, project, solve_dual
from gemproj.backends import triton

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="make bench-gpu is there for that")


class Whole(type):
    def __instancecheck__(cls, value):
        return isinstance(value, int)


class Int(metaclass=Whole):
    """What the interpreter takes for `int`: NumPy does not convert arrays with one entry any more."""

    def __new__(cls, value):
        return int(value.item() if isinstance(value, np.ndarray) else value)


@contextmanager
def kernels(used=True):
    """Have problems of torch take the kernels, or not."""
    with make_device(), patch.object(backends, "available", lambda device: used):
        backends._module.cache_clear()
        try:
            yield
        finally:
            backends._module.cache_clear()


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr("triton.runtime.interpreter.int", Int, raising=False)


def both(call):
    """Return what a call returns with the kernels, and without."""
    with kernels():
        found = call()
    with kernels(used=False):
        return found, call()


def draw(*shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    G = torch.randn(*shape, generator=generator, dtype=torch.float64) + 0.1
    g = torch.randn(*shape[:-2], shape[-1], generator=generator, dtype=torch.float64) - 0.2
    return G.to(dtype), g.to(dtype)


@pytest.mark.parametrize("t", [*range(1, 9), 11])
def test_any_number_of_rows(t):
    G, g = draw(t, 700)
    with kernels():
        assert backends.select(solve_dual.__globals__["check_problem"](G, g)).name == "triton"
    for found, expected in zip(*both(lambda: [*gram(G, g), project(G, g)]), strict=True):
        assert_close(found, expected, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes_are_rounded_once(dtype):
    G, g = draw(3, 520, dtype=dtype)
    with kernels():
        x = project(G, g)
    right = project(*(a.double().numpy() for a in (G, g)))
    assert x.dtype == dtype
    # The interpreter cuts bfloat16 off.
    assert_close(
        x.double(), right, atol=0, rtol=(1.01 if dtype == torch.bfloat16 else 0.51) * torch.finfo(dtype).eps
    )


CALLS = {
    "many parts": lambda G, g: project(G.repeat(1, 20), g.repeat(20)),
    "unaligned": lambda G, g: project(G[:, 3:-2], g[3:-2]),
    "rows by columns": lambda G, g: project(G.T.contiguous().T, g),
    "blocks": lambda G, g: project(
        [G[:, :60].reshape(4, 6, 10), G[:, 60:].contiguous()], [g[:60].reshape(6, 10), g[60:]]
    ),
    "a block of nothing": lambda G, g: project([G, G[:, :0]], [g, g[:0]]),
    "metric": lambda G, g: project(G, g, metric=torch.linspace(0.1, 3.0, 640, dtype=g.dtype)),
    "metric of a batch": lambda G, g: project(
        G, g.expand(3, -1), metric=torch.linspace(1, 4, 1920).view(3, 640)
    ),
    "batch": lambda G, g: project(G.view(4, 4, 160)[:, :3], g.view(4, 160)),
    "many gradients": lambda G, g: project(G, torch.stack([g, -g, 2 * g])),
    "in place": lambda G, g: project(G, y := g.clone(), out=y),
    "margin": lambda G, g: project(G, g, margin=0.3),
    "equality": lambda G, g: project(G, g, equality=torch.tensor([True, False, True, False])),
    "penalty": lambda G, g: project(G, g, penalty=0.05),
    "h": lambda G, g: project(G, g, h=torch.tensor([-1.0, 2.0, 0.0, 0.5])),
    "zero row": lambda G, g: project(G * torch.tensor([[1.0], [0.0], [1.0], [1.0]]), g),
    "repeated rows": lambda G, g: project(torch.cat([G, G]), g),
    "pgd": lambda G, g: project(G, g, method="pgd"),
    "rows unseen": lambda G, g: combine(
        G * torch.tensor([[1.0], [torch.nan], [1], [1]]), g, torch.tensor([1.0, 0, 2, 0])
    ),
    "out with gaps": lambda G, g: project(G, g, out=torch.zeros(640, 2, dtype=g.dtype)[:, 0]),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    found, expected = both(lambda: CALLS[name](*draw(4, 640)))
    for a, b in zip(*(c if isinstance(c, list) else [c] for c in (found, expected)), strict=True):
        assert_close(a, b, atol=1e-11)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_are_not_finite_are_left_out(bad):
    G, g = draw(2, 4, 50)
    spoilt = G.clone()
    spoilt[1, 2, 7] = bad
    with kernels():
        x, sol = project(spoilt, g), solve_dual(spoilt, g)
        lam = project(spoilt, g, margin=0.2)
    with kernels(used=False):
        expected, with_margin = project(G, g), project(spoilt, g, margin=0.2)
        expected[1] = project(G[1, [0, 1, 3]], g[1])
    assert_close(x, expected, atol=1e-12)
    assert_close(lam, with_margin, atol=1e-12)
    assert (sol.status & Status.ROW_DROPPED > 0).tolist() == [False, True]
    assert float(sol.kkt_residual().max()) < 1e-12


@pytest.mark.parametrize("name", FAMILIES)
def test_hard_families(name):
    for G, g in FAMILIES[name].problems(1, 8):
        with kernels():
            sol = solve_dual(*map(torch.from_numpy, (G, g)))
            status, residual = int(sol.status), float(sol.kkt_residual())
        assert residual < 1e-9 or status & Status.UNRESOLVED


def test_problems_without_columns_or_members():
    for shape in ((3, 0), (0, 3, 5), (0, 5)):
        found, expected = both(lambda shape=shape: project(*draw(*shape)))
        assert_close(found, expected, atol=0)


def test_where_triton_does_not_work(monkeypatch):
    with pytest.warns(RuntimeWarning, match="GEMPROJ_BACKEND=portable"):
        assert not triton.available.__wrapped__(torch.device("cuda"))  # which this torch cannot use
    monkeypatch.setattr(triton, "find_spec", lambda name: None)
    assert not triton.available.__wrapped__(torch.device("cuda"))
    assert not triton.available.__wrapped__(torch.device("cpu"))
