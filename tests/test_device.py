"""The public functions on a device, or on the CPU taken for one: no look at a value, and the CPU's answers."""

import math
import runpy
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np
import problems
import pytest
import torch
from devices import DEVICE, draw, make_device
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from gemproj import FISTA, PGD, combine, gram, project, solve_dual, solve_gram

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")

ROOT = Path(__file__).resolve().parents[1]
# Operations whose result, or shape, the CPU would have to wait for.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero"}


class NoWaiting(TorchDispatchMode):
    """Raise where the CPU waits for the device, and count the operations that are not views."""

    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.__name__.split(".")[0]
        indices = args[1] if name in ("index", "index_put_") else []
        if name in WAITING or any(a is not None and a.dtype == torch.bool for a in indices):
            raise AssertionError(f"{func} makes the CPU wait for the device")
        returned = [r.alias_info for r in func._schema.returns]
        self.operations += not any(alias is not None and not alias.is_write for alias in returned)
        return func(*args, **(kwargs or {}))


@contextmanager
def waiting(copies=0):
    """Raise where the CPU waits for the device, be it a real one or not, but for some copies to NumPy."""
    if DEVICE == "cuda" and not copies:
        torch.cuda.set_sync_debug_mode("error")
    found, copy = [], torch.Tensor.numpy

    def copied(a):
        found.append(a)
        assert len(found) <= copies, "copied to the CPU"
        return copy(a)

    try:
        with NoWaiting() as mode, patch.object(torch.Tensor, "numpy", copied):
            yield mode
    finally:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def to(device, tree):
    """Bring all tensors to a device."""
    return tree_map(lambda a: a.to(device) if isinstance(a, torch.Tensor) else a, tree)


def assert_close(a, b, **tolerances):
    """Assert that numbers are close, wherever they are."""
    problems.assert_close(*to("cpu", (a, b)), **tolerances)


def on_cpu(function, *arrays, **options):
    """Return what a function of the package returns for the same tensors on the CPU."""
    arrays, options = to("cpu", (arrays, options))
    return to(DEVICE, function(*arrays, **options))


def certificates(sol):
    return sol.kkt_residual(), sol.duality_gap(), sol.cosine(), sol.active, sol.status


def right(t):
    """Return a right-hand side that switches the first row off."""
    return torch.cat([torch.tensor([-math.inf]), torch.linspace(-0.3, 0.2, t - 1)]).double()


OPTIONS = {
    "exact": lambda t: {},
    "margin": lambda t: {"margin": torch.linspace(0.0, 0.1, t)},
    "h": lambda t: {"h": right(t)},
    "margin and h": lambda t: {"margin": 0.05, "h": right(t)},
    "pgd": lambda t: {"method": PGD(steps=3), "h": right(t), "penalty": 0.1},
    "fista": lambda t: {"method": FISTA(steps=30), "margin": 0.05, "equality": torch.arange(t) == 1},
    "agem": lambda t: {"method": "agem", "h": right(t)},
    "penalty": lambda t: {"penalty": torch.full((t,), 0.1), "h": right(t)},
    "equality": lambda t: {"equality": torch.arange(t) != 1, "h": torch.tensor(0.1)},
}
CASES = [*product(OPTIONS, [(6, 300), (2, 1, 9, 30), (3, 2, 7, 20)])]
CASES += [*product(["exact", "pgd", "fista", "agem"], [(1, 9), (2, 2100), (12, 40), (3, 2, 70)])]
CASES += [("exact", (300, 8, 20))]  # more than one slab of active sets


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("name", "shape"), CASES)
def test_same_answer_without_waiting(name, shape, shared):
    """A device is read in one copy by the exact method for more than 8 rows, penalties and equalities."""
    t, (G, g) = shape[-2], draw(*shape)
    G = G[(0,) * (G.ndim - 2)] if shared else G
    options = to(DEVICE, OPTIONS[name](t) if t > 1 else {})
    expected, host = on_cpu(project, G, g, **options), on_cpu(solve_dual, G, g, **options)
    copies = int("method" not in options and (t > 8 or name in ("penalty", "equality")))
    start = torch.rand((*g.shape[:-1], t), dtype=torch.float64, device=DEVICE) if copies else None
    with make_device():
        with waiting(copies):
            x = project(G, g, warm_start=start, **options)
        with waiting(1):  # all but the products is computed by NumPy
            found = certificates(solve_dual(G, g, **options))
        for a, b in zip(found, certificates(host), strict=True):
            assert a.device.type == DEVICE
            assert_close(a, b, atol=1e-13)
    assert_close(x, expected, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(12, 300), (12, 20_000), (3, 12, 40)])
def test_nearly_opposite_rows_are_read_again(shape, dtype):
    """From the device, in tiles that it multiplies; up to 8 rows, where a penalty is given, if infinite."""
    G, g = draw(*shape)
    G[..., 1::2, :] = 1e-5 * G[..., 1::2, :] - G[..., ::2, :]
    G, g = G.to(dtype), (g - 0.3 * G[..., ::2, :].sum(-2)).to(dtype)
    for t, options in ((12, {}), (4, {"penalty": math.inf})):
        rows = G[..., :t, :]
        expected, host = on_cpu(project, rows, g, **options), on_cpu(solve_dual, rows, g)
        with make_device():
            x, sol = project(rows, g, **options), solve_dual(rows, g, **options)
            assert torch.equal(x, combine(rows, g, sol))
            assert bool(sol.refined.all() & ~sol.status.any())
            assert torch.equal(sol.multipliers, solve_dual(rows, g).multipliers)
        assert_close(sol.error_bound(), host.error_bound(), rtol=0.1)
        assert_close(x, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-11 * float(g.norm()))


def test_wrong_options_raise_where_a_device_is_read():
    (G, g), none = draw(12, 30), torch.zeros(12, device=DEVICE)
    with make_device():
        for name, wrong in {"h": none / 0.0, "margin": none - 1.0, "penalty": none - 1.0}.items():
            with pytest.raises(ValueError, match=f"{name} must be"):
                project(G, g, **{name: wrong})
        with pytest.raises(TypeError, match="equality must be True, False or an array of one boolean"):
            project(G, g, equality=none)
        with pytest.raises(ValueError, match=r"h is infeasible: .* in rows 0, 1 at once"):
            solve_dual(torch.stack([G[0], -2.0 * G[0]]), g, h=none[:2] + 1.0)
        with pytest.raises(ValueError, match="K must be a Gram matrix"):
            solve_gram(-torch.eye(2, device=DEVICE), none[:2])
        G[3, 7] = math.inf
        for function, rows in ((project, G), (solve_dual, G[:4])):
            with pytest.raises(ValueError, match="G is not finite: row 3, which holds"):
                function(rows, g)


def test_a_device_without_float64(monkeypatch):
    """Such as Apple's: t-space has float32, and the CPU solves in float64."""
    monkeypatch.setattr("gemproj.backends.wanted", "portable")
    for module in ("_arrays", "_problem", "_checks", "_tspace"):
        monkeypatch.setattr(f"gemproj.{module}.wide_dtype", lambda xp, device: xp.float32)
    for t in (5, 12):
        G, g = draw(t, 300, dtype=torch.float32)
        with make_device():
            x, sol = project(G, g), solve_dual(G, g)
            assert {a.dtype for a in (x, *sol.gram, sol.multipliers, sol.kkt_residual())} == {torch.float32}
            assert not bool(sol.status.any())
        assert_close(x.double(), on_cpu(project, G.double(), g.double()), atol=1e-5)


CALLS = {
    "gram": lambda G, g, w: tuple(gram(G, g)),
    "combine": lambda G, g, w: combine(G, g, w[:8]),
    "metric": lambda G, g, w: project(G, g, metric=w),
    "columns": lambda G, g, w: project(G.T.contiguous().T, g),
    "blocks": lambda G, g, w: project([G[:, :20].view(8, 4, 5), G[:, 20:]], [g[:20].view(4, 5), g[20:]]),
    "bfloat16": lambda G, g, w: project(G.bfloat16(), g.bfloat16()),
    "in place": lambda G, g, w: project(G, y := g.clone(), out=y),
    "a gap after each entry": lambda G, g, w: project(G, g, out=torch.stack([w, w], dim=1)[:, 0]),
}


@pytest.mark.parametrize("name", CALLS)
def test_other_calls_without_waiting(name):
    G, g = draw(8, 1500)
    weight = torch.linspace(0.1, 1.1, 1500, dtype=torch.float64, device=DEVICE)
    expected = on_cpu(CALLS[name], G, g, weight)
    with make_device(), waiting():
        found = CALLS[name](G, g, weight)
    for a, b in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert a.dtype == b.dtype
        assert_close(a.double(), b.double(), rtol=0.008 if a.dtype == torch.bfloat16 else 1e-12, atol=1e-13)


@pytest.mark.parametrize("options", [{}, {"margin": 0.05}, {"method": "pgd", "penalty": 0.1}], ids=str)
def test_one_K_for_many_gradients(options):
    """K is kept once, also where a row of G or one of the gradients is not finite; these are left out."""
    G, g = draw(4, 30)
    many = torch.stack([g, -g, 0.5 * g + G[0]])
    expected = on_cpu(project, G[1:], many, **options)
    G[0, 3], many[1, 5] = torch.inf, torch.nan
    with make_device(), waiting():
        x = project(G, many, **options)
    assert_close(x[[0, 2]].cpu(), expected[[0, 2]].cpu(), atol=1e-13)
    assert torch.equal(torch.nan_to_num(x[1]), torch.nan_to_num(many[1]))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("t", [3, 11])
def test_rows_that_are_not_finite_are_left_out_unseen(device, bad, t, rng):
    G, g = rng.standard_normal((2, t, 80)) - 0.3, rng.standard_normal((2, 80)) + 0.3
    spoilt, raw = G.copy(), PGD(steps=3, normalize=False)
    spoilt[1, 0, 7] = bad
    rows, vector = device.array(spoilt), device.array(g)
    few = [{}, {"margin": 0.1}, {"h": 0.1}, {"h": 0.1, "margin": 0.1}] if t < 9 else []
    for options in [*few, {"method": raw}, {"method": "fista", "penalty": 0.1}, {"method": "agem", "h": 0.1}]:
        x = device.numpy(project(rows, vector, **options))
        assert_close(x[0], project(G[0], g[0], **options), atol=1e-12)
        assert_close(x[1], project(G[1, 1:], g[1], **options), atol=1e-12)
        assert np.all(np.isnan(device.numpy(project(rows, device.array(g * np.nan), **options))))


def test_the_captured_step_of_the_example():
    torch.manual_seed(0)
    names = runpy.run_path(str(ROOT / "examples" / "cuda_graph.py"))
    rows = [torch.cat([v.flatten() for v in names["gradient"](*m)]) for m in names["memories"]]
    names["step"]()
    step = torch.cat([p.grad.flatten() for p in names["parameters"]])
    assert all(float(row @ step) > -1e-6 for row in rows)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("t", "d"), [(3, 100_000), (12, 5000)])
def test_arrays_of_cupy_in_its_default_stream_and_another(t, d, own):
    """What a stream has yet to write is not read, and x is there for what follows in it."""
    pytest.importorskip("cupy")
    order = pytest.importorskip("asv_benchmarks.reports.gpu.order")
    with make_device():
        _, error, bound = order.in_cupy_stream(own, t, d)
    assert error <= bound
