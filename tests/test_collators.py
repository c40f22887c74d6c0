"""The collators of transformers, data sets of Hugging Face and loaders of its Trainer, as they come."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

import models  # noqa: E402
from models import begin, language_model  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from gemproj.torch import EpisodicMemory, Promise  # noqa: E402
from gemproj.torch.losses import CrossEntropy, Distillation  # noqa: E402

TEXTS = ["a b c", "d", "e f g h i j", "b a d", "k k a b"]
TOKENIZER = models.tokenizer("abcdefghijk")
FLAT = transformers.DataCollatorWithFlattening()


def examples(**more):
    """A data set of tokenized texts, as ``datasets.map`` makes it."""
    rows = [dict(TOKENIZER(text, return_token_type_ids=False)) for text in TEXTS]
    rows = [row | {name: function(row["input_ids"]) for name, function in more.items()} for row in rows]
    return datasets.Dataset.from_list(rows)


def store(data, promise, **options):
    gem = begin(promise, model=language_model().double(), per_task=10)[2]
    gem.keep(data, name="a", **options)
    return gem.memory


def kept(batch):
    """The texts of a padded batch."""
    pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [TOKENIZER.decode(row[mask.bool()]) for row, mask in pairs]


def language(side="right"):
    return transformers.DataCollatorForLanguageModeling(models.tokenizer("abcdefghijk", side), mlm=False)


def logits(model, batch):
    return model(batch["input_ids"], batch["attention_mask"]).logits


@pytest.mark.parametrize(
    ("collator", "more"),
    [
        (transformers.DataCollatorWithPadding(TOKENIZER), {"labels": len}),
        (language(), {}),
        (transformers.DataCollatorForSeq2Seq(TOKENIZER), {"labels": lambda ids: ids[1:]}),
    ],
    ids=["padding", "language", "sequences"],
)
@pytest.mark.parametrize("kind", ["loader", "data set", "iterable"])
def test_examples_are_padded_to_the_longest_of_those_drawn(collator, more, kind):
    rows, collate = examples(**more), None if kind == "loader" else collator
    if kind != "data set":
        rows = DataLoader(rows, 2, collate_fn=collator) if kind == "loader" else rows.to_iterable_dataset()
    memory = store(rows, lambda model, batch: logits(model, batch).mean((1, 2)), collate=collate)
    assert kept(memory.batch("a")) == TEXTS
    for _ in range(5):
        batch = next(memory.batches(n=2))
        assert isinstance(batch, transformers.BatchEncoding)
        assert batch.input_ids.shape[1] == max(len(text.split()) for text in kept(batch))
        assert all("labels" in one for one in (batch, memory.batch("a")))


def test_a_data_set_in_the_format_of_torch_needs_no_collator():
    rows = datasets.Dataset.from_dict({"x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]}).with_format("torch")
    memory = store(rows, lambda model, batch: model.lm_head.weight.sum() * batch["x"].sum(1))
    assert memory.batch("a")["x"].tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    assert memory.nbytes == 10 * 2 * 4


@pytest.mark.parametrize("streamed", [False, True])
def test_the_loader_of_a_trainer_is_one_of_examples(streamed, tmp_path):
    model, each = language_model().double(), CrossEntropy(logits, shift=True)
    options = {"per_device_train_batch_size": 2, "max_steps": 1, "report_to": "none", "use_cpu": True}
    arguments, rows = transformers.TrainingArguments(str(tmp_path), **options), examples()
    rows = rows.to_iterable_dataset() if streamed else rows
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, data_collator=language())
    _, optimizer, gem = begin(each, model=model, tolerance=0.0)
    gem.end_task(trainer.get_train_dataloader())
    stored = gem.memory.batch(0)
    assert streamed is (kept(stored.batch) == TEXTS)  # the loader of a data set shuffles
    assert sorted(kept(stored.batch)) == sorted(TEXTS)
    assert stored.batch.input_ids.shape == (5, 6)
    torch.testing.assert_close(stored.losses, each(model, stored.batch).detach())
    (-each(model, stored.batch)).mean().backward()
    optimizer.step()
    assert gem.last.num_violated == 1
    torch.save(gem.memory.state_dict(), tmp_path / "memory.pt")
    other = EpisodicMemory(100, collate=language())
    other.load_state_dict(torch.load(tmp_path / "memory.pt", weights_only=True))
    assert kept(other.batch(0).batch) == kept(stored.batch)


def test_packed_texts_are_apart_also_where_the_model_would_keep_a_cache():
    model = language_model().double()
    model.config.use_cache = True
    said = Distillation()
    gem = begin(Promise(said, tolerance=0.0), model=model, per_task=10)[2]
    rows = examples()
    gem.keep(rows, name="a", collate=FLAT)
    assert model.config.use_cache
    gem.projector.recall(model, gem.memory.promised(gem.promise), gem.promise)
    assert float(gem.projector._matrix.losses.abs().max()) < 1e-6
    for row, stored in zip(rows, gem.memory.batch("a").outputs, strict=True):
        apart = torch.log_softmax(model(torch.tensor([row["input_ids"]])).logits[0], -1)
        torch.testing.assert_close(stored, apart, rtol=0, atol=1e-6)
