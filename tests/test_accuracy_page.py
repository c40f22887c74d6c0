"""The judge of docs/accuracy.md, the script that makes its tables, and `make fuzz`."""

import os
import re
import signal
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
from asv_benchmarks.reports.solvers import Findings  # noqa: E402


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


@pytest.mark.parametrize("lam", [[1, 0], [-1, 0], [0, 0]])  # not complementary, negative, violated
def test_judge_refuses_a_wrong_answer(lam, monkeypatch):
    monkeypatch.setattr(judge, "_active_set", lambda K, b, start: judge._real(np.array(lam, dtype=object)))
    with pytest.raises(ArithmeticError, match="misses the optimality conditions"):
        judge.project_precisely(np.eye(2), np.array([1.0, -1.0]))


def test_script_writes_its_tables(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(accuracy, "REPEATS", 1)
    monkeypatch.setattr(accuracy, "LARGEST", 3)
    accuracy.main(tmp_path, families="tiny", solvers="exact,NNLS,DAQP,agem")
    text = (tmp_path / "accuracy.md").read_text()
    assert "held for 40 of its 40 answers" in text
    assert "| gemproj exact | 1 | 0 | 0 |  |  |  |\n" in text
    assert re.search(r"\| DAQP \| \d+ \| \d+ \| \d+ \| \d+ \| \d+ \| \d+ \|\n", text)
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"solvers": "exact"}, "a part of the tables does not replace docs/results"),
        ({"families": "tiny,huge", "out": "here"}, "no name contains huge; there are: .*tiny integers"),
        ({"solvers": "", "families": "none", "out": "here"}, "no name contains none"),
    ],
)
def test_script_does_nothing_by_mistake(options, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(accuracy.typer.BadParameter, match=text):
        accuracy.main(**options)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("options", [["--problems", "0"], ["--workers", "0"]])
def test_fuzz_draws_something(options):
    app = accuracy.typer.Typer()
    app.command()(fuzz.main)
    with pytest.raises(SystemExit, match="2"):
        app(options)


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
        wrong = {
            verdict.way: verdict.failures for verdict in fuzz.run(0, ["right-hand-sides", "all-options"])
        }
        assert wrong["all options, portable"][0].startswith("all options, portable: {'G': ")
        assert bool(wrong["right-hand sides, project"]) == (ignored in ("h", "equality"))
    one, none = (fuzz.Problem(np.array([[1.0], [-1.0]]), np.zeros(1), np.array(h)) for h in ([2, -2], [2, 0]))
    for guess, refused in product(
        ([0.0, 0.0], [1.0, 1.0], [7.0, 0.0]), (False, True)
    ):  # whatever a search says
        assert fuzz.expected(one, np.array(guess), refused) == 2.0
        assert fuzz.expected(none, np.array(guess), refused) is None


def test_score_tells_failures_apart():
    G, g, x = np.eye(2), np.array([-1.0, 1.0]), np.array([0.0, 1.0])
    right = x, Findings(np.array([1.0, 0.0]))
    answers = right, (g, Findings()), (None, Findings())
    good, silent, missing = (accuracy.score((G, g, x), (1.0, *answer)) for answer in answers)
    assert (good.primal, good.complementarity, good.error, good.failed) == (0.0, 0.0, 0.0, False)
    assert silent.primal == pytest.approx(2**-0.5)
    cell = accuracy.Cell([good, silent, missing], "exact")
    assert (cell.percent, cell.silent, cell.worst("error")) == (67, 1, pytest.approx(2**-0.5))


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_a_solver_with_care_gets_a_problem_of_norm_one(scale, monkeypatch):
    def solve(name, G, g, settings):
        np.testing.assert_allclose(np.append(np.linalg.norm(G, axis=1), np.linalg.norm(g)), [1, 0, 1])
        return np.maximum(0.0, -G @ g)  # exact for orthogonal rows

    monkeypatch.setattr(solvers, "minimum", solve)
    G, g = scale * np.array([[2.0, 0.0], [0.0, 0.0]]), scale * np.array([-3.0, 1.0])
    assert_close(
        solvers.with_care("any", "any").project(G, g), scale * np.array([0.0, 1.0]), atol=1e-15 * scale
    )


def test_cost_in_t_counts_what_a_search_does(tmp_path):
    cost_in_t.main(t="2,9", d=1000, draws=2, seconds=0.0, out=tmp_path / "cost.md")
    text = (tmp_path / "cost.md").read_text()
    rows = [
        [c.strip() for c in line.split("|")[1:-1]] for line in text.splitlines() if re.match(r"\| \d", line)
    ]
    assert [row[0] for row in rows] == ["2", "9"] * 4
    assert all(0 <= int(pivots) <= 12 * int(t) for t, pivots, *_ in rows[:6])


def test_a_solver_that_hangs_or_dies_is_replaced():
    run = Isolated("SciPy NNLS", patience=2.0)
    for stop in (signal.SIGSTOP, signal.SIGKILL):
        os.kill(run._process.pid, stop)
        assert run(np.eye(2), -np.ones(2))[1] is None
        assert_close(run(np.eye(2), -np.ones(2))[1], np.zeros(2), atol=1e-15)
    run.close()


def test_a_solver_has_a_limit_of_processor_time():
    run = Isolated("gemproj pgd, 100 steps", limit=1e-3)
    G = np.random.default_rng(0).standard_normal((200, 2000))
    assert run(G, -G.sum(0))[1] is None
    run.close()
    run = Isolated("gemproj pgd, 100 steps")
    assert run(G, -G.sum(0))[1] is not None
    run.close()
