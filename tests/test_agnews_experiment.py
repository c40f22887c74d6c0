"""The AG News experiment in miniature, with the paper's numbers beside it, and a backbone of the paper's shape."""

import json
import math
import shutil
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("mnist1d", reason="needs the extra examples")

from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM

from examples.common import metrics
from examples.common.command import SetupError
from examples.lora_agnews import backbone, data, small, stream, train
from examples.lora_agnews.__main__ import main, parser
from examples.lora_agnews.config import METHODS, MINI, PAPER
from examples.study import paper, paper_report


@pytest.fixture(scope="module", autouse=True)
def generated_corpus():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("AGNEWS_DIR", raising=False)
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


def experiment_in(root, *more):
    """Do what is missing of the experiment in a folder; return its results, and the paper's page."""
    folders = [part for name in ("runs", "cache", "out") for part in (f"--{name}", str(root / name))]
    options = ["--preset", "mini", "--methods", "plain,agem,gem", "--jobs", "2"]
    assert paper.main([*options, *folders, *more]) == 0
    page = (root / "out/table.md").read_text(encoding="utf-8")
    return json.loads((root / "runs/results.json").read_text(encoding="utf-8")), page


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Folder, results and page of an experiment that has run once."""
    root = tmp_path_factory.mktemp("experiment")
    return root, *experiment_in(root)


def test_runs_and_tables(finished, monkeypatch):
    """Runs have all numbers, and tables those of the paper beside them."""
    root, results, page = finished
    names = ("plain", "agem", "gem")
    found = {name: [run for run in results["runs"] if run["method"] == name] for name in names}
    for name, of in found.items():
        assert [run["seed"] for run in of] == [*MINI.seeds]
        for run in of:
            assert run["metrics"]["forgetting"] == metrics.forgetting(run["accuracies"])
            assert (run["seconds"]["projections"] == 12) == (name != "plain")
    violated = {name: [run["guarantee"]["gradient"]["violated"] for run in of] for name, of in found.items()}
    assert any(violated["plain"])
    assert not any(violated["gem"])
    gem, agem = ([100 * r["metrics"]["average_accuracy"] for r in found[name]] for name in ("gem", "agem"))
    assert f"| GEM | 77.45 ± 3.26 | {statistics.mean(gem):.2f} ± {statistics.stdev(gem):.2f} |" in page
    # Conclusions are paired over the seeds; Student's t with one degree of freedom.
    low, high = sorted(a - b for a, b in zip(gem, agem, strict=True))
    difference = f"{(low + high) / 2:+.2f} ± {math.tan(0.475 * math.pi) * (high - low) / 2:.2f}"
    pair = {**results, "runs": [run for run in results["runs"] if run["method"] in ("agem", "gem")]}
    [row] = paper_report.claim_rows(pair)
    assert row == ["AvgAcc, GEM minus A-GEM (points)", "+1.44", difference]
    monkeypatch.setattr(paper.figures, "draw", lambda *given: [])  # which takes seconds, and is done
    assert experiment_in(root) == (results, page)  # finished runs are kept
    assert experiment_in(root, "--draw")[1] == page  # from the results alone


@pytest.fixture(scope="module")
def stage(finished):
    """Stream and pretrained model of the experiment."""
    needed = [sum(column) for column in zip(*stream.rows_needed(MINI), strict=True)]
    articles = data.load(None, needed)
    return stream.build(articles.texts, articles.labels, MINI), next((finished[0] / "cache").iterdir())


def test_pretraining_sees_the_training_texts_only(stage, tmp_path):
    experiences, folder = stage
    texts = [text for one in experiences for text in one.train.texts]
    assert small.cached(MINI, texts, tmp_path).name == folder.name  # a hash of the texts, too
    assert small.cached(MINI, texts[::-1], tmp_path).name != folder.name


@pytest.mark.parametrize("method", sorted({*METHODS} - {"plain", "agem", "gem"}))
def test_every_other_method_runs(stage, method, one_thread):
    found = train.Run(MINI, method, 3, *stage)()["seconds"]
    assert found["projections"] == 12 * (not method.startswith("replay"))


def test_what_is_stored_is_no_part_of_a_step(stage, monkeypatch, one_thread):
    phases, recorders = [], []
    watch, add = train.Recorder.watch, train.Memory.add
    monkeypatch.setattr(train.Recorder, "watch", lambda one, *to: recorders.append(one) or watch(one, *to))
    monkeypatch.setattr(
        train.Memory, "add", lambda memory, *of: phases.append(recorders[0].phase) or add(memory, *of)
    )
    train.Run(MINI, "replay", 3, *stage)()
    assert phases == [None] * MINI.experiences


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "nowhere"], "nowhere: no such folder, named by --data"),
        (["--methods", "gem,sgd"], "unknown methods ['sgd']"),
        (["--dominant-share", "1.5"], "dominant_share must lie between 0 and 1, got 1.5"),
        (["--rows", "5"], "rows: 3 experiences of 5 have 12 training articles"),
        (["--out", f"{__file__}/out"], f"Not a directory: '{__file__}/out'"),
        (["--cache", __file__], f"File exists: '{__file__}'"),
        (["--small-width", "100"], "small_width must be a multiple of 32"),
        (["--margin", "inf"], "margin must be finite, and not negative, got inf"),
        (["--jobs", "0"], "--jobs: must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit, match="2"):
        sys.exit(main(["--preset", "mini", *arguments]))
    assert message in "".join(capsys.readouterr())
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("program", [main, paper.main])
def test_damaged_results_are_named(program, tmp_path, capsys):
    for text in ('{"runs": [', '{"runs": [3]}', "[]"):
        (tmp_path / "results.json").write_text(text)
        assert program(["--draw", "--out", str(tmp_path)]) == 2
        assert "results.json is damaged" in "".join(capsys.readouterr().out.split("\n"))


@pytest.mark.parametrize("name", ["paper", "paper-smollm2"])
def test_the_pages_beside_the_paper_are_those_of_their_results(name):
    folder = Path(__file__).parents[1] / "docs/results/study" / name
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert paper_report.markdown(results) == (folder / "table.md").read_text(encoding="utf-8")
    assert results["config"]["backbone"] == ("small" if name == "paper" else "smollm2")


def test_the_protocol_is_the_papers():
    assert PAPER.seeds == paper_report.SEEDS == (0, 2, 5, 7, 11)
    assert (PAPER.lr, PAPER.batch_size, PAPER.eval_batch_size, PAPER.epochs) == (1e-3, 32, 50, 1)
    assert (PAPER.per_task, PAPER.sample_size, PAPER.margin, PAPER.pgd_steps) == (100, 150, 0.3, 3)
    found = parser().parse_args(paper.protocol(None))  # on the small backbone, where there is no hub
    assert (found.seeds, found.methods) == (paper_report.SEEDS, PAPER.methods)
    with pytest.raises(SetupError, match="elsewhere"):  # what is named is not replaced in silence
        paper.protocol("elsewhere")


def test_the_papers_shape_trains_as_many_numbers(tmp_path):
    GPT2Config(n_layer=24, n_embd=1_024, n_head=16).save_pretrained(tmp_path)
    assert backbone.trained(tmp_path, PAPER) == 2_166_784


def test_a_backbone_of_another_kind(stage, tmp_path):
    tokenizer = shutil.copytree(stage[1], tmp_path / "other")
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 3}
    LlamaConfig(**shape, num_key_value_heads=1, vocab_size=400).save_pretrained(tokenizer)
    LlamaForCausalLM(LlamaConfig.from_pretrained(tokenizer)).save_pretrained(tokenizer)
    backbone.check(tokenizer, MINI)
    model = backbone.load(tokenizer, 0, MINI)
    texts = [one[: 5 + 8 * k] for k, one in enumerate(stage[0][0].train.texts)]  # with padding
    split = stream.Split(tuple(texts), stage[0][0].train.labels)
    batch = backbone.encode(split, tokenizer, MINI)
    assert batch["attention_mask"][:5].sum(1).max() < MINI.max_length
    assert backbone.logits(model, batch).shape == (len(batch["labels"]), 4)
    adapted = {name.split(".")[-4] for name, p in model.named_parameters() if "lora_A" in name}
    assert adapted == set(backbone.LAYERS)
    assert backbone.trained(tokenizer, MINI) == model.get_nb_trainable_parameters()[0]
    # The last layer alone, on stored inputs, says the same: adapters begin at zero.
    last = replace(MINI, last_layers=1)
    cut, stored = backbone.load(tokenizer, 0, last).eval(), backbone.encode(split, tokenizer, last)
    assert len(cut.base_model.model.model.layers) == 1
    few = {name: values[:5] for name, values in stored.items()}
    expected = backbone.logits(model.eval(), batch)
    assert torch.allclose(backbone.logits(cut, stored), expected, atol=1e-5)
    assert torch.allclose(backbone.logits(cut, few), expected[:5], atol=1e-5)
    assert backbone.trained(tokenizer, last) == cut.get_nb_trainable_parameters()[0]


def test_only_models_like_llamas_are_cut(tmp_path):
    GPT2Config(n_layer=3).save_pretrained(tmp_path)
    backbone.check(tmp_path, replace(MINI, last_layers=3))
    with pytest.raises(SetupError, match="last_layers must be at least 3"):
        backbone.check(tmp_path, replace(MINI, last_layers=2))
    with pytest.raises(SetupError, match="last_layers must be at least 2 for backbone small"):
        replace(MINI, small_layers=2, last_layers=1)
