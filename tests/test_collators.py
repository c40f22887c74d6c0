"""The collators of transformers, data sets of Hugging Face and loaders of its Trainer, as they come."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

import models  # noqa: E402
from loops import begin, through_a_file  # noqa: E402
from models import language_model  # noqa: E402

from gemproj.torch import Promise  # noqa: E402
from gemproj.torch.losses import CrossEntropy, Distillation  # noqa: E402

TEXTS = ["a b c", "d", "e f g h i j", "b a d", "k k a b"]
TOKENIZER = models.tokenizer("abcdefghijk")
FLAT = transformers.DataCollatorWithFlattening()


def examples():
    """Return a data set of tokenized texts, as ``datasets.map`` makes it."""
    return datasets.Dataset.from_list([dict(TOKENIZER(text, return_token_type_ids=False)) for text in TEXTS])


def kept_texts(batch):
    """Return the texts of a padded batch."""
    pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [TOKENIZER.decode(row[mask.bool()]) for row, mask in pairs]


def language(side="right"):
    return transformers.DataCollatorForLanguageModeling(models.tokenizer("abcdefghijk", side), mlm=False)


def logits(model, batch):
    return model(batch["input_ids"], batch["attention_mask"]).logits


@pytest.mark.parametrize("limit", [None, 2])
def test_a_data_set_in_the_format_of_torch_needs_no_collator(limit):
    rows = datasets.Dataset.from_dict({"x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]}).with_format("torch")
    keeper = begin(
        lambda m, batch: m.lm_head.weight.sum() * batch["x"].sum(1), model=language_model().double()
    )[2]
    keeper.keep(rows, limit=limit)
    found = sorted(one["x"].tolist() for one in keeper.sets[0].examples)
    assert len(found) == (limit or 3)
    assert all(one in rows["x"][:].tolist() for one in found)


@pytest.mark.parametrize("streamed", [False, True])
def test_the_loader_of_a_trainer_is_one_of_examples(streamed, tmp_path):
    model, each = language_model().double(), CrossEntropy(logits, shift=True)
    options = {"per_device_train_batch_size": 2, "max_steps": 1, "report_to": "none", "use_cpu": True}
    arguments, rows = transformers.TrainingArguments(str(tmp_path), **options), examples()
    rows = rows.to_iterable_dataset() if streamed else rows
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, data_collator=language())
    _, optimizer, keeper = begin(each, model=model, tolerance=0.0)
    loader = trainer.get_train_dataloader()
    with pytest.warns(UserWarning, match="1 of 5 examples of set 0 have no label and are left out"):
        keeper.keep(loader)  # a text of one token predicts nothing
    kept = keeper.sets[0]
    batch, longer = kept.fetch(list(range(len(kept))), None)[0], [text for text in TEXTS if " " in text]
    assert streamed is (kept_texts(batch) == longer)  # the loader of a data set shuffles
    assert sorted(kept_texts(batch)) == sorted(longer)
    assert batch.input_ids.shape == (4, 6)
    torch.testing.assert_close(kept.losses, each(model, batch).detach())
    (-each(model, batch)).mean().backward()
    optimizer.step()
    assert keeper.last.num_violated == 1
    keeper.load_state_dict(through_a_file(keeper.state_dict()))
    other = keeper.sets[0].fetch(list(range(len(kept))), None)[0]
    assert kept_texts(other) == kept_texts(batch)


def test_packed_texts_are_apart_also_where_the_model_would_keep_a_cache():
    model = language_model().double()
    model.config.use_cache = True
    _, optimizer, keeper = begin(Promise(Distillation(), tolerance=0.0), model=model)
    rows = examples()
    keeper.keep(rows, name="a", collate=FLAT)
    assert model.config.use_cache
    optimizer.step()
    assert float(keeper.rows.losses.abs().max()) < 1e-6
    for row, stored in zip(rows, keeper.sets["a"].outputs, strict=True):
        apart = torch.log_softmax(model(torch.tensor([row["input_ids"]])).logits[0], -1)
        torch.testing.assert_close(stored, apart, rtol=0, atol=1e-6)
