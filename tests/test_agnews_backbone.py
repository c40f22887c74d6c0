"""The small backbone and its cache, and the adapters on top."""

import dataclasses

import pytest

pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("sklearn")

import torch

from examples.lora_agnews import backbone, corpus, pretrain
from examples.lora_agnews.config import MINI

TEXTS, LABELS = corpus.generate([80] * 4)
RECIPE = dataclasses.replace(pretrain.Recipe.of(MINI), steps=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return pretrain.prepare(RECIPE, TEXTS, tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(pretrain.Recipe)])
def test_the_key_depends_on_every_part_of_the_recipe(field):
    changed = dataclasses.replace(RECIPE, **{field: getattr(RECIPE, field) * 2 + 1})
    assert changed.key(TEXTS) != RECIPE.key(TEXTS)


def test_the_key_depends_on_texts_and_library_versions(monkeypatch):
    key = RECIPE.key(TEXTS)
    assert RECIPE.key(TEXTS) == key
    assert RECIPE.key(TEXTS[::-1]) != key
    assert RECIPE.key((*TEXTS[:-1], TEXTS[-1] + "!")) != key
    for library in pretrain.LIBRARIES:
        with monkeypatch.context() as patch:
            patch.setattr(pretrain, "version", lambda name, other=library: "99.0" if name == other else "1.0")
            newer = RECIPE.key(TEXTS)
            patch.setattr(pretrain, "version", lambda name: "1.0")
            assert RECIPE.key(TEXTS) != newer


def test_the_settings_of_an_experiment_reach_the_recipe():
    changes = {
        "small_layers": 3,
        "small_width": 64,
        "small_vocabulary": 500,
        "small_steps": 9,
        "max_length": 32,
    }
    for name, value in changes.items():
        other = pretrain.Recipe.of(dataclasses.replace(MINI, **{name: value}))
        assert other.key(TEXTS) != pretrain.Recipe.of(MINI).key(TEXTS), name


def test_a_cached_backbone_is_not_made_again(folder, monkeypatch):
    monkeypatch.setattr(pretrain, "train_model", lambda *args: pytest.fail("pretrained again"))
    assert pretrain.prepare(RECIPE, TEXTS, folder.parent) == folder


def test_an_interrupted_pretraining_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(pretrain, "train_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pretrain.prepare(RECIPE, TEXTS, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_pretraining_is_reproducible_and_leaves_the_global_generator_alone(folder):
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    tokenizer = pretrain.train_tokenizer(TEXTS, RECIPE.vocabulary)
    model = pretrain.train_model(RECIPE, tokenizer, TEXTS)
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_num_threads() == threads
    saved = pretrain.GPT2LMHeadModel.from_pretrained(folder).state_dict()
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())


def test_only_adapters_and_head_are_trained(folder):
    model, tokenizer = backbone.load(folder, seed=0)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("lora_" in name or "score" in name for name in trained)
    adapted = {name.split(".h.0.")[1].split(".lora")[0] for name in trained if "lora_" in name}
    assert adapted == {"attn.c_attn", "attn.c_proj", "mlp.c_proj"}
    assert any("score" in name for name in trained)
    assert all(p.shape[0] == 8 for name, p in model.named_parameters() if "lora_A" in name)
    assert tokenizer.pad_token_id == model.config.pad_token_id


def test_the_seed_decides_the_head_and_the_adapters(folder):
    def start(seed):
        parameters = backbone.load(folder, seed)[0].named_parameters()
        return torch.cat([p.detach().flatten() for _, p in parameters if p.requires_grad])

    assert torch.equal(start(1), start(1))
    assert not torch.equal(start(1), start(2))


def test_padding_does_not_change_the_answer(folder):
    model, tokenizer = backbone.load(folder, seed=0)
    model.eval()
    alone = tokenizer([TEXTS[0][:40]], return_tensors="pt")
    padded = tokenizer([TEXTS[0][:40]], return_tensors="pt", padding="max_length", max_length=RECIPE.context)
    assert padded["input_ids"].shape[1] > alone["input_ids"].shape[1]
    torch.testing.assert_close(model(**alone).logits, model(**padded).logits)


def test_a_name_that_leads_nowhere_is_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(backbone.hub, "offline", lambda: "no network")
    with pytest.raises(backbone.BackboneError, match=r"no/such-model.*no network.*--backbone small"):
        backbone.locate("no/such-model")
    with pytest.raises(backbone.BackboneError, match=r"config\.json"):
        backbone.locate(str(tmp_path))
