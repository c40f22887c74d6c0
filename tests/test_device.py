"""The public functions on a device: no look at a value, and the answers of the CPU.

Where there is no GPU, the CPU is taken for one.
"""

import math
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np
import problems
import pytest
from devices import DEVICE, make_device
from pages import run

from conftest import UNSEEN
from gemproj import FISTA, PGD, Status, combine, gram, project, solve_dual, solve_gram

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
]
tree = pytest.importorskip("torch.utils._pytree")
tree_map, tree_leaves = tree.tree_map, tree.tree_leaves
dispatch = pytest.importorskip("torch.utils._python_dispatch")

ROOT = Path(__file__).resolve().parents[1]
# Operations whose result, or shape, the CPU would have to wait for.
WAITING = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero"}


class NoWaiting(dispatch.TorchDispatchMode):
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
def copies(most):
    """Raise where more than so many tensors become arrays of NumPy, which takes a copy from a device."""
    found = []

    def copied(a):
        found.append(a)
        assert len(found) <= most, "copied to the CPU"
        return copy(a)

    copy = torch.Tensor.numpy
    with patch.object(torch.Tensor, "numpy", copied):
        yield


@contextmanager
def no_waiting():
    """Raise where the CPU waits for the device, be it a real one or not."""
    if DEVICE == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        with NoWaiting() as mode, copies(0):
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


def draw(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    G = torch.randn(*shape, generator=generator, dtype=torch.float64) - 0.2
    g = torch.randn(*shape[:-2], shape[-1], generator=generator, dtype=torch.float64) + 0.2
    return G.to(DEVICE, dtype), g.to(DEVICE, dtype)


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
    waits = "method" not in options and (t > 8 or name in ("penalty", "equality"))
    start = torch.rand((*g.shape[:-1], t), dtype=torch.float64, device=DEVICE)
    with make_device():
        with copies(1) if waits else no_waiting():
            x = project(G, g, warm_start=start if waits else None, **options)
        with copies(1) if waits else no_waiting():
            sol = solve_dual(G, g, **options)
            found = sol.kkt_residual(), sol.duality_gap(), sol.cosine(), sol.active, sol.status
        certificates = host.kkt_residual(), host.duality_gap(), host.cosine(), host.active, host.status
        for a, b in zip(found, certificates, strict=True):
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
            assert bool(sol.refined.all())
            assert not bool(sol.status.any())
        assert_close(sol.error_bound(), host.error_bound(), rtol=0.1)
        assert_close(x, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-11 * float(g.norm()))


def test_options_of_a_device_are_checked_where_it_is_read():
    G, g = draw(12, 30)
    with make_device():
        for h, margin, match in (
            (math.nan, 0.0, "h must be finite"),
            (0.0, -1.0, "margin must be at least 0"),
        ):
            with pytest.raises(ValueError, match=match):
                project(G, g, h=torch.full((12,), h), margin=torch.tensor(margin))
        with pytest.raises(TypeError, match="equality must be True, False or an array of one boolean"):
            project(G, g, equality=torch.ones(12))
        with pytest.raises(ValueError, match="G is not finite: row 3, which holds"):
            project(torch.where(torch.arange(12)[:, None] == 3, math.inf, G), g)


def test_a_device_without_float64(monkeypatch):
    """Such as Apple's: t-space has float32, and the CPU solves in float64."""
    for module in ("_arrays", "_problem", "_gram", "_checks", "_tspace"):
        monkeypatch.setattr(f"gemproj.{module}.wide_dtype", lambda xp, device: xp.float32)
    for t in (5, 12):
        G, g = draw(t, 300, dtype=torch.float32)
        expected = on_cpu(project, G.double(), g.double())
        with make_device():
            x, sol = project(G, g), solve_dual(G, g)
            assert {a.dtype for a in (x, *sol.gram, sol.multipliers, sol.kkt_residual())} == {torch.float32}
        assert not bool(sol.status.any())
        assert_close(x.double(), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("t", range(1, 9))
def test_few_operations(t, dtype):
    G, g = draw(t, 300, dtype=dtype)
    with make_device(), no_waiting() as mode:
        project(G, g)
    assert mode.operations <= 60


CALLS = {
    "gram": lambda G, g, w: tuple(gram(G, g)),
    "combine": lambda G, g, w: combine(G, g, w[:8]),
    "many gradients": lambda G, g, w: project(G, torch.stack([g, -g, 0.5 * g])),
    "metric": lambda G, g, w: project(G, g, metric=w),
    "columns": lambda G, g, w: project(G.T.contiguous().T, g),
    "blocks": lambda G, g, w: project(
        [G[:, :20].reshape(8, 4, 5), G[:, 20:]], [g[:20].reshape(4, 5), g[20:]]
    ),
    "bfloat16": lambda G, g, w: project(G.bfloat16(), g.bfloat16()),
    "in place": lambda G, g, w: project(G, y := g.clone(), out=y),
    "a gap after each entry": lambda G, g, w: project(G, g, out=torch.stack([w, w], dim=1)[:, 0]),
}


@pytest.mark.parametrize("name", CALLS)
def test_other_calls_without_waiting(name):
    G, g = draw(8, 1500)
    weight = torch.linspace(0.1, 1.1, 1500, dtype=torch.float64, device=DEVICE)
    expected = on_cpu(CALLS[name], G, g, weight)
    with make_device(), no_waiting():
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
    with make_device(), no_waiting():
        sol, x = solve_dual(G, many, **options), project(G, many, **options)
        status = sol.status
    assert sol.gram.K.shape == (4, 4)
    assert_close(x[[0, 2]].cpu(), expected[[0, 2]].cpu(), atol=1e-13)
    assert torch.equal(torch.nan_to_num(x[1]), torch.nan_to_num(many[1]))
    assert bool((status & Status.ROW_DROPPED > 0).all())


def test_what_stands_where_there_is_no_factor_is_not_used(monkeypatch):
    """Torch promises nothing of it."""
    linalg = pytest.importorskip("array_api_compat.torch").linalg

    def with_holes(a):
        factor, failed = cholesky_ex(a)
        holes = torch.full_like(factor, torch.nan)
        holes.diagonal(dim1=-2, dim2=-1).fill_(1.0)
        return torch.where((failed > 0)[..., None, None], holes, factor), failed

    cholesky_ex = linalg.cholesky_ex
    monkeypatch.setattr(linalg, "cholesky_ex", with_holes)
    G, g = draw(3, 20)
    expected = on_cpu(project, G, g)
    with make_device():
        x = project(torch.cat([G, G]), g)
    assert_close(x, expected, atol=1e-13)


def test_nearly_dependent_active_rows_are_unresolved(device, rng):
    """By K, and not where such rows are inactive."""
    u, v = rng.standard_normal((2, 50))
    G = device.array(np.stack([u, -u + 1e-5 * v]))
    active, apart = (solve_dual(G, device.array(sign * v + 0.1 * u)).status for sign in (-1.0, 1.0))
    assert int(device.numpy(active)) & Status.UNRESOLVED
    assert int(device.numpy(apart)) == Status.OPTIMAL


def test_a_row_that_is_switched_off_leaves_no_trace(device, rng):
    """Nor is it nearly dependent on an active one."""
    G, h = rng.standard_normal((4, 50)), np.array([0.2, 0.0, 0.1, -np.inf])
    G[3], g = 1e-9 * G[3] - G[0], 0.1 * rng.standard_normal(50) - G[0]
    assert int(solve_dual(device.array(G), device.array(g), h=device.array(h)).status) == Status.OPTIMAL
    assert_close(device.project(G, g, h=device.array(h)), project(G[:3], g, h=h[:3]), atol=1e-13)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("t", [3, 11])
def test_rows_that_are_not_finite_are_left_out_unseen(device, bad, t, rng):
    G, g = rng.standard_normal((2, t, 80)) - 0.3, rng.standard_normal((2, 80)) + 0.3
    spoilt = G.copy()
    spoilt[1, 0, 7] = bad
    rows, vector = device.array(spoilt), device.array(g)
    raw, h = PGD(steps=3, normalize=False), device.array(np.full(t, 0.1))
    methods = [{"method": raw}, {"method": "fista", "penalty": 0.1}, {"method": "agem"}]
    for options in [*methods, *([{}, {"margin": 0.1}, {"h": h}, {"h": h, "margin": 0.1}] * (t < 9))]:
        x, sol = device.numpy(project(rows, vector, **options)), solve_dual(rows, vector, **options)
        some = options | ({"h": 0.1 * np.ones(t)} if "h" in options else {})
        assert_close(x[0], project(G[0], g[0], **some), atol=1e-12)
        some = options | ({"h": 0.1 * np.ones(t - 1)} if "h" in options else {})
        assert_close(x[1], project(G[1, 1:], g[1], **some), atol=1e-12)
        dropped = (device.numpy(sol.status).astype(int) & Status.ROW_DROPPED) > 0
        assert dropped.tolist() == [False, True]
        for value in (sol.kkt_residual(), sol.duality_gap(), sol.cosine()):
            assert np.all(np.isfinite(device.numpy(value)))
    assert np.all(np.isnan(device.numpy(project(rows, device.array(g * np.nan), method=raw))))


@pytest.mark.parametrize("t", [2, 4])
def test_an_infeasible_right_hand_side_is_a_status(device, t, rng):
    """Other problems of the batch are as they were, and loose rows hide nothing."""
    G, g, h = rng.standard_normal((2, t, 60)), rng.standard_normal((2, 60)), np.zeros((2, t + 1))
    G = np.concatenate([G, -2.0 * G[:, 1:2]], axis=1)
    h[:, 1], h[0, t], h[1, t] = 1.0, -1.0, -4.0  # x cannot be above 1 and below 1/2 along row 1
    for loose in (0.0, -1e9, -np.inf):
        h[0, 0] = loose
        sol = solve_dual(device.array(G), device.array(g), h=device.array(h))
        status = device.numpy(sol.status).astype(int)
        assert status[0] == Status.INFEASIBLE | Status.STALLED | Status.UNRESOLVED
        assert status[1] == Status.OPTIMAL
        x = device.numpy(combine(device.array(G), device.array(g), sol))
        assert_close(x[1], project(G[1], g[1], h=h[1]), atol=1e-12)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # where a device of NumPy's stands in
@pytest.mark.parametrize("bad", [[np.nan, np.nan], [np.inf, -np.inf], [1.0, np.nan]], ids=str)
def test_certificates_where_a_row_of_k_is_not_finite(device, bad):
    K, b = np.eye(3), np.array([-1.0, 0.0, 2.0])
    K[1, 1], b[1] = bad
    sol = solve_gram(device.array(K), device.array(b))
    assert int(device.numpy(sol.status)) == int(Status.ROW_DROPPED)
    assert device.numpy(sol.multipliers).tolist() == [1.0, 0.0, 0.0]
    assert float(device.numpy(sol.kkt_residual())) == 0.0
    if device.title != UNSEEN:
        assert float(sol.error_bound()) < 1e-12


def test_the_captured_step_of_the_documentation():
    torch.manual_seed(0)
    names = run(ROOT / "docs" / "gpu.md")
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
