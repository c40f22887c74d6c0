"""What `make bench` measures with, and the script that makes its tables and its figure."""

import threading
import time

import numpy as np
import pytest
from problems import assert_close, draw

torch = pytest.importorskip("torch")
for package in ("matplotlib", "osqp", "quadprog", "rich", "scipy", "threadpoolctl", "typer"):
    pytest.importorskip(package)
from benchmarks import memory, projection, small, timing  # noqa: E402
from benchmarks.candidates import FLOOR, GIVEN, MAIN, MEAN, candidates, problem  # noqa: E402
from benchmarks.quality import grade  # noqa: E402
from benchmarks.tables import Table, digits  # noqa: E402
from benchmarks.timing import BURST, FEWEST, MOST, Call, burst, in_turn, settle  # noqa: E402


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(timing, "settle", lambda: None)


def test_only_the_call_itself_is_timed():
    call = Call(lambda: time.sleep(0.001), lambda: time.sleep(0.02), lambda: time.sleep(0.02))
    assert 0.001 <= min(burst(call, 1e-9)) < 0.02


def test_calls_take_turns_and_are_prepared(impatient):
    log = []
    calls = {
        name: Call(
            lambda name=name: (log.append(name), time.sleep(1.1 * BURST)),
            lambda name=name: log.append("prepare " + name),
            lambda name=name: log.append("just before " + name),
        )
        for name in "ab"
    }
    times = in_turn(calls, seconds=0.0)
    assert [len(times[name]) for name in "ab"] == [FEWEST, FEWEST]
    assert log[:4] == ["prepare a", "a", "prepare b", "b"]
    assert log[4:] == FEWEST * ["prepare a", "just before a", "a", "prepare b", "just before b", "b"]


def test_short_calls_get_more_rounds_and_are_repeated(impatient):
    calls = {part: Call(lambda part=part: time.sleep(part * BURST)) for part in (0.0, 1.1, 5.0)}
    rounds = {part: len(times) for part, times in in_turn(calls, seconds=11 * BURST).items()}
    assert rounds[5.0] == FEWEST < rounds[1.1] < MOST < rounds[0.0] / 3


def test_settle_waits_for_busy_threads():
    end = time.perf_counter() + 0.15

    def spin():
        while time.perf_counter() < end:
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    settle()
    assert time.perf_counter() >= end
    thread.join()


def test_peak_memory_counts_what_is_freed_again():
    if memory.peak_memory(lambda: None) is None:
        pytest.skip("no /proc/self/clear_refs here")
    size = 64 << 20

    def run():
        np.ones(size, np.uint8)
        return np.ones(size // 4, np.uint8)

    assert memory.peak_memory(run) == pytest.approx(size, rel=0.05)
    kept = np.zeros(size, np.uint8)
    assert memory.peak_memory(lambda: kept.fill(1)) < 0.05 * size


def test_peak_memory_without_proc(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "PROC", tmp_path / "nothing")
    assert memory.peak_memory(lambda: None) is None


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
    G, g = problem(t, 40_000)  # more columns than a tile of the judge
    before = g.clone()
    assert bool((G @ g < 0).all())
    found = [c for c in candidates(G, g) if c.role != "floor"]
    for _ in range(2):
        answers = []
        for c in found:
            c.prepare()
            answers.append(torch.as_tensor(c.run()).clone())
        assert_close(g, before, atol=0)
        error = {c.name: quality.error for c, quality in zip(found, grade(G, g, answers), strict=True)}
        exact = ["quadprog", "osqp", "fista", "gem2017"]
        exact = [name for name in error if "exact" in name or name.split()[-1] in exact]
        assert len(exact) == 8
        assert max(error[name] for name in [*exact, "GEM, reference recipe"]) < 1e-6
        assert error["I-GEM, published"] < 1e-2
        assert error[MEAN] == pytest.approx(error["gemproj agem"], abs=1e-6)
        assert (error[GIVEN] > 0.01) == (t > 1)


def test_main_candidates_exist():
    assert set(MAIN) <= {c.name for c in candidates(*problem(1, 10))}


def test_digits():
    numbers = 0, 0.012345, 1, 12.345, 999.9, 1234.5
    assert [digits(v) for v in numbers] == ["0", "0.0123", "1.00", "12.3", "1,000", "1,234"]


def test_table():
    lines = Table("title", ["a\nb", "c"], [["1", "2"]]).markdown().splitlines()
    assert lines == ["**title**", "", "| a b | c |", "| :-- | --: |", "| 1 | 2 |"]


def test_small_tables():
    assert [row[0] for row in small.overhead(1e-3).rows] == ["exact", "agem"]
    table = small.batches(1e-3, sizes=(2, 3), numbers=1024)
    assert [row[:2] for row in table.rows] == [["2", "8"], ["3", "5"]]
    assert all(float(rate.replace(",", "")) > 1 for row in table.rows for rate in row[2:])


def test_script_writes_tables_and_figure(impatient, tmp_path, capsys):
    out, figure = tmp_path / "bench.md", tmp_path / "bench.png"
    projection.main(t="1,2", d=2000, seconds=0.0, out=out, figure=figure)
    text, shown = out.read_text(), capsys.readouterr().out
    for word in ("t = 1: G has", "t = 2: G has", FLOOR, "gemproj exact, NumPy, in place", "Batches"):
        assert word in text
        assert word in shown
    rows = [[part.strip() for part in line.split("|")[1:-1]] for line in text.splitlines() if "|" in line]
    given = [row for row in rows if row[0] == GIVEN]
    assert [len(row) for row in given] == [len(projection.HEAD)] * 2
    assert [row[3] for row in given] == ["1.0", "1.0"]
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert figure.stat().st_size > 30_000


def test_exchange_counts_what_two_processes_send(tmp_path, capsys):
    from benchmarks import exchange

    out = tmp_path / "exchange.md"
    exchange.main(t="3", d=1001, processes="2", rounds=2, out=out)
    assert "Exchange of one projection" in capsys.readouterr().out
    row = next(line for line in out.read_text().splitlines() if line.startswith("| 3 |"))
    cells = [cell.strip() for cell in row.split("|")[1:-1]]
    # 3 * 3 + 3 + 1 numbers in float64 and 3 in int64
    assert cells[:5] == ["3", "2", "2", str(8 * (13 + 3)), "0.0120"]
    assert all(float(cell) > 0 for cell in cells[5:])
