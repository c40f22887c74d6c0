"""The collators of transformers, data sets of Hugging Face and loaders of Accelerate, as they come."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
datasets = pytest.importorskip("datasets")

from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from transformers import (  # noqa: E402
    BatchEncoding,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorWithFlattening,
    DataCollatorWithPadding,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)

from gemproj.torch import GEM, EpisodicMemory, Promise  # noqa: E402
from gemproj.torch.losses import CrossEntropy, Distillation, model_loss  # noqa: E402
from gemproj.torch.remember import remember  # noqa: E402

WORDS = ["<pad>", *"abcdefghijk"]
TEXTS = ["a b c", "d", "e f g h i j", "b a d", "k k a b"]


def tokenizer(side="right"):
    """A tokenizer of a few words, which are told apart by spaces."""
    words = Tokenizer(models.WordLevel({word: k for k, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", padding_side=side)


def examples(**more):
    """A data set of tokenized texts, as ``datasets.map`` makes it."""
    own = tokenizer()
    rows = [dict(own(text, return_token_type_ids=False)) for text in TEXTS]
    rows = [row | {name: function(row["input_ids"]) for name, function in more.items()} for row in rows]
    return datasets.Dataset.from_list(rows)


def llama(seed=0):
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        use_cache=False,  # with a cache, sequences in one row would attend to each other
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).double().eval()


def store(data, promise, model=None, **options):
    memory = EpisodicMemory(10)
    remember(memory, data, "a", llama() if model is None else model, promise, **options)
    return memory


def kept(batch):
    """The texts of a padded batch."""
    pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [" ".join(WORDS[k] for k in row[mask.bool()]) for row, mask in pairs]


def language(side="right"):
    return DataCollatorForLanguageModeling(tokenizer(side), mlm=False)


EACH = CrossEntropy(
    lambda model, batch: model(batch["input_ids"], batch["attention_mask"]).logits, shift=True
)


@pytest.mark.parametrize(
    ("collator", "more"),
    [
        (DataCollatorWithPadding, {"labels": len}),
        (lambda own: DataCollatorForLanguageModeling(own, mlm=False), {}),
        (DataCollatorForSeq2Seq, {"labels": lambda ids: ids[1:]}),
    ],
    ids=["padding", "language", "sequences"],
)
@pytest.mark.parametrize("kind", ["loader", "data set", "iterable"])
def test_examples_are_padded_to_the_longest_of_those_drawn(collator, more, kind):
    collator, rows = collator(tokenizer()), examples(**more)
    loss = lambda model, batch: model(batch["input_ids"], batch["attention_mask"]).logits.mean((1, 2))  # noqa: E731
    data = {
        "loader": lambda: DataLoader(rows, 2, collate_fn=collator),
        "data set": lambda: rows,
        "iterable": lambda: rows.to_iterable_dataset(),
    }
    memory = store(data[kind](), Promise(loss), collate=None if kind == "loader" else collator)
    assert kept(memory.batch("a")) == TEXTS
    for _ in range(5):
        batch = next(memory.batches(n=2))
        assert isinstance(batch, BatchEncoding)
        assert batch.input_ids.shape[1] == max(len(text.split()) for text in kept(batch))
        assert all("labels" in one for one in (batch, memory.batch("a")))


def test_what_has_no_collator_is_told_what_to_pass():
    with pytest.raises(ValueError, match=r"default_collate cannot .* Pass collate="):
        store(examples(), Promise())
    with pytest.raises(TypeError, match=r"several sets\. Pass one of them: data\['train'\]"):
        store(datasets.DatasetDict({"train": examples()}), Promise())


def test_a_data_set_in_the_format_of_torch_needs_no_collator():
    rows = datasets.Dataset.from_dict({"x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]}).with_format("torch")
    memory = store(rows, Promise(lambda model, batch: model.lm_head.weight.sum() * batch["x"].sum(1)))
    assert memory.batch("a")["x"].tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    assert memory.nbytes == 10 * 2 * 4


def test_divergences_do_not_depend_on_padding_side_and_neighbours():
    teacher, model, loss = llama(0), llama(1), Distillation(top=3)
    rows = list(examples())
    expected = []
    for row in rows:
        batch = language()([row])
        expected.append(loss(model, batch, loss.outputs(teacher, batch)).item())
    by_text = dict(zip(TEXTS, expected, strict=True))
    memory = store(DataLoader(rows, 2, collate_fn=language()), Promise(loss, tolerance=0.1), teacher)
    position = 3 * (8 + 4)  # three log-probabilities and classes
    tokens = sum(len(text.split()) for text in TEXTS)
    alone = store(DataLoader(rows, 2, collate_fn=language()), Promise(model_loss))
    assert memory.nbytes == alone.nbytes + tokens * position + 10 * 8
    for side in ("left", "right"):
        memory.add([], "a", collate=language(side))
        for n in (1, 2, 5):
            stored = next(memory.batches(n=n))
            found = loss(model, stored.batch, stored.outputs).tolist()
            assert found == pytest.approx([by_text[text] for text in kept(stored.batch)], abs=1e-9)


def test_padding_free_batches_have_losses_of_each_example_alone():
    teacher, model, loss = llama(0), llama(1), Distillation()
    rows, flat = list(examples()), DataCollatorWithFlattening()
    memory = store(rows, Promise(loss, tolerance=0.1), teacher, collate=flat)
    stored = memory.batch("a")
    assert stored.batch["input_ids"].shape == (1, 17)
    assert stored.losses.shape == (5,)
    expected = [
        loss(model, one, loss.outputs(teacher, one)).item()
        for one in map(language(), ([row] for row in rows))
    ]
    assert loss(model, stored.batch, stored.outputs).tolist() == pytest.approx(expected, abs=1e-9)
    each = CrossEntropy(shift=True)
    alone = [each(model, language()([row])).item() for row in rows]
    assert each(model, flat(rows)).tolist() == pytest.approx(alone, abs=1e-9)
    padded = store(rows, Promise(loss), teacher, collate=language())
    assert [len(one) for one in padded.batch("a").outputs] == [len(one) for one in stored.outputs]


def test_the_loader_of_a_trainer_is_one_of_examples(tmp_path):
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, report_to="none", use_cpu=True
    )
    model = llama()
    trainer = Trainer(model, arguments, train_dataset=examples(), data_collator=language())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gem = GEM(model, optimizer, EACH, tolerance=0.0)
    gem.end_task(trainer.get_train_dataloader())
    stored = gem.memory.batch(0)
    assert sorted(kept(stored.batch)) == sorted(TEXTS)
    assert stored.batch.input_ids.shape == (5, 6)
    torch.testing.assert_close(stored.losses, EACH(model, stored.batch).detach())
    before = EACH(model, stored.batch).mean().item()
    for _ in range(3):
        optimizer.zero_grad()
        (-EACH(model, language()(list(examples())))).mean().backward()
        optimizer.step()
    assert gem.last.num_violated == 1
    assert EACH(model, stored.batch).mean().item() < before + 0.05
    state = gem.memory.state_dict()
    torch.save(state, tmp_path / "memory.pt")
    other = EpisodicMemory(100, collate=language())
    other.load_state_dict(torch.load(tmp_path / "memory.pt", weights_only=True))
    assert kept(other.batch(0).batch) == kept(stored.batch)
