"""A skill is kept within the tolerance that was given, in the example and in the study, which tunes on other seeds."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("mnist1d", reason="needs the extra examples")

import torch

from examples import keep_a_skill
from examples.study import skill
from examples.study.results import Results
from examples.study.settings import SEEDS, TUNING_SEEDS
from examples.study.skill import METHODS, RATES, SETTINGS, Run

# The matrices are small, and threads would wait for those of other tests.
pytestmark = pytest.mark.usefixtures("one_thread")


def test_keep_a_skill(tmp_path, monkeypatch):
    chosen = ("plain", "replay of KL, weight 3", "KL held, tolerance 0.1")
    monkeypatch.setattr(keep_a_skill, "METHODS", [m for m in keep_a_skill.METHODS if str(m) in chosen])
    figure, out = tmp_path / "figure.png", tmp_path / "numbers.json"
    keep_a_skill.main(["--steps", "40", "--figure", str(figure), "--out", str(out)])
    assert figure.read_bytes().startswith(b"\x89PNG")
    rows = json.loads(out.read_text())["rows"]
    before, plain, replay, held = rows
    assert [row["method"] for row in rows] == ["before", *chosen]
    assert before["kl"] < 1e-5
    assert before["x"] != before["reference"]  # which are other texts
    assert plain["y"] < before["y"] - 1
    assert plain["x"] > before["x"] + 0.5
    for row in (replay, held):
        assert row["x"] < plain["x"] - 0.3
        assert row["y"] < before["y"] - 0.8
    assert held["kl"] < 0.1 + 0.03


@pytest.mark.parametrize(
    ("setting", "method"), [("full", name) for name in METHODS] + [("lora", "kl-held"), ("few", "text-held")]
)
def test_every_method_learns(setting, method, monkeypatch):
    """Methods leave the pretrained model alone."""
    monkeypatch.setattr(skill, "PRETRAINING", 4)
    monkeypatch.setitem(SETTINGS, setting, replace(SETTINGS[setting], steps=3))
    start = skill.pretrained.__wrapped__(100)
    monkeypatch.setattr(skill, "pretrained", lambda seed: start)
    before = [p.clone() for p in start.parameters()]
    run = Run(setting, method, 1e-2, METHODS[method].grid[0], 100, "tune")
    record = run.record(run())
    assert record["loss"]["y"] != record["loss"]["before"]
    assert all(torch.equal(p, q) for p, q in zip(before, start.parameters(), strict=True))


def best(run):
    """The lowest X is at the second rate and the first knob, whatever the seed adds."""
    grid = METHODS[run.method].grid
    return 2 + abs(RATES.index(run.rate) - 1) + 0.1 * grid.index(run.knob) + 0.01 * run.seed


def test_seeds_of_tuning_and_reports(tmp_path):
    """Rate and knob are chosen on tuning seeds, and reported on others."""
    results, runs = Results(tmp_path / "skill.jsonl"), []
    assert skill.page(results) == ""
    while waiting := skill.todo(results):
        runs += waiting
        for run in waiting:
            loss = {"x": best(run), "y": 2.0, "reference": 1.0, "kl": 0.1, "before": 1.2}
            results.records[run.key] = run.record({"loss": loss, "seconds": 2.0})
    for name in METHODS:
        assert skill.chosen("full", name, results) == (RATES[1], METHODS[name].grid[0])
    for phase, seeds in (("tune", TUNING_SEEDS), ("report", SEEDS)):
        assert {run.seed for run in runs if run.phase == phase} == set(seeds)
    tuned = [run for run in runs if run.phase == "tune"]
    assert not any(SETTINGS[run.setting].tuned for run in tuned)
    for name in (name for name in METHODS if METHODS[name].knob):
        mine = [run for run in tuned if (run.setting, run.method) == ("lora", name)]
        assert len(mine) == (len(RATES) + 2) * len(TUNING_SEEDS)
    [row, *_] = [
        line for line in skill.page(results).splitlines() if line.startswith("| KL held, tolerance 0.03 |")
    ]
    assert "+0.100 ± 0.000" in row  # X + Y above that of replay of KL at its chosen weight
