"""The public functions on a device: no look at a value, and the answers of the CPU.

Where there is no GPU, the CPU is taken for one.
"""

import re
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest
from devices import DEVICE, make_device
from problems import assert_close

from gemproj import FISTA, PGD, Exact, Status, combine, gram, project, solve_dual, solve_gram

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning"),
]
tree_map = pytest.importorskip("torch.utils._pytree").tree_map
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


@pytest.fixture
def device(monkeypatch):
    """Return a context in which the CPU is a device."""

    @contextmanager
    def context():
        with monkeypatch.context() as patch, make_device():
            patch.setattr("gemproj.backends.wanted", "portable")
            yield

    return context


def on_cpu(function, *arrays, **options):
    """Return what a function of the package returns for the same tensors on the CPU."""
    arrays, options = to("cpu", (arrays, options))
    return to(DEVICE, function(*arrays, **options))


def to(device, tree):
    """Bring all tensors to a device."""
    return tree_map(lambda a: a.to(device) if isinstance(a, torch.Tensor) else a, tree)


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
def test_same_answer_without_waiting(device, name, shape):
    options = to(DEVICE, OPTIONS[name])
    G, g = draw(*shape)
    expected = on_cpu(project, G, g, **options)
    certificate = on_cpu(lambda *args, **given: solve_dual(*args, **given).kkt_residual(), G, g, **options)
    # Above eight rows the portable search of active sets runs on the CPU, and says so.
    waits = "method" not in options and shape[-2] > (5 if "penalty" in options else 8)
    with device():
        with nullcontext() if waits else no_waiting():
            x, sol = project(G, g, **options), solve_dual(G, g, **options)
            residual = sol.kkt_residual(), sol.duality_gap(), sol.cosine()
        assert_close(residual[0], certificate, atol=1e-14)
    assert_close(x, expected, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("t", range(1, 9))
def test_few_operations(device, t, dtype):
    G, g = draw(t, 300, dtype=dtype)
    with device(), no_waiting() as mode:
        project(G, g)
    assert mode.operations <= 60


@pytest.mark.parametrize("options", [{}, {"equality": True}, {"penalty": 0.1}], ids=str)
@pytest.mark.parametrize("shape", [(9, 30), (4, 9, 30)])
def test_one_copy_to_the_cpu_above_eight_rows(device, shape, options):
    G, g = draw(*shape)
    start = torch.rand(*shape[:-1], dtype=torch.float64, device=DEVICE)
    expected = on_cpu(project, G, g, **options)
    with device(), copies(1):
        x = project(G, g, warm_start=start, **options)
    assert_close(x, expected, atol=1e-13)


HARD = ["nearly parallel, cosine .999", "row norms 1e-6 to 1e6", "all times 1e-30", "all times 1e30"]
HARD += ["zero rows", "duplicates", "opposite pairs", "t = 2d", "tiny integers"]


@pytest.mark.parametrize("name", HARD)
def test_hard_families(device, name):
    """Repeated, opposite and too many rows leave sets without a Cholesky factor, or with one of rounding."""
    families = pytest.importorskip("asv_benchmarks.reports.families").FAMILIES
    for t, seed in product(range(1, 9), range(4)):
        drawn = families[name].draw(np.random.default_rng([t, seed]), t)
        G, g = (torch.from_numpy(a).to(DEVICE) for a in drawn)
        expected = on_cpu(project, G, g)
        with device():
            x, sol = project(G, g), solve_dual(G, g)
            residual = float(sol.kkt_residual())
        assert residual < 1e-13
        assert (sol.multipliers >= 0).all()
        assert float((x - expected).norm()) <= 1e-12 * float(g.norm())


def test_no_multiplier_is_negative(device):
    rng = np.random.default_rng(0)
    G, g = (
        torch.from_numpy(rng.integers(-2, 3, s).astype(float)).to(DEVICE) for s in [(999, 5, 3), (999, 3)]
    )
    with device():
        assert (solve_dual(G, g).multipliers >= 0).all()


def test_what_stands_where_there_is_no_factor_is_not_used(device, monkeypatch):
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
    with device():
        x = project(torch.cat([G, G]), g)
    assert_close(x, expected, atol=1e-13)


def test_many_gradients_of_one_matrix(device):
    G, _ = draw(8, 20)
    _, gs = draw(300, 1, 20, seed=1)
    expected = on_cpu(project, G, gs)
    with device(), no_waiting():
        x = project(G, gs)
    assert_close(x, expected, atol=1e-13)


def test_without_a_violation_x_is_g(device):
    """Of many sets of active rows that all give g, with rows that just meet their constraint and are repeated."""
    G = torch.eye(8, 9, dtype=torch.float64, device=DEVICE)
    G[5], G[6], G[7] = G[0], G[1] + G[2], 0.0
    g = torch.tensor([0.0, 0.0, 0.0, 1.0, 0.3, -0.7, 2.0, -4.0, 0.1], dtype=torch.float64, device=DEVICE)
    with device():
        assert torch.equal(project(G, g), g)
        assert not solve_dual(G, g).multipliers.any()


def test_status_on_a_device(device):
    """UNRESOLVED where active rows are nearly dependent by K, and not where others are."""
    (u, v), _ = draw(2, 50)
    G = torch.stack([u, -u + 1e-5 * v])
    with device():
        active, apart = (solve_dual(G, sign * v + 0.1 * u) for sign in (-1.0, 1.0))
        found = [int(sol.status) for sol in (active, apart)]
    assert found[0] & Status.UNRESOLVED
    assert found[1] == Status.OPTIMAL


@pytest.mark.parametrize("method", [PGD(steps=200), PGD(steps=200, normalize=False), Exact()], ids=repr)
@pytest.mark.parametrize("t", [3, 12])
def test_warm_starts_may_be_anything(device, t, method):
    G, g = draw(t, 60)
    odd = torch.tensor([torch.nan, -1.0, torch.inf], dtype=torch.float64, device=DEVICE).repeat(t // 3)
    expected = on_cpu(project, G, g, method=method)
    with device():
        x = project(G, g, method=method, warm_start=odd)
    assert_close(x, expected, atol=1e-9)


def test_stages_one_by_one(device):
    G, g = draw(3, 1500, dtype=torch.float32)
    lam = torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64, device=DEVICE)
    expected = on_cpu(gram, G, g), on_cpu(combine, G, g, lam)
    with device(), no_waiting():
        found = gram(G, g), combine(G, g, lam)
        out = g.clone()
        assert combine(G, out, lam, out=out) is out
    for a, b in zip(found[0], expected[0], strict=True):
        assert_close(a, b, rtol=1e-12)
    assert_close(found[1], expected[1], rtol=1e-7)
    assert torch.equal(out, found[1])


def test_blocks_and_narrow_dtypes(device):
    G, g = draw(4, 60, dtype=torch.bfloat16)
    blocks = [G[:, :20].reshape(4, 4, 5), G[:, 20:].contiguous()], [g[:20].reshape(4, 5), g[20:].clone()]
    expected = on_cpu(project, G, g)
    with device(), no_waiting():
        x = project(*blocks)
    assert [a.dtype for a in x] == [torch.bfloat16] * 2
    assert_close(torch.cat([a.reshape(-1) for a in x]).double(), expected.double(), rtol=0.008)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("t", [3, 11])
def test_rows_that_are_not_finite_are_left_out_unseen(device, bad, t):
    G, g = draw(t, 80)
    raw = PGD(steps=3, normalize=False)
    expected, stepped = on_cpu(project, G[1:], g), on_cpu(project, G[1:], g, method=raw)
    G[0, 7] = bad
    with device():
        x = project(G, g)
        assert int(solve_dual(G, g).status) == Status.ROW_DROPPED
        assert_close(x, expected, atol=1e-13)
        assert_close(project(G, g, method=raw), stepped, atol=1e-13)
        assert project(G, g, margin=0.1).isfinite().all()
        assert int(solve_dual(G, g, h=torch.full_like(G[:, 0], 0.1)).status) == Status.ROW_DROPPED
        assert project(G, torch.full_like(g, float("nan"))).isnan().all()


def test_refinement_on_a_device(device):
    """Rows at an angle of 1e-5: K is known to 1e-16 / 1e-5^2 of x, and G to 1e-16 / 1e-5."""
    judge = pytest.importorskip("asv_benchmarks.reports.judge")
    gained = []
    for seed in range(3):
        (base, tilt), g = draw(2, 50, seed=seed)
        G = torch.stack([base, 1e-5 * tilt - base])
        g = -torch.sign(g @ tilt) * g  # both rows are active
        expected = torch.as_tensor(judge.project_precisely(G.cpu().numpy(), g.cpu().numpy())).to(DEVICE)
        with device(), no_waiting():
            rough, fine = project(G, g), project(G, g, refine=2)
        rough, fine = (float((x - expected).norm() / g.norm()) for x in (rough, fine))
        assert fine < 1e-9
        gained.append(rough > 1e3 * fine)
    assert any(gained)


@pytest.mark.parametrize(
    "options",
    [
        {"h": torch.tensor([0.3, -0.2, 0.1, 0.0])},
        {"equality": torch.tensor([True, False, False, True]), "h": torch.tensor([0.3, 0.0, 0.1, -0.2])},
        {"margin": 0.1},
        {"penalty": 0.05},
        {"penalty": torch.tensor([0.02, 5.0, 0.3, 0.1]), "h": torch.tensor([0.3, -0.2, 0.1, 0.0])},
        {"margin": torch.tensor([0.1, 0.0, 0.3, 0.2]), "equality": torch.tensor([True, False, False, False])},
    ],
    ids=lambda options: " and ".join(options),
)
def test_refinement_keeps_what_the_options_ask_for(device, options):
    """On rows that need none it changes nothing, within bounds and with a right-hand side too."""
    G, g = draw(4, 60)
    expected = on_cpu(project, G, g, **options)
    assert (expected - on_cpu(project, G, g)).norm() > 1e-3
    with device():
        for times in (1, 3):
            assert_close(project(G, g, refine=times, **to(DEVICE, options)), expected, atol=1e-13)


@pytest.mark.parametrize("t", [2, 4, 12])
def test_an_infeasible_right_hand_side_is_a_status(device, t):
    """Where nothing is looked at, nothing can be raised; other problems of the batch are as they were."""
    G, g = draw(2, t, 60)
    h = torch.zeros(2, t + 1, dtype=torch.float64, device=DEVICE)
    G = torch.cat([G, -2.0 * G[:, 1:2]], dim=1)
    h[:, 1], h[0, t] = 1.0, -1.0  # x cannot be above 1 and below 1/2 along row 1
    h[1, t] = -4.0
    expected, penalised = on_cpu(project, G[1], g[1], h=h[1]), on_cpu(project, G, g, h=h, penalty=2.0)
    with device():
        found, soft = ([int(s) for s in solve_dual(G, g, h=h, penalty=c).status] for c in (None, 2.0))
        x, bent = project(G, g, h=h), project(G, g, h=h, penalty=2.0)
    assert found[0] & Status.INFEASIBLE
    assert found[1] == Status.OPTIMAL
    assert not any(status & Status.INFEASIBLE for status in soft)
    assert_close(x[1], expected, atol=1e-12)
    assert_close(bent, penalised, atol=1e-12)


def test_columns_a_metric_and_outputs_with_gaps(device):
    G, g = draw(3, 40)
    weight = torch.linspace(0.1, 1.1, 40, dtype=torch.float64, device=DEVICE)
    strided = G.T.contiguous().T
    expected = on_cpu(project, G, g), on_cpu(lambda G, g, w: project(G, g, metric=w), G, g, weight)
    gaps = torch.zeros(40, 2, dtype=torch.float64, device=DEVICE)
    with device(), no_waiting():
        found = project(strided, g), project(G, g, metric=weight)
        project(G, g, out=gaps[:, 0])
    for x, right in zip((*found, gaps[:, 0]), (*expected, expected[0]), strict=True):
        assert_close(x, right, atol=1e-13)
    assert not gaps[:, 1].any()


def test_the_captured_step_of_the_documentation(monkeypatch):
    """On stand-ins where there is no GPU: then the capture runs the step, and a replay does nothing."""
    code = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "gpu.md").read_text(), re.S)[1]
    if DEVICE == "cpu":
        code = code.replace('"cuda"', '"cpu"').replace("capturable=True", "capturable=False")
        stream = SimpleNamespace(wait_stream=lambda other: None)
        for name in ("Stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, lambda: stream)
        for name in ("stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, nullcontext)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: SimpleNamespace(replay=lambda: None))
    torch.manual_seed(0)
    names = {}
    exec(compile(code, "gpu.md", "exec"), names)
    rows = [torch.cat([v.flatten() for v in names["gradient"](*m)]) for m in names["memories"]]
    names["step"]()
    step = torch.cat([p.grad.flatten() for p in names["parameters"]])
    assert all(float(row @ step) > -1e-6 for row in rows)


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(("t", "d"), [(3, 100_000), (12, 5000)])
def test_arrays_of_cupy_in_its_default_stream_and_another(device, t, d, own):
    """What a stream has yet to write is not read, and x is there for what follows in it."""
    pytest.importorskip("cupy")
    order = pytest.importorskip("asv_benchmarks.reports.gpu.order")
    with device():
        _, error, bound = order.in_cupy_stream(own, t, d)
    assert error <= bound


@pytest.mark.parametrize("bad", [[torch.nan, torch.nan], [torch.inf, -torch.inf], [1.0, torch.nan]], ids=str)
def test_certificates_where_a_row_of_k_is_not_finite(bad):
    K, b = torch.eye(3, dtype=torch.float64), torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
    K[1, 1], b[1] = bad
    with make_device():
        sol = solve_gram(K.to(DEVICE), b.to(DEVICE))
        assert int(sol.status) == int(Status.ROW_DROPPED)
        assert sol.multipliers.tolist() == [1.0, 0.0, 0.0]
        assert float(sol.error_bound()) < 1e-12
