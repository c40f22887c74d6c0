"""The judge of docs/accuracy.md, the script that makes its tables, and `make fuzz`."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import numpy as np
import pytest
from problems import assert_close, rational_projection

import gemproj
from gemproj.backends.numba import installed

pytest.importorskip("mpmath")
pytest.importorskip("scipy")
accuracy = pytest.importorskip("asv_benchmarks.reports.accuracy")
from asv_benchmarks.reports import cost_in_t, fuzz, judge, solvers  # noqa: E402
from asv_benchmarks.reports.families import FAMILIES  # noqa: E402
from asv_benchmarks.reports.isolated import Isolated  # noqa: E402


@pytest.mark.parametrize("suggest", [judge._suggest, lambda G, g: np.zeros(len(G))])
def test_judge_agrees_with_rational_arithmetic(suggest, monkeypatch):
    """Wherever it starts."""
    monkeypatch.setattr(judge, "_suggest", suggest)
    problems = list(FAMILIES["tiny integers"].problems(repeats=2, largest=5))
    problems += list(FAMILIES["opposite, tilt 1e-7"].problems(repeats=2, largest=5))
    for G, g in problems:
        expected = np.array(rational_projection(G, g), dtype=float)
        for scale in (2.0**-500, 1.0, 2.0**500):
            assert_close(judge.project_precisely(scale * G, scale * g) / scale, expected, atol=0)
    g = np.array([1.0, -2.0])
    assert_close(judge.project_precisely(np.zeros((3, 2)), g), g, atol=0)


class Here:
    """A solver in this process; what processes of their own are for is tested below."""

    def __init__(self, name):
        self.solver = solvers.SOLVERS[name]

    def __call__(self, G, g):
        return 1.0, self.solver.project(G, g), self.solver.inspect(G, g)

    def close(self):
        pass


def test_script_writes_its_tables(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(accuracy, "Isolated", Here)
    monkeypatch.setattr(accuracy, "ProcessPoolExecutor", lambda mp_context: ThreadPoolExecutor(1))
    monkeypatch.setattr(accuracy, "REPEATS", 1)
    monkeypatch.setattr(accuracy, "LARGEST", 3)
    accuracy.main(tmp_path, families="tiny", solvers="exact,NNLS,DAQP,agem")
    text = (tmp_path / "accuracy.md").read_text()
    assert "held for 40 of its 40 answers" in text
    assert "| gemproj exact | 1 | 0 | 0 |  |  |  |\n" in text
    assert re.search(r"\| DAQP \| \d+ \| \d+ \| \d+ \| \d+ \| \d+ \| \d+ \|\n", text)
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000


def test_fuzz_tells_wrong_from_right(monkeypatch):
    monkeypatch.setattr(fuzz, "CHUNK", 48)
    right = fuzz.run(0)
    assert not any(verdict.failures for verdict in right)
    assert len(right) == (11 if installed() else 7)
    monkeypatch.setattr(fuzz, "CHUNK", 240)
    for ignored in ("h", "equality", "penalty", "margin", "metric"):

        def project(G, g, ignored=ignored, **options):
            options.pop(ignored, None)
            return gemproj.project(G, g, **options)

        monkeypatch.setattr(fuzz, "project", project)
        both = fuzz.run(0, ["right-hand-sides", "all-options"])
        wrong = {verdict.way: verdict.failures for verdict in both}
        assert wrong["all options, portable"][0].startswith("all options, portable: {'G': ")
        assert bool(wrong["right-hand sides, project"]) == (ignored in ("h", "equality"))
    one, none = (fuzz.Problem(np.array([[1.0], [-1.0]]), np.zeros(1), np.array(h)) for h in ([2, -2], [2, 0]))
    guesses = [0.0, 0.0], [1.0, 1.0], [7.0, 0.0]
    for guess, refused in product(guesses, (False, True)):  # whatever a search says
        assert fuzz.expected(one, np.array(guess), refused) == 2.0
        assert fuzz.expected(none, np.array(guess), refused) is None


def test_cost_in_t_counts_what_a_search_does(tmp_path):
    cost_in_t.main(t="2,9", d=1000, draws=2, seconds=0.0, out=tmp_path / "cost.md")
    text = (tmp_path / "cost.md").read_text()
    lines = [line for line in text.splitlines() if re.match(r"\| \d", line)]
    rows = [[c.strip() for c in line.split("|")[1:-1]] for line in lines]
    assert [row[0] for row in rows] == ["2", "9"] * 4
    assert all(0 <= int(pivots) <= 12 * int(t) for t, pivots, *_ in rows[:6])


def test_a_solver_that_hangs_or_takes_more_processor_time_than_its_limit_is_replaced():
    run, small = Isolated("gemproj pgd, 100 steps", limit=0.1, patience=2.0), (np.eye(2), -np.ones(2))
    os.kill(run._process.pid, signal.SIGSTOP)
    assert run(*small)[1] is None
    assert_close(run(*small)[1], np.zeros(2), atol=1e-15)
    large = np.random.default_rng(0).standard_normal((1000, 3000))
    assert run(large, -large.sum(0))[1] is None
    assert_close(run(*small)[1], np.zeros(2), atol=1e-15)
    run.close()
