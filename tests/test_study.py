"""The study: its methods, its runs, and what is kept of them."""

import json
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

pytest.importorskip("mnist1d", reason="needs the extra examples")

import torch
from rich.console import Console

from examples.common.command import SetupError
from examples.common.memory import Memory, choose
from examples.common.origin import CODE
from examples.common.results import Results
from examples.study import __main__ as study
from examples.study import plan, publish, settings, skill, streams, train
from examples.study.learners import Setup
from examples.study.runs import results_of
from examples.study.settings import METHODS, STREAMS, TUNING_SEEDS

pytestmark = pytest.mark.usefixtures("one_thread")

FOLDER = Path(__file__).parents[1] / "docs/results/study"
TINY = replace(STREAMS["permuted"], options={"tasks": 3, "rows": 60, "hidden": 16}, seeds=(0, 1, 2))
TINY = replace(TINY, per_task=8, eval_interval=3, probe_interval=2)
ABOUT = {"hashes": {"data": "0a"}, "versions": {"torch": "2"}}


@lru_cache
def done(name, **changes):
    """Return the record of a run in miniature, in the middle of the method's grid; each is run once."""
    knob = METHODS[name].grid[1] if METHODS[name].grid else 0.0
    run = replace(train.Run("tiny", name, 0.05, knob, 3, "report"), **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(STREAMS, "tiny", replace(TINY, optimizer="adamw" if name == "gem-step" else "sgd"))
        return run.record(run())


@pytest.mark.parametrize("name", [*settings.BASIC, *settings.CHEAPER])
def test_every_method_learns(name):
    record = done(name)
    assert len(record["accuracies"]) == 4
    assert record["curve"][-1]["step"] == record["boundaries"][-1] == 18
    assert json.loads(json.dumps(record)) == record


def test_promises_memory_and_what_diverges():
    """GEM keeps its promise and others do not, with as many bytes of examples; a run may diverge."""
    assert done("plain")["guarantee"]["gradient"]["violated"] > 0
    assert done("gem-all")["guarantee"]["gradient"]["violated"] == 0
    assert done("gem-step")["guarantee"]["update"]["violated"] == 0
    example = 64 * 4 + 8
    # Those that store outputs, too, have room for fewer.
    bounds = 3 * 8 * example - 3 * (example + 40), 3 * 8 * example
    names = [name for name in settings.BASIC if METHODS[name].family not in ("reference", "no examples")]
    assert all(bounds[0] < done(name)["bytes"] <= bounds[1] for name in names)
    assert done("gem", rate=1e30)["diverged"]
    assert done("gem-step", rate=1e3)["diverged"]


def learner_of(name, knob=0.0, like=None, optimizer=torch.optim.SGD, rate=0.1):
    """Return a learner, of the same model as another one if there is one, and a batch of each task."""
    stream = streams.load("permuted", 0, tasks=3, rows=40, hidden=8)
    setup = Setup(stream, optimizer(stream.model.parameters(), lr=rate), knob, replace(TINY, examples=8), 0)
    learner = METHODS[name].learner(setup)
    learner.model = like.model if like else learner.model
    return learner, [task.train for task in stream.tasks]


def first(n, batch):
    return {name: values[:n] for name, values in batch.items()}


def test_replay_adds_the_mean_loss_of_each_past_task():
    """With the divergence from what the model has said about examples, which is zero just after."""
    learner, (*past, now) = learner_of("replay", 0.7)
    plain, _ = learner_of("plain", like=learner)
    kept = [first(8, batch) for batch in past]
    for k, batch in enumerate(kept):
        learner.end_task(k, batch)
    expected = plain.loss(now) + 0.7 * sum(plain.loss(batch) for batch in kept)
    torch.testing.assert_close(learner.loss(now), expected)
    distilled, _ = learner_of("der", 0.7, like=learner)
    for k, batch in enumerate(kept):
        distilled.end_task(k, first(6, batch))
    before = distilled.loss(now) - learner.loss(now)
    with torch.no_grad():
        learner.model[-1].weight.mul_(2.0)
    assert distilled.loss(now) - learner.loss(now) > before + 1e-3


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
    if name == "ewc":  # the mean square of the gradients of single examples
        learner, (batch, *_) = learner_of("ewc", 1.0)
        learner.end_task(0, first(2, batch))
        one = [{key: values[i : i + 1] for key, values in batch.items()} for i in range(2)]
        losses = [learner.cross_entropy(learner.model, part).sum() for part in one]
        squares = [torch.autograd.grad(loss, learner.parameters)[0] ** 2 for loss in losses]
        torch.testing.assert_close(learner.importance[0], (squares[0] + squares[1]) / 2)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("gem", {0: 8, 1: 8}),
        ("agem", {"past": 16}),
        ("gem-label", {(task, label): 2 for task in range(2) for label in range(4)}),
    ],
)
def test_examples_of_a_row(name, expected):
    """As many of each task, whether one row is about them, one for each label, or one for all."""
    learner, (*past, _) = learner_of(name, 0.5)
    for k, batch in enumerate(past):
        labels = torch.arange(8) % 4
        learner.end_task(k, first(8, batch) | {"labels": labels})
    learner.loss(past[0]).backward()
    learner.setup.optimizer.step()
    sets = learner.keeper.sets
    assert learner.keeper.last.names == list(sets)
    assert {name: min(len(kept), kept.promise.examples) for name, kept in sets.items()} == expected


def test_which_examples_are_kept():
    """Each with the same probability, or evenly over the labels, or the last ones of each label."""
    labels, random = [0] * 40 + [1] * 6 + [0] * 30 + [2] * 4, torch.Generator().manual_seed(0)
    assert sorted(choose(labels, 12, "ring", random)) == [*range(42, 46), *range(72, 80)]
    for _ in range(20):
        kept = choose(labels, 11, "balanced", random)
        assert sorted(Counter(labels[k] for k in kept).values()) == [3, 4, 4]
    times = Counter(k for _ in range(1000) for k in choose(range(20), 5, "reservoir", random))
    assert all(abs(times[k] - 250) < 70 for k in range(20))  # five standard deviations
    memory = Memory(10, seed=0)
    memory.add({"x": torch.arange(30), "labels": torch.zeros(30, dtype=torch.int64)}, "a task")
    drawn = torch.cat([memory.draw(4)[0]["x"] for _ in range(5)])
    assert set(Counter(drawn.tolist()).values()) == {2}  # none again before all
    assert len(memory.sample(99)["x"]) == 10


def test_tuning_of_each_method(tmp_path):
    """On as many settings as every other one, with other seeds than those reported."""
    assert not set(TUNING_SEEDS) & set(settings.SEEDS)
    results = Results(tmp_path / "runs.jsonl")
    score = lambda rate, knob: knob - abs(rate - 3e-4)  # noqa: E731
    for name in (name for name in STREAMS["agnews3"].methods if not METHODS[name].like):
        while tuning := results.missing(train.Run.tune("agnews3", name, results)[0]):
            assert set(tuning) <= set(train.Run.todo("agnews3", [name], results))
            assert {run.seed for run in tuning} == set(TUNING_SEEDS)
            for run in tuning:
                metrics = {"average_accuracy": score(run.rate, run.knob)}
                results.records[run.key] = {"key": run.key, "metrics": metrics}
        tried = [(run.rate, run.knob) for run in train.Run.tune("agnews3", name, results)[0]]
        assert len(set(tried)) == 5
        assert train.Run.chosen("agnews3", name, results) == max(tried, key=lambda point: score(*point))
    # What agnews20 takes over was chosen with fewer tasks.
    committed = Results(FOLDER / "runs/agnews10.jsonl")
    for name, point in STREAMS["agnews20"].fixed.items():
        assert point == train.Run.chosen("agnews10", name, committed)


def test_results_come_back(tmp_path):
    """A line that was cut off is done again; other damage is an error that names its line."""
    path = tmp_path / "runs" / "tiny.jsonl"
    results = Results(path)
    for k in range(3):
        results.add({"key": f"k{k}", "value": k}, ABOUT)
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        again = Results(path)
        assert list(again.records) == [f"k{k}" for k in range(whole[:end].count(b"\n") - 1)]
        for k in range(len(again.records), 3):
            again.add({"key": f"k{k}", "value": k}, ABOUT)
        assert path.read_bytes() == whole
    for damaged in ('{"key": "b"\n{"key": "c"}', "[3]", '{"x": 1}'):
        path.write_text(f'{{"key": "a"}}\n{damaged}\n')
        with pytest.raises(SetupError, match="line 2 is damaged"):
            Results(path)


def test_runs_of_other_code_are_told(tmp_path, capsys):
    """Those of before the code was recorded are not."""
    for k, code in enumerate(({}, {"code": CODE}, {"code": CODE | {"study": "0c"}})):
        Results(tmp_path / "runs.jsonl").add({"key": f"k{k}"}, ABOUT | code)
        Results(tmp_path / "runs.jsonl")
        said = " ".join(capsys.readouterr().err.split())
        assert ("1 of 3 runs are of other code than today's, in study." in said) == (k == 2)


def test_a_study_goes_on_and_mixes_no_data(tmp_path, monkeypatch):
    monkeypatch.setitem(STREAMS, "tiny", TINY)
    monkeypatch.setattr(train.Run, "chosen", lambda *names: (0.05, 0.0))
    waited = []

    def work(waiting, keep, jobs, console):
        waited.append(len(waiting))
        keep(waiting[0], {"wall_seconds": 0.0} | waiting[0]())
        raise KeyboardInterrupt

    monkeypatch.setattr("examples.common.results.work", work)
    for _ in TINY.seeds:
        with pytest.raises(KeyboardInterrupt):
            plan.complete(["tiny"], ["plain"], tmp_path, 1, False, Console(quiet=True))
    assert waited == [3, 2, 1]
    other = tmp_path / "other"
    results_of("tiny", other).add({"key": "a"}, ABOUT)
    with pytest.raises(SetupError, match="other data"):
        results_of("tiny", other).add({"key": "b"}, {**ABOUT, "hashes": {"data": "0b"}})
    with pytest.raises(SetupError, match="another backbone"):
        plan.complete(["tiny"], ["plain"], other, 1, False, Console(quiet=True))


@pytest.mark.parametrize("program", [study.main, skill.main])
def test_a_report_without_runs_says_so(program, tmp_path, capsys):
    assert program(["--report", "--out", str(tmp_path)]) == 2
    assert "has no" in " ".join(capsys.readouterr().out.split())
    assert not [*tmp_path.iterdir()]


def test_committed_pages_follow_from_committed_runs():
    """Every table stands on the runs beside it."""
    found = sorted((FOLDER / "runs").glob("*.jsonl"))
    assert found
    for path in found:
        name, results = path.stem, Results(path)
        text = skill.page(results) if name == "skill" else publish.page(name, plan.published(name, results))
        page = FOLDER / f"{name}.md"
        assert text == (page.read_text("utf-8") if page.exists() else "")
    for name, text in publish.overview(FOLDER).items():
        assert text == (FOLDER / name).read_text("utf-8")
