"""The study of a skill: what is run, what is chosen on which seeds, and the page."""

from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("rich")
pytest.importorskip("matplotlib")

import torch

from examples.study import skill
from examples.study.results import Results
from examples.study.settings import SEEDS, TUNING_SEEDS
from examples.study.skill import METHODS, RATES, SETTINGS, Run


@pytest.fixture
def tiny(monkeypatch, one_thread):
    monkeypatch.setattr(skill, "PRETRAINING", 4)
    for name, setting in SETTINGS.items():
        monkeypatch.setitem(SETTINGS, name, replace(setting, steps=3))
    skill.pretrained.cache_clear()
    yield
    skill.pretrained.cache_clear()


@pytest.mark.parametrize(
    ("setting", "method"), [("full", name) for name in METHODS] + [("lora", "kl-held"), ("few", "text-held")]
)
def test_every_method_learns_and_leaves_the_pretrained_model_alone(setting, method, tiny):
    before = [p.clone() for p in skill.pretrained(100).parameters()]
    run = Run(setting, method, 1e-2, METHODS[method].grid[0], 100, "tune")
    result = run(lambda *state: None)
    record = run.record(result)
    assert record["loss"]["y"] != record["loss"]["before"]
    assert {"x", "y", "reference", "kl", "before"} == set(record["loss"])
    assert (record["knob"] is None) == (not METHODS[method].knob)
    assert run.brief(result).startswith("loss on X")
    assert all(torch.equal(p, q) for p, q in zip(before, skill.pretrained(100).parameters(), strict=True))


def test_adapters_leave_the_weights_alone(tiny, monkeypatch):
    seen = []
    learn = skill.learn
    monkeypatch.setattr(skill, "learn", lambda model, *rest: seen.append(model) or learn(model, *rest))
    Run("lora", "plain", 1e-2, 0.0, 100, "tune")(lambda *state: None)
    names = [name for name, p in seen[-1].named_parameters() if p.requires_grad]
    assert names
    assert all("lora_" in name for name in names)


def answered(results, score, steps=10):
    """Answer whatever is asked for: `score` gives X of a run, Y is 2."""
    for _ in range(steps):
        for run in skill.todo(results):
            loss = {"x": score(run), "y": 2.0, "reference": 1.0, "kl": 0.1, "before": 1.2}
            results.records[run.key] = run.record({"loss": loss, "seconds": 2.0})
    return results


def best(run):
    """The lowest X is at the second rate and the first knob, whatever the seed adds."""
    grid = METHODS[run.method].grid
    return 2 + abs(RATES.index(run.rate) - 1) + 0.1 * grid.index(run.knob) + 0.01 * run.seed


def test_rate_and_knob_are_chosen_on_tuning_seeds_and_reported_on_others(tmp_path):
    results = answered(Results(tmp_path / "skill.jsonl"), best)
    assert not skill.todo(results)
    for name in METHODS:
        assert skill.chosen("full", name, results) == (RATES[1], METHODS[name].grid[0])
    runs = [Run(*key) for key in {(r["setting"], r["method"], r["lr"], r["knob"] or 0.0, r["seed"], r["phase"])
                                  for r in results.records.values()}]  # fmt: skip
    assert {run.seed for run in runs if run.phase == "tune"} == set(TUNING_SEEDS)
    assert {run.seed for run in runs if run.phase == "report"} == set(SEEDS)
    tuned = {name: sum(run.phase == "tune" and run.setting == "lora" and run.method == name for run in runs)
             for name in METHODS}  # fmt: skip
    assert {tuned[name] for name in METHODS if METHODS[name].knob} == {(len(RATES) + 2) * len(TUNING_SEEDS)}
    assert not any(run.phase == "tune" for run in runs if SETTINGS[run.setting].tuned)
    assert {run.knob for run in runs if run.setting == "few" and run.method == "kl"} == {
        METHODS["kl"].grid[0]
    }


def test_the_page_has_a_table_for_each_setting_that_is_complete(tmp_path):
    results = Results(tmp_path / "skill.jsonl")
    assert skill.page(results) == ""
    text = skill.page(answered(results, best))
    assert [title for title in (s.title for s in SETTINGS.values()) if f"**{title}**, 10 seeds" in text] == [
        setting.title for setting in SETTINGS.values()
    ]
    [row, *_] = [line for line in text.splitlines() if line.startswith("| KL held, bound 0.03 |")]
    assert "+0.100 ± 0.000" in row  # X + Y above that of replay of KL at its chosen weight
    assert "Replay of KL, weight 1 (chosen)" in text
    written = skill.publish(results, tmp_path)
    assert [path.name for path in written] == ["skill.md", "skill-full.png", "skill-lora.png"]
    key = next(key for key, record in results.records.items() if record["setting"] == "few")
    del results.records[key]
    assert SETTINGS["few"].title not in skill.page(results)
