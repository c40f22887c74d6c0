"""The study's comparisons and figures on made-up runs, whose numbers are known.

Its tables are compared, letter by letter, with the committed pages in test_study.py.
"""

from dataclasses import dataclass

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("scipy", reason="needs the extra examples")
pytest.importorskip("rich", reason="needs the extra examples")
pytest.importorskip("matplotlib", reason="needs the extra examples")


from examples.common.drawing import STYLE, save
from examples.common.metrics import METRICS
from examples.study import compare, figures, report


@dataclass(frozen=True)
class Method:
    title: str
    colour: str
    family: str
    knob: str = ""
    joint: bool = False
    like: str = ""


METHODS = {
    "plain": Method("Fine-tuning", "#999999", "Bounds"),
    "replay": Method("Replay", "#009E73", "Replay", "weight"),
    "gem": Method("GEM", "#0072B2", "GEM", "margin"),
    "cheap": Method("GEM, 4 rows", "#56B4E9", "GEM", "margin", like="gem"),
    "gpm": Method("GPM", "#CC79A7", "Subspaces"),
}


def run(method, seed, gain=0.0, step=0.01, **changes):
    """Three tasks; every accuracy after training is higher by `gain`, and by a little for the seed."""
    R = np.array([[0.2, 0.1, 0.3], [0.8, 0.2, 0.3], [0.5, 0.7, 0.3], [0.4, 0.6, 0.9]])
    R[1:] += gain + 0.01 * (seed % 3)
    curve = {
        0: [0.2, 0.1, 0.3], 10: [0.8, 0.2, 0.3], 15: [0.3, 0.5, 0.3],
        20: [0.5, 0.7, 0.3], 25: [0.45, 0.2, 0.8], 30: [0.4, 0.6, 0.9],
    }  # fmt: skip
    part = {"batch": step, "constraints": 0.0, "projection": 0.0, "optimizer": 0.0}
    record = {
        "stream": "permuted", "method": method, "phase": "report", "budget": "rows", "lr": 0.03, "knob": None,
        "seed": seed, "accuracies": R.tolist(), "metrics": {name: f(R) for name, f in METRICS.items()},
        "boundaries": [10, 20, 30],
        "curve": [{"step": s, "accuracy": a} for s, a in curve.items()],
        "guarantee": {v: {"violated": 0.25, "worst_cosine": -0.5} for v in ("gradient", "update")},
        "drift": 0.1, "seconds": {"per_step": part, "mean_projection": None}, "bytes": 2000,
    }  # fmt: skip
    return record | changes


@pytest.fixture
def records():
    found = [run("plain", seed) for seed in range(4)]
    found += [run("replay", seed, 0.05, 0.03, knob=2.0) for seed in range(4)]
    gains = [0.08, 0.10, 0.09, 0.09]
    found += [run("gem", seed, gain, 0.08, knob=0.3) for seed, gain in enumerate(gains)]
    noise = [0.12, 0.06, 0.10, 0.05]
    return found + [run("cheap", seed, gain, 0.02, knob=0.5) for seed, gain in enumerate(noise)]


def grouped(records, methods=METHODS):
    return compare.reported(records, methods, "permuted", "rows")


@pytest.fixture
def runs(records):
    """Return the records by method; steps take 10, 30, 80 and 20 ms."""
    return grouped(records)


def test_lowest_past_accuracy_looks_after_each_task_was_learned():
    # Task 1: .3 at step 15, not the .2 before training; task 2: .2 at step 25. Task 3 is not past.
    assert compare.lowest_past_accuracy(run("gem", 0)) == pytest.approx((0.3 + 0.2) / 2)


def test_intervals_agree_with_scipy():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 10))
    expected = stats.ttest_rel(a, b).confidence_interval()
    found = compare.interval(a - b)
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((expected.low, expected.high))
    assert found.excludes_zero == (stats.ttest_rel(a, b).pvalue < 0.05)


def test_an_interval_of_one_seed_excludes_nothing_and_of_equal_values_not_zero():
    assert not compare.interval([3.0]).excludes_zero
    assert not compare.interval([0.0, 0.0]).excludes_zero
    assert compare.interval([3.0, 3.0]).excludes_zero
    with pytest.raises(ValueError, match="must not be empty"):
        compare.interval([])


def test_pairs_are_of_the_same_seed_whatever_the_order():
    a = [run("gem", seed, 0.1) for seed in (5, 1, 0, 2)]
    b = [run("replay", seed) for seed in (0, 1, 2, 3)]
    found = compare.paired(a, b, compare.average_accuracy)
    assert (found.mean, found.n) == (pytest.approx(0.1), 3)
    assert found.half == pytest.approx(0, abs=1e-12)  # what differs between seeds is gone
    assert compare.paired(a, [run("replay", 9)], compare.average_accuracy) is None


def test_only_the_reported_runs_of_the_stream_and_the_budget_count(records):
    others = [{"phase": "tune"}, {"stream": "split"}, {"budget": "time"}]
    noise = [run("gpm", 0, **other) for other in others] + [run("gem", 100, **other) for other in others]
    runs = grouped(noise + records[::-1])
    assert list(runs) == ["plain", "replay", "gem", "cheap"]
    assert [record["seed"] for record in runs["gem"]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("extra", "message"),
    [({"seed": 2}, r"seeds \[2\] more than once"), ({"seed": 7, "lr": 1.0}, "more than one")],
)
def test_runs_that_do_not_belong_together_are_an_error(records, extra, message):
    extra = run("gem", **{"knob": 0.3} | extra)
    with pytest.raises(ValueError, match=message):
        grouped([*records, extra])


def rows_of(text):
    """Return the cells of a Markdown table by method."""
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return {cells[0]: dict(zip(lines[0][1:], cells[1:], strict=True)) for cells in lines[2:]}


def test_the_cheapest_is_the_fastest_that_is_not_worse(runs):
    assert compare.cheapest_within_noise(runs, runs, runs, "gem") == "cheap"  # plain is faster, and worse
    assert compare.cheapest_within_noise(runs, runs, ["plain", "gpm"], "gem") is None
    runs["plain"] = runs["plain"][:1]  # one seed has no interval
    assert compare.cheapest_within_noise(runs, runs, ["plain", "gem"], "gem") == "gem"
    text = report.cheapest(runs, runs, METHODS, ["cheap", "gem"], "gem")
    assert "GEM, 4 rows: 20 ms per step against 80" in text


def test_the_front_holds_what_nothing_cheaper_surpasses():
    points = {"a": (1, 5), "b": (2, 4), "c": (3, 8), "d": (3, 7), "e": (4, 8), "f": (9, 9)}
    assert figures.pareto(points) == ["a", "c", "f"]


def test_figures_are_drawn_also_of_few_seeds(runs, records, tmp_path, monkeypatch):
    monkeypatch.setitem(STYLE, "figure.dpi", 40)
    runs["plain"] = runs["plain"][:1]
    kinds = [{"per_task": n, "policy": policy} for n in (10, 100) for policy in ("ring", "reservoir")]
    sizes = [record | kind for record in records for kind in kinds]
    skills = [
        one | {"loss": {"x": 4.0 + one["seed"], "y": 3.0 + k}, "knob": k}
        for k in (1.0, 3.0)
        for one in records
    ]
    drawings = [
        (figures.accuracy_and_cost, runs, METHODS),
        (figures.accuracy_over_stream, runs, METHODS, ["gem", "plain", "gpm"]),
        (figures.paired_differences, runs, METHODS),
        (figures.after_each_task, runs, METHODS, "gem", ["plain", "cheap", "gpm"]),
        (figures.ladders, runs, METHODS, runs, [["replay", "gem"], ["plain", "cheap"]]),
        (figures.losses, skills, METHODS, 3.5),
        (figures.memory, sizes, METHODS),
    ]
    for drawing, *arguments in drawings:
        path = save(tmp_path / f"{drawing.__name__}.png", drawing, *arguments)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_times_are_those_of_runs_that_had_the_machine_to_themselves():
    records = [run(name, seed, step=0.01) for name in ("plain", "replay") for seed in range(3)]
    records += [run("replay", seed, step=0.04) | {"phase": "time"} for seed in range(2)]
    runs = grouped(records)
    times = compare.timed(runs, records)
    assert len(runs["replay"]) == 3
    assert [len(times[name]) for name in ("plain", "replay")] == [3, 2]
    ratio = compare.mean_step(times["replay"]) / compare.mean_step(times["plain"])
    assert ratio == pytest.approx(4, rel=0.1)
