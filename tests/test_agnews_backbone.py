"""The small backbone and its cache, and the adapters on top."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("sklearn")

import torch
from transformers import AutoTokenizer, GPT2Config, GPT2Model

from examples.common.batch import parts
from examples.common.command import SetupError
from examples.lora_agnews import backbone, data, small, train
from examples.lora_agnews.config import MINI
from examples.lora_agnews.stream import Split

TEXTS, LABELS = data.generate([80] * 4)
CONFIG = replace(MINI, small_steps=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a pretrained model, which a script has made that has no guard for its main process."""
    cache = tmp_path_factory.mktemp("cache")
    folder, script = small.cached(CONFIG, TEXTS, cache), cache / "script.py"
    script.write_text(
        "from pathlib import Path\n"
        "from examples.lora_agnews import small\n"
        "from tests.test_agnews_backbone import CONFIG, TEXTS\n"
        f"small.prepare(CONFIG, TEXTS, Path({str(folder)!r}), print)\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-3:] == ["1", "2", "3"]
    return folder


@pytest.mark.parametrize(
    "name", ["small_layers", "small_width", "small_vocabulary", "small_steps", "max_length"]
)
def test_other_settings_or_texts_make_another_model(tmp_path, name):
    folder = small.cached(CONFIG, TEXTS, tmp_path)
    assert small.cached(CONFIG, TEXTS, tmp_path) == folder
    assert small.cached(CONFIG, TEXTS[::-1], tmp_path) != folder
    assert small.cached(replace(CONFIG, **{name: 64}), TEXTS, tmp_path) != folder


def test_pretraining_is_reproducible_and_does_not_depend_on_the_processor(folder, tmp_path, monkeypatch):
    # What other processors would choose by themselves. Without AVX2 torch sums in another order.
    for name, value in {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "AUTO"}.items():
        monkeypatch.setenv(name, value)
    small.prepare(CONFIG, TEXTS, tmp_path / "again", lambda done: None)
    first, again = ((path / "model.safetensors").read_bytes() for path in (folder, tmp_path / "again"))
    assert first == again
    assert os.environ["ATEN_CPU_CAPABILITY"] == "default"


def test_a_failed_pretraining_is_an_error_and_leaves_nothing(tmp_path, capfd):
    with pytest.raises(RuntimeError, match="exit status 1"):
        small.prepare(CONFIG, [], tmp_path / "model", lambda done: None)
    assert "Traceback" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_pretraining_leaves_nothing(tmp_path):
    def interrupt(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        small.prepare(CONFIG, TEXTS, tmp_path / "model", interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_another_process_made_meanwhile_is_kept(tmp_path, monkeypatch):
    def other_is_faster(config, texts, draft, on_step):
        for path in (draft, tmp_path / "model"):
            path.mkdir()
        (tmp_path / "model" / "theirs").touch()

    monkeypatch.setattr(small, "_in_own_process", other_is_faster)
    small.prepare(CONFIG, TEXTS, tmp_path / "model", print)
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == [
        "model",
        "model/theirs",
    ]


def test_only_adapters_and_head_are_trained_and_the_seed_decides_them(folder):
    model, tokenizer = backbone.load(folder, seed=0)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name or "score" in name for name in trained)
    adapted = {name.split(".h.0.")[1].split(".lora")[0] for name in trained if "lora_" in name}
    assert adapted == {"attn.c_attn", "attn.c_proj", "mlp.c_proj"}
    assert any("score" in name for name in trained)
    assert tokenizer.pad_token_id == model.config.pad_token_id
    for seed in (0, 1):
        others = dict(backbone.load(folder, seed)[0].named_parameters())
        assert all(torch.equal(p, others[name]) for name, p in trained.items()) == (seed == 0)


def test_padding_does_not_change_the_answer(folder):
    model, tokenizer = backbone.load(folder, seed=0)
    model.eval()
    alone = tokenizer([TEXTS[0][:40]], return_tensors="pt")
    padded = tokenizer([TEXTS[0][:40]], return_tensors="pt", padding="max_length", max_length=24)
    assert padded["input_ids"].shape[1] > alone["input_ids"].shape[1]
    torch.testing.assert_close(model(**alone).logits, model(**padded).logits)


def test_a_name_that_leads_nowhere_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(backbone, "unreachable_hub", lambda: "no network")
    with pytest.raises(SetupError, match=r"no/such-model.*no network.*--backbone small"):
        backbone.locate("no/such-model")
    with pytest.raises(SetupError, match=r"config\.json"):
        backbone.locate(str(tmp_path))


def test_a_batch_in_parts_has_the_same_gradient(folder):
    model, tokenizer = backbone.load(folder, seed=0, dropout=False)
    split = Split(TEXTS[:7], LABELS[:7])
    batch = backbone.encode(split, tokenizer, replace(CONFIG, device="cpu"))
    found = []
    for size in (7, 3):
        model.zero_grad()
        train.backward(model, batch, size)
        found.append([p.grad for p in model.parameters() if p.requires_grad])
    torch.testing.assert_close(*found)
    widths = [int(part["attention_mask"].sum(dim=1).max()) for part in parts(batch, 3)]
    assert len(widths) == 3
    assert widths == sorted(widths)  # sorted by length: less padding


def test_gelu_in_one_operation_gives_the_same_answer(folder, tmp_path):
    shape = GPT2Config.from_pretrained(folder)
    shape.activation_function = "gelu_new"  # as of GPT-2 on the hub
    slow = GPT2Model(shape).eval()
    slow.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    model, tokenizer = backbone.load(tmp_path, seed=0)
    assert model.config.activation_function == "gelu_pytorch_tanh"
    tokens = tokenizer([TEXTS[0][:40]], return_tensors="pt")
    fast = model.eval().base_model.model.transformer
    torch.testing.assert_close(slow(**tokens).last_hidden_state, fast(**tokens).last_hidden_state)
