"""The kernels against the portable form: compiled where there is a GPU, interpreted on the CPU elsewhere."""

import os
import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
triton = pytest.importorskip("triton")
if not torch.cuda.is_available() and not isinstance(
    triton.language.sum, triton.runtime.interpreter.InterpretedFunction
):
    pytest.skip("Triton was imported before it could be told to interpret", allow_module_level=True)

from devices import interpret_faster  # noqa: E402
from torch.utils._pytree import tree_map  # noqa: E402

import gemproj  # noqa: E402
from gemproj import FISTA, PGD, Exact  # noqa: E402
from gemproj._problem import check_problem  # noqa: E402
from gemproj.backends.triton import available  # noqa: E402
from gemproj.backends.triton import combine as stage3  # noqa: E402
from gemproj.backends.triton import gram as stage1  # noqa: E402
from gemproj.backends.triton._layout import lay_out, lay_out_batch  # noqa: E402
from gemproj.backends.triton.solve import solve  # noqa: E402
from gemproj.backends.triton.solve import supports as solves  # noqa: E402

interpret_faster()
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter computes with NumPy, which warns of what is not finite.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
SIZES = [(1, 1), (1, 1000), (2, 7), (3, 5000), (5, 1000), (8, 2100), (9, 7), (9, 1000), (17, 2100)]
SIZES += [(33, 1000), (70, 200)]
NARROW = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
METHODS = [
    Exact(),
    PGD(steps=4),
    PGD(steps=4, step_size="power", c=0.7),
    PGD(steps=2, normalize=False),
    FISTA(steps=20),
    FISTA(steps=20, restart=False, normalize=False),
]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(20171208)


def randn(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=torch.float64).to(dtype).to(DEVICE)


def float64(values):
    return torch.tensor(values, dtype=torch.float64, device=DEVICE)


def as_blocks(a):
    return [a] if isinstance(a, torch.Tensor) else a


def layout(G, g):
    batch = isinstance(g, torch.Tensor) and g.ndim > 1
    return lay_out_batch(G, g) if batch else lay_out(as_blocks(G), as_blocks(g))


def gram(G, g):
    at = layout(G, g)
    assert stage1.supports(at)
    return stage1.gram(at).squeeze(0)


def split(total):
    return total[..., :-1, :-1], total[..., :-1, -1], total[..., -1, -1]


def combine(G, g, lam, out=None):
    """Write into `out`, or into new memory, none of which may stay as it is."""
    out = tree_map(lambda v: torch.full_like(v, float("nan")), g) if out is None else out
    at = layout(G, g)
    assert stage3.supports(at, as_blocks(out))
    stage3.combine(at, lam.view(at.problems, at.t), as_blocks(out))
    return out


def solved(K, b, method=METHODS[0], **options):
    """Solve with the kernels what lies on the CPU."""
    options = {k: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    return solve(K.to(DEVICE), b.to(DEVICE), method=method, **options)


def close(a, b, scale=1.0):
    torch.testing.assert_close(a, b, rtol=0.0, atol=1e-13 * float(scale))


def check_gram(G, g, found=None):
    """Compare with the portable form what the kernels find, or what they found of more rows."""
    found = gram(G, g) if found is None else found
    # In float64 the portable form sums in float64 too.
    expected = gemproj.gram(*tree_map(torch.Tensor.double, (G, g)))
    scale = float(expected.K.abs().max() + expected.gg.max())
    for a, b in zip(split(found), expected, strict=True):
        close(a, b, scale)
    assert torch.equal(found, found.mT)


def cuts_off(dtype):
    """Whether what does not fit into a dtype is cut off, as the interpreter does, not rounded."""
    return dtype == torch.bfloat16 and DEVICE.type == "cpu"


def check(G, g):
    """Compare both stages with their formulas; x may be in memory of its own, and in the place of g."""
    check_gram(G, g)
    at, own = layout(G, g), tree_map(torch.clone, g)
    lam = randn(at.problems, at.t, dtype=torch.float64).squeeze(0)
    out = combine(G, g, lam)
    combine(G, own, lam, own)
    for x, same, rows, v in zip(*map(as_blocks, (out, own, G, g)), strict=True):
        exact = v.double() + (lam[..., None, :] @ rows.double().reshape(*lam.shape, -1)).view(v.shape)
        unit = torch.finfo(x.dtype).eps * (1.0 if cuts_off(x.dtype) else 0.51)
        assert ((x.double() - exact).abs() <= unit * exact.abs() + 1e-12).all()
        assert torch.equal(x, same)


# Stages 1 and 3


@pytest.mark.parametrize(("t", "d"), SIZES)
def test_one_array(t, d):
    check(randn(t, d), randn(d))


@pytest.mark.parametrize("rows", NARROW)
@pytest.mark.parametrize("vector", NARROW)
def test_dtypes(rows, vector):
    check(randn(3, 100, dtype=rows), randn(100, dtype=vector))


@pytest.mark.parametrize("t", [2, 9])
def test_rows_with_gaps(t):
    check(randn(2 * t, 1500)[::2, 3:1203], randn(1200))


@pytest.mark.parametrize("t", [3, 17])
def test_blocks(t):
    G = [randn(t, 40, 50, dtype=torch.bfloat16), randn(t, 1200), randn(t, 0), randn(t, dtype=torch.float64)]
    g = [randn(40, 50), randn(1200, dtype=torch.float64), randn(0), randn(), randn(48, dtype=torch.float16)]
    G.append(randn(2 * t, 48)[t:])
    if not stage1.supports(lay_out(G, g)):
        pytest.skip("this Triton does not compile products of many rows of 16 bits")
    check(G, g)


def test_blocks_of_one_dtype():
    shapes = [(64, 16), (640,), (32, 32)]
    check([randn(2, *s) for s in shapes], [randn(*s) for s in shapes])


@pytest.mark.parametrize(("t", "d"), [(4, 5), (2, 64), (8, 33), (9, 40), (3, 2100)])
def test_batch(t, d):
    G, g = randn(3, t, d), randn(3, d)
    check(G, g)
    check(G[::2, :, 1:], g[::2, 1:])


# Stage 1


@pytest.mark.parametrize("t", [2, 9])
def test_an_odd_block_takes_nothing_from_the_others(t):
    """Loads are wide where a block begins, and what is cut off it."""
    sizes = (3, 1001, 640, 5, 1024)
    G, g = [randn(t, n) for n in sizes], [randn(n) for n in sizes]
    check(G, g)
    cut = lay_out(G, g).cut(64, 7)
    assert cut.parts == 7
    lines = cut.table.get()[cut.parts + 1 :].reshape(-1, 5).cpu()
    assert len(lines) > len(G)
    assert not (lines[:, :2] % 16).any()
    assert sorted(n % 64 for n in lines[:, 3].tolist() if n % 64) == [3, 5, 1001 % 64]
    assert int(lines[:, 3].sum()) == sum(sizes)


@gpu  # the interpreter runs one program after the other
@pytest.mark.parametrize("t", [1, 8, 17])
def test_gram_repeats_to_the_last_bit(t):
    G, g = randn(t, 2100), randn(2100)  # in two parts
    first = gram(G, g)
    for _ in range(2):
        assert torch.equal(first, gram(G, g))


@pytest.mark.parametrize(("t", "bad"), [(3, 1), (8, 7), (17, 16), (70, 64)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_gram_keeps_what_is_not_finite_in_its_row(t, bad, value):
    G, g = randn(t, 300), randn(300)
    G[bad, 7] = value
    total = gram(G, g)
    assert not torch.isfinite(total[bad, bad])
    assert not torch.isfinite(total[bad, -1])
    keep = torch.arange(t + 1) != bad
    check_gram(G[keep[:-1]], g, total[keep][:, keep])


@pytest.mark.parametrize("parts", [1, 2, 33])
def test_partial_sums_are_added(parts, monkeypatch):
    monkeypatch.setattr(stage1, "UNIT", 4)
    monkeypatch.setattr(stage1, "_LEAST", 4)
    monkeypatch.setattr(stage1, "processors", lambda device: parts)
    G, g = randn(1, 32 * parts), randn(32 * parts)
    check_gram(G, g)
    cut = lay_out([G], [g]).cut(4, 8 * parts)
    assert (cut.share, cut.parts) == (4, 8 * parts)


def test_a_new_x_needs_no_new_table():
    """Blocks of x are views of one array, of which the table has the distances."""
    G = [randn(3, n) for n in (64, 5, 100)]
    g = [a[0].clone() for a in G]
    problem, at = check_problem(G, g), lay_out(G, g)
    assert lay_out(G, list(g)) is at
    first, second = problem.empty_views(), problem.empty_views()
    assert first[0].data_ptr() != second[0].data_ptr()
    assert all(a.data_ptr() % 256 == first[0].data_ptr() % 256 for a in first)
    lam = float64([0.5, 0.0, 2.0])
    for x in (first, second, g):
        expected = [v.double() + lam @ rows.double() for v, rows in zip(g, G, strict=True)]
        combine(G, g, lam, x)
        for a, e in zip(x, expected, strict=True):
            close(a.double(), e, 1e7)
    tables = [len(cut._outputs) for cut in at._cuts.values()]
    assert tables == [2]  # for x that is new and x that is g


def test_a_triton_that_cannot_launch_is_told_once(monkeypatch):
    trial = import_module("gemproj.backends.triton.trial")

    def failing(device):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(trial, "launch", failing)
    works = import_module("gemproj.backends.triton")._works
    works.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="portable operations are: Failed to find C compiler"):
            assert not available(torch.device("cuda", 0))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert not available(torch.device("cuda", 0))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
        with pytest.warns(RuntimeWarning, match=r"the kernels need compute capability 8\.0"):
            assert not available(torch.device("cuda", 1))
    finally:
        works.cache_clear()


def test_arrays_of_cupy_are_worked_on_in_its_stream(monkeypatch):
    """CuPy has current streams of its own; 0 and 1 stand for the default one."""
    stages = import_module("gemproj.backends.triton.stages")
    device = SimpleNamespace(id=0)
    current, entered = SimpleNamespace(ptr=0), []
    cupy = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda device: current))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda ptr, device: ("external", ptr))
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "default")
    monkeypatch.setattr(torch.cuda, "stream", entered.append)
    for ptr in (0, 1, 4096):
        current.ptr = ptr
        stages._stream_of(SimpleNamespace(device=device))
    assert entered == ["default", "default", ("external", 4096)]
    with stages._stream_of(torch.ones(2)):
        assert len(entered) == 3


def test_what_the_kernels_do_not_read(monkeypatch):
    assert lay_out([randn(6, 2).mT], [randn(6)]) is None
    assert lay_out([randn(2, 3, 4).mT], [randn(4, 3)]) is None
    assert lay_out([randn(2, 6)], [randn(12)[::2]]) is None
    assert lay_out([torch.ones(2, 6, dtype=torch.int64)], [randn(6)]) is None
    assert lay_out([randn(2, 6), randn(6, 2).mT], [randn(6), randn(6)]) is None
    assert lay_out_batch(randn(3, 4, 2).mT, randn(3, 4)) is None
    assert lay_out_batch(randn(3, 2, 4), randn(3, 4)) is not None
    assert not solves("exact", 3)
    assert not solves(Exact(), 169)
    assert not available(torch.device("cpu"))
    with monkeypatch.context() as patch:  # Triton 3.6
        patch.setattr(stage1, "_DOTS_HALVES", False)
        assert stage1.supports(lay_out([randn(9, 6)], [randn(6)]))
        assert stage1.supports(lay_out([randn(8, 6, dtype=torch.bfloat16)], [randn(6)]))
        assert not stage1.supports(lay_out([randn(9, 6)], [randn(6, dtype=torch.bfloat16)]))
        assert not stage1.supports(lay_out_batch(randn(2, 9, 6, dtype=torch.float16), randn(2, 6)))


# Stage 2


def t_space(t, batch=2):
    """Gram matrices with repeated, opposite and zero rows of all sizes."""
    G = torch.randn(batch, t, 2 * t + 3, dtype=torch.float64) + 0.3
    G *= 10.0 ** torch.randint(-4, 4, (batch, t, 1))
    if t > 3:
        G[0, 1], G[-1, 2], G[-1, 3] = G[0, 0], -G[-1, 0], 0.0
    K, b, _ = gemproj.gram(G, -G.mean(1) + torch.randn(batch, 2 * t + 3, dtype=torch.float64))
    return G, K, b


def same_x(lam, expected, G):
    """Compare what multipliers mean: repeated rows share theirs in any way."""
    moved, size = (((a[:, None] @ G)[:, 0]).abs().amax(-1) for a in (expected - lam, expected))
    assert (moved <= 1e-10 * (1.0 + size)).all()


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("t", [1, 3, 8, 17])
@pytest.mark.parametrize("bounded", [False, True])
def test_solve(method, t, bounded):
    G, K, b = t_space(t)
    norm = K.diagonal(dim1=-2, dim2=-1).sqrt()
    per_norm = 1.0 / norm.where(norm > 0, torch.ones_like(norm))
    upper = 3.0 * torch.rand_like(b) * per_norm if bounded else None
    start = torch.rand_like(b) * (torch.rand_like(b) < 0.5) * per_norm
    start = start if upper is None else torch.minimum(start, upper)
    for first in (None, start):
        expected = method.solve(K, b, None, upper, first)
        found = solved(K, b, method, upper=upper, start=first)
        lam = found.multipliers.cpu()
        assert lam.shape == b.shape
        assert (lam >= 0).all() or isinstance(method, PGD)
        assert upper is None or (lam <= upper * (1 + 1e-15)).all()
        same_x(lam, expected.multipliers, G)
        if isinstance(method, Exact):
            same = torch.as_tensor(found.status).cpu() | 8, torch.as_tensor(expected.status) | 8
            assert torch.equal(*same)
        else:
            assert found[1:3] == expected[1:3]


@pytest.mark.parametrize(("t", "bounded"), [(4, True), (7, False)])
def test_many_problems_are_searched_one_by_one(t, bounded, monkeypatch):
    """Enumeration takes a whole processor for each."""
    stage2 = import_module("gemproj.backends.triton.solve")
    monkeypatch.setattr(stage2, "processors", lambda device: 4)
    G, K, b = t_space(t, batch=5)
    upper = 0.5 / K.diagonal(dim1=-2, dim2=-1).clamp(min=1e-9).sqrt() if bounded else None
    expected = Exact().solve(K, b, None, upper).multipliers
    for count in (4, 5):
        found = solved(K[:count], b[:count], upper=upper[:count] if bounded else None)
        assert isinstance(found.iterations, torch.Tensor) == (count > 4)
        same_x(found.multipliers.cpu(), expected[:count], G[:count])


@pytest.mark.parametrize("method", [Exact(), PGD(steps=4, step_size="power"), FISTA(steps=5)], ids=repr)
def test_solve_more_rows_than_registers_hold(method):
    _, K, b = t_space(70, batch=1)
    expected, norm = method.solve(K, b).multipliers[0], K[0].diagonal().sqrt()
    found = solved(K[0], b[0], method).multipliers.cpu()
    close(found * norm, expected * norm, 1e4)


@pytest.mark.parametrize("t", [4, 9])
def test_resolution(t):
    G = torch.randn(t, 40, dtype=torch.float64)
    G[1] = G[0] + 1e-5 * G[1]
    for g, lost in ((-G[0] - G[1], True), (G.sum(0), False)):
        K, b, _ = gemproj.gram(G, g)
        found, expected = solved(K, b), Exact().solve(K, b)
        assert int(found.status) == int(expected.status) == 8 * lost
        alone = solved(K, b, only_multipliers=True)
        assert torch.equal(alone.multipliers, found.multipliers)
        assert int(alone.status) == 0


@pytest.mark.parametrize("t", [1, 3, 9])
def test_no_conflict_gives_exact_zeros(t):
    K, b = torch.eye(t).double(), torch.ones(t).double()
    for found in (solved(K, b), solved(0 * K, 0 * b), solved(K, b, upper=0.0)):
        assert not found.multipliers.any()
        assert int(found.status) == 0


@pytest.mark.parametrize("method", [Exact(), PGD(steps=9)], ids=repr)
def test_one_bound_for_all(method):
    K, b = torch.eye(3).double(), torch.tensor([-5.0, -0.25, 1.0]).double()
    assert solved(K, b, method, upper=0.5).multipliers.tolist() == pytest.approx([0.5, 0.25, 0.0])


def test_step_size_does_not_know_the_padding():
    # A star: of the bounds of its largest eigenvalue the Frobenius norm is the smallest.
    K, b = torch.eye(5, dtype=torch.float64), -torch.ones(5, dtype=torch.float64)
    K[0, 1:] = K[1:, 0] = 0.49
    found = solved(K, b, PGD(steps=1))
    close(found.multipliers.cpu(), PGD(steps=1).solve(K, b).multipliers)


@pytest.mark.parametrize("t", [3, 9])
def test_nan_ends(t):
    K = torch.full((t, t), float("nan"), dtype=torch.float64)
    for upper in (None, 1.0):
        solved(K, K[0].contiguous(), upper=upper)


def natural_residual(K, b, lam, lower, upper):
    """The residual of the problem with rows of norm one and max |b| = 1, per 1 + sum |lam|."""
    norm = K.diagonal(dim1=-2, dim2=-1).sqrt()
    size = (b / norm).abs().amax(-1, keepdim=True)
    s, lam, upper = ((K @ lam[..., None])[..., 0] + b) / norm / size, lam * norm / size, upper * norm / size
    step = (lam - (lam - s).maximum(lower).minimum(upper)).abs()
    return float((step.amax(-1) / (1.0 + lam.abs().sum(-1))).max())


@pytest.mark.parametrize(
    ("method", "t", "d"),
    [(Exact(), *size) for size in [(1, 2), (4, 2), (5, 9), (9, 3), (20, 60)]]
    + [(FISTA(steps=60), 5, 300), (PGD(steps=60), 3, 300)],
    ids=repr,
)
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("bounded", [False, True])
def test_bounds_and_right_hand_sides(method, t, d, signed, bounded):
    """G x >= h, or = h where lower is -inf: with t > d dependent rows must be exchanged for free ones."""
    G, g, x = (torch.randn(3, *s, dtype=torch.float64) for s in ((t, d), (1, d), (1, d)))
    equal = torch.rand(3, t) < 0.3 if signed else torch.zeros(3, t, dtype=torch.bool)
    exact = isinstance(method, Exact)
    if exact:
        G[0, -1] = -2.0 * G[0, 0]
    slack = torch.rand(3, t, dtype=torch.float64) * (torch.rand(3, t) < 0.5) * ~equal
    K, b = G @ G.mT, (G @ (3.0 * g - x).mT)[..., 0] + slack  # h = G x - slack can be met
    lower = torch.zeros_like(b).masked_fill(equal, -torch.inf)
    upper = 2.0 * torch.rand_like(b) if bounded else torch.full_like(b, torch.inf)
    found = solved(K, b, method, lower=lower if signed else None, upper=upper if bounded else None)
    assert natural_residual(K, b, found.multipliers.cpu(), lower, upper) < (1e-13 if exact else 1e-8)
    assert not exact or not (found.status & 2).any()


def test_a_row_that_enters_and_leaves_is_barred():
    # Rows in the plane at small angles: many pivots, dependent rows, blocked moves.
    angle = torch.linspace(0.0, 1.0, 12, dtype=torch.float64)
    G = torch.stack([angle.cos(), angle.sin()], dim=-1)
    G = torch.cat([G, -G[::3]])
    for g in torch.randn(6, 2, dtype=torch.float64):
        K, b, _ = gemproj.gram(G, g)
        found, expected = solved(K, b), Exact().solve(K, b)
        close(found.multipliers.cpu() @ G, expected.multipliers @ G, 100.0)
        assert int(found.status) & 2 == 0


# Stage 3


def test_combine_does_not_read_rows_without_multiplier():
    G, g = randn(3, 600), randn(600)
    G[1] = float("nan")
    out = combine(G, g, float64([1.0, 0.0, 2.0]))
    torch.testing.assert_close(out, g + G[0] + 2.0 * G[2])


@pytest.mark.parametrize(("dtype", "unit"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
def test_combine_rounds_once(dtype, unit):
    if cuts_off(dtype):
        pytest.skip("the interpreter cuts off what does not fit into bfloat16")
    # Just above half a unit above one: in float32 that is a tie, which goes down to even.
    G, g = float64([[1.0, -1.0]]), float64([1.0, -1.0]).to(dtype)
    combine(G, g, float64([unit * (1 + 2.0**-30)]), g)
    assert g.tolist() == [1.0 + 2 * unit, -1.0 - 2 * unit]


# What the interpreter does not see


@pytest.fixture
def report():
    for package in ("rich", "typer"):
        pytest.importorskip(package)
    return import_module("asv_benchmarks.reports.kernels")


@pytest.mark.usefixtures("report")
def test_all_kernels_compile(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    out = tmp_path / "kernels.md"
    call = [sys.executable, "-W", "error", "-m", "asv_benchmarks.reports.kernels", "--arch", "90"]
    found = subprocess.run(
        [*call, "--no-every", "--out", out], env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stderr
    lines = [line.split("|")[1:-1] for line in out.read_text().splitlines() if line.startswith("| ")]
    kernels = [[cell.strip() for cell in line] for line in lines[1:] if ":-" not in line[0]]
    names = {"few_rows", "many_rows", "add_up", "combine", "enumerate_sets", "descend", "search_active_set"}
    assert {kernel[0] for kernel in kernels} == names
    # What a program may have on any GPU since sm_80.
    assert all(int(kernel[4].replace(",", "")) <= 99 << 10 for kernel in kernels)


def test_the_page_of_the_kernels_is_about_these(report):
    """Nothing that it was made from has changed, and it has all that can be asked for."""
    digest, rows = report.listed()
    # No kernel is compiled again for another number of rows, nor for its divisors.
    assert ["few_rows", "t = 5, float32"] in rows
    assert ["few_rows", "t = 6, float32"] not in rows
    page = (Path(__file__).parents[1] / "docs/results/kernels.md").read_text()
    assert digest in page, "run make kernels"
    tables = page.split("**sm_")[1:]
    assert [table[:2] for table in tables] == ["80", "90"]
    for table in tables:
        lines = [line.split(" | ")[:2] for line in table.splitlines() if line.startswith("| ")]
        assert [[name[2:], about] for name, about in lines[2:]] == rows


# On a GPU only


def project(G, g, out):
    """Project by the kernels alone."""
    K, b, _ = split(gram(G, g))
    combine(G, g, solve(K, b, method=Exact()).multipliers, out)


@gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature:UserWarning")
@pytest.mark.parametrize("t", [2, 8, 32, 100])
def test_nothing_waits_for_the_device(t):
    G, g = randn(t, 100_000), randn(100_000)
    out = torch.empty_like(g)
    project(G, g, out)
    torch.cuda.set_sync_debug_mode("error")
    try:
        project(G, g, out)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@gpu
@pytest.mark.parametrize("t", [2, 8, 32, 100])
@pytest.mark.parametrize("in_blocks", [False, True])
def test_graph_replays_on_new_data(t, in_blocks):
    G, g = randn(t, 100_000), randn(100_000)
    out = torch.empty_like(g)
    parts = [a.split([60_000, 40_000], dim=-1) if in_blocks else a for a in (G, g, out)]
    project(*parts)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        project(*parts)
    for _ in range(2):
        G.copy_(randn(t, 100_000)), g.copy_(randn(100_000))
        graph.replay()
        first = out.clone()
        torch.testing.assert_close(first.cpu(), gemproj.project(G.cpu(), g.cpu()), rtol=1e-5, atol=1e-5)
        for _ in range(100):
            graph.replay()
            assert torch.equal(out, first)
