"""`make bench-gpu`, part by part, on the CPU: nothing runs for the first time on a GPU."""

import importlib
import pkgutil
import sys
import time
from contextlib import nullcontext
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from devices import DEVICE, make_device

from asv_benchmarks.reports.gpu import correctness, device, order, speed, training
from asv_benchmarks.reports.gpu import rows as gpu_rows
from asv_benchmarks.reports.gpu.model import Shape
from asv_benchmarks.reports.gpu.printing import Checks, Found

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="make bench-gpu is there for that")


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


def put(monkeypatch, module, **values):
    for name, value in values.items():
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def gpu(monkeypatch):
    """The CPU as a device, on which nothing has to be waited for, and a graph is its call."""
    put(monkeypatch, torch.cuda, Event=Event, Stream=object, stream=nullcontext)
    put(monkeypatch, torch.cuda, synchronize=lambda: None, set_sync_debug_mode=lambda mode: None)
    for module in (order, speed):
        put(monkeypatch, module, as_graph=lambda call: call)
    put(monkeypatch, device, FLUSH=1, FEWEST=1, MOST=1, WARM_CALLS=1, HOST_CALLS=1)
    put(monkeypatch, order, REPLAYS=2, _ADDITIONS=1)
    with make_device():
        yield


@pytest.fixture
def rows(capsys):
    """Return the cells of all rows that have been printed."""

    def read():
        lines = (line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line[:1] == "|")
        return [[cell.strip() for cell in line] for line in lines]

    return read


def test_correctness_and_wrong_answers_are_seen(gpu, monkeypatch, rows):
    put(monkeypatch, correctness, SIZES=(1,), SOME=(1,), ORDERED=(1,), BATCHES=[(1, 5, (2,))])
    put(monkeypatch, correctness, D=70, LARGER=90, LARGE=80, HUGE=95, FUZZ=[(2, 2, 2)], LARGEST=2)
    some = {name: correctness.FAMILIES[name] for name in ("zero rows", "opposite, tilt 1e-7")}
    put(monkeypatch, correctness, FAMILIES=some, run_suites=lambda seconds: 0)
    assert correctness.main(1.0) == 0
    found = rows()[2:]
    assert {row[-1] for row in found} <= {"right", "not there"}  # CuPy
    counts = {row[0]: row[1] for row in found}
    assert counts["hard families"] == "1"  # the other one is beyond a Gram matrix
    monkeypatch.setattr("gemproj.backends.portable.combine", lambda at, lam, out: out[0].fill_(-1.0))
    kind = "kind", torch.float32, [(torch.ones(1, 5), -torch.ones(5), {})]
    put(monkeypatch, correctness, cases=lambda: [kind], check_time=lambda checks: None)
    assert correctness.main(1.0) == 1
    assert rows()[2][-1] == "**wrong**"
    checks = Checks("title")
    for worst in (1e-9, 2e-9, np.nan):
        checks.add(f"{worst}", lambda worst=worst: Found(1234, worst, 1e-9))
    checks.add("raises", lambda: 1 / 0)
    assert [row[-1].strip("*") for row in rows()[2:]] == ["right", "wrong", "wrong", "failed"]
    draws = iter(torch.rand(99, 5))
    monkeypatch.setattr(order.gemproj, "project", lambda G, g, **options: next(draws))
    assert order.two_streams(1, 5) == Found(2, 2, 0)
    put(monkeypatch, order.gemproj, project=Mock(side_effect=[None, RuntimeError("synchronizing")] * 10))
    assert order.waits((1, 2), 5) == Found(10, 10, 0)


def test_speed(gpu, monkeypatch, rows):
    put(monkeypatch, speed, SIZES=(2,), COLUMNS=(50,), DTYPES=(torch.float32,), COPIED=1)
    put(monkeypatch, speed, BATCH_SIZES=(2,), BATCH_D=10, BATCHES={"triton": 2, "portable": 2})
    put(monkeypatch, speed, MOST={"eager": 1e9, "captured": 1e-9})
    assert speed.main(1.0) == 0
    assert [row[3] for row in rows() if row[0].startswith("t = 2")] == ["yes", "no"]  # within the most


def test_rows(gpu, monkeypatch, rows):
    put(monkeypatch, torch.cuda, reset_peak_memory_stats=lambda: None, memory_allocated=lambda: 0)
    put(monkeypatch, torch.cuda, max_memory_allocated=lambda: 1)
    put(monkeypatch, gpu_rows, CASES={"MLP": [(2, 3)], "GPT-2 of 2 layers of 128, LoRA": [(1, 2)]}, TOKENS=5)
    assert gpu_rows.main(0.0) == 0
    assert len([row for row in rows() if row[0] in "12"]) == 3


def test_training(gpu, monkeypatch, rows):
    shape = Shape(layers=1, width=16, heads=2, words=9, positions=8, rank=2)
    put(monkeypatch, training, SHAPE=shape, TEXTS=4, TOKENS=3, TASKS=(1, 2), STORED=3, ROUNDS=1)
    assert training.main(1e9) == 0
    found = [row for row in rows() if row[0].startswith(("plain", "replay", "A-GEM", "GEM"))]
    assert len(found) == 6 * len(training.WAYS)
    with torch.device("meta"):
        model = training.Classifier(Shape())
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == speed.LORA
    assert sum(p.numel() for p in model.parameters()) == 354_823_168 + speed.LORA


def test_it_needs_no_more_than_what_machines_with_a_gpu_have(monkeypatch):
    """No rich and typer, nor what other reports draw and compare with."""
    for name in [name for name in sys.modules if name.startswith("asv_benchmarks")]:
        monkeypatch.delitem(sys.modules, name)
    others = "typer", "rich", "matplotlib", "pandas", "scipy", "threadpoolctl", "mpmath", "quadprog", "osqp"
    for name in others:
        monkeypatch.setitem(sys.modules, name, None)
    package = importlib.import_module("asv_benchmarks.reports.gpu")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
