"""The public functions on a device: no look at a value, and the answers of the CPU.

Where there is no GPU, the CPU is taken for one.
"""

from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np
import problems
import pytest
from devices import DEVICE, make_device
from pages import run

from conftest import UNSEEN
from gemproj import FISTA, PGD, Exact, Status, combine, gram, project, solve_dual, solve_gram

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


OPTIONS = {
    "exact": {},
    "penalty": {"penalty": 0.1},
    "margin": {"margin": 0.05},
    "equality": {"equality": True, "h": torch.tensor(0.1)},
    "pgd": {"method": PGD(steps=3)},
    "fista": {"method": FISTA(steps=30)},
}
CASES = [*product(OPTIONS, [(6, 300), (2, 1, 9, 30)])]
CASES += [*product(["exact", "penalty"], [(1, 9), (2, 2100), (12, 40), (3, 2, 70)])]
CASES += [("exact", (300, 8, 20))]  # more than one slab of active sets


@pytest.mark.parametrize(("name", "shape"), CASES)
def test_same_answer_without_waiting(name, shape):
    options = to(DEVICE, OPTIONS[name])
    G, g = draw(*shape)
    expected = on_cpu(project, G, g, **options)
    certificate = on_cpu(lambda *args, **given: solve_dual(*args, **given).kkt_residual(), G, g, **options)
    # Above eight rows the portable search of active sets runs on the CPU, after one copy, and says so.
    waits = "method" not in options and shape[-2] > (5 if "penalty" in options else 8)
    start = torch.rand(shape[:-1], dtype=torch.float64, device=DEVICE)
    with make_device():
        with copies(1) if waits else no_waiting():
            x = project(G, g, warm_start=start if waits else None, **options)
        with nullcontext() if waits else no_waiting():
            sol = solve_dual(G, g, **options)
            residual = sol.kkt_residual(), sol.duality_gap(), sol.cosine()
        assert_close(residual[0], certificate, atol=1e-14)
    assert_close(x, expected, atol=1e-13)


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
    "refine": lambda G, g, w: project(G, g, method=Exact(refine=2)),
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


@pytest.mark.parametrize("options", [{}, {"penalty": 0.1, "margin": 0.05}], ids=str)
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
    K, b = torch.tensor([[2.0, 1], [1, 2]]), torch.tensor([[torch.nan, -1.0], [-1, -1]])
    with make_device():
        sol = solve_gram(K.to(DEVICE), b.to(DEVICE))
    assert_close(sol.multipliers.cpu(), [[0.0, 0], [1 / 3, 1 / 3]], atol=1e-15)


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


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("t", [3, 11])
def test_rows_that_are_not_finite_are_left_out_unseen(device, bad, t, rng):
    if t > 8 and device.title == UNSEEN:
        pytest.skip("more than 8 rows are fetched")
    G, g = rng.standard_normal((2, t, 80)) - 0.3, rng.standard_normal((2, 80)) + 0.3
    spoilt = G.copy()
    spoilt[1, 0, 7] = bad
    rows, vector = device.array(spoilt), device.array(g)
    raw = PGD(steps=3, normalize=False)
    for options in ({}, {"method": raw}, {"method": "fista"}, {"margin": 0.1}, {"penalty": 0.1}):
        x, sol = device.numpy(project(rows, vector, **options)), solve_dual(rows, vector, **options)
        assert_close(x[0], project(G[0], g[0], **options), atol=1e-12)
        assert_close(x[1], project(G[1, 1:], g[1], **options), atol=1e-12)
        dropped = (device.numpy(sol.status).astype(int) & Status.ROW_DROPPED) > 0
        assert dropped.tolist() == [False, True]
        for value in (sol.kkt_residual(), sol.duality_gap(), sol.cosine()):
            assert np.all(np.isfinite(device.numpy(value)))
    assert np.all(np.isnan(device.numpy(project(rows, device.array(g * np.nan)))))


@pytest.mark.parametrize("t", [2, 4, 12])
def test_an_infeasible_right_hand_side_is_a_status(device, t, rng):
    """Other problems of the batch are as they were, a penalty has a solution, and loose rows hide nothing."""
    if t > 8 and device.title == UNSEEN:
        pytest.skip("more than 8 rows are fetched")
    G, g, h = rng.standard_normal((2, t, 60)), rng.standard_normal((2, 60)), np.zeros((2, t + 1))
    G = np.concatenate([G, -2.0 * G[:, 1:2]], axis=1)
    h[:, 1], h[0, t], h[1, t] = 1.0, -1.0, -4.0  # x cannot be above 1 and below 1/2 along row 1

    def solved(**options):
        arrays = device.array(G), device.array(g)
        sol = solve_dual(*arrays, h=device.array(h), **options)
        return device.numpy(sol.status).astype(int), device.numpy(combine(*arrays, sol.multipliers))

    status, x = solved()
    assert status[0] & Status.INFEASIBLE
    assert status[1] == Status.OPTIMAL
    assert_close(x[1], project(G[1], g[1], h=h[1]), atol=1e-12)
    status, x = solved(penalty=2.0)
    assert not np.any(status & Status.INFEASIBLE)
    assert_close(x, project(G, g, h=h, penalty=2.0), atol=1e-12)
    h[0, 0] = -1e9
    assert solved()[0][0] & Status.STALLED


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
