"""The asv benchmarks: all of them run, and the numbers that they track are what they say."""

import importlib
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
from asv_benchmarks.benchmarks import common

ROOT = Path(__file__).parent.parent
MODULES = [
    importlib.import_module(f"asv_benchmarks.benchmarks.{name}")
    for name in ("batches", "memory", "projection", "ratios", "stages")
]
BENCHMARKS = [
    pytest.param(module, value, name, id=f"{module.__name__.rpartition('.')[2]}.{value.__name__}.{name}")
    for module in MODULES
    for value in vars(module).values()
    if isinstance(value, type) and value.__module__ == module.__name__
    for name in vars(value)
    if name.startswith(("time_", "peakmem_", "track_"))
]


@pytest.mark.parametrize(("module", "cls", "name"), BENCHMARKS)
def test_runs_once(module, cls, name, monkeypatch):
    if hasattr(module, "LORA") and "columns d" not in cls.param_names:
        monkeypatch.setattr(module, "LORA", 2_000)
    function = getattr(cls, name)
    assert function.pretty_name
    assert not name.startswith("track_") or function.unit
    ran = set()
    # All combinations of names, with the smallest of all numbers. Memory is measured in processes of its own:
    # of one dtype.
    choices = [p if isinstance(p[0], str) else [min(p)] for p in cls.params]
    if module.__name__.endswith("memory"):
        choices = [p[:1] if p == common.DTYPES else p for p in choices]
    for params in itertools.product(*choices):
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
    present = {"numpy"} | ({"torch"} if importlib.util.find_spec("torch") else set())
    assert {p for param in cls.params for p in param} & set(common.BACKENDS) & present <= ran
    assert ran or "torch" not in present


@pytest.mark.parametrize("layout", ["rows", "columns"])
@pytest.mark.parametrize("t", common.CONSTRAINTS)
@pytest.mark.parametrize("d", [1_000, 100_000])
def test_problems_violate_every_constraint(t, d, layout):
    G, g, _ = common.problem("numpy", "float64", t, d, layout)
    assert G.strides == ((8, 8 * t) if layout == "columns" else (8 * d, 8))
    assert (G @ g < 0).all()
    K = G @ G.T
    cosines = K / np.sqrt(np.outer(K.diagonal(), K.diagonal()))
    assert np.abs(cosines - np.where(np.eye(t), 1.0, 0.09 / 1.09)).max() < 5 / np.sqrt(d)


def test_kkt_residual_is_small_for_the_projection_only(rng):
    residual = common.kkt_residual
    G, g = rng.standard_normal((5, 20)), rng.standard_normal(20)
    x, lam = gemproj.project(G, g), gemproj.solve_dual(G, g).multipliers
    assert (lam > 0.1).any()
    assert residual(G, g, x, lam) < 1e-14
    assert residual(G, g, g, 0 * lam) > 0.01  # violates constraints
    assert residual(G, g, g + G.T @ (lam + 1), lam + 1) > 0.01  # not complementary
    assert residual(G, g, g - G.T @ np.ones(5), -np.ones(5)) > 0.01  # negative multipliers
    assert residual(G, g, x + 0.1, lam) > 0.01  # another x
    assert residual(1e-3 * G, 1e2 * g, 1e2 * x, 1e5 * lam) < 1e-14


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
