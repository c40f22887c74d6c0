"""The asv benchmarks: all of them run, and the numbers that they track are what they say."""

import importlib.util
import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gemproj

ROOT = Path(__file__).parent.parent
SUITE = ROOT / "asv_benchmarks" / "benchmarks"


def load():
    # asv imports the folder as `benchmarks`, which is another package here.
    spec = importlib.util.spec_from_file_location(
        "asv_suite", SUITE / "__init__.py", submodule_search_locations=[str(SUITE)]
    )
    sys.modules["asv_suite"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["asv_suite"])
    names = sorted(path.stem for path in SUITE.glob("*.py") if path.stem != "__init__")
    return {name: importlib.import_module(f"asv_suite.{name}") for name in names}


MODULES = load()
BENCHMARKS = [
    pytest.param(
        module, value, name, id=f"{module.__name__}.{value.__name__}.{name}".removeprefix("asv_suite.")
    )
    for module in MODULES.values()
    for value in vars(module).values()
    if isinstance(value, type) and value.__module__ == module.__name__
    for name in vars(value)
    if name.startswith(("time_", "peakmem_", "track_"))
]


def smallest(params):
    """All combinations of names, with the smallest of all numbers."""
    return itertools.product(*(p if isinstance(p[0], str) else [min(p)] for p in params))


def test_there_are_benchmarks_of_everything():
    names = {param.id.rpartition(".")[2] for param in BENCHMARKS}
    assert {"time_project", "time_gram", "time_combine", "peakmem_project", "track_kkt_residual"} <= names
    assert {param.id.split(".")[0] for param in BENCHMARKS} == set(MODULES) - {"common"}


@pytest.mark.parametrize(("module", "cls", "name"), BENCHMARKS)
def test_runs_once(module, cls, name, monkeypatch):
    if hasattr(module, "LORA") and "columns d" not in cls.param_names:
        monkeypatch.setattr(module, "LORA", 2_000)
    function = getattr(cls, name)
    assert function.pretty_name
    assert len(cls.params) == len(cls.param_names)
    assert not name.startswith("track_") or function.unit
    ran = set()
    for params in smallest(cls.params):
        benchmark = cls()
        try:
            benchmark.setup(*params)
            value = getattr(benchmark, name)(*params)
        except NotImplementedError:
            continue
        ran.update(params)
        if name.startswith("track_"):
            assert math.isfinite(value)
            assert value >= 0
    if not ran and not importlib.util.find_spec("torch"):
        pytest.skip("torch is not installed")
    backends = {p for param in cls.params for p in param} & set(MODULES["common"].BACKENDS)
    present = {"numpy"} | ({"torch"} if importlib.util.find_spec("torch") else set())
    assert backends & present <= ran
    assert ran


def test_titles_are_unique_and_fit_the_page():
    titles = [getattr(param.values[1], param.values[2]).pretty_name for param in BENCHMARKS]
    assert len(set(titles)) == len(titles)
    assert max(map(len, titles)) <= 42


@pytest.mark.parametrize("t", MODULES["common"].CONSTRAINTS)
@pytest.mark.parametrize("d", [1_000, 100_000])
def test_problems_violate_some_constraints_and_not_others(t, d):
    problem = MODULES["common"].problem("numpy", "float64", t, d)
    b = problem.G @ problem.g
    assert (b < 0).sum() == 1 if t == 1 else t / 4 <= (b < 0).sum() <= 3 * t / 4
    assert b[0] < 0
    assert b.sum() < 0
    K = problem.G @ problem.G.T
    cosines = K / np.sqrt(np.outer(K.diagonal(), K.diagonal()))
    assert np.abs(cosines - np.where(np.eye(t), 1.0, 0.09 / 1.09)).max() < 5 / np.sqrt(d)


def test_kkt_residual_is_small_for_the_projection_only(rng):
    residual = MODULES["common"].kkt_residual
    G, g = rng.standard_normal((5, 20)), rng.standard_normal(20)
    x, lam = gemproj.project(G, g), gemproj.solve_dual(G, g).multipliers
    assert (lam > 0.1).any()
    assert residual(G, g, x, lam) < 1e-14
    assert residual(G, g, g, 0 * lam) > 0.01  # violates constraints
    assert residual(G, g, g + G.T @ (lam + 1), lam + 1) > 0.01  # not complementary
    assert residual(G, g, g - G.T @ np.ones(5), -np.ones(5)) > 0.01  # negative multipliers
    assert residual(G, g, x + 0.1, lam) > 0.01  # another x
    assert residual(1e-3 * G, 1e2 * g, 1e2 * x, 1e5 * lam) < 1e-14


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="peaks can be reset on Linux only")
@pytest.mark.parametrize("backend", ["numpy", "torch"])
def test_peak_counts_what_a_call_allocates(backend):
    common = MODULES["common"]
    if backend == "torch":
        pytest.importorskip("torch")
    megabyte = 1 << 20

    def call():
        temporary = common.empty(backend, "float64", (4 * megabyte,))
        temporary[...] = 1.0
        del temporary
        result = common.empty(backend, "float64", (megabyte,))
        result[...] = 1.0
        return result

    # The allocator may, or may not, put the result where the temporary array was.
    assert 31 * megabyte < common.peak_extra(call, backend) < 44 * megabyte
    assert common.peak_extra(lambda: None, backend) < megabyte


def test_asv_accepts_the_suite():
    pytest.importorskip("asv")
    command = [
        sys.executable,
        "-m",
        "asv",
        "--config",
        "asv_benchmarks/asv.conf.json",
        "check",
        "--python=same",
    ]
    env = dict(os.environ, ASV_PYTHONPATH=str(ROOT))
    found = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    assert "No problems found" in found.stdout
