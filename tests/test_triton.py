"""Triton's kernels against the portable operations, in Triton's interpreter; `make bench-gpu` runs them on a GPU."""

from collections import defaultdict
from contextlib import contextmanager
from itertools import islice, product
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("triton")
import torch
from devices import DEVICE, draw, make_device
from problems import assert_close

from asv_benchmarks.reports.families import FAMILIES
from gemproj import DualSolution, Status, backends, combine, gram, project, solve_dual, solve_gram
from gemproj._dual import measured_for, solve_unread
from gemproj._problem import check_problem
from gemproj.backends import solve_few, triton
from gemproj.backends.triton import backend

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
    with make_device(), patch.object(backends, "available", lambda a: used):
        yield


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr("triton.runtime.interpreter.int", Int, raising=False)


def both(call):
    """Return what a call returns with the kernels, and without."""
    with kernels():
        found = call()
    with kernels(used=False):
        return found, call()


def assert_same(call, atol=1e-11):
    """Assert that a call returns the same with the kernels and without: arrays, solutions, or lists of them."""
    for a, b in zip(*map(listed, both(call)), strict=True):
        assert_close(a, b, atol=atol, rtol=1e-13)


def listed(found):
    if isinstance(found, DualSolution):
        return [found.multipliers, found.status, *found.gram, found.error_bound(), found.kkt_residual()]
    return [part for one in found for part in listed(one)] if isinstance(found, (list, tuple)) else [found]


@pytest.mark.parametrize("t", [1, 2, 3, 5, 8, 11])
def test_any_number_of_rows(t, monkeypatch):
    G, g = draw(t, 700)
    with kernels():
        assert backends.select(check_problem(G, g)).name == "triton"
        assert 1e-15 < float(solve_dual(G, g).error_bound()) < 1e-9
        monkeypatch.setattr(backends, "wanted", "portable")
        assert backends.select(check_problem(G, g)).name == "portable"
    monkeypatch.setattr(backends, "wanted", "")
    assert_same(lambda: [*gram(G, g), project(G, g), solve_dual(G, g)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_dtypes_are_rounded_once(dtype):
    G, g = draw(3, 520, dtype=dtype)
    with kernels():
        x = project(G, g)
    right = project(*(a.double().numpy() for a in (G, g)))
    assert x.dtype == dtype
    units = 1.01 if dtype == torch.bfloat16 else 0.51  # the interpreter cuts bfloat16 off
    assert_close(x.double(), right, atol=0, rtol=units * torch.finfo(dtype).eps)


CALLS = {
    "many parts": lambda G, g: project(G.repeat(1, 20), g.repeat(20)),
    "unaligned": lambda G, g: project(G[:, 3:-2], g[3:-2]),
    "rows by columns": lambda G, g: project(G.T.contiguous().T, g),
    "blocks": lambda G, g: project([G[:, :60].view(4, 6, 10), G[:, 60:]], [g[:60].view(6, 10), g[60:]]),
    "a block of nothing": lambda G, g: project([G, G[:, :0]], [g, g[:0]]),
    "metric": lambda G, g: project(G, g, metric=torch.linspace(0.1, 3.0, 640, dtype=g.dtype)),
    "metric of a batch": lambda G, g: project(
        G, g.expand(3, -1), metric=torch.linspace(1, 4, 1920).view(3, 640)
    ),
    "batch": lambda G, g: project(G.view(4, 4, 160)[:, :3], g.view(4, 160)),
    "many gradients": lambda G, g: project(G, torch.stack([g, -g, 2 * g])),
    "in place": lambda G, g: project(G, y := g.clone(), out=y),
    "margin": lambda G, g: project(G, g, margin=0.3),
    "h": lambda G, g: project(G, g, h=torch.tensor([-1.0, 2.0, 0.0, 0.5])),
    "zero row": lambda G, g: project(G * torch.tensor([[1.0], [0.0], [1.0], [1.0]]), g, margin=0.3),
    "repeated rows": lambda G, g: project(torch.cat([G, G]), g),
    "rows unseen": lambda G, g: combine(
        G * torch.tensor([[1.0], [torch.nan], [1], [1]]), g, torch.tensor([1.0, 0, 2, 0])
    ),
    "multipliers with gaps": lambda G, g: combine(G, g, torch.arange(8.0)[::2]),
    "out with gaps": lambda G, g: project(G, g, out=torch.zeros(640, 2, dtype=g.dtype)[:, 0]),
    "scales that overflow together": lambda G, g: project(
        torch.diag(torch.tensor([1e-155, 1e-155, 1.0], dtype=g.dtype)), -torch.ones(3, dtype=g.dtype)
    ),
    "a gradient that is not finite": lambda G, g: project(
        torch.stack([G, G]), torch.stack([g, g * torch.nan])
    ).nan_to_num(9.0),
    "no columns or members": lambda G, g: [project(*draw(*shape)) for shape in ((3, 0), (0, 3, 5), (0, 5))],
    "what kernels cannot read": lambda G, g: [
        project(G, torch._neg_view(g)), project(torch._neg_view(G), g),
        project(G, g, out=torch._neg_view(torch.zeros_like(g))).resolve_neg(),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls(name):
    assert_same(lambda: CALLS[name](*draw(4, 640)))


def test_sums_of_many_programs(monkeypatch):
    monkeypatch.setattr(backend, "_processors", lambda device: 100)
    monkeypatch.setattr(backend, "_LEAST", 256)
    assert_same(lambda: [*gram(*draw(2, 20_000))], atol=1e-8)


def test_strides_of_the_small_problem():
    """Views of larger arrays."""
    G, g = draw(3, 4, 30)
    G[1, 1] = 0.0
    wide = torch.zeros(3, 7, 9, dtype=G.dtype)
    wide[:, :4, 2:6], wide[:, 6, :4] = G @ G.mT, (G @ g[..., None])[..., 0]
    K, b = wide[:, :4, 2:6], torch.stack([wide[:, 6, :4], wide[:, 6, :4]], dim=-1)[..., 0]
    for given in ((K, b), (K.mT, b), (K[0], b), (K[:1].mT, b[:1]), (K[0, :3, :3], b[0, :3]), (K.float(), b)):
        assert_same(lambda given=given: solve_few(*given), atol=1e-9)
    assert_same(lambda: solve_few(K, torch._neg_view(b)))


class Spy:
    """A kernel that is compiled for its constants, dtypes and alignment, and computes nothing."""

    def __init__(self, kernel):
        self.names, self.compiled = kernel.arg_names, []

    def __getitem__(self, grid):
        return self.compile

    def compile(self, *given, **options):
        def again(*arguments):
            assert self.kind(arguments) == kind

        kind = self.kind(given)
        self.compiled.append(kind)
        return defaultdict(lambda: again)

    def kind(self, arguments):
        whole = dict(zip(self.names, arguments, strict=True))
        if whole.get("ALIGNED"):
            assert not any(a.data_ptr() % 16 for name, a in whole.items() if name in "Ggwx")
            assert not any(whole[name] % 16 for name in ("stride", "of_G", "of_g", "of_w"))
        constants = {name: value for name, value in whole.items() if name.isupper() and name not in "GK"}
        return [a.dtype for a in arguments if isinstance(a, torch.Tensor)], constants


def test_a_compiled_kernel_is_used_for_what_it_was_compiled_for(monkeypatch):
    spies = {name: Spy(getattr(backend.kernels, name)) for name in ("products", "search", "add_rows")}
    for name, spy in spies.items():
        monkeypatch.setattr(backend.kernels, name, spy)
    monkeypatch.setattr(backend, "_compiled", {})
    whole = torch.zeros(9 * 3200 + 1)
    with kernels():
        dtypes = torch.float32, torch.float64, torch.bfloat16
        for dtype, (start, t) in product(dtypes, [(0, 2), (1, 2), (0, 3)]):
            rows, vector = whole[start:][: t * 3200].view(t, 3200), whole[start:][:3200]
            G, g = rows.to(dtype), vector.to(dtype)
            project(G, g)
            project(G, g.double(), out=torch.zeros(3201, dtype=torch.float64)[start:][:3200])
            project(G, g, metric=g)
            project(G, g, metric=g.double(), margin=0.1)
            project(rows, whole[:3200])
            project(whole[: t * 3200].view(t, 3200), vector)
        for K in (torch.eye(2, dtype=torch.float64), torch.eye(2)):
            solve_few(K, torch.ones(2, dtype=torch.float64))
    assert all(spy.compiled for spy in spies.values())


@pytest.mark.filterwarnings("ignore:(invalid value|overflow):RuntimeWarning")  # of NumPy, which interprets
@pytest.mark.parametrize("bad", [np.nan, 1e200])
def test_rows_that_are_not_finite_are_left_out(bad):
    G, g = draw(2, 4, 50)
    spoilt, h = G.clone(), torch.tensor([0.1, -torch.inf, 0.2, 0.0])
    spoilt[1, 2, 7], g[1, 7] = bad, 0.0
    with kernels():
        x = project(spoilt, g)
    with kernels(used=False):
        expected = project(G, g)
        expected[1] = project(G[1, [0, 1, 3]], g[1])
    assert_close(x, expected, atol=1e-12)
    for options in ({"margin": 0.2}, {"h": h}, {"h": h, "margin": 0.2}):
        assert_same(lambda options=options: project(spoilt, g, **options), atol=1e-12)
        assert_same(lambda options=options: project(spoilt[1], g, **options), atol=1e-12)


@pytest.mark.parametrize("name", FAMILIES)
def test_hard_families(name):
    for G, g in islice(FAMILIES[name].problems(1, 8), 0, None, 5 if name == "tiny integers" else 1):
        asked = "exact", (*map(torch.from_numpy, (G, g)), None, None, 0.0, None, False, None)
        found, expected = both(lambda asked=asked: solve_unread(*measured_for(*asked)[1])._read())
        status = int(solve_gram(*gram(G, g)).status)  # whether K resolves the rows
        assert not int(found.status) or status & Status.UNRESOLVED
        if not status | int(expected.status):
            lam = expected.multipliers
            assert_close(found.multipliers, lam, rtol=1e-6, atol=1e-6 * float(lam.max()))


def test_degenerate_problems(rng):
    """The same decisions: of equal solutions, and of rows that depend on others."""
    for t, d in ((3, 2), (5, 3), (6, 4)):
        G = torch.from_numpy(rng.integers(-1, 2, (5, t, d)).astype(float))
        g = torch.from_numpy(rng.integers(-2, 3, (5, d)).astype(float))
        assert_same(lambda G=G, g=g: project(G, g))


class Device(str):
    type = "cuda"


def test_where_there_are_no_kernels(monkeypatch):
    class Meta(torch.Tensor):
        device = Device("some")

    monkeypatch.setattr(triton, "_found", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "captured" in triton.missing("first")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with patch.object(torch, "ones", side_effect=torch.OutOfMemoryError("full")):
        assert "out of memory" in triton.missing("first")
    assert triton._found == {}  # it is asked again
    with pytest.warns(RuntimeWarning, match="does not work on cuda: .*GEMPROJ_BACKEND=portable"):
        assert triton.missing(torch.device("cuda"))  # which this torch cannot use
    assert triton.missing(torch.device("cuda"))
    triton._found.clear()
    with patch.object(torch.version, "hip", "6.0"):
        assert "NVIDIA" in triton.missing("amd")
    monkeypatch.setattr(triton, "find_spec", lambda name: None)
    assert "not installed" in triton.missing("cuda")
    tensor = torch.ones(2)
    assert not triton.available(tensor)
    assert not triton.available(tensor.as_subclass(Meta))
    with patch.object(torch, "Tensor", Meta), patch.dict(triton._found, some=""):
        assert triton.available(tensor.as_subclass(Meta))
        with patch("torch.fx.experimental.proxy_tensor.get_proxy_mode"):  # while make_fx records
            assert not triton.available(tensor.as_subclass(Meta))
    monkeypatch.setattr(backends, "wanted", "triton")
    assert_close(project(torch.eye(2), tensor), [1.0, 1.0], atol=0)  # on the CPU it asks for nothing
    with pytest.raises(ImportError, match="is not available: triton is not installed"):
        backends._on_device(tensor.as_subclass(Meta), "triton")
