"""The paper's experiment in miniature: its tables and figures, and a backbone of its shape with random weights."""

import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("sklearn")

import torch
from transformers import GPT2Config

from examples.common.command import SetupError
from examples.lora_agnews import __main__ as agnews
from examples.lora_agnews import backbone
from examples.lora_agnews import runs as lora_runs
from examples.lora_agnews.config import PRESETS
from examples.study import one_step, paper, paper_report, published, random_backbone
from tests.tiny import one_by_one


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Folder of tables and figures of an experiment that has run once."""
    root = tmp_path_factory.mktemp("paper")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("AGNEWS_DIR", raising=False)
        patch.setenv("HF_HUB_OFFLINE", "1")  # a generated corpus
        options = ["--preset", "mini", "--methods", "agem,gem", "--jobs", "1"]
        folders = {"--runs": root / "runs", "--out": root / "out", "--cache": root / "cache"}
        named = [str(part) for pair in folders.items() for part in pair]
        patch.setattr(lora_runs, "work", one_by_one)
        assert paper.main([*options, *named]) == 0
    return root / "out"


def test_both_tables_have_the_papers_numbers_beside_those_here(finished):
    table = (finished / "table.md").read_text(encoding="utf-8")
    runs = json.loads((finished / "results.json").read_text(encoding="utf-8"))["runs"]
    mean = 50 * sum(run["metrics"]["average_accuracy"] for run in runs if run["method"] == "gem")
    assert f"| GEM | 77.45 ± 3.26 | {mean:.2f} ± " in table
    assert "| A-GEM | -0.103 ± 0.037 | " in table
    assert "seeds 0, 1; the paper has others" in table
    assert "| Articles | AG News | built-in generated news corpus |" in table
    assert "| Rows of an experience | not given | 48 to train, 12 to test |" in table
    assert "nan" not in table


def test_conclusions_are_paired_over_the_seeds(finished):
    results = json.loads((finished / "results.json").read_text(encoding="utf-8"))
    gem, agem = (
        [run["metrics"]["average_accuracy"] for run in results["runs"] if run["method"] == method]
        for method in ("gem", "agem")
    )
    low, high = sorted(100 * (a - b) for a, b in zip(gem, agem, strict=True))
    half = 12.706 * (high - low) / 2  # Student's t with one degree of freedom
    [row] = paper_report.claim_rows(results, {"agem": {}, "gem": {}})
    assert row == ["AvgAcc, GEM minus A-GEM (points)", "+1.44", f"{(low + high) / 2:+.2f} ± {half:.2f}"]


def test_tables_and_figures_can_be_drawn_again_from_the_results_alone(finished, tmp_path):
    text = (finished / "results.json").read_text(encoding="utf-8")
    assert "probes" not in text
    (tmp_path / "results.json").write_text(text, encoding="utf-8")
    assert paper.main(["--draw", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "table.md").read_bytes() == (finished / "table.md").read_bytes()


def test_the_protocol_is_the_papers_where_its_backbone_is_at_hand(monkeypatch):
    def locate(name):
        if name not in ("there", at_hand):
            raise SetupError(f"{name} is out of reach")

    monkeypatch.setattr(backbone, "locate", locate)
    monkeypatch.delenv(paper.VARIABLE, raising=False)
    at_hand = paper.MEDIUM
    assert paper.protocol(None) == ["--preset", "paper", "--backbone", paper.MEDIUM]
    at_hand = None
    found = agnews.parser().parse_args(paper.protocol(None))
    assert (found.preset, found.rows, found.max_length) == ("quick", 1_600, 48)
    assert (found.seeds, found.methods) == (published.SEEDS, PRESETS["paper"].methods)
    monkeypatch.setenv(paper.VARIABLE, "there")
    assert paper.protocol(None) == ["--preset", "paper", "--backbone", "there"]
    with pytest.raises(SetupError, match="elsewhere"):  # what is named is not replaced in silence
        paper.protocol("elsewhere")
    assert PRESETS["paper"].seeds == published.SEEDS


def test_random_weights_make_a_backbone_for_a_step_of_the_experiment(tmp_path, capsys, monkeypatch):
    monkeypatch.delenv("AGNEWS_DIR", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = tmp_path / "model"
    assert random_backbone.main([str(folder), "--layers", "2", "--width", "64"]) == 0
    model, tokenizer = backbone.load(backbone.locate(str(folder)), seed=0)
    d = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert d == backbone.trained(folder) == 2 * 8 * 11 * 64 + 4 * 64
    assert model.config.n_positions == 1_024
    batch = dict(tokenizer(["Shares fell."], return_tensors="pt"), labels=torch.tensor([2]))
    assert torch.isfinite(backbone.batch_loss(model, batch))
    assert "random weights" in capsys.readouterr().out
    options = f"--backbone {folder} --rows 2 --microbatch 1 --max-length 24 --methods plain,gem --device cpu"
    assert one_step.main(options.split()) == 0
    head, _, plain, gem = (line.split(" | ") for line in capsys.readouterr().out.splitlines())
    assert head[1:5] == ["Batch (s)", "Constraints (s)", "Projection (s)", "Optimizer (s)"]
    assert (plain[2], plain[3]) == ("-", "-")
    assert all(float(gem[part]) > 0 for part in range(1, 5))


def test_the_papers_architecture_trains_2166784_parameters(tmp_path):
    GPT2Config(n_layer=24, n_embd=1_024, n_head=16).save_pretrained(tmp_path)
    assert backbone.trained(tmp_path) == 2_166_784
