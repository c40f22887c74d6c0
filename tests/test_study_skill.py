"""The study of a skill: it is kept within the tolerance that was given, and tuned on other seeds."""

import copy
from dataclasses import replace

import pytest

pytest.importorskip("mnist1d", reason="needs the extra examples")

import torch

from examples.common.results import Results
from examples.study import language, skill
from examples.study.settings import SEEDS, TUNING_SEEDS
from examples.study.skill import METHODS, RATES, SETTINGS, Run

# The matrices are small, and threads would wait for those of other tests.
pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_tolerance_keeps_the_skill():
    texts = language.texts_of(0)
    torch.manual_seed(0)
    start = language.network()
    language.learn(start, texts["pretrain"], 160, 0, 3e-2)
    said = language.KL.outputs(start, texts["reference"])
    found = {"before": language.losses(start, texts, said)}
    for kind, tolerance in (("plain", None), ("held", 0.1)):
        model = copy.deepcopy(start)
        loss = language.KL if tolerance else None
        language.learn(model, texts["tune"], 40, 0, 3e-2, kind, loss, tolerance, texts["reference"])
        found[kind] = language.losses(model, texts, said)
    before, plain, held = found.values()
    assert before["kl"] < 1e-5
    assert plain["y"] < before["y"] - 0.8
    assert held["y"] < before["y"] - 0.5
    assert held["x"] < plain["x"] - 0.3
    assert held["kl"] < 0.1 + 0.03


def test_the_seed_draws_stored_texts(monkeypatch):
    assert not torch.equal(*(next(language.drawn(48, seed)) for seed in (0, 1)))
    seeds, texts = [], language.texts_of(0)
    monkeypatch.setattr(language, "seed_draws", lambda keeper, seed: seeds.append(seed))
    how = (1, 7, 1e-2, "held", language.KL, 0.1, texts["reference"])
    language.learn(language.network(), texts["tune"], *how)
    assert seeds == [7]


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
        assert Run.chosen("full", name, results) == (RATES[1], METHODS[name].grid[0])
    for phase, seeds in (("tune", TUNING_SEEDS), ("report", SEEDS)):
        assert {run.seed for run in runs if run.phase == phase} == set(seeds)
    assert "| KL held, tolerance 0.03 |" in skill.page(results)
