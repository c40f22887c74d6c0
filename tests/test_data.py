"""Data as it comes: loaders, data sets and lists of examples of different lengths, and what is stored of them."""

import dataclasses
import sys

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from models import perceptron, task  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset  # noqa: E402

from gemproj.torch import GEM, EpisodicMemory, Promise  # noqa: E402
from gemproj.torch.losses import CrossEntropy, Distillation, PerExample  # noqa: E402
from gemproj.torch.remember import remember  # noqa: E402

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


class Texts(Dataset):
    """A data set of examples."""

    def __init__(self, examples=None):
        self.examples = texts() if examples is None else examples

    def __len__(self):
        return len(self.examples)

    def __getitem__(self, i):
        return self.examples[i]


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


def store(data, promise=None, model=None, name=0, per_task=100, collate=None, microbatch=None, **options):
    memory = EpisodicMemory(per_task, **options)
    model = Reader() if model is None else model
    promise = Promise(of_labels) if promise is None else promise
    remember(memory, data, name, model, promise, collate=collate, microbatch=microbatch)
    return memory


WANTED = [one["input_ids"] for one in texts()]

# --- what may be passed ---------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_of_a_loader_that_pads_the_examples_are_stored(workers):
    loader = DataLoader(Texts(), batch_size=4, collate_fn=padded, num_workers=workers)
    memory = store(loader)
    assert ids(memory.batch(0)) == WANTED
    for batch in memory.batches(n=2):
        assert batch["input_ids"].shape == (2, max(batch["attention_mask"].sum(1)))


def test_a_stream_with_a_collate_function_is_one_of_examples():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(texts())

    assert ids(store(DataLoader(Stream(), batch_size=4, collate_fn=padded)).batch(0)) == WANTED
    dropped = DataLoader(Stream(), batch_size=4, collate_fn=padded, drop_last=True)
    assert ids(store(dropped).batch(0)) == WANTED[:4]


@pytest.mark.parametrize("kind", ["list", "generator", "set", "loader", "no batches", "torch's"])
def test_examples_with_a_collate_function_of_ones_own(kind):
    examples = texts()
    data = {
        "list": lambda: examples,
        "generator": lambda: (one for one in examples),
        "set": lambda: Texts(examples),
        "loader": lambda: DataLoader(Texts(examples), batch_size=4, collate_fn=list),
        "no batches": lambda: DataLoader(Texts(examples), batch_size=None, collate_fn=lambda one: one),
        "torch's": lambda: DataLoader(Texts(examples), batch_size=4),
    }[kind]()
    assert ids(store(data, collate=padded).batch(0)) == WANTED


def test_a_data_set_of_tensors_is_stored_in_batches():
    model, (x, y) = perceptron(), task(0)
    loss = lambda model, batch: cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    by_set = store(TensorDataset(x, y), Promise(loss), model, per_task=5)
    by_batch = store([(x, y)], Promise(loss), model, per_task=5)
    assert by_set.nbytes == by_batch.nbytes == 5 * 7 * 8
    for found, expected in zip(by_set.batch(0), by_batch.batch(0), strict=True):
        assert torch.equal(found, expected)


def test_a_data_set_of_more_than_tensors_is_collated_by_torch():
    examples = [{"x": torch.full((2,), float(k)), "text": f"text {k}"} for k in range(3)]
    loss = lambda model, batch: model(batch["x"].double() @ torch.ones(2, 6).double()).sum()  # noqa: E731
    batch = store(Texts(examples), Promise(loss), perceptron()).batch(0)
    assert batch["text"] == ["text 0", "text 1", "text 2"]
    assert batch["x"][:, 0].tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(ValueError, match=r"default_collate cannot .*Pass collate="):
        store(Texts(texts()))


def test_loaders_without_a_collate_function_have_batches():
    x, y = task(0)
    loss = lambda model, batch: cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    handed_on = DataLoader([(x[:5], y[:5]), (x[5:], y[5:])], batch_size=1, collate_fn=lambda some: some[0])
    for data in (DataLoader(TensorDataset(x, y), batch_size=5), handed_on):
        memory = store(data, Promise(loss), perceptron())
        assert torch.equal(memory.batch(0)[0], x)
        assert memory.nbytes == 100 * 7 * 8


def test_loaders_that_iterate_in_a_way_of_their_own_have_batches():
    class Doubling(DataLoader):
        def __iter__(self):
            return ({name: leaf * 2 for name, leaf in batch.items()} for batch in super().__iter__())

    loader = Doubling(Texts(texts(lengths=[4, 4])), batch_size=2, collate_fn=padded)
    memory = store(loader, Promise(lambda model, batch: model.table.sum()))
    assert memory.batch(0)["input_ids"].tolist() == [
        [2 * i for i in one["input_ids"]] for one in texts(lengths=[4, 4])
    ]


@pytest.mark.parametrize(
    ("data", "collate", "error", "text"),
    [
        (
            [padded(texts()), padded(texts(lengths=[2]))],
            None,
            ValueError,
            r"pass the loader itself, .*collate=",
        ),
        (texts(), 7, TypeError, "collate must be a function of a list of examples; found int"),
        ([{"image": object()}], padded, TypeError, r"found builtins.object.*\(batch for batch in loader\)"),
        (DataLoader([{"image": object()}], collate_fn=padded), None, TypeError, "Convert it in the data set"),
        (padded(texts()), padded, TypeError, "found one batch, of type dict"),
        ([], padded, ValueError, "data holds no example"),
    ],
)
def test_what_cannot_be_stored_is_told_what_to_do(data, collate, error, text):
    with pytest.raises(error, match=text):
        store(data, collate=collate)


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


def test_dataclasses_and_views():
    big = torch.arange(1000.0)
    examples = [Pair(big[k : k + 2], k) for k in range(3)]

    def collate(some):
        return Pair(torch.stack([one.ids for one in some]), torch.tensor([one.label for one in some]))

    memory = EpisodicMemory(label=lambda batch: batch.label)
    memory.add(examples, 0, collate=collate)
    assert memory.nbytes == 3 * 8 + sum(map(sys.getsizeof, range(3)))
    big += 1.0
    batch = memory.batch(0)
    assert batch.ids.tolist() == [[0.0, 1.0], [1.0, 2.0], [2.0, 3.0]]
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
    assert memory.nbytes == 4 * (16 + 16)
    for _ in range(2):
        batch = memory.batch(0)
        assert torch.equal(batch["x"], torch.full((4, 4), 7.0))
        assert batch["a"].shape == (4, 4)
    assert set(seen) == {16}
    assert not big.any()


def same(left, right):
    return len(left) == len(right) and all(
        torch.equal(a, b) if torch.is_tensor(a) else np.array_equal(a, b)
        for a, b in zip(left, right, strict=True)
    )


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
    memory, loaded = (EpisodicMemory(4, seed=seed) for seed in (1, 2))
    memory.add(examples, "a", collate=list)
    next(memory.batches(n=3))
    torch.save(memory.state_dict(), tmp_path / "memory.pt")
    state = torch.load(tmp_path / "memory.pt", weights_only=True)
    loaded.load_state_dict(state)
    with pytest.raises(ValueError, match=r"task 'a' were loaded without .*Set memory\.collate"):
        loaded.batch("a")
    loaded.collate = list
    for _ in range(5):
        found, expected = next(loaded.batches(n=3)), next(memory.batches(n=3))
        assert same(tree_leaves(found), tree_leaves(expected))
        for one in found:
            assert one["tensor"].dtype == torch.bfloat16
            assert [type(leaf) for leaf in one["arrays"]] == [np.ndarray, np.float32, np.ndarray]
            assert type(one["when"]) is np.datetime64
    assert loaded.nbytes == memory.nbytes
    for one in (memory, loaded):
        one.add(examples, "a", collate=list)
    assert same(tree_leaves(loaded.batch("a")), tree_leaves(memory.batch("a")))


def test_a_resumed_memory_has_the_collate_function_that_it_had(tmp_path):
    memory, other, late = (EpisodicMemory(4) for _ in range(3))
    for one in (memory, other):
        one.add(texts(), 0, collate=padded)
    other.load_state_dict(memory.state_dict())
    assert ids(other.batch(0)) == ids(memory.batch(0))
    late.load_state_dict(memory.state_dict())
    late.add(texts(1), 0, collate=padded)
    assert len(ids(late.batch(0))) == 4
    state = memory.state_dict()
    state["tasks"][0]["batch"][0]["input_ids"].append(1)
    assert ids(memory.batch(0)) == WANTED[:4] or ids(memory.batch(0)) == ids(other.batch(0))


def test_policies_and_labels_of_examples():
    examples = texts(lengths=[2] * 30 + [3] * 4)
    for policy in ("balanced", "ring"):
        memory = store(
            DataLoader(Texts(examples), batch_size=7, collate_fn=padded),
            per_task=6,
            label="label",
            policy=policy,
        )
        assert sorted(memory.batch(0)["label"].tolist()) == [0, 0, 0, 1, 1, 1]
        by_label = [batch["label"].tolist() for batch in memory.batches(n=2, per="label")]
        assert by_label == [[0, 0], [1, 1]]
    as_batches = EpisodicMemory(6, "label", policy="balanced")
    for one in examples:
        as_batches.add({"label": torch.tensor([one["label"]])}, 0)
    listed = store(examples, collate=padded, per_task=6, label="label", policy="balanced")
    places = [[one.name for one in memory.batches(per="example").sources] for memory in (listed, as_batches)]
    assert places[0] == places[1]


def test_draws_of_examples_are_those_of_batches():
    listed, dense = (EpisodicMemory(6, seed=4) for _ in range(2))
    for k in range(2):
        values = torch.arange(10 * k, 10 * k + 9)
        listed.add(list(values), k, collate=torch.stack)
        dense.add(values, k)
    for per, n in (("task", 4), ("example", 2), ("all", 5), ("task", None), ("all", 3)):
        pairs = zip(listed.batches(n=n, per=per), dense.batches(n=n, per=per), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert torch.equal(listed.sample(7), dense.sample(7))


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
        for source in sources:
            assert source.all()[0] == 10 * source.name[0] + source.name[2]
    else:
        assert [source.name for source in sources] == names[per]


def test_sets_with_equal_promises_have_one_row_together():
    memory, together = several(), Promise(per="all", examples=5)
    memory.promises |= {1: Promise(per="label", examples=2), 2: Promise(per="all", examples=5), 0: together}
    sources = list(memory.promised(Promise(examples=2)).sources)
    assert [source.name for source in sources] == [(None, None), (1, 0), (1, 1), (3, None)]
    assert [source.size for source in sources] == [5, 2, 2, 2]
    assert {int(x) // 10 for x in sources[0].all()[0]} == {0, 2}
    parts = [sources[0].fetch(slice(k, k + 2))[0] for k in (0, 2, 4)]
    assert torch.equal(torch.cat(parts), sources[0].all()[0])
    memory = EpisodicMemory()
    assert list(memory.promised(Promise(per="label"))) == []
    memory.add(torch.zeros(2), 0)
    with pytest.raises(ValueError, match="per='label' needs label"):
        memory.promised(Promise(per="label"))


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


def alone(loss, model, before, examples, collate):
    """The loss of each example by itself."""
    batches = [collate([one]) for one in examples]
    return torch.cat([loss(model, batch, loss.outputs(before, batch)).detach() for batch in batches])


@pytest.mark.parametrize("top", [None, 2])
@pytest.mark.parametrize("collate", [padded, flattened])
def test_divergences_are_those_of_each_example_alone(collate, top):
    loss, before, now = Distillation(said, top=top), Reader(0), Reader(1)
    examples = texts()
    expected = alone(loss, now, before, examples, collate)
    memory = store(examples, Promise(loss, tolerance=0.1), before, collate=collate, microbatch=4)
    stored = memory.batch(0)
    assert isinstance(stored.outputs, PerExample)
    assert [len(tree_leaves(one)[0]) for one in stored.outputs] == LENGTHS
    torch.testing.assert_close(stored.losses, torch.zeros(6, dtype=torch.float64))
    places = {tuple(one["input_ids"]): k for k, one in enumerate(examples)}
    for n in (1, 3, 6):
        batch = next(memory.batches(n=n))
        values = loss(now, batch.batch, batch.outputs)
        if collate is padded:
            chosen = [places[tuple(one)] for one in ids(batch.batch)]
            torch.testing.assert_close(values, expected[chosen])
    for other in (padded, flattened, lambda some: padded(some, left=True)):
        values = loss(now, other(examples), stored.outputs)
        torch.testing.assert_close(values, expected)
    with pytest.raises(ValueError, match=r"stored of \[3, 7, .* positions .*now \[2, 7, "):
        loss(now, padded([*texts(lengths=[2]), *examples[1:]]), stored.outputs)


def test_a_padding_free_batch_is_one_loss_for_each_example():
    model, examples = Reader(1), texts()
    for shift in (False, True):
        loss = CrossEntropy(said, shift=shift)
        expected = [loss(model, flattened([one])) for one in examples]
        assert [one.shape for one in expected] == [(1,)] * 6
        torch.testing.assert_close(loss(model, flattened(examples)), torch.cat(expected))
        packed = {name: leaf.view(2, 13) for name, leaf in flattened(texts(lengths=[6, 7, 8, 5])).items()}
        torch.testing.assert_close(loss(model, packed), loss(model, flattened(texts(lengths=[6, 7, 8, 5]))))
    assert expected[2] == 0.0  # of one token


def token_mean(model, batch):
    return CrossEntropy(said).of(model(batch), batch | {"attention_mask": ()}).mean()


def test_losses_of_several_in_one_number_are_stored_one_at_a_time():
    wanted = Promise(token_mean, tolerance=0.1)
    with pytest.raises(ValueError, match=r"one loss for each example, .*microbatch=1"):
        store(texts(), wanted, collate=flattened)
    memory = store(texts(), wanted, collate=flattened, microbatch=1)
    expected = [token_mean(Reader(), flattened([one])).detach() for one in texts()]
    torch.testing.assert_close(memory.batch(0).losses, torch.stack(expected))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("tolerance", [None, 0.1])
def test_a_loss_that_is_not_a_number_is_not_stored(value, tolerance):
    def loss(model, batch):
        return of_labels(model, batch) * torch.where(batch["attention_mask"].sum(1) == 7, value, 1.0)

    with pytest.raises(ValueError, match=f"The loss of examples of 'b' is {value}"):
        store(texts(), Promise(loss, tolerance=tolerance), name="b", collate=padded)


@pytest.mark.parametrize("microbatch", [None, 1, 4])
def test_rows_of_examples_are_gradients_of_their_mean_loss(microbatch):
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gem = GEM(model, optimizer, of_labels, microbatch=microbatch)
    loader = DataLoader(Texts(), batch_size=4, collate_fn=padded)
    gem.end_task(loader, "a")
    gem.end_task(DataLoader(Texts(texts(1)), batch_size=4, collate_fn=padded), "b")
    G = [
        torch.autograd.grad(of_labels(model, padded(texts(seed))).mean(), model.parameters())[0].flatten()
        for seed in (0, 1)
    ]
    (-of_labels(model, padded(texts())).sum()).backward()
    optimizer.step()
    torch.testing.assert_close(gem.projector.constraints, torch.stack(G))
    assert gem.last.num_violated > 0
