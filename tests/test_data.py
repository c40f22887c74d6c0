"""Data as it comes: loaders, data sets and lists of examples of different lengths, and what is stored of them."""

import dataclasses
import itertools
import sys
from functools import partial
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from models import EACH, SAID, begin, language_model, perceptron, rows, task  # noqa: E402
from models import loss as mean_loss  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, default_collate  # noqa: E402

from gemproj.torch import EpisodicMemory, Promise, reading  # noqa: E402
from gemproj.torch.losses import CrossEntropy, Distillation, PerExample, model_logits  # noqa: E402

LENGTHS = [3, 7, 1, 5, 4, 6]
CLASSES = 5


def texts(seed=0, lengths=LENGTHS):
    """Examples of different lengths, as tokenizers make them, with the label of a sequence."""
    random = np.random.default_rng(seed)
    return [
        {"input_ids": random.integers(1, 9, n).tolist(), "attention_mask": [1] * n, "label": int(n % 2)}
        for n in lengths
    ]


def padded(examples, left=False):
    """Pad to the longest, with the mask and the labels of sequences."""
    longest = max(len(one["input_ids"]) for one in examples)

    def fill(name, value):
        rows = [(one[name], [value] * (longest - len(one[name]))) for one in examples]
        return torch.tensor([pad + own if left else own + pad for own, pad in rows])

    batch = {name: fill(name, 0) for name in ("input_ids", "attention_mask")}
    return batch | {"label": torch.tensor([one["label"] for one in examples])}


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


def ids(batch):
    """Return the tokens of each example of a padded batch."""
    pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [row[mask.bool()].tolist() for row, mask in pairs]


def store(
    data, promise=of_labels, model=None, name=0, per_task=100, collate=None, microbatch=None, **options
):
    memory = EpisodicMemory(per_task, **options)
    gem = begin(promise, model=Reader() if model is None else model, memory=memory, microbatch=microbatch)[2]
    gem.keep(data, name=name, collate=collate)
    return memory


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
def test_examples_are_stored_as_they_are_and_padded_to_the_longest_of_those_drawn(data, collate):
    loader = data()
    memory = store(loader, collate=collate)
    assert ids(memory.batch(0)) == WANTED[: 4 if getattr(loader, "drop_last", False) else None]
    for batch in memory.batches(n=2):
        assert batch["input_ids"].shape == (2, max(batch["attention_mask"].sum(1)))


X, Y = task(0)


@pytest.mark.parametrize(
    "data",
    [
        TensorDataset(X, Y),
        [(X, Y)],
        DataLoader(TensorDataset(X, Y), batch_size=5),
        DataLoader([(X[:5], Y[:5]), (X[5:], Y[5:])], batch_size=1, collate_fn=lambda some: some[0]),
    ],
    ids=["set", "batches", "loader", "batches handed on"],
)
def test_tensors_are_stored_in_batches(data):
    memory = store(data, mean_loss, perceptron(), per_task=15)
    assert all(map(torch.equal, memory.batch(0), (X, Y)))
    assert memory.nbytes == 15 * 7 * 8


def test_a_data_set_of_more_than_tensors_is_collated_by_torch():
    examples = [{"x": torch.full((2,), float(k)), "text": f"text {k}"} for k in range(3)]
    loss = lambda model, batch: model.table.sum() * batch["x"].sum()  # noqa: E731
    batch = store(data_set(examples), loss).batch(0)
    assert batch["text"] == ["text 0", "text 1", "text 2"]
    assert batch["x"][:, 0].tolist() == [0.0, 1.0, 2.0]


def test_loaders_that_iterate_in_a_way_of_their_own_have_batches():
    examples = texts(lengths=[4, 4])
    memory = store(
        Doubling(data_set(examples), batch_size=2, collate_fn=padded), lambda m, batch: m.table.sum()
    )
    assert memory.batch(0)["input_ids"].tolist() == [[2 * i for i in one["input_ids"]] for one in examples]


class Trainer:
    def get_train_dataloader(self):
        return [task(0)]


class Endless(IterableDataset):
    def __iter__(self):
        return itertools.repeat(task(0))


IDS = torch.zeros(1, 6, dtype=torch.long)
PACKED = {"input_ids": IDS, "cu_seq_lens_q": torch.tensor([0, 3, 6]), "labels": IDS}
SETS = type("DatasetDict", (dict,), {"__module__": "datasets.dataset_dict"})
NO_END = r"no length, and no end after 5 batches.*itertools.islice\(batches, n\)"


@pytest.mark.parametrize(
    ("data", "collate", "error", "text"),
    [
        (Trainer(), None, TypeError, r"found Trainer. Pass trainer.get_train_dataloader\(\)"),
        (7, None, TypeError, "data must be a loader, a data set or an iterable of batches; found int"),
        (SETS(), None, TypeError, r"several sets\. Pass one of them: data\['train'\]"),
        (type("Mine", (SETS,), {})(), None, TypeError, r"several sets\. Pass one of them: data\['train'\]"),
        ([X, Y], None, TypeError, r"one batch, of type list. Pass \[batch\]"),
        (X, None, TypeError, r"one batch, of type Tensor. Pass \[batch\]"),
        ({"x": X}, None, TypeError, r"one batch, of type dict. Pass \[batch\]"),
        (padded(texts()), padded, TypeError, "found one batch, of type dict"),
        ([{"x": X[0], "y": Y[0]}], None, ValueError, r"\(\) in batch\['y'\]. Elements .* pass the data set"),
        ([{"x": X[0, 0], "y": Y[0]}], None, ValueError, r"\(\) in batch\['x'\], \(\) in batch\['y'\]. Elements "),
        ([{"ids": [1, 2], "y": 0}], None, TypeError, r"found int in batch\['ids'\]\[0\]. Elements .*DataLoader"),
        ([{"text": ["a", "b"], "y": Y}], None, TypeError, r"found str in batch\['text'\]\[0\].*Leave out or convert"),
        ([Trainer()], None, TypeError, "tensors only, in dicts, lists and tuples; found Trainer in batch"),
        ([{"x": X, "z": Y[1:]}], None, ValueError, r"\(12, 6\) in batch\['x'\], \(11,\) in batch\['z'\]\.$"),
        ([PACKED | {"max_length_q": 3}], None, TypeError, r"int in batch\['max_length_q'\].*pass the loader itself"),
        ([PACKED], None, ValueError, r"\(3,\) in batch\['cu_seq_lens_q'\].*pass the loader itself"),
        ([{"x": X, "y": Y}, {"x": X[:, :5], "y": Y}], None, ValueError,
         r"float64 in batch\['x'\]; found \(5,\).*pass the loader itself, whose collate_fn pads.*collate="),
        (data_set(texts()), None, ValueError, r"default_collate cannot .*Pass collate="),
        (texts(), 7, TypeError, "collate must be a function of a list of examples; found int"),
        ([{"image": object()}], padded, TypeError, r"found builtins.object.*\(batch for batch in loader\)"),
        (DataLoader([{"image": object()}], collate_fn=padded), None, TypeError, "Convert it in the data set"),
        ([], padded, ValueError, "data holds no example"),
        ((), None, ValueError, "no example.*read only once"),
        (itertools.repeat(task(0)), None, ValueError, NO_END),
        (Endless(), None, ValueError, NO_END),
        (DataLoader(Endless(), batch_size=None), None, ValueError, NO_END),
    ],
)  # fmt: skip
def test_what_cannot_be_stored_is_told_what_to_do(data, collate, error, text, monkeypatch):
    monkeypatch.setattr(reading, "_MOST_BATCHES", 5)
    gem = begin(of_labels)[2]
    with pytest.raises(error, match=text):
        gem.keep(data, collate=collate)
    assert gem.memory.tasks == []


@pytest.mark.parametrize("bound", [None, 0.0])
def test_what_is_read_once_and_what_has_an_end(bound, monkeypatch):
    monkeypatch.setattr(reading, "_MOST_BATCHES", 5)
    gem, stream = begin(EACH, tolerance=bound)[2], itertools.islice(itertools.repeat(task(0)), 5)
    gem.end_task(stream)
    with pytest.raises(ValueError, match=r"no example.*read only once"):
        gem.end_task(stream)
    gem.end_task([task(0)] * 9)
    own = type("Dataset", (DataLoader,), {"__module__": "datasets.loaders"})
    gem.end_task(own(TensorDataset(X, Y), batch_size=4))
    assert gem.memory.tasks == [0, 1, 2]


def test_a_task_is_of_one_kind_and_tasks_may_differ():
    memory = store(texts(), collate=padded)
    with pytest.raises(ValueError, match=r"stored as a list, .*Pass examples with collate="):
        memory.add(padded(texts()), 0)
    memory.add({"other": torch.zeros(3, 2)}, 1)
    with pytest.raises(ValueError, match="stored in batches of tensors; found a list"):
        memory.add([{"other": torch.zeros(2)}], 1, collate=padded)
    assert [sorted(batch) for batch in memory.batches(n=2)][1] == ["other"]
    for draw in (lambda: memory.sample(4), lambda: list(memory.batches(per="all"))):
        with pytest.raises(ValueError, match=r"cannot be mixed in one batch\. Draw from each task"):
            draw()
    memory.remove(0)
    memory.add({"z": torch.zeros(3, 2)}, 2)
    with pytest.raises(ValueError, match="differ in structure, shape or dtype"):
        memory.sample(4)


# --- what is stored, and what survives a file -----------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Pair:
    """An example that is a dataclass."""

    ids: torch.Tensor
    label: int


def test_dataclasses():
    big = torch.arange(1000.0)
    examples = [Pair(big[k : k + 2], k) for k in range(3)]

    def collate(some):
        return Pair(torch.stack([one.ids for one in some]), torch.tensor([one.label for one in some]))

    memory = EpisodicMemory(label=lambda batch: batch.label)
    memory.add(examples, 0, collate=collate)
    assert memory.nbytes == 3 * 8 + sum(map(sys.getsizeof, range(3)))
    assert memory.batch(0).ids.tolist() == [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]
    assert [one.label.tolist() for one in memory.batches(per="label")] == [[0], [1], [2]]
    moved = dataclasses.replace(memory.source(0), device="meta").all()
    assert (moved.ids.device.type, moved.label.device.type) == ("meta", "meta")


def test_no_view_holds_a_data_set_and_no_draw_changes_the_memory():
    seen = []

    def spoiling(some):
        for one in some:
            seen.append(one["x"].untyped_storage().nbytes())
            one["x"] += 7.0
        return {"x": torch.stack([one["x"] for one in some]), "a": np.stack([one.pop("a") for one in some])}

    big, table = torch.zeros(1000, 4), np.zeros((1000, 4), np.float32)
    memory = EpisodicMemory(4, label=lambda batch: batch["x"][:, 0].long())
    memory.add([{"x": big[k], "a": table[k]} for k in range(20)], 0, collate=spoiling)
    big += 1.0  # what is stored are copies
    assert memory.nbytes == 4 * (16 + 16)
    for _ in range(2):
        batch = memory.batch(0)
        assert torch.equal(batch["x"], torch.full((4, 4), 7.0))
        assert batch["a"].shape == (4, 4)
    assert set(seen) == {16}
    assert (big == 1.0).all()


def test_any_example_survives_a_file(tmp_path):
    examples = [
        {
            "tensor": torch.arange(k + 1.0).bfloat16(),
            "arrays": [np.arange(k + 1, dtype=np.uint16), np.float32(k / 3), np.array(["a", "text"])],
            ("a", 1): (k, k / 3, 1j * k, True, None, "text"),
            "when": np.datetime64("2026-01-01"),
            "none": np.zeros((0, 3)),
        }
        for k in range(6)
    ]

    def same(left, right):
        pairs = zip(*map(tree_leaves, (left, right)), strict=True)
        return all(torch.equal(a, b) if torch.is_tensor(a) else np.array_equal(a, b) for a, b in pairs)

    memory, loaded = (EpisodicMemory(4, seed=seed) for seed in (1, 2))
    memory.add(examples, "a", collate=list)
    next(memory.batches(n=3))
    torch.save(memory.state_dict(), tmp_path / "memory.pt")
    loaded.load_state_dict(torch.load(tmp_path / "memory.pt", weights_only=True))
    with pytest.raises(ValueError, match=r"task 'a' were loaded without .*Set memory\.collate"):
        loaded.batch("a")
    loaded.collate = list
    for _ in range(5):
        found = next(loaded.batches(n=3))
        assert same(found, next(memory.batches(n=3)))
        for one in found:
            assert one["tensor"].dtype == torch.bfloat16
            assert [type(leaf) for leaf in one["arrays"]] == [np.ndarray, np.float32, np.ndarray]
            assert type(one["when"]) is np.datetime64
    assert loaded.nbytes == memory.nbytes
    for one in (memory, loaded):
        one.add(examples, "a", collate=list)
    assert same(loaded.batch("a"), memory.batch("a"))


def test_no_further_examples_may_bring_another_collate_function():
    memory = store(texts(), collate=padded)
    memory.add([], 0, collate=len)
    assert memory.batch(0) == len(texts())
    memory.add([], 1, collate=len)
    assert memory.tasks == [0]


# As a loop makes them.
@pytest.mark.parametrize("alike", [[lambda some: some for _ in "ab"], [partial(list) for _ in "ab"]])
def test_one_batch_has_one_collate_function(alike):
    memory, fresh = EpisodicMemory(), EpisodicMemory()
    for name, collate in zip("abc", [*alike, list], strict=True):
        memory.add(list(task(1)[0]), name, collate=collate)
    assert len(memory.sample(4, exclude="c")) == 4
    with pytest.raises(ValueError, match="collate functions differ"):
        memory.sample(36)
    fresh.load_state_dict(memory.state_dict())
    with pytest.raises(ValueError, match="loaded without their collate function"):
        fresh.sample(36)


def test_outputs_are_not_stored_of_what_is_drawn_at_random():
    def collate(examples):
        x, y = default_collate(examples)
        return x * (torch.rand_like(x) > 0.3), y

    with pytest.raises(ValueError, match="'a' each time, as masking at random does"):
        store(TensorDataset(X, Y), SAID, perceptron(), "a", collate=collate)


def test_a_resumed_memory_has_the_collate_function_that_it_had():
    memory, other, late = (EpisodicMemory(4) for _ in range(3))
    for one in (memory, other):
        one.add(texts(), 0, collate=padded)
    state = memory.state_dict()
    for one in (other, late):
        one.load_state_dict(state)
    kept = ids(memory.batch(0))
    late.add(texts(1), 0, collate=padded)
    assert len(ids(late.batch(0))) == 4
    state["tasks"][0]["batch"][0]["input_ids"].append(1)  # which is nobody else's
    assert ids(other.batch(0)) == ids(memory.batch(0)) == kept


@pytest.mark.parametrize("policy", ["reservoir", "balanced", "ring"])
def test_examples_in_a_list_stay_and_are_drawn_as_those_in_batches(policy):
    listed, dense = (EpisodicMemory(6, 1, seed=4, policy=policy) for _ in range(2))
    for k in range(2):
        batch = torch.arange(40 * k, 40 * k + 34), torch.tensor([0] * 30 + [1] * 4)
        listed.add(list(zip(*batch, strict=True)), k, collate=default_collate)
        for part in zip(*(leaf.split(7) for leaf in batch), strict=True):
            dense.add(part, k)
    for per, n in (
        ("task", None),
        ("task", 4),
        ("example", 2),
        ("label", 2),
        ("all", 5),
        ("all", None),
        ("all", 3),
    ):
        for one, other in zip(listed.batches(n=n, per=per), dense.batches(n=n, per=per), strict=True):
            torch.testing.assert_close(one, list(other), rtol=0, atol=0)
    torch.testing.assert_close(listed.sample(7), list(dense.sample(7)), rtol=0, atol=0)


# --- promises of sets -----------------------------------------------------------------------------


def several(**options):
    memory = EpisodicMemory(6, label=1, **options)
    for k in range(4):
        memory.add((torch.arange(10 * k, 10 * k + 8), torch.arange(8) % 2), k)
    return memory


@pytest.mark.parametrize("per", ["task", "label", "example", "all"])
@pytest.mark.parametrize("n", [None, 3])
def test_one_promise_for_all_draws_as_batches_does(per, n):
    left, right, promise = several(), several(), Promise(per=per, examples=n)
    for _ in range(3):
        sources = list(left.promised(promise, exclude=2).sources)
        batches = list(right.batches(2, n=n, per=per))
        assert [source.size for source in sources] == [len(x) for x, _ in batches]
        for source, (x, _) in zip(sources, batches, strict=True):
            assert torch.equal(source.all()[0], x)
            assert source.promise is promise
    names = {
        "task": [(k, None) for k in (0, 1, 3)],
        "label": [(k, y) for k in (0, 1, 3) for y in (0, 1)],
        "all": [(None, None)],
    }
    if per == "example":
        assert all(one.all()[0] == 10 * one.name[0] + one.name[2] for one in sources)
    else:
        assert [source.name for source in sources] == names[per]


def test_sets_with_equal_promises_have_one_row_together():
    memory, together = several(), Promise(per="all", examples=5)
    memory.promises |= {1: Promise(per="label", examples=2), 2: Promise(per="all", examples=5), 0: together}
    sources = list(memory.promised(Promise(examples=2)).sources)
    assert [source.name for source in sources] == [((0, 2), None), (1, 0), (1, 1), (3, None)]
    assert [source.size for source in sources] == [5, 2, 2, 2]
    assert {int(x) // 10 for x in sources[0].all()[0]} == {0, 2}
    parts = [sources[0].fetch(slice(k, k + 2))[0] for k in (0, 2, 4)]
    assert torch.equal(torch.cat(parts), sources[0].all()[0])
    assert list(EpisodicMemory().promised(Promise(per="label"))) == []


def test_promises_are_not_in_a_state_but_missed():
    memory, other = several(), several()
    memory.promises[2] = Promise(weight=0.5)
    state = memory.state_dict()
    with pytest.raises(ValueError, match=r"keep\(\.\.\., name=2\).*memory.promises\[2\] = Promise\(\.\.\.\)"):
        other.load_state_dict(state)
    other.promises[2] = Promise(weight=0.5)
    other.load_state_dict(state)
    other.remove(2)
    assert other.promises == {}
    assert list(memory.promises) == [2]


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
    loss, wanted = Distillation(kit.logits, top=top), {}
    for one in kit.rows:
        batch = kit.right([one])
        wanted[tuple(one["input_ids"])] = loss(kit.now, batch, loss.outputs(kit.before, batch)).detach()
    expected, lengths = torch.cat(list(wanted.values())), [len(own) for own in wanted]
    promise, options = Promise(loss, tolerance=0.1), {"collate": getattr(kit, collate), "microbatch": 4}
    memory = store(kit.rows, promise, kit.before, **options)
    stored = memory.batch(0)
    assert isinstance(stored.outputs, PerExample)
    assert [len(tree_leaves(one)[0]) for one in stored.outputs] == lengths
    torch.testing.assert_close(stored.losses, torch.zeros(len(lengths), dtype=torch.float64))
    if top:  # log-probabilities and classes of each token, and losses, beside the examples
        plain = store(kit.rows, lambda m, batch: next(m.parameters()).sum(), kit.before, **options)
        assert memory.nbytes == plain.nbytes + sum(lengths) * top * (8 + 4) + 100 * 8
    for n in (1, 3, None) if collate != "flat" else ():
        batch = next(memory.batches(n=n))
        chosen = torch.cat([wanted[tuple(own)] for own in ids(batch.batch)])
        torch.testing.assert_close(loss(kit.now, batch.batch, batch.outputs), chosen)
    for other in (kit.right, kit.left, kit.flat):
        torch.testing.assert_close(loss(kit.now, other(kit.rows), stored.outputs), expected)
    if kit.logits is said:
        with pytest.raises(ValueError, match=r"stored for \[3, 7, .* positions .*now \[2, 7, "):
            loss(kit.now, padded([*texts(lengths=[2]), *kit.rows[1:]]), stored.outputs)


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


def test_an_example_without_a_label_has_no_loss():
    assert CrossEntropy(said, shift=True)(Reader(), flattened(texts(lengths=[1]))) == 0.0


def token_mean(model, batch):
    return CrossEntropy(said).of(model(batch), batch | {"attention_mask": ()}).mean()


def test_losses_of_several_in_one_number_are_stored_one_at_a_time():
    wanted = Promise(token_mean, tolerance=0.1)
    with pytest.raises(ValueError, match=r"one loss for each example, .*microbatch=1"):
        store(texts(), wanted, collate=flattened)
    memory = store(texts(), wanted, collate=flattened, microbatch=1)
    expected = [token_mean(Reader(), flattened([one])).detach() for one in texts()]
    torch.testing.assert_close(memory.batch(0).losses, torch.stack(expected))


@pytest.mark.parametrize("microbatch", [None, 1, 4])
def test_rows_of_examples_are_gradients_of_their_mean_loss(microbatch):
    model, optimizer, gem = begin(of_labels, model=Reader(), microbatch=microbatch)
    for seed in (0, 1):
        gem.end_task(DataLoader(data_set(texts(seed)), batch_size=4, collate_fn=padded))
    G = rows(model, [padded(texts(seed)) for seed in (0, 1)], lambda *given: of_labels(*given).mean())
    (-of_labels(model, padded(texts())).sum()).backward()
    optimizer.step()
    torch.testing.assert_close(gem.projector.constraints, G)
    assert gem.last.num_violated > 0
