"""Data as it comes: loaders, data sets and lists of examples of different lengths, and what is kept of them."""

import itertools
from collections import UserDict
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loops import begin, take
from models import EACH, SAID, language_model, perceptron, task
from models import loss as mean_loss
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from gemproj.torch import PerExample, Promise
from gemproj.torch import data as reading
from gemproj.torch.losses import CrossEntropy, Distillation, model_logits

LENGTHS = [3, 7, 1, 5, 4, 6]
CLASSES = 5


def texts(seed=0, lengths=LENGTHS):
    """Return examples of different lengths, as tokenizers make them, with the label of a sequence."""
    random = np.random.default_rng(seed)
    return [
        {"input_ids": random.integers(1, 9, n).tolist(), "attention_mask": [1] * n, "label": int(n % 2)}
        for n in lengths
    ]


def padded(examples, left=False):
    """Pad to the longest, with the mask and the labels of sequences."""
    side, batch = "left" if left else "right", {}
    for name in ("input_ids", "attention_mask"):
        batch[name] = pad_sequence([torch.tensor(one[name]) for one in examples], True, 0, side)
    return batch | {"label": torch.tensor([one["label"] for one in examples])}


def masked(generator, examples):
    """Pad, and replace tokens at random."""
    batch = padded(examples)
    hidden = torch.rand(batch["input_ids"].shape, generator=generator) < 0.5
    return batch | {"input_ids": batch["input_ids"].masked_fill(hidden, 0)}


def flattened(examples):
    """Make a padding-free batch, as DataCollatorWithFlattening does."""
    ids = [one["input_ids"] for one in examples]
    return {
        "input_ids": torch.tensor([[i for own in ids for i in own]]),
        "position_ids": torch.tensor([[i for own in ids for i in range(len(own))]]),
        "labels": torch.tensor([[y for own in ids for y in [-100, *own[1:]]]]) % CLASSES,
    }


def data_set(examples):
    return Subset(examples, range(len(examples)))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(texts())


class Doubling(DataLoader):
    """Iterates in a way of its own."""

    def __iter__(self):
        return ({name: leaf * 2 for name, leaf in batch.items()} for batch in super().__iter__())


class Reader(torch.nn.Module):
    """Puts out logits for each token, which depend on nothing but the token."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.nn.Parameter(torch.randn(9, CLASSES, generator=generator, dtype=torch.float64))

    def forward(self, batch):
        return self.table[batch["input_ids"]]


def said(model, batch):
    return model(batch)


def of_labels(model, batch):
    """Return the loss of each example: its logits, averaged over its tokens, and its label."""
    mask = batch["attention_mask"][..., None]
    return cross_entropy((model(batch) * mask).sum(1) / mask.sum(1), batch["label"], reduction="none")


def table(model, batch):
    """Return a loss of any batch."""
    return model.table.sum()


def ids(batch):
    """Return the tokens of each example of a padded batch."""
    pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [row[mask.bool()].tolist() for row, mask in pairs]


def keep(data, promise=of_labels, model=None, microbatch=None, **options):
    """Return the set that is kept of data."""
    keeper = begin(promise, model=Reader() if model is None else model, microbatch=microbatch)[2]
    keeper.keep(data, name="a", **options)
    return keeper.sets["a"]


def every(kept):
    """Return all examples of a set as a batch."""
    return kept.fetch(list(range(len(kept))), None)[0]


WANTED = [one["input_ids"] for one in texts()]

# --- what may be passed ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "collate"),
    [
        (lambda: DataLoader(data_set(texts()), batch_size=4, collate_fn=padded), None),
        (lambda: DataLoader(data_set(texts()), batch_size=4, collate_fn=padded, num_workers=1), None),
        (lambda: DataLoader(Stream(), batch_size=4, collate_fn=padded), None),
        (lambda: DataLoader(Stream(), batch_size=4, collate_fn=padded, drop_last=True), None),
        (texts, padded),
        (lambda: (one for one in texts()), padded),
        (lambda: data_set(texts()), padded),
        (lambda: DataLoader(data_set(texts()), batch_size=4, collate_fn=list), padded),
        (lambda: DataLoader(data_set(texts()), batch_size=None, collate_fn=lambda one: one), padded),
        (lambda: DataLoader(data_set(texts()), batch_size=4), padded),
    ],
)
def test_examples_are_kept_as_they_are_and_padded_to_the_longest_of_those_drawn(data, collate):
    loader = data()
    kept = keep(loader, collate=collate)
    assert ids(every(kept)) == WANTED[: 4 if getattr(loader, "drop_last", False) else None]
    assert kept.fetch([2, 0], None)[0]["input_ids"].shape == (2, 3)


@pytest.mark.parametrize(
    ("made", "fits"),
    [
        (lambda examples: padded(examples), True),
        (lambda examples: padded(examples, left=True) | {"unused": 0}, True),  # which no loss sees
        (lambda examples: padded([one | {"label": 1 - one["label"]} for one in examples]), False),
    ],
)
def test_what_is_added_to_a_set_is_collated_like_what_is_at_hand(made, fits):
    keeper = begin(of_labels, model=Reader())[2]
    keeper.keep(texts(), name="a", collate=padded)
    with (
        nullcontext() if fits else pytest.raises(ValueError, match=r"makes other batches.*of 'a'.*mean loss")
    ):
        keeper.keep(texts(1), name="a", collate=made)
    assert len(keeper.sets["a"]) == len(LENGTHS) * (1 + fits)


def test_collate_functions_that_draw_from_generators_of_their_own_may_be_made_anew():
    keeper = begin(of_labels, model=Reader())[2]
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        keeper.keep(texts(seed), name="a", collate=partial(masked, generator))
    assert len(keeper.sets["a"]) == 2 * len(LENGTHS)


X, Y = task(0)


@pytest.mark.parametrize(
    "data",
    [
        TensorDataset(X, Y),
        [(X, Y)],
        DataLoader(TensorDataset(X, Y), batch_size=5),
        DataLoader([(X[:5], Y[:5]), (X[5:], Y[5:])], batch_size=1, collate_fn=lambda some: some[0]),
        type("Dataset", (DataLoader,), {"__module__": "datasets.loaders"})(TensorDataset(X, Y), batch_size=4),
    ],
    ids=["set", "batches", "loader", "batches handed on", "loader of another kind"],
)
def test_tensors_are_collated_by_torch(data):
    kept = keep(data, mean_loss, perceptron())
    assert kept.collate is default_collate
    assert all(map(torch.equal, every(kept), (X, Y)))


def test_a_data_set_of_more_than_tensors_is_collated_by_torch():
    examples = [{"x": torch.full((2,), float(k)), "text": f"text {k}"} for k in range(3)]
    batch = every(keep(data_set(examples), table))
    assert batch["text"] == ["text 0", "text 1", "text 2"]
    assert batch["x"][:, 0].tolist() == [0.0, 1.0, 2.0]


def test_loaders_that_iterate_in_a_way_of_their_own_have_batches():
    examples = texts(lengths=[4, 4])
    batch = every(keep(Doubling(data_set(examples), batch_size=2, collate_fn=padded), table))
    assert batch["input_ids"].tolist() == [[2 * i for i in one["input_ids"]] for one in examples]


def test_mappings_are_batches_at_any_depth_and_their_order_does_not_matter():
    def nested(model, batch):
        return cross_entropy(model(batch[0]["x"]), batch[1])

    model, optimizer, keeper = begin(nested)
    keeper.keep([(UserDict(x=X, a=Y), Y), (UserDict(a=Y, x=X), Y)])
    keeper.keep(DataLoader(TensorDataset(X, Y), batch_size=5, collate_fn=lambda all: ({"x": X, "a": Y}, Y)))
    take(model, optimizer, task(9))
    assert len(keeper.sets[0]) == 24
    assert len(keeper.rows) == 2


class Trainer:
    def get_train_dataloader(self):
        return [task(0)]


class Endless(IterableDataset):
    def __iter__(self):
        return itertools.repeat(task(0))


IDS = torch.zeros(1, 6, dtype=torch.long)
PACKED = {"input_ids": IDS, "cu_seq_lens_q": torch.tensor([0, 3, 6]), "labels": IDS}
SETS = type("DatasetDict", (dict,), {"__module__": "datasets.dataset_dict"})
NO_END = r"no length, and no end after 5 batches. Pass limit=, or .*itertools.islice\(batches, n\)"


@pytest.mark.parametrize(
    ("data", "collate", "error", "text"),
    [
        (Trainer(), None, TypeError, r"found Trainer. Pass trainer.get_train_dataloader\(\)"),
        (7, None, TypeError, "data must be a loader, a data set or an iterable of batches; found int"),
        (type("Mine", (SETS,), {})(), None, TypeError, r"several sets\. Pass one of them: data\['train'\]"),
        ([X, Y], None, TypeError, r"one batch, of type list. Pass \[batch\]"),
        ((X, X), None, TypeError, r"one batch, of type tuple. Pass \[batch\]"),
        (X, None, TypeError, r"one batch, of type Tensor. Pass \[batch\]"),
        ({"x": X}, None, TypeError, r"one batch, of type dict. Pass \[batch\]"),
        (padded(texts()), padded, TypeError, "found one batch, of type dict"),
        (["a", "b"], None, TypeError, r"found a list of texts\. Pass collate="),
        ([{"x": X[0], "y": Y[0]}], None, ValueError, r"\['y'\] Tensor \(\) .* Elements .* pass the data set"),
        ([{"ids": [1, 2], "y": 0}], None, ValueError, r"found \['ids'\] list of 2, \['y'\] int\..* Elements "),
        ([{"text": ["a", "b"], "y": Y}], None, ValueError, r"\['text'\] list of 2, .*Leave out or convert"),
        ([Trainer()], None, ValueError, "dense tensors, in dicts, lists and tuples, .*; found Trainer"),
        ([torch.eye(3).to_sparse()], None, ValueError, r"found Tensor \(3, 3\) torch.float32 torch\.sparse_coo"),
        ([{"x": X, "z": Y[1:]}], None, ValueError, r"\['x'\] Tensor \(12, 6\) .*\['z'\] Tensor \(11,\)"),
        ([PACKED | {"max_length_q": 3}], None, ValueError, r"\['max_length_q'\] int.*packed.* the loader itself"),
        ([PACKED], None, ValueError, r"\['cu_seq_lens_q'\] Tensor \(3,\) .*packed texts .* the loader itself"),
        ([{"x": X, "y": Y}, {"x": X[:, :5], "y": Y}], None, ValueError,
         r"are alike.*\(5,\).*Pass collate=.*or the loader itself, whose collate_fn pads"),
        ([{"x": X}, {"z": X}], None, ValueError, "are alike.*another one .*'z'"),
        ([(X,), (X.float(),)], None, ValueError, "torch.float64.*, and another one with .*torch.float32"),
        (data_set(texts()), None, ValueError, r"default_collate makes .*list of 3.*list of 7.* Pass collate="),
        (data_set([{"x": None}]), None, ValueError, "tensors, numbers and strings; found .*NoneType"),
        (texts(), 7, TypeError, "collate must be a function of a list of examples; found int"),
        ([{"image": object()}], padded, TypeError, r"found builtins.object.*\(batch for batch in loader\)"),
        (DataLoader([{"image": object()}], collate_fn=padded), None, TypeError, "Convert it in the data set"),
        ((), None, ValueError, "no example.*read only once"),
        (DataLoader(Endless(), batch_size=None), None, ValueError, NO_END),
        (Endless(), None, TypeError, r"found Endless, whose .*\(data, batch_size=n\) .* batch_size=None"),
    ],
)  # fmt: skip
def test_what_cannot_be_kept_is_told_what_to_do(data, collate, error, text, monkeypatch):
    monkeypatch.setattr(reading, "_MOST_BATCHES", 5)
    keeper = begin(of_labels)[2]
    with pytest.raises(error, match=text):
        keeper.keep(data, collate=collate)
    assert keeper.sets == {}


@pytest.mark.skipif(not hasattr(BaseException, "add_note"), reason="notes are of Python 3.11")
def test_elements_that_look_like_batches_are_told_what_to_do():
    """Texts of one length in torch's format, taken one by one: 48 tokens look like 48 examples."""
    elements = [{"input_ids": torch.arange(48), "labels": torch.arange(48)}] * 3
    keeper = begin(lambda model, batch: batch["input_ids"].sum(1).float().mean() + model(X).mean())[2]
    with pytest.raises(IndexError) as caught:
        keeper.keep(elements)
    assert "elements of a data set, pass the data set, or a DataLoader" in "".join(caught.value.__notes__)
    keeper.keep(DataLoader(elements, batch_size=2))
    with pytest.raises(AttributeError) as caught:  # torch makes a tensor for each place in a list
        keeper.keep(DataLoader([{"input_ids": [1, 2, 3]}] * 4))
    assert "Lists in them need collate=" in "".join(caught.value.__notes__)


def test_examples_of_a_set_are_collated_together_and_sets_may_differ():
    keeper = begin(table, model=Reader())[2]
    keeper.keep(texts(), name="a", collate=padded)
    keeper.keep([{"other": torch.zeros(3, 2)}], name="b")
    with pytest.raises(ValueError, match=r"are alike.*list of 3.*list of 7"):
        keeper.keep([padded(texts())], name="a")
    with pytest.raises(KeyError, match="input_ids"):
        keeper.keep(texts(), name="b", collate=padded)
    assert [len(one) for one in keeper.sets.values()] == [6, 3]
    keeper.keep([torch.ones(2)], name="b", collate=lambda some: some)
    assert len(keeper.sets["b"]) == 4


# --- a limit, and no end --------------------------------------------------------------------------


class Counted(Dataset):
    """Counts what is read."""

    def __init__(self, n):
        self.n, self.read = n, []

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.read.append(i)
        return torch.tensor([float(i)])


SOURCES = {
    "data set": lambda: Counted(20),
    "batches": lambda: [torch.arange(20.0)[:, None][k : k + 3] for k in range(0, 20, 3)],
    "iterator": lambda: iter([torch.arange(20.0)[:, None]]),
    "examples": lambda: list(torch.arange(20.0)[:, None]),
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_limit_is_a_uniform_sample(source):
    counts, random = torch.zeros(20, 20), torch.Generator().manual_seed(0)
    collate = torch.stack if source == "examples" else None
    for _ in range(400):
        examples, _ = reading.read(SOURCES[source](), collate, 5, random)
        found = [int(x) for x in examples]
        assert len(set(found)) == 5
        counts[found, [[i] for i in found]] += 1
    # Within 4.5 standard deviations of 400 draws with the chance of an example, and of a pair.
    single, pairs = counts.diagonal(), counts[~torch.eye(20, dtype=torch.bool)]
    assert abs(single - 100).max() < 4.5 * (100 * 0.75) ** 0.5
    assert abs(pairs - 400 / 19).max() < 4.5 * (400 / 19) ** 0.5


def test_of_a_data_set_only_the_chosen_examples_are_read():
    data = Counted(1000)
    kept = keep(data, lambda model, batch: model.table.sum() * batch.mean(), limit=7)
    assert sorted(data.read) == sorted(map(float, kept.examples))
    assert len(set(data.read)) == 7
    fewer = keep(Counted(3), lambda model, batch: model.table.sum() * batch.mean(), limit=7)
    assert list(map(float, fewer.examples)) == [0.0, 1.0, 2.0]


class Longer:
    """A stream whose length is wrong."""

    __iter__ = Endless.__iter__

    def __len__(self):
        return 2


@pytest.mark.parametrize("stream", [lambda: itertools.repeat((X, Y)), lambda: iter(Endless()), Longer])
def test_a_stream_without_an_end_ends_with_a_limit_and_says_so(stream, monkeypatch):
    monkeypatch.setattr(reading, "_MOST_FOR_ONE", 10)
    kept = keep(stream(), mean_loss, perceptron(), limit=7)
    assert len(kept) == 7
    monkeypatch.setattr(reading, "_PATIENCE", -1.0)
    with pytest.warns(UserWarning, match=r"12 examples were read so far. This ends after 70 of them"):
        keep(stream(), mean_loss, perceptron(), limit=7)
    monkeypatch.setattr(reading, "_MOST_BATCHES", 3)
    with (
        pytest.warns(UserWarning, match="without limit= keeps them all"),
        pytest.raises(ValueError, match="no end after 3"),
    ):
        keep(stream(), mean_loss, perceptron())


# --- collate functions that do not fit ---------------------------------------------------------------


def test_outputs_are_not_stored_of_what_is_drawn_at_random():
    def collate(examples):
        x, y = default_collate(examples)
        return x * (torch.rand_like(x) > 0.3), y

    random = torch.get_rng_state()
    for promise in (SAID, Promise(EACH, tolerance=0.1)):
        with pytest.raises(ValueError, match="'a' each time, as masking at random does"):
            keep(TensorDataset(X, Y), promise, perceptron(), collate=collate)
    keep(TensorDataset(X, Y), EACH, perceptron(), collate=collate)
    assert torch.equal(random, torch.get_rng_state())


# --- losses, and outputs of one's own positions -----------------------------------------------------


@pytest.fixture(params=["own", "transformers"])
def kit(request):
    """Return a model now and before, their logits, and functions that make batches of texts."""
    if request.param == "own":
        own = {"right": padded, "left": lambda some: padded(some, left=True), "flat": flattened}
        return SimpleNamespace(before=Reader(0), now=Reader(1), logits=said, rows=texts(), **own)
    collators = pytest.importorskip("test_collators")
    # With a cache, sequences in one row would attend to each other.
    before, now = (language_model(seed=k, use_cache=False).double().eval() for k in (0, 1))
    theirs = {"right": collators.language(), "left": collators.language("left"), "flat": collators.FLAT}
    rows = list(collators.examples())
    return SimpleNamespace(before=before, now=now, logits=model_logits, rows=rows, **theirs)


@pytest.mark.parametrize("top", [None, 2])
@pytest.mark.parametrize("collate", ["right", "left", "flat"])
def test_divergences_are_those_of_each_example_alone(kit, collate, top):
    loss, lengths = Distillation(kit.logits, top=top), [len(one["input_ids"]) for one in kit.rows]
    promise, collate_fn = Promise(loss, tolerance=0.1), getattr(kit, collate)
    kept = keep(kit.rows, promise, kit.before, collate=collate_fn, microbatch=4)
    stored = PerExample(kept.outputs)
    alone = [(kit.right([one]), outputs) for one, outputs in zip(kit.rows, stored, strict=True)]
    expected = torch.cat([loss(kit.now, batch, PerExample([outputs])).detach() for batch, outputs in alone])
    if top is None:  # nothing is drawn
        each = [loss.outputs(kit.before, batch)[0] for batch, _ in alone]
        torch.testing.assert_close(list(stored), each)
    assert kept.listed
    assert [len(tree_leaves(one)[0]) for one in kept.outputs] == lengths
    torch.testing.assert_close(kept.losses, torch.zeros(len(lengths), dtype=torch.float64))
    if top:  # of each token, log-probabilities and classes
        assert {leaf.shape[1] for one in kept.outputs for leaf in one} == {2}
    for at in ([3], [4, 0, 1]) if collate != "flat" else ():
        batch, outputs = kept.fetch(at, "cpu")
        torch.testing.assert_close(loss(kit.now, batch, outputs), expected[at])
    for other in (kit.right, kit.left, kit.flat):
        torch.testing.assert_close(loss(kit.now, other(kit.rows), stored), expected)
    if kit.logits is said:
        with pytest.raises(ValueError, match=r"stored for \[3, 7, .* positions .*now \[2, 7, "):
            loss(kit.now, padded([*texts(lengths=[2]), *kit.rows[1:]]), stored)


def test_outputs_that_differ_in_shape_need_a_list():
    class Said:
        outputs = staticmethod(said)

        def __call__(self, model, batch, outputs=None):
            return (model(batch) - outputs).square().mean((1, 2))

    with pytest.raises(ValueError, match=r"\(7, 5\).*\(5, 5\).*must return a PerExample"):
        keep(texts(), Promise(Said(), examples=2), collate=padded)


@pytest.mark.parametrize("shift", [False, True])
def test_a_padding_free_batch_is_one_loss_for_each_example(kit, shift):
    loss = CrossEntropy(lambda *given: kit.logits(*given), shift=shift)  # not the default, which insists
    expected = [loss(kit.now, kit.flat([one])) for one in kit.rows]
    assert [one.shape for one in expected] == [(1,)] * len(kit.rows)
    torch.testing.assert_close(loss(kit.now, kit.flat(kit.rows)), torch.cat(expected))


@pytest.mark.parametrize("shift", [False, True])
def test_packed_rows_are_one_loss_for_each_example(shift):
    loss, flat = CrossEntropy(said, shift=shift), flattened(texts(lengths=[6, 7, 8, 5]))
    packed = {name: leaf.view(2, 13) for name, leaf in flat.items()}
    torch.testing.assert_close(loss(Reader(1), packed), loss(Reader(1), flat))
    kept = keep([packed], Promise(loss, tolerance=0.1), microbatch=1)  # as one example each
    torch.testing.assert_close(kept.losses, loss(Reader(), packed).detach().view(2, 2).mean(1))


def token_mean(model, batch):
    return CrossEntropy(said).of(model(batch), batch | {"attention_mask": ()}).mean()


def test_losses_of_several_in_one_number_are_stored_one_at_a_time():
    wanted = Promise(token_mean, tolerance=0.1)
    with pytest.raises(ValueError, match=r"one loss for each example, .*microbatch=1"):
        keep(texts(), wanted, collate=flattened)
    kept = keep(texts(), wanted, collate=flattened, microbatch=1)
    expected = [token_mean(Reader(), flattened([one])).detach() for one in texts()]
    torch.testing.assert_close(kept.losses, torch.stack(expected))


def test_packed_sequences():
    """As batches of a collate function, of which outputs are stored."""
    rows = [torch.randn(n, 2) for n in (4, 2, 3)]

    def collate(some):
        return torch.nn.utils.rnn.pack_sequence(some, enforce_sorted=False)

    model, said = torch.nn.LSTM(2, 3), Distillation(lambda model, x: model(x)[1][0][-1])
    _, optimizer, keeper = begin(Promise(said), model=model)
    keeper.keep(rows, collate=collate)
    optimizer.step()
    assert float(keeper.last.losses.abs().max()) < 1e-6
