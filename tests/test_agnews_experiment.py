"""The whole experiment in miniature."""

import io
import json
import logging
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

import torch
from PIL import Image
from rich.console import Console

from examples.common import metrics
from examples.lora_agnews import backbone, data, experiment, runs, small, stream, train
from examples.lora_agnews.__main__ import main
from examples.lora_agnews.config import METHODS, MINI, PAPER
from examples.lora_agnews.data import Articles


class Finished:
    """An experiment that has run once: what it said and what it left."""

    def __init__(self, root):
        self.out, self.cache = root / "out", root / "cache"
        self.said = self.run()
        self.runs = json.loads((self.out / "results.json").read_text(encoding="utf-8"))["runs"]

    def run(self):
        screen = io.StringIO()
        articles = Articles(*data.generate([100] * 4), "generated", "for a test")
        experiment.run(MINI, articles, self.cache, self.out, 2, Console(file=screen, width=120))
        return screen.getvalue()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return Finished(tmp_path_factory.mktemp("experiment"))


@pytest.fixture(scope="module")
def stage(finished):
    """What a run needs: stream and backbone."""
    texts, labels = data.generate([100] * 4)
    experiences = stream.build(texts, labels, MINI.experiences, MINI.rows, MINI.dominant_share)
    return experiences, next(finished.cache.iterdir())


def test_the_screen_says_what_happened(finished):
    for expected in ("generated (for a test)", "90% Sports", "pretrained once", "written"):
        assert expected in finished.said
    assert finished.said.count("finished ") == 4


def test_runs_have_all_numbers_and_gem_keeps_its_promise(finished):
    assert [(run["method"], run["seed"]) for run in finished.runs] == [
        (method, seed) for method in MINI.methods for seed in MINI.seeds
    ]
    for run in finished.runs:
        assert run["metrics"]["forgetting"] == metrics.forgetting(run["accuracies"])
        assert len(run["guarantee"]["probes"]) == 6
        assert run["curve"][-1]["step"] == run["boundaries"][-1] == 18
        assert (run["seconds"]["projections"] == 12) == (run["method"] == "gem")
        if run["method"] == "gem":
            assert run["guarantee"]["gradient"]["violated"] == 0
    assert any(run["guarantee"]["gradient"]["violated"] > 0 for run in finished.runs)
    plain, gem = finished.runs[1], finished.runs[3]
    assert plain["accuracies"][:2] == gem["accuracies"][:2]  # alike until there is a memory


def test_tables_and_figures(finished):
    table = (finished.out / "table.md").read_text(encoding="utf-8")
    accuracies = [100 * run["metrics"]["average_accuracy"] for run in finished.runs[2:]]
    mean, std = (float(f(torch.tensor(accuracies, dtype=torch.double))) for f in (torch.mean, torch.std))
    assert f"| GEM | {mean:.1f} ± {std:.1f} |" in table
    assert table.count("| GEM | ") == table.count("| Fine-tuning | ") == 3
    assert "| Fine-tuning | - |" in table
    assert "nan" not in table
    for path in finished.out.glob("*.png"):
        with Image.open(path) as picture:
            assert len(picture.convert("L").getcolors()) > 20  # something is drawn
    assert len(list(finished.out.glob("*.png"))) == 4


def test_a_second_call_keeps_finished_runs(finished):
    files = {path: path.stat().st_mtime_ns for path in (finished.out / "runs").iterdir()}
    assert len(files) == 4
    said = finished.run()
    assert said.count("kept  ") == 4
    assert "pretrained earlier" in said
    assert {path: path.stat().st_mtime_ns for path in (finished.out / "runs").iterdir()} == files


def test_pretraining_sees_the_training_texts_only(stage, tmp_path):
    train, test = (
        [text for experience in stage[0] for text in getattr(experience, part).texts]
        for part in ("train", "test")
    )
    assert small.cached(MINI, train, tmp_path).name == stage[1].name  # a hash of the texts, too
    assert not set(train) & set(test)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_and_a_run_is_deterministic(stage, method, one_thread):
    first = runs.Run(MINI, method, 3, *stage)(lambda *state: None)
    if method in ("plain", "igem", "replay"):
        second = runs.Run(MINI, method, 3, *stage)(lambda *state: None)
        for key in ("accuracies", "curve", "guarantee", "metrics"):
            assert first[key] == second[key]
    assert (first["seconds"]["projections"] > 0) == (method not in ("plain", "replay", "replay-few"))


@pytest.mark.parametrize("method", ["plain", "gem", "agem"])
def test_no_graph_has_more_rows_than_a_microbatch_whatever_is_measured(
    stage, method, one_thread, monkeypatch
):
    sizes = {"learning": [], "measuring": []}

    def watch(module, kind):
        loss = module.batch_loss

        def watched(model, batch):
            if torch.is_grad_enabled():
                sizes[kind].append(len(batch["labels"]))
            return loss(model, batch)

        monkeypatch.setattr(module, "batch_loss", watched)

    watch(backbone, "measuring")
    watch(train, "learning")
    runs.Run(replace(MINI, microbatch=5), method, 3, *stage)(lambda *state: None)
    assert max(sizes["learning"]) == 5
    # The constraints of GEM are what is measured.
    assert max(sizes["measuring"], default=0) == (0 if method == "gem" else 5)


def test_what_gemproj_logs_is_printed(monkeypatch):
    def compiling(G, g):
        logging.getLogger("gemproj").info("compiling [loops]")

    screen = io.StringIO()
    monkeypatch.setattr(experiment, "project", compiling)
    experiment._compile_loops(Console(file=screen))
    assert screen.getvalue() == "gemproj   compiling [loops]\n"
    assert not logging.getLogger("gemproj").handlers


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--data", "nowhere"], "elsewhere", "nowhere: no such folder, named by --data"),
        ([], "elsewhere", "named by the environment variable AGNEWS_DIR"),
        (["--methods", "gem,sgd"], None, "unknown methods ['sgd']"),
        (["--experiences", "1"], None, "experiences must be at least 2"),
        (["--dominant-share", "1.5"], None, "dominant_share must lie between 0 and 1, got 1.5"),
        (["--seeds", "0,0"], None, "each once"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    arguments, environment, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("AGNEWS_DIR", raising=False)
    if environment:
        monkeypatch.setenv("AGNEWS_DIR", environment)
    assert main(["--preset", "mini", *arguments]) == 2
    assert message in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "huge"], "invalid choice: 'huge'"),
        (["--seeds", "1,one"], "invalid list of int value: '1,one'"),
        (["--help"], "AGNEWS_DIR"),
    ],
)
def test_the_command_line(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in "".join(capsys.readouterr())


def test_the_preset_paper_is_the_papers():
    assert PAPER.seeds == (0, 2, 5, 7, 11)
    assert (PAPER.lr, PAPER.batch_size, PAPER.eval_batch_size, PAPER.epochs) == (1e-3, 32, 50, 1)
    assert (PAPER.per_task, PAPER.sample_size, PAPER.margin, PAPER.pgd_steps) == (100, 150, 0.3, 3)
