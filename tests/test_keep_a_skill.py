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


@pytest.mark.filterwarnings("ignore:After 20 steps")  # so few steps go with a high rate
def test_keep_a_skill(tmp_path, monkeypatch):
    chosen = ("plain", "KL held, tolerance 0.1")
    monkeypatch.setattr(keep_a_skill, "METHODS", [m for m in keep_a_skill.METHODS if str(m) in chosen])
    figure, out = tmp_path / "figure.png", tmp_path / "numbers.json"
    keep_a_skill.main(["--steps", "40", "--figure", str(figure), "--out", str(out)])
    assert figure.read_bytes().startswith(b"\x89PNG")
    before, plain, held = json.loads(out.read_text())["rows"]
    assert before["kl"] < 1e-5
    assert before["x"] != before["reference"]  # which are other texts
    assert plain["y"] < before["y"] - 1
    assert plain["x"] > before["x"] + 0.5
    assert held["x"] < plain["x"] - 0.3
    assert held["y"] < before["y"] - 0.8
    assert held["kl"] < 0.1 + 0.03


REFUSED = {"--steps 0": "at least 1", "--seeds 0": "at least 1", "--out no/numbers.json": "in no folder"}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_cannot_be_done_is_said_before_the_first_seed(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        keep_a_skill.main(arguments.split())
    assert REFUSED[arguments] in capsys.readouterr().err


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


def test_rate_and_knob_are_chosen_on_other_seeds_than_those_reported(tmp_path):
    """The lowest X is at the second rate and the first knob, whatever the seed adds."""
    results, runs = Results(tmp_path / "skill.jsonl"), []
    while waiting := skill.todo(results):
        runs += waiting
        for run in waiting:
            knob = METHODS[run.method].grid.index(run.knob)
            x = 2 + abs(RATES.index(run.rate) - 1) + 0.1 * knob + 0.01 * run.seed
            loss = {"x": x, "y": 2.0, "reference": 1.0, "kl": 0.1, "before": 1.2}
            results.records[run.key] = run.record({"loss": loss, "seconds": 2.0})
    for name in METHODS:
        assert skill.chosen("full", name, results) == (RATES[1], METHODS[name].grid[0])
    for phase, seeds in (("tune", TUNING_SEEDS), ("report", SEEDS)):
        assert {run.seed for run in runs if run.phase == phase} == set(seeds)
    assert "| KL held, tolerance 0.03 |" in skill.page(results)
