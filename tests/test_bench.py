"""The asv benchmarks all run, `make bench` writes its tables, and both measure what they say."""

import importlib
import itertools

import numpy as np
import pytest

pytest.importorskip("qpsolvers", reason="needs the extra compare")
pytest.importorskip("typer", reason="needs the extra examples")
import torch

from asv_benchmarks.benchmarks import common, peaks, timing
from asv_benchmarks.reports import figure, projection
from asv_benchmarks.reports.candidates import FLOOR, GIVEN, LOOKS, MEAN, READ, candidates
from asv_benchmarks.reports.quality import grade

BENCHMARKS = [
    pytest.param(module, value, name, id=f"{value.__name__}.{name}")
    for module in (
        importlib.import_module(f"asv_benchmarks.benchmarks.{name}")
        for name in ("batches", "memory", "projection", "ratios", "stages")
    )
    for value in vars(module).values()
    if isinstance(value, type) and value.__module__ == module.__name__
    for name in vars(value)
    if name.startswith(("time_", "track_"))
]


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr("gc.collect", lambda: 0)  # before each measurement of memory
    monkeypatch.setattr(timing, "settle", lambda: None)
    monkeypatch.setattr(timing.burst, "__defaults__", (0.0,))  # each burst is one call


@pytest.mark.parametrize(("module", "cls", "name"), BENCHMARKS)
def test_a_benchmark_runs_once(module, cls, name, monkeypatch, impatient):
    if hasattr(module, "LORA") and "columns d" not in cls.param_names:
        monkeypatch.setattr(module, "LORA", 2_000)
    ran = set()
    # All combinations of names, with the smallest of all numbers.
    for params in itertools.product(*(p if isinstance(p[0], str) else [min(p)] for p in cls.params)):
        benchmark = cls()
        try:
            benchmark.setup(*params)
            value = getattr(benchmark, name)(*params)
        except NotImplementedError:
            continue
        ran.update(params)
        assert not name.startswith("track_") or 0 <= value < np.inf
    assert {p for param in cls.params for p in param} & {"numpy", "torch"} <= ran
    assert ran


def test_peak_memory_counts_what_is_freed_again(monkeypatch, tmp_path, impatient):
    size = 64 << 20
    kept = np.zeros(size, np.uint8)

    def run():
        np.ones(size, np.uint8)
        return np.ones(size // 4, np.uint8)

    call = timing.Call(run)
    if peaks.peak_memory(call) is not None:
        # The system may take the large array back after the small one is there.
        assert 0.95 * size < peaks.peak_memory(call) < 1.35 * size
        assert peaks.peak_memory(timing.Call(lambda: kept.fill(1))) < 0.05 * size
    monkeypatch.setattr(peaks, "PROC", tmp_path / "nothing")
    assert peaks.peak_memory(call) is None


@pytest.mark.parametrize("t", [1, 3])
def test_candidates_answer_the_same_question_again_and_again(t):
    G, g, _ = common.problem("torch", "float32", t, 40_000)  # more columns than a tile of the judge
    before = g.clone()
    found = {name: call for name, call in candidates(G, g).items() if name not in (FLOOR, READ)}
    assert LOOKS.keys() - {FLOOR} <= found.keys()
    for _ in range(2):
        answers = []
        for call in found.values():
            call.prepare()
            answers.append(torch.as_tensor(call.run()).clone())
        assert torch.equal(g, before)
        violation = (-(G @ g).double() / G.double().norm(dim=1)).max() / g.double().norm()
        [[given, _]] = grade(G, g, [g])
        assert given == pytest.approx(float(violation), rel=1e-5)
        error = {name: distance for name, (_, distance) in zip(found, grade(G, g, answers), strict=True)}
        exact = [name for name in error if name.startswith("gemproj") and not name.endswith(("pgd", "agem"))]
        assert len(exact) == 9
        assert max(error[name] for name in [*exact, "GEM, reference recipe"]) < 1e-6
        assert max(error[name] for name in ("I-GEM, published", "gemproj pgd")) < 0.1
        assert error[MEAN] == pytest.approx(error["gemproj agem"], abs=1e-6)
        assert (error[GIVEN] > 0.01) == (t > 1)


def test_the_report_is_written_with_its_figure(impatient, tmp_path, monkeypatch):
    out, picture = tmp_path / "bench.md", tmp_path / "bench.png"
    projection.main(t="1,2", d=20_000, seconds=0.0, out=out)
    figure.main(out, picture)
    rows = [line.split(" | ") for line in out.read_text().splitlines() if line.startswith(f"| {GIVEN} |")]
    assert [row[3] for row in rows] == ["1.0", "1.0"]  # over itself
    assert picture.read_bytes().startswith(b"\x89PNG")
