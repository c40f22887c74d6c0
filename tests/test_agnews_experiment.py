"""The whole experiment in miniature."""

import io
import json
import os
from concurrent.futures import Future
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("sklearn")
pytest.importorskip("typer")

import torch
from PIL import Image
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner

from examples.lora_agnews import compare, data, experiment, metrics, pretrain, report, stream, train
from examples.lora_agnews.__main__ import app
from examples.lora_agnews.config import MINI, PAPER, QUICK, SetupError, configure
from examples.lora_agnews.data import DataError

FIGURES = ("final_accuracy", "accuracy_over_steps", "transfer", "projection_time")


class Finished:
    """An experiment that has run once: what it said and what it left."""

    def __init__(self, root, seen):
        self.out, self.cache, self.seen = root / "out", root / "cache", seen
        self.said, self.succeeded = self.run(MINI)

    def run(self, config):
        screen = io.StringIO()
        console = Console(file=screen, width=120)
        succeeded = experiment.run(config, None, "", self.cache, self.out, 2, console)
        return screen.getvalue(), succeeded


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    def unreachable():
        raise DataError("the hub was not asked")

    def spy(function, position):
        def call(*args):
            seen.append((function.__name__, tuple(args[position])))
            return function(*args)

        return call

    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data, "read_hub", unreachable)
        patch.setattr(pretrain, "train_tokenizer", spy(pretrain.train_tokenizer, 0))
        patch.setattr(pretrain, "train_model", spy(pretrain.train_model, 2))
        patch.setattr(pretrain, "word_vectors", spy(pretrain.word_vectors, 2))
        yield Finished(tmp_path_factory.mktemp("experiment"), seen)


@pytest.fixture(scope="module")
def results(finished):
    return json.loads((finished.out / "results.json").read_text(encoding="utf-8"))


def test_the_screen_says_what_happened(finished):
    assert finished.succeeded
    for expected in ("generated news corpus", "hub was not asked", "linear classifier", "written"):
        assert expected in finished.said
    assert finished.said.count("finished ") == 4
    assert "kept  " not in finished.said


def test_results_hold_config_environment_runs_and_summary(results):
    assert results["config"]["lr"] == MINI.lr
    assert results["environment"]["torch"] == torch.__version__
    assert [(run["method"], run["seed"]) for run in results["runs"]] == [
        (method, seed) for method in MINI.methods for seed in MINI.seeds
    ]
    for run in results["runs"]:
        assert len(run["accuracies"]) == 4
        assert run["metrics"]["forgetting"] == metrics.forgetting(run["accuracies"])
        assert run["guarantee"]["probed_steps"] == 6
        assert run["curve"][-1]["step"] == run["boundaries"][-1] == 18
    values = [run["metrics"]["average_accuracy"] for run in results["runs"] if run["method"] == "gem"]
    assert results["summary"]["gem"]["average_accuracy"] == metrics.mean_std(values)


def test_gem_projects_and_keeps_its_promise_and_plain_does_neither(results):
    for run in results["runs"]:
        projects = run["method"] == "gem"
        seconds = run["seconds"]
        assert (seconds["projections"] == 12) is projects
        assert (seconds["per_step"]["constraints"] > 0) is projects
        assert seconds["per_step"]["batch"] > 0
        if projects:
            assert run["guarantee"]["gradient"]["violated"] == 0
    assert any(run["guarantee"]["gradient"]["violated"] > 0 for run in results["runs"])


def test_methods_of_a_seed_are_alike_until_there_is_a_memory(results):
    plain, gem = (
        next(r for r in results["runs"] if (r["method"], r["seed"]) == (m, 1)) for m in MINI.methods
    )
    assert plain["accuracies"][:2] == gem["accuracies"][:2]
    assert plain["order"] == gem["order"]


def test_tables_and_figures(finished):
    table = (finished.out / "table.md").read_text(encoding="utf-8")
    assert "| Method | AvgAcc (%) | BWT | FWT | Forgetting |" in table
    assert table.count("| GEM | ") == table.count("| Fine-tuning | ") == 3
    assert "nan" not in table
    for name in FIGURES:
        with Image.open(finished.out / f"{name}.png") as picture:
            assert min(picture.size) >= 500
            assert len(picture.convert("L").getcolors()) > 20  # something is drawn


def test_a_second_call_keeps_finished_runs_and_other_settings_do_not(finished):
    files = sorted((finished.out / "runs").iterdir())
    assert [file.name for file in files] == [
        "gem-seed0.json",
        "gem-seed1.json",
        "plain-seed0.json",
        "plain-seed1.json",
    ]
    written = [file.stat().st_mtime_ns for file in files]
    before = json.loads((finished.out / "results.json").read_text(encoding="utf-8"))["runs"]
    said, succeeded = finished.run(MINI)
    assert succeeded
    assert said.count("kept  ") == 4
    assert "pretrained earlier" in said
    assert [file.stat().st_mtime_ns for file in files] == written
    assert json.loads((finished.out / "results.json").read_text(encoding="utf-8"))["runs"] == before


def test_only_the_same_settings_count_as_finished(finished):
    path = finished.out / "runs" / "gem-seed0.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    identity = {key: stored[key] for key in ("settings", "data", "backbone", "versions")}
    assert compare.finished(compare.Run("gem", 0, path), identity)
    assert not compare.finished(compare.Run("gem", 1, path), identity)
    for key in ("data", "backbone"):
        assert not compare.finished(compare.Run("gem", 0, path), identity | {key: "other"})
    other = identity["settings"] | {"margin": 0.5}
    assert not compare.finished(compare.Run("gem", 0, path), identity | {"settings": other})


def test_a_half_written_or_missing_file_does_not_count(finished, tmp_path):
    half = tmp_path / "gem-seed0.json"
    assert not compare.finished(compare.Run("gem", 0, half), {})
    half.write_text(
        (finished.out / "runs" / "gem-seed0.json").read_text(encoding="utf-8")[:300], encoding="utf-8"
    )
    assert not compare.finished(compare.Run("gem", 0, half), {})


@pytest.fixture(scope="module")
def stage(finished):
    """What a run needs: stream and backbone."""
    shape = MINI.experiences, MINI.rows, MINI.dominant_share
    needed = [sum(column) for column in zip(*stream.rows_needed(*shape), strict=True)]
    articles = data.load(None, "", needed)
    experiences = stream.build(articles.texts, articles.labels, *shape)
    return experiences, next(finished.cache.iterdir())


def test_pretraining_sees_every_training_text_and_no_test_text(finished, stage):
    trained = {text for experience in stage[0] for text in experience.train.texts}
    tested = {text for experience in stage[0] for text in experience.test.texts}
    assert [name for name, _ in finished.seen] == ["train_tokenizer", "train_model", "word_vectors"]
    for name, texts in finished.seen:
        assert set(texts) == trained, name
        assert not set(texts) & tested, name


@pytest.mark.parametrize("method", ["agem", "gem", "igem", "replay"])
def test_a_run_is_deterministic(stage, method):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    first, second = (train.run(MINI, method, 3, *stage) for _ in range(2))
    torch.set_num_threads(threads)
    for key in ("accuracies", "curve", "guarantee", "metrics"):
        assert first[key] == second[key]


def test_every_method_can_be_summarized(stage):
    records = [train.run(replace(MINI, epochs=2), method, 0, *stage) for method in ("replay", "agem")]
    assert records[0]["seconds"]["mean_projection"] is None
    assert records[1]["boundaries"] == [12, 24, 36]
    table = report.markdown(report.summarize(records))
    assert "| Replay | - |" in table
    assert "One seed." in table


def test_a_failing_run_is_named_and_costs_no_other(tmp_path):
    screen = io.StringIO()
    run = compare.Run("agem", 7, tmp_path / "agem-seed7.json")
    future = Future()
    future.set_exception(RuntimeError("out of memory"))
    with Progress(console=Console(file=screen, width=200)) as progress:
        assert not compare._settle(future, run, {}, progress, progress.add_task("", total=1))
    assert "A-GEM, seed 7: RuntimeError: out of memory" in screen.getvalue()
    assert "out of memory" in (tmp_path / "agem-seed7.error.txt").read_text(encoding="utf-8")
    assert not run.path.exists()


def test_help_needs_no_model_library():
    answer = CliRunner().invoke(app, ["--help"])
    assert answer.exit_code == 0
    assert "AGNEWS_DIR" in answer.output


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--data", "nowhere"], {}, "named by --data"),
        (["--data", "nowhere"], {"AGNEWS_DIR": "elsewhere"}, "named by --data"),
        ([], {"AGNEWS_DIR": "elsewhere"}, "AGNEWS_DIR"),
        (["--preset", "huge"], {}, "unknown preset"),
        (["--methods", "gem,sgd"], {}, "unknown methods"),
        (["--experiences", "1"], {}, "experiences must be at least 2"),
        (["--seeds", "1,one"], {}, "whole numbers"),
        (["--device", "abacus"], {}, "abacus"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(arguments, environment, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AGNEWS_DIR", raising=False)
    answer = CliRunner().invoke(app, ["--preset", "mini", *arguments], env=environment)
    assert answer.exit_code == 2
    assert message in " ".join(answer.output.split())
    assert os.listdir(tmp_path) == []


def test_presets_are_the_papers_settings_and_can_be_changed():
    assert PAPER.seeds == (0, 2, 5, 7, 11)
    assert (PAPER.lr, PAPER.batch_size, PAPER.eval_batch_size, PAPER.epochs) == (1e-3, 32, 50, 1)
    assert (PAPER.per_task, PAPER.sample_size, PAPER.margin, PAPER.pgd_steps) == (100, 150, 0.3, 3)
    same = (
        "lr",
        "batch_size",
        "per_task",
        "sample_size",
        "margin",
        "pgd_steps",
        "projection_interval",
        "experiences",
    )
    assert all(getattr(QUICK, name) == getattr(PAPER, name) for name in same)
    assert configure("quick", {"lr": 0.1, "margin": None}) == replace(QUICK, lr=0.1)
    with pytest.raises(SetupError, match="dominant_share"):
        configure("quick", {"dominant_share": 1.5})
