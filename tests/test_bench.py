"""What `make bench` and `make bench-exchange` measure with, and the tables that they write."""

import numpy as np
import pytest
from problems import draw

torch = pytest.importorskip("torch")
for package in ("matplotlib", "osqp", "quadprog", "rich", "scipy", "threadpoolctl", "typer"):
    pytest.importorskip(package)
from asv_benchmarks.benchmarks import peaks, timing  # noqa: E402
from asv_benchmarks.benchmarks.common import problem  # noqa: E402
from asv_benchmarks.reports import exchange, projection  # noqa: E402
from asv_benchmarks.reports.candidates import FLOOR, GIVEN, MAIN, MEAN, candidates  # noqa: E402
from asv_benchmarks.reports.quality import grade  # noqa: E402
from asv_benchmarks.reports.tables import Table, digits, power  # noqa: E402


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(timing, "settle", lambda: None)
    monkeypatch.setattr(peaks, "rest", lambda: None)  # which collects garbage each time
    monkeypatch.setattr(timing.burst, "__defaults__", (0.0,))  # each burst is one call


def cells(path):
    lines = (line for line in path.read_text().splitlines() if line.startswith("|"))
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


def test_calls_take_turns_and_are_prepared(impatient):
    log = []
    steps = "prepare", "just before", "run"
    calls = {
        name: timing.Call(*(lambda name=name, step=step: log.append(f"{step} {name}") for step in order))
        for name, order in dict.fromkeys("ab", (steps[2], steps[0], steps[1])).items()
    }
    times = timing.in_turn(calls, seconds=0.0)
    assert log[:4] == ["prepare a", "run a", "prepare b", "run b"]
    assert log[4:] == timing.FEWEST * [f"{step} {name}" for name in "ab" for step in steps]
    assert [len(times[name]) for name in "ab"] == [timing.FEWEST] * 2


def test_peak_memory_counts_what_is_freed_again(monkeypatch, tmp_path):
    size = 64 << 20
    kept = np.zeros(size, np.uint8)

    def run():
        np.ones(size, np.uint8)
        return np.ones(size // 4, np.uint8)

    if peaks.peak_memory(run) is not None:
        assert peaks.peak_memory(run) == pytest.approx(size, rel=0.05)
        assert peaks.peak_memory(lambda: kept.fill(1)) < 0.05 * size
    monkeypatch.setattr(peaks, "PROC", tmp_path / "nothing")
    assert peaks.peak_memory(run) is None


def test_grades(rng):
    G, g, x, _, _ = draw(rng, "generic", 6, 40)
    G, g, x = (torch.from_numpy(a) for a in (G, g, x))
    right, untouched = grade(G, g, [x, g])
    assert right.violation < 1e-14
    assert right.error < 1e-13
    assert untouched.violation == pytest.approx(float((-(G @ g) / G.norm(dim=1)).max() / g.norm()))
    assert untouched.error == pytest.approx(float((x - g).norm() / g.norm()))


@pytest.mark.parametrize("t", [1, 3])
def test_candidates_answer_the_same_question_again_and_again(t):
    G, g, _ = problem("torch", "float32", t, 40_000)  # more columns than a tile of the judge
    before = g.clone()
    found = [c for c in candidates(G, g) if c.role != "floor"]
    assert set(MAIN) - {FLOOR} <= {c.name for c in found}
    for _ in range(2):
        answers = []
        for c in found:
            c.prepare()
            answers.append(torch.as_tensor(c.run()).clone())
        assert torch.equal(g, before)
        error = {c.name: quality.error for c, quality in zip(found, grade(G, g, answers), strict=True)}
        exact = [name for name in error if name.startswith("gemproj") and not name.endswith(("pgd", "agem"))]
        assert len(exact) == 9
        assert max(error[name] for name in [*exact, "GEM, reference recipe"]) < 1e-6
        assert max(error[name] for name in ("I-GEM, published", "gemproj pgd")) < 0.1
        assert error[MEAN] == pytest.approx(error["gemproj agem"], abs=1e-6)
        assert (error[GIVEN] > 0.01) == (t > 1)


def test_numbers_and_tables():
    numbers = 0, 0.012345, 1, 12.345, 999.9, 1234.5
    assert [digits(v) for v in numbers] == ["0", "0.0123", "1.00", "12.3", "1,000", "1,234"]
    assert [power(v) for v in (0.0, 2.4e-8, np.nan)] == ["0", "2e-08", ""]
    lines = Table("title", ["a\nb", "c"], [["1", "2"]]).markdown().splitlines()
    assert lines == ["**title**", "", "| a b | c |", "| :-- | --: |", "| 1 | 2 |"]


def test_the_report_has_all_tables_and_the_figure(impatient, tmp_path, capsys):
    out, figure = tmp_path / "bench.md", tmp_path / "bench.png"
    projection.main(t="1,2", d=20_000, seconds=0.0, out=out, figure=figure)
    text, shown = out.read_text(), capsys.readouterr().out
    for word in (
        "t = 1: G has",
        "t = 2: G has",
        FLOOR,
        "G by columns",
        "Sizes: t = 9",
        "One tiny",
        "Batches",
    ):
        assert word in text
        assert word in shown
    given = [row for row in cells(out) if row[0] == GIVEN]
    assert [len(row) for row in given] == [len(projection.HEAD)] * 2
    assert [row[3] for row in given] == ["1.0", "1.0"]
    assert (
        next(row for row in cells(out) if row[0] == "10,000")[1] == "0.36"
    )  # 9 rows of 10,000 floats, in MB
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_exchange_counts_what_two_processes_send(tmp_path):
    out = tmp_path / "exchange.md"
    exchange.main(t="3", d=1001, processes="2", rounds=2, out=out)
    row = next(row for row in cells(out) if row[0] == "3")
    # 3 * 3 + 3 + 1 numbers in float64 and 3 in int64
    assert row[:5] == ["3", "2", "2", str(8 * (13 + 3)), "0.0120"]
    assert all(float(cell) > 0 for cell in row[5:])
