"""`make bench-gpu`, part by part, on the CPU: nothing runs for the first time on a GPU."""

import importlib
import pkgutil
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from devices import DEVICE, make_device  # noqa: E402

from asv_benchmarks.reports.gpu import (  # noqa: E402
    __main__,
    correctness,
    device,
    order,
    problems,
    speed,
    suites,
    training,
)
from asv_benchmarks.reports.gpu.model import Shape  # noqa: E402
from asv_benchmarks.reports.gpu.printing import Checks, Found  # noqa: E402

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


def rows(text):
    """Return the cells of all rows of all tables."""
    lines = (line.split("|")[1:-1] for line in text.splitlines() if line.startswith("|"))
    return [[cell.strip() for cell in line] for line in lines]


def test_checks_tell_wrong_from_right(capsys):
    checks = Checks("title")
    for worst in (0.0, 1e-9, 2e-9, np.nan):
        checks.add(f"{worst}", lambda worst=worst: Found(1234, worst, 1e-9))
    checks.add("raises", lambda: 1 / 0)
    assert checks.wrong == 3
    table = rows(capsys.readouterr().out)
    assert table[2] == ["0.0", "1,234", "0", "1e-09", "right"]
    assert [row[-1].strip("*") for row in table[3:]] == ["right", "wrong", "wrong", "failed"]
    assert table[-1][2] == "ZeroDivisionError: division by zero"


@pytest.fixture
def small(monkeypatch):
    put(monkeypatch, correctness, SIZES=(1,), SOME=(1,), ORDERED=(1,), BATCHES=[(1, 5, (2,))])
    put(monkeypatch, correctness, D=70, LARGER=90, LARGE=80, HUGE=95, FUZZ=[(2, 2, 2)], LARGEST=2)
    some = {name: correctness.FAMILIES[name] for name in ("zero rows", "opposite, tilt 1e-7")}
    put(monkeypatch, correctness, FAMILIES=some, run_suites=lambda seconds: 0)
    cupy = ModuleType("cupy")
    stream = SimpleNamespace(Stream=lambda non_blocking: nullcontext(), Device=lambda: torch.cuda)
    stream.Stream.null = nullcontext()
    cupy.cuda, cupy.asarray, cupy.asnumpy = stream, np.array, np.array
    cupy.zeros, cupy.zeros_like = np.zeros, np.zeros_like
    cupy.__spec__, cupy.ndarray = ModuleSpec("cupy", None), type("ndarray", (), {})
    monkeypatch.setitem(sys.modules, "cupy", cupy)


def test_correctness(gpu, small, capsys):
    assert correctness.main(1.0) == 0
    table = rows(capsys.readouterr().out)[2:]
    assert {row[-1] for row in table} == {"right"}
    assert all(float(row[2]) <= float(row[3]) for row in table)
    names = [row[0] for row in table]
    assert len(set(names)) == len(names)
    counts = {row[0]: row[1] for row in table}
    assert counts["hard families"] == "1"  # the other one is beyond a Gram matrix
    assert counts["degenerate integers"] == "2"
    assert counts["CuPy, a stream of its own"] == "1"


def test_wrong_answers_are_seen(gpu, small, monkeypatch, capsys):
    monkeypatch.setattr(
        "gemproj.backends.portable.Portable.combine", lambda self, at, lam, out: out[0].fill_(-1.0)
    )
    kind = "kind", torch.float32, [problems.Case(torch.ones(1, 5), -torch.ones(5), {})]
    put(monkeypatch, correctness, cases=lambda: [kind], check_time=lambda checks: None)
    assert correctness.main(1.0) == 1
    assert [row[-1] for row in rows(capsys.readouterr().out)[2:3]] == ["**wrong**"]


def test_waits_and_other_bits_are_counted(gpu, monkeypatch):
    def wait(*arrays):
        raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(order.gemproj, "solve_dual", wait)
    assert order.waits((1, 2), 5) == Found(2, 2, 0)
    draws = iter(torch.rand(99, 5))
    monkeypatch.setattr(order.gemproj, "project", lambda G, g: next(draws))
    assert order.two_streams(1, 5) == Found(2, 2, 0)


def test_graphs_are_captured_after_a_first_call(monkeypatch):
    log = []
    graph = SimpleNamespace(replay=lambda: log.append("replay"))
    put(monkeypatch, torch.cuda, CUDAGraph=lambda: graph, graph=nullcontext)
    put(monkeypatch, torch.cuda, synchronize=lambda: log.append("wait"))
    device.as_graph(lambda: log.append("call"))()
    assert log == ["call", "wait", "call", "replay"]


def test_speed(gpu, monkeypatch, capsys):
    put(monkeypatch, speed, SIZES=(2,), COLUMNS=(50,), DTYPES=(torch.float32,), COPIED=1)
    put(monkeypatch, speed, BATCH_SIZES=(2,), BATCH_D=10, BATCH=2)
    put(monkeypatch, speed, MOST={"eager": 1e9, "captured": 1e-9})
    assert speed.main(1.0) == 0
    table = rows(capsys.readouterr().out)
    sizes = [row for row in table if len(row) == len(speed.HEAD) and row[0] == "2"]
    assert len(sizes) == 1
    assert all(float(cell.replace(",", "")) > 0 for row in sizes for cell in row[:-1])
    verdicts = [row[3] for row in table if row[0].startswith("t = 2")]
    assert verdicts == ["yes", "no"]
    assert ["I-GEM", "2,160"] in [row[:2] for row in table]
    monkeypatch.setattr(speed, "BOUND", -1.0)
    for table in ("published", "host", "batches", "verdicts"):
        monkeypatch.setattr(speed.Speed, table, lambda self: None)
    assert speed.main(1.0) == 1
    monkeypatch.setattr(speed.Speed, "sizes", lambda self, d, dtype: 1 / 0)
    assert speed.main(1.0) == 1
    assert "**Failed: ZeroDivisionError**" in capsys.readouterr().out


def test_a_call_that_cannot_be_captured_leaves_its_cell_empty(gpu, monkeypatch):
    def fail(call):
        raise RuntimeError("operation not permitted when stream is capturing")

    put(monkeypatch, speed, as_graph=fail, COPIED=1)
    assert speed.Speed()._replayed(lambda: None) is None


def test_training(gpu, monkeypatch, capsys):
    shape = Shape(layers=1, width=16, heads=2, words=9, positions=8, rank=2)
    put(monkeypatch, training, SHAPE=shape, TEXTS=4, TOKENS=3, TASKS=(1, 2), STORED=3, ROUNDS=1)
    assert training.main(1e9) == 0
    table = rows(capsys.readouterr().out)
    assert [row[0] for row in table].count("no constraints") == 2
    assert all(float(row[-1]) > 0 for row in table if row[0].startswith(("no", "A-GEM", "GEM")))
    monkeypatch.setattr(training, "BOUND", -1.0)
    assert training.main(0.0) == 1
    assert len(rows(capsys.readouterr().out)) == len(table) // 2


def test_the_model_has_the_parameters_of_the_paper():
    with torch.device("meta"):
        model = training.Classifier(Shape())
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == speed.LORA
    assert sum(p.numel() for p in model.parameters()) == 354_823_168 + speed.LORA


def test_suites_share_out_tests_and_tell_what_failed(monkeypatch, capsys, tmp_path):
    suite = suites.Suite(["methods"], 1, "nicknames or negative_start")
    monkeypatch.setattr(suites, "SUITES", {"some": suite})
    assert suites.run_suites(120.0) == 0
    assert rows(capsys.readouterr().out)[2][:3] == ["some, 0 skipped", "2", "0"]
    with monkeypatch.context() as patch:
        put(patch, suites, _start=lambda *arguments: (), _result=lambda end: [])
        assert suites.run_suites(1.0) == 1
    path = tmp_path / "results"
    monkeypatch.setenv("GEMPROJ_SHARE", f"1 2 {path}")
    items = list("abcde")
    suites.pytest_collection_modifyitems(items)
    assert sorted(items) == ["b", "d"]
    suites.pytest_runtest_logstart("a")
    failed = SimpleNamespace(reprcrash=SimpleNamespace(message="assert 1\tor 2\nmore"))
    for when, outcome in (("setup", "passed"), ("call", "failed"), ("teardown", "passed")):
        reason = failed if outcome == "failed" else None
        report = SimpleNamespace(when=when, outcome=outcome, nodeid="a", longrepr=reason)
        suites.pytest_runtest_logreport(report)
    suites.pytest_runtest_logstart("b")
    (tmp_path / "results.out").touch()
    process = subprocess.Popen(["sleep", "60"])
    lines = suites._result(process, path, time.monotonic())
    process.wait()
    assert lines == [
        ["started", "a", ""],
        ["failed", "a", "assert 1 or 2"],
        ["started", "b", ""],
        ["failed", "b", "pytest ended: killed, out of time"],
    ]


def test_a_part_that_hangs_or_fails_takes_nothing_from_the_others(monkeypatch, tmp_path, capsys):
    codes = {
        "correctness": "print('right'); import sys; sys.exit(0)",
        "speed": "print('begun', flush=True); import time; time.sleep(60)",
        "training": "import sys; print('wrong'); sys.exit(3)",
    }
    put(monkeypatch, torch.cuda, is_available=lambda: True, get_device_name=lambda: "A GPU")
    put(monkeypatch, __main__, command=lambda part, seconds: [sys.executable, "-c", codes[part]], LEAST=4.0)
    out = tmp_path / "report.md"
    assert __main__.main(["--seconds", "0", "--out", str(out)]) == 1
    text = out.read_text()
    assert text == capsys.readouterr().out
    assert text.startswith("A GPU, torch ")
    for ending in ("Correctness: right", r"Speed: killed, \d+ s"):
        assert re.search(ending, text)
    assert "begun" in text
    assert "Training: ended with code 3" in text
    assert __main__.main(["--parts", "correctness"]) == 0


def test_without_a_gpu_it_says_so(capsys):
    assert __main__.main([]) == 1
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        __main__.main(["--parts", "speed,sped"])
    assert "no such part: sped" in capsys.readouterr().err
    command = __main__.command("speed", 12.3)
    assert command[2:] == ["-m", "asv_benchmarks.reports.gpu.speed", "12"]


def test_it_needs_no_more_than_what_machines_with_a_gpu_have(monkeypatch):
    """No rich and typer, nor what other reports draw and compare with."""
    for name in [name for name in sys.modules if name.startswith("asv_benchmarks")]:
        monkeypatch.delitem(sys.modules, name)
    others = ["typer", "rich", "matplotlib", "pandas", "scipy", "threadpoolctl", "mpmath", "quadprog", "osqp"]
    for name in others:
        monkeypatch.setitem(sys.modules, name, None)
    package = importlib.import_module("asv_benchmarks.reports.gpu")
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    assert {*__main__.PARTS, "__main__"} <= set(names)
    for name in names:
        importlib.import_module(f"{package.__name__}.{name}")
