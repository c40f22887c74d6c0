"""The study's tables and figures on made-up runs, whose numbers are known."""

from dataclasses import dataclass

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("scipy", reason="needs the extra examples")
pytest.importorskip("rich", reason="needs the extra examples")
pytest.importorskip("matplotlib", reason="needs the extra examples")

from matplotlib.text import Text

from examples.common.drawing import STYLE, save
from examples.common.metrics import METRICS
from examples.study import across, compare, figures, report


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


def test_tables_show_means_deviations_settings_and_seeds(runs):
    row = rows_of(report.accuracy(runs, METHODS))["GEM"]
    values = 100 * (np.mean([0.4, 0.6, 0.9]) + np.array([0.08, 0.11, 0.11, 0.09]))  # gains, and seeds
    assert row["Seeds"] == "4"
    assert row["Setting"] == "lr 0.03, margin 0.3"
    assert row["AvgAcc (%)"] == f"{values.mean():.1f} ± {values.std(ddof=1):.1f}"
    assert row["Lowest of past tasks (%)"] == "25.0 ± 0.0"
    costs = rows_of(report.cost(runs, METHODS))
    assert costs["GEM"]["Relative"] == "8.00 ± 0.00"
    assert costs["GEM"]["Batch"] == costs["GEM"]["Whole step"] == "80 ± 0"
    assert costs["GEM"]["Projection"] == "-"
    assert costs["GEM"]["Memory (kB)"] == "2 ± 0"
    assert rows_of(report.promises(runs, METHODS))["Replay"]["Worst cosine of a step"] == "-0.500 ± 0.000"


def test_a_number_that_some_runs_lack_says_of_how_many_it_is(records):
    for record in records:
        if record["method"] == "gem" and record["seed"] != 1:
            record["guarantee"] = {"gradient": None, "update": None, "probes": []}
        if record["method"] == "plain":
            record["drift"] = None
    rows = rows_of(report.promises(grouped(records), METHODS))
    assert rows["GEM"]["Violated by step (%)"] == "25.0 (1 of 4 seeds)"
    assert rows["GEM"]["Drift (nats)"] == "0.100 ± 0.000"
    assert rows["Fine-tuning"]["Drift (nats)"] == "-"


def test_differences_are_bold_where_the_interval_excludes_zero(runs):
    runs["plain"] = runs["plain"][:1]
    rows = rows_of(report.differences(runs, METHODS))
    assert set(rows) == {"Fine-tuning", "GEM", "GEM, 4 rows"}
    assert rows["GEM"]["AvgAcc"].startswith("**+4.0 [+")
    assert not rows["GEM, 4 rows"]["AvgAcc"].startswith("**")
    assert rows["Fine-tuning"] == rows["Fine-tuning"] | {"Seeds": "1", "AvgAcc": "-5.0 (one seed)"}


def test_the_page_names_what_is_missing_and_stands_without_any_run(records):
    text = report.page(records, METHODS, "permuted", "rows")
    assert "No reported runs yet: GPM." in text
    assert text.count("| Method |") == 5  # accuracy, cost, promises, differences to replay and to GEM
    assert report.page([], METHODS, "permuted", "rows").startswith("No reported runs yet: Fine-tuning")


def test_the_cheapest_is_the_fastest_that_is_not_worse(runs):
    assert compare.cheapest_within_noise(runs, runs, runs, "gem") == "cheap"  # plain is faster, and worse
    assert compare.cheapest_within_noise(runs, runs, ["plain", "gpm"], "gem") is None
    runs["plain"] = runs["plain"][:1]  # one seed has no interval
    assert compare.cheapest_within_noise(runs, runs, ["plain", "gem"], "gem") == "gem"
    text = report.cheapest(runs, runs, METHODS, ["cheap", "gem"], "gem")
    assert "GEM, 4 rows: 20 ms per step against 80" in text


def test_variants_stand_below_what_they_vary(runs):
    lines = [line for line in report.variants(runs, METHODS, ["cheap"], runs).splitlines() if "|" in line]
    gem, cheap = lines[2:]
    assert gem.startswith("| GEM |")
    assert cheap.startswith("| GEM, 4 rows | 4 |")
    found = compare.paired(runs["cheap"], runs["gem"], compare.average_accuracy)
    assert report.difference(found) in cheap


def test_differences_after_each_task_are_of_the_tasks_learned_so_far(runs):
    rows = rows_of(report.after_each_task(runs, METHODS, "gem", ["plain", "gpm"]))
    assert list(rows) == ["Fine-tuning"]
    assert list(rows["Fine-tuning"]) == ["2 tasks", "3 tasks"]
    for k in (2, 3):
        gains = [np.mean(np.subtract(a["accuracies"], b["accuracies"])[k, :k])
                 for a, b in zip(runs["gem"], runs["plain"], strict=True)]  # fmt: skip
        assert rows["Fine-tuning"][f"{k} tasks"] == report.difference(compare.interval(gains))


def test_the_same_time_takes_the_longest_step_within_the_budget(runs):
    ladders = ["plain", "replay"], ["cheap", "gem"]
    rows = rows_of(report.equal_time(runs, runs, METHODS, ladders, (0.5, 2, 5, 9)))
    assert [row["Fine-tuning"] for row in rows.values()] == ["-", "Fine-tuning", "Replay", "Replay"]
    assert [row["GEM, 4 rows"] for row in rows.values()] == ["-", "GEM, 4 rows", "GEM, 4 rows", "GEM"]
    assert rows["0.5"]["Difference"] == "-"
    assert rows["9"]["Difference"] == report.difference(
        compare.paired(runs["gem"], runs["replay"], compare.average_accuracy)
    )


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


def test_figures_say_over_how_many_seeds_and_never_mix_settings(runs, records):
    runs["gem"] = runs["gem"][:3]
    assert "over 3 to 4 seeds" in figures.accuracy_and_cost(runs, METHODS).get_supxlabel()
    assert "over 4 seeds" in figures.accuracy_over_stream(runs, METHODS, ["plain", "gpm"]).get_supxlabel()
    sizes = [record | {"per_task": 10, "policy": "ring"} for record in records]
    assert "over 4 seeds" in figures.memory([*sizes, sizes[0] | {"phase": "tune"}], METHODS).get_supxlabel()
    with pytest.raises(ValueError, match="one run per seed"):
        figures.memory([*sizes, sizes[0] | {"lr": 1.0}], METHODS)


def test_labels_do_not_cover_each_other():
    names = {f"m{k}": Method(f"Method {k}", "#0072B2", "One") for k in range(15)}
    runs = {
        f"m{k}": [run(f"m{k}", seed, 0.002 * k, 0.01 + 0.001 * k) for seed in range(3)] for k in range(15)
    }
    figure = figures.accuracy_and_cost(runs, names, plain="m0")
    figure.draw_without_rendering()
    boxes = [Text.get_window_extent(text) for text in figure.axes[0].texts]
    assert len(boxes) == 15
    assert not any(a.overlaps(b) for k, a in enumerate(boxes) for b in boxes[:k])


def test_joint_training_has_no_order_and_a_diverged_run_no_drift():
    methods = METHODS | {"all": Method("Joint", "#000000", "Bounds", joint=True)}
    records = [run(name, seed) for name in ("plain", "replay", "all") for seed in range(3)]
    records[0] |= {"drift": 1e30, "diverged": True}
    text = report.page(records, methods, "permuted", "rows")
    row = rows_of(report.accuracy(grouped(records, methods), methods))["Joint"]
    assert list(row.values()).count("-") == 4
    assert "(2 of 3 seeds)" in text
    assert "Joint" not in text[text.index("Method minus Replay") :]


def test_times_are_those_of_runs_that_had_the_machine_to_themselves():
    records = [run(name, seed, step=0.01) for name in ("plain", "replay") for seed in range(3)]
    records += [run("replay", seed, step=0.04) | {"phase": "time"} for seed in range(2)]
    runs = grouped(records)
    times = compare.timed(runs, records)
    assert len(runs["replay"]) == 3
    assert [len(times[name]) for name in ("plain", "replay")] == [3, 2]
    ratio = compare.mean_step(times["replay"]) / compare.mean_step(times["plain"])
    assert ratio == pytest.approx(4, rel=0.1)


def test_tables_over_streams_leave_out_what_nobody_ran(runs):
    streams = {"First": runs, "Second": {"gem": runs["gem"][:1], "replay": runs["replay"]}, "Third": {}}
    pairs = {"Replay": ("gem", "replay"), "Plain": ("gem", "plain"), "GPM": ("gem", "gpm")}
    gain = np.array([0.03, 0.05, 0.04, 0.04])
    half = 100 * compare.interval(gain).half
    expected = {"Seeds": "4", "Replay": f"**+4.0 ± {half:.1f}**", "Plain": f"**+9.0 ± {half:.1f}**"}
    found = rows_of(across.differences("", streams, pairs))
    assert found == {"First": expected, "Second": {"Seeds": "1", "Replay": "+3.0 (one seed)", "Plain": "-"}}
    turned = rows_of(across.differences("", streams, pairs, turned=True))
    assert {name: row["First"] for name, row in turned.items()} == expected


def test_a_single_line_of_differences_stands_at_its_tasks(runs):
    for others in (["replay"], ["replay", "plain", "cheap"]):
        (axes,) = figures.after_each_task(runs, METHODS, "gem", others).axes
        lines = [container[0].get_xdata() for container in axes.containers]
        assert len(lines) == len(others)
        np.testing.assert_allclose(np.mean(lines, axis=0), [2, 3])


def test_methods_are_compared_where_rate_and_weight_are_the_same(runs):
    assert len(rows_of(across.at_equal_settings("", {"First": runs}, "gem", ("replay", "plain")))) == 0
    same = {"gem": runs["gem"], "replay": [run("replay", seed, knob=0.3) for seed in range(4)]}
    row = rows_of(across.at_equal_settings("", {"First": same}, "gem", ("plain", "replay")))["First"]
    assert (row["Rate"], row["Weight"], row["AvgAcc"][:6]) == ("0.03", "0.3", "**+9.0")
    assert row["Lowest of past tasks"] == "+0.0 ± 0.0"  # the same curve


def test_steps_are_compared_where_they_were_timed_alone(runs):
    alone = {name: [run(name, seed, step=0.02 * k, phase="time") for seed in (0, 1)] for k, name in
             enumerate(("plain", "gem"), 1)}  # fmt: skip
    text = across.relative_times(
        "Times.", {"First": runs | alone, "Second": runs}, {"gem": "GEM", "replay": "Replay"}
    )
    assert text.startswith("Times.\n\n")
    assert rows_of(text) == {"GEM": {"First": "2.0"}, "Replay": {"First": "-"}}
