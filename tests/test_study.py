"""The study: its methods, its runs, and what is kept of them."""

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("rich")
pytest.importorskip("sklearn")
pytest.importorskip("psutil")

import psutil
import torch
from rich.console import Console

from examples.common.command import SetupError
from examples.study import plan, publish, runs, settings, skill, streams, train
from examples.study.learners import Setup
from examples.study.results import Results, results_of
from examples.study.settings import METHODS, STREAMS, TUNING_SEEDS
from tests.tiny import TINY, one_by_one

pytestmark = pytest.mark.usefixtures("one_thread")

ADAM = ("gem-step", "gem-moments")


def run_of(name, **changes):
    """Return a run in miniature, in the middle of the method's grid."""
    knob = METHODS[name].grid[1] if METHODS[name].grid else 0.0
    setting = replace(TINY, optimizer="adamw" if name in ADAM else "sgd")
    return replace(train.Run("tiny", setting, name, 0.05, knob, 3, "report"), **changes)


@lru_cache
def done(name, **changes):
    """Return the record of a run; the same one whenever it is asked for."""
    run = run_of(name, **changes)
    return run.record(run(lambda *state: None))


def without_times(record):
    return {key: value for key, value in record.items() if key not in ("seconds", "wall_seconds", "stream")}


@pytest.mark.parametrize("name", [*settings.BASIC, *settings.CHEAPER])
def test_every_method_learns(name):
    record = done(name)
    assert record["method"] == name
    assert len(record["accuracies"]) == 4
    assert record["curve"][-1]["step"] == record["boundaries"][-1] == 18
    assert json.loads(json.dumps(record)) == record


@pytest.mark.parametrize("name", ["gem-label", "sgem", "gpm", "der", "mega2"])
def test_a_run_repeats_itself(name):
    assert without_times(done.__wrapped__(name)) == without_times(done(name))


def test_gem_keeps_its_promise_and_others_do_not():
    assert done("plain")["guarantee"]["gradient"]["violated"] > 0
    assert done("gem-all")["guarantee"]["gradient"]["violated"] == 0
    assert done("gem-step")["guarantee"]["update"]["violated"] == 0


def test_methods_that_store_examples_have_the_same_bytes():
    names = [name for name in settings.BASIC if METHODS[name].family not in ("reference", "no examples")]
    found = {name: done(name)["bytes"] for name in names}
    example = 64 * 4 + 8
    # Those that store outputs, too, have room for fewer; losses of a bound come on top, four bytes each.
    assert all(3 * 8 * example - 3 * (example + 40) < b <= 3 * 8 * (example + 4) for b in found.values())


def test_until_there_is_a_memory_all_methods_are_alike():
    alike = [name for name in settings.BASIC if name not in ("joint", "gem-step")]
    assert len({tuple(done(name)["accuracies"][1]) for name in alike}) == 1


def learner_of(name, knob=0.0, like=None, optimizer=torch.optim.SGD, rate=0.1):
    """Return a learner, of the same model as another one if there is one, and a batch of each task."""
    stream = streams.load("permuted", 0, tasks=3, rows=40, hidden=8)
    setup = Setup(stream, optimizer(stream.model.parameters(), lr=rate), knob, 8, "reservoir", 8, 0)
    learner = METHODS[name].learner(setup)
    learner.model = like.model if like else learner.model
    return learner, [task.train for task in stream.tasks]


def first(n, batch):
    return {name: values[:n] for name, values in batch.items()}


def test_replay_adds_the_mean_loss_of_each_past_task():
    learner, (*past, now) = learner_of("replay", 0.7)
    plain, _ = learner_of("plain", like=learner)
    kept = [first(8, batch) for batch in past]
    for k, batch in enumerate(kept):
        learner.end_task(k, batch)
    expected = plain.loss(now) + 0.7 * sum(plain.loss(batch) for batch in kept)
    torch.testing.assert_close(learner.loss(now), expected)


def test_replay_with_divergence_adds_nothing_of_it_before_a_step():
    """The divergence from what the model has just said is zero: what is left is replay."""
    distilled, (batch, now, _) = learner_of("der", 0.7)
    replay, _ = learner_of("replay", 0.7, like=distilled)
    for learner in (distilled, replay):
        learner.end_task(0, first(6, batch))
    torch.testing.assert_close(distilled.loss(now), replay.loss(now))


@pytest.mark.parametrize("name", ["ewc", "si"])
def test_a_penalty_is_quadratic_around_the_old_weights(name):
    learner, (batch, *_) = learner_of(name, 2.0)
    optimizer = learner.setup.optimizer
    for _ in range(3):
        optimizer.zero_grad()
        learner.loss(batch).backward()
        optimizer.step()
        learner.end_step()
    plain, _ = learner_of("plain", like=learner)
    learner.end_task(0, first(8, batch))
    torch.testing.assert_close(learner.loss(batch), plain.loss(batch))
    assert all((w >= 0).all() for w in learner.importance)
    assert max(float(w.max()) for w in learner.importance) > 0
    excess = []
    for factor in (1.0, 2.0):
        with torch.no_grad():
            for p, a in zip(learner.parameters, learner.anchor, strict=True):
                p.copy_(a + factor * 0.1)
        excess.append((learner.loss(batch) - plain.loss(batch)).item())
    assert excess[1] == pytest.approx(4 * excess[0], rel=1e-3)


def test_importances_of_ewc_are_mean_squares_of_gradients():
    learner, (batch, *_) = learner_of("ewc", 1.0)
    learner.end_task(0, first(2, batch))
    rows = []
    for i in range(2):
        loss = learner.cross_entropy(learner.model, {k: v[i : i + 1] for k, v in batch.items()}).sum()
        rows.append(torch.autograd.grad(loss, learner.parameters)[0])
    torch.testing.assert_close(learner.importance[0], (rows[0] ** 2 + rows[1] ** 2) / 2)


def test_two_moments_of_adam():
    """Without a violated constraint nothing is changed; with one, the second moment is that of the gradient."""
    learner, (batch, *_) = learner_of("gem-moments", optimizer=torch.optim.AdamW, rate=1e-3)
    optimizer, parameters = learner.setup.optimizer, learner.setup.parameters
    record = train.Recorder.__new__(train.Recorder)
    record.time = lambda phase: contextlib.nullcontext()
    learner.loss(batch).backward()
    optimizer.step()
    learner.end_task(0, first(8, batch))
    before = [optimizer.state[p]["exp_avg_sq"].clone() for p in parameters]
    optimizer.zero_grad()
    (-learner.loss(first(8, batch))).backward()  # against the constraint
    raw = [p.grad.clone() for p in parameters]
    learner.constrain(record, None)
    assert not torch.allclose(raw[0], parameters[0].grad)
    optimizer.step()
    for p, g, v in zip(parameters, raw, before, strict=True):
        torch.testing.assert_close(optimizer.state[p]["exp_avg_sq"], 0.999 * v + 0.001 * g.square())


def test_a_run_that_diverges_is_a_result():
    for name in ("plain", "gem", "replay", "gpm"):
        record = done(name, rate=1e30)
        assert record["diverged"]
        assert record["metrics"]["average_accuracy"] < 0.5


def test_each_method_has_the_same_number_of_settings(tmp_path):
    results = Results(tmp_path / "runs.jsonl")
    for name in STREAMS["agnews3"].methods:
        answers(results, "agnews3", name, lambda point: point[1] - abs(point[0] - 3e-4))
        if METHODS[name].like:
            continue
        tried = plan.points("agnews3", name, results)
        assert len(set(tried)) == 5
        best = plan.chosen("agnews3", name, results)
        assert best == max(tried, key=lambda point: point[1] - abs(point[0] - 3e-4))


def test_what_is_taken_over_was_chosen_with_fewer_tasks():
    committed = Results(Path(__file__).parents[1] / "docs/results/study/runs/agnews10.jsonl")
    for name, point in STREAMS["agnews20"].fixed.items():
        assert point == plan.chosen("agnews10", name, committed)
    waiting = plan.todo("agnews20", Results(Path("none.jsonl")))
    assert {run.phase for run in waiting} == {"report"}
    assert {(run.rate, run.knob) for run in waiting if run.method == "gem-margin-4"} == {(1e-3, 0.5)}


def answers(results, stream, name, score):
    """Put results of tuning into a store, as far as they are asked for."""
    while waiting := [run for run in plan.todo(stream, results, [name]) if run.phase == "tune"]:
        for run in waiting:
            metrics = {"average_accuracy": score((run.rate, run.knob))}
            results.records[run.key] = {"key": run.key, "metrics": metrics}


def test_what_is_reported_was_not_chosen_on():
    assert not set(TUNING_SEEDS) & set(settings.SEEDS)


ABOUT = {"hashes": {"data": "0a"}, "versions": {"torch": "2"}}


def test_results_come_back_and_a_line_that_was_cut_off_is_done_again(tmp_path):
    path = tmp_path / "runs" / "tiny.jsonl"
    results = Results(path)
    for k in range(3):
        results.add({"key": f"k{k}", "value": k}, ABOUT)
    whole = path.read_bytes()
    assert whole.count(b"about") == 1
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        again = Results(path)
        lines = whole[:end].count(b"\n")
        assert list(again.records) == [f"k{k}" for k in range(lines - 1)]
        for k in range(len(again.records), 3):
            again.add({"key": f"k{k}", "value": k}, ABOUT)
        assert path.read_bytes() == whole


def test_damage_is_an_error_that_names_the_line(tmp_path):
    path = tmp_path / "tiny.jsonl"
    for damaged in ('{"key": "b"\n{"key": "c"}', "[3]", '{"x": 1}'):
        path.write_text(f'{{"key": "a"}}\n{damaged}\n')
        with pytest.raises(SetupError, match="line 2 is damaged"):
            Results(path)


def test_results_of_other_data_are_not_mixed(tmp_path):
    path = tmp_path / "tiny.jsonl"
    Results(path).add({"key": "a"}, ABOUT)
    with pytest.raises(SetupError, match="other data"):
        Results(path).add({"key": "b"}, {**ABOUT, "hashes": {"data": "0b"}})


@pytest.mark.parametrize("timing", [False, True])
def test_what_cannot_be_kept_is_not_run(timing, tmp_path, monkeypatch):
    monkeypatch.setitem(STREAMS, "tiny", TINY)
    monkeypatch.setattr(plan, "todo", lambda *names: [] if timing else ["a run"])
    monkeypatch.setattr(plan, "to_time", lambda *names: ["a run"])
    monkeypatch.setattr(runs, "work", lambda *given: pytest.fail("it was run"))
    results_of("tiny", tmp_path).add({"key": "a"}, ABOUT)
    with pytest.raises(SetupError, match="another backbone"):
        runs.complete(["tiny"], [], tmp_path, 1, timing, Console(quiet=True))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is full")
def test_a_full_disk_is_an_error(tmp_path):
    path = tmp_path / "tiny.jsonl"
    results = Results(path)
    path.symlink_to("/dev/full")
    with pytest.raises(SetupError, match="No space left"):
        results.add({"key": "a"}, ABOUT)
    assert "a" not in results


# Workers import the script, too: only the main process needs the rest.
SCRIPT = """
if __name__ == "__main__":
    import pathlib, sys
    from rich.console import Console
    from examples.study import plan, runs, settings
    from tests.tiny import TINY
    settings.STREAMS["tiny"] = TINY
    plan.chosen = lambda *names: (0.05, 0.0)  # nothing is tuned
    runs.complete(["tiny"], ["plain"], pathlib.Path(sys.argv[1]), 1, False, Console(quiet=True))
"""


def test_a_killed_study_goes_on_to_the_same_numbers(tmp_path, monkeypatch):
    """Kill it when the first runs are finished, which ends its workers, too, and start again."""
    script, file = tmp_path / "study.py", tmp_path / "runs" / "tiny.jsonl"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(command, env=environment)
    while not (file.exists() and file.read_bytes().count(b"\n") > 2):
        assert process.poll() is None
        time.sleep(0.02)
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert not psutil.wait_procs(children, timeout=60)[1]
    begun = file.read_bytes()
    monkeypatch.setitem(STREAMS, "tiny", TINY)
    monkeypatch.setattr(plan, "chosen", lambda *names: (0.05, 0.0))
    monkeypatch.setattr(runs, "work", one_by_one)
    runs.complete(["tiny"], ["plain"], tmp_path, 1, False, Console(quiet=True))
    assert file.read_bytes().startswith(begun[: begun.rfind(b"\n") + 1])
    expected = [without_times(done("plain", seed=seed, knob=0.0)) for seed in TINY.seeds]
    assert [without_times(record) for record in Results(file).records.values()] == expected


def test_unknown_names_are_refused():
    with pytest.raises(SetupError, match="unknown stream tiny; choose from permuted"):
        runs.check(["tiny"], [])
    with pytest.raises(SetupError, match="unknown method sgd; choose from plain"):
        runs.check(["split"], ["sgd"])


def test_committed_pages_follow_from_committed_runs():
    """Every table stands on the runs beside it."""
    folder = Path(__file__).parents[1] / "docs/results/study"
    found = sorted((folder / "runs").glob("*.jsonl"))
    assert found
    for path in found:
        name, results = path.stem, Results(path)
        text = skill.page(results) if name == "skill" else publish.page(name, plan.published(name, results))
        page = folder / f"{name}.md"
        assert text == (page.read_text("utf-8") if page.exists() else "")
    for name, text in publish.overview(folder).items():
        assert text == (folder / name).read_text("utf-8")
