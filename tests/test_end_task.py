"""What is stored at the end of a task: all of it or nothing, of batches and losses that are what they seem."""

import weakref
from collections import UserDict
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from models import EACH, SAID, begin, logits, loss, perceptron, rival, rows, take, task  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from torch.utils.data import DataLoader, Dataset, TensorDataset  # noqa: E402

from gemproj.torch import EpisodicMemory, Promise  # noqa: E402
from gemproj.torch.batches import output_of  # noqa: E402
from gemproj.torch.losses import CrossEntropy, Distillation  # noqa: E402


def held(memory):
    """Everything that a memory holds, its random state included."""
    return [memory.tasks, [x.tolist() if torch.is_tensor(x) else x for x in tree_leaves(memory.state_dict())]]


# --- all of it, or nothing ----------------------------------------------------------------------


def interrupted():
    yield task(1)
    raise KeyboardInterrupt


class Full(Distillation):
    """Runs out of memory, or is interrupted, while it computes outputs."""

    error = None

    def outputs(self, model, batch):
        if self.error is not None:
            raise self.error
        return super().outputs(model, batch)


FAILURES = {
    "interrupted": KeyboardInterrupt(),
    "out of memory": RuntimeError("out of memory"),
    "stream": interrupted,
    "another length": lambda: [task(1), (torch.ones(4, 7, dtype=torch.float64), task(1)[1][:4])],
    "labels": lambda: [task(1), task(1)[::-1]],
}


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES)
def test_an_end_of_a_task_that_fails_changes_nothing(failure, name):
    promised, stored = Full(logits), []
    model, optimizer, gem = begin(promised, tolerance=0.0, per_task=5)
    gem.end_task([task(0), task(3)], "a")
    take(model, optimizer, task(9))
    before, batches = held(gem.memory), [task(1), task(2)]
    if isinstance(failure, BaseException):
        promised.error = failure
    with pytest.raises((KeyboardInterrupt, RuntimeError, ValueError)):
        gem.end_task(batches if promised.error else failure(), name)
    assert held(gem.memory) == before
    promised.error = None
    other = begin(SAID, tolerance=0.0, per_task=5)[2]
    other.end_task([task(0), task(3)], "a")
    for one in (gem, other):  # as if nothing had happened
        one.end_task(batches, name, model=model)
        stored.append({name: one.memory.batch(name) for name in one.memory.tasks})
    torch.testing.assert_close(*stored)


# --- losses -------------------------------------------------------------------------------------


def tokens(model, batch):
    """Losses of tokens, flattened, of which those without a label are zero."""
    twice = model(batch[0]).repeat_interleave(2, 0)
    return cross_entropy(twice, batch[1].repeat_interleave(2), reduction="none", ignore_index=0)


def broken(value):
    return lambda model, batch: EACH(model, batch) * torch.where(torch.arange(len(batch[1])) == 1, value, 1.0)


def without_loss(model, batch):
    return output_of(lambda **given: SimpleNamespace(loss=None), {"x": batch[0]}, "loss")


SHAPE = "one number for each of these 12, .*found {}.*logits.*tokens"


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (lambda model: 0.0, TypeError, "positional argument"),
        (lambda model, batch: loss(model, batch).item(), TypeError, "must return a tensor; found float"),
        (lambda model, batch: loss(model, batch["x"]), TypeError, "indices"),
        (lambda model, batch: loss(model, batch).detach(), ValueError, r"has no gradient: .*detach\(\)"),
        (torch.no_grad()(loss), ValueError, r"has no gradient: .*torch.no_grad\(\)"),
        (without_loss, ValueError, r"\(\*\*batch\).loss is None; found a batch with x. .*if the batch has labels"),
        (logits, ValueError, SHAPE.format(r"\(12, 3\)")),
        (tokens, ValueError, SHAPE.format(r"\(24,\)")),
        (lambda model, batch: EACH(model, batch)[:, None], ValueError, SHAPE.format(r"\(12, 1\)")),
        (broken(torch.nan), ValueError, "The loss of examples of 'a' is nan"),
        (broken(torch.inf), ValueError, "The loss of examples of 'a' is inf"),
        (Promise(broken(torch.nan), tolerance=0.1), ValueError, "The loss of examples of 'a' is nan"),
        (Promise(CrossEntropy(logits, labels=lambda batch: 0 * batch[1] - 100)), ValueError, "No example of 'a' has a label"),
    ],
)  # fmt: skip
def test_the_loss_is_tried_when_a_task_ends(wrong, error, text):
    model, optimizer, gem = begin(wrong)
    with pytest.raises(error, match=text) as caught:
        gem.end_task([task(0)], "a")
    if hasattr(caught.value, "add_note") and "gradient" not in text and "xample" not in text:
        assert "[(12, 6), (12,)]" in "".join(caught.value.__notes__).replace("((", "[(").replace(",))", ",)]")
    assert gem.memory.tasks == []
    if "one number" in text:
        gem.memory.add(task(0), 0)  # by hand, where nothing is tried
        with pytest.raises(ValueError, match="one number for each of these 12"):
            take(model, optimizer, task(1))


SOME_LABELS = CrossEntropy(
    logits, labels=lambda batch: batch[1].where(torch.arange(len(batch[1])) == 0, -100)
)


@pytest.mark.parametrize("right", [loss, EACH, SOME_LABELS, lambda m, b: loss(m, b).reshape(1)])
def test_a_loss_is_a_number_or_one_for_each_example(right):
    gem = begin(right)[2]
    gem.end_task([task(0)])
    gem.end_task([tuple(leaf[:1] for leaf in task(1))])


@pytest.mark.parametrize(("options", "size"), [({}, 2), ({"microbatch": 1}, 1)])
def test_a_trial_leaves_no_traces(options, size):
    seen, plain = [], perceptron()
    norm = torch.nn.BatchNorm1d(8, dtype=torch.float64) if size == 2 else plain[1]
    model = torch.nn.Sequential(plain[0], norm, torch.nn.Dropout(0.5), plain[2])

    def watched(model, batch):
        seen.append((len(batch[0]), model.training, torch.is_grad_enabled()))
        return loss(model, batch)

    _, _, gem = begin(watched, model=model, **options)
    loss(model, task(9)).backward()
    gradients, before = [p.grad for p in model.parameters()], [*map(torch.clone, model.state_dict().values())]
    random = torch.get_rng_state()
    gem.end_task([task(0)])
    assert seen == [(size, False, True)]
    assert torch.equal(random, torch.get_rng_state())
    assert all(a is b.grad for a, b in zip(gradients, model.parameters(), strict=True))
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert model.training


@pytest.mark.parametrize(
    ("options", "most"), [({}, 12), ({"examples": 6}, 6), ({"examples": 9, "microbatch": 5}, 5)]
)
def test_a_loss_may_need_more_than_a_few_examples(options, most):
    sizes = []

    def hardest(model, batch):
        sizes.append(len(batch[0]))
        return EACH(model, batch).topk(5).values.mean()

    _, _, gem = begin(hardest, **options)
    gem.end_task([task(0)])
    assert sizes[-1] == most
    with pytest.raises(RuntimeError, match="out of range"):
        gem.end_task([tuple(leaf[:4] for leaf in task(1))])


@pytest.mark.parametrize("promised", [loss, SAID, EACH])
@pytest.mark.parametrize("bound", [None, 0.1])
def test_another_model_may_be_named_and_frozen(promised, bound):
    gem = begin(EACH if bound and promised is loss else promised, tolerance=bound)[2]
    teacher = perceptron(seed=1).requires_grad_(False)  # whose loss has no gradient
    gem.end_task([task(0)], model=teacher)
    stored = gem.memory.batch(0)
    if promised is SAID:
        torch.testing.assert_close(stored.outputs, SAID.outputs(teacher, stored.batch))
    elif bound:
        torch.testing.assert_close(stored.losses, EACH(teacher, stored.batch))
    assert not any(p.requires_grad for p in teacher.parameters())


def test_examples_without_outputs():
    model, optimizer, gem = begin(SAID)
    gem.end_task([task(0)], "a")
    gem.memory.add(task(1), "b")
    with pytest.raises(ValueError, match="Examples of 'b' are stored without outputs"):
        take(model, optimizer, task(9))


def test_examples_may_be_stored_in_inference_mode():
    model, optimizer, gem = begin(EACH)
    with torch.inference_mode():
        gem.keep(([leaf + 0 for leaf in task(1)] for _ in range(2)), name="a")
    gem.keep([list(task(2))], name="a")
    take(model, optimizer, rival(task(1)))
    assert gem.last.constraints == 1


# --- one batch at a time ------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"microbatch": 1}, {"examples": 5}], ids=str)
@pytest.mark.parametrize("promised", [loss, SAID])
def test_one_batch_of_the_memory_is_there_at_a_time(promised, options):
    seen, alive, sizes = [], [], []

    def watched(model, batch, *outputs):
        alive.append(sum(one() is not None for one in seen))
        for leaf in (batch[0], *outputs):
            seen.append(weakref.ref(leaf))
            sizes.append(leaf.untyped_storage().nbytes() // leaf[0].nbytes)
        return promised(model, batch, *outputs)

    if promised is SAID:
        watched.outputs = SAID.outputs
    model, optimizer, gem = begin(watched, **options)
    for k in range(4):
        gem.end_task([task(k)])
    sizes.clear()
    for _ in range(2):
        take(model, optimizer, task(9))
    assert len(gem.projector.constraints) == 4
    assert max(alive) <= 2  # the one before is overwritten by the next one
    # Rows that are this small share a pass, which has no more examples than a microbatch.
    assert max(sizes) <= (options.get("microbatch") or 4 * (options.get("examples") or 12))


# --- what looks like a batch ---------------------------------------------------------------------------


X, Y = task(0)


@pytest.mark.skipif(not hasattr(BaseException, "add_note"), reason="notes are of Python 3.11")
def test_elements_that_look_like_batches_are_told_what_to_do():
    """Texts of one length in torch's format, taken one by one: 48 tokens look like 48 examples."""
    elements = [{"input_ids": torch.arange(48), "labels": torch.arange(48)}] * 3
    _, optimizer, gem = begin(lambda model, batch: batch["input_ids"].sum(1).float().mean() + model(X).mean())

    def by_hand():  # where nothing is tried
        gem.memory.add(elements[0], 0)
        optimizer.step()

    for use in (lambda: gem.end_task(elements), by_hand):
        with pytest.raises(IndexError) as caught:
            use()
        assert "elements of a data set, pass the data set, or a DataLoader" in "".join(caught.value.__notes__)
    gem.memory.remove(0)
    gem.end_task(DataLoader(elements, batch_size=2))
    with pytest.raises(AttributeError) as caught:  # torch makes a tensor for each place in a list
        gem.end_task(DataLoader([{"input_ids": [1, 2, 3]}] * 4))
    assert "Lists in them need collate=" in "".join(caught.value.__notes__)


def test_mappings_are_batches_at_any_depth_and_their_order_does_not_matter():
    def nested(model, batch):
        return cross_entropy(model(batch[0]["x"]), batch[1])

    model, optimizer, gem = begin(nested)
    gem.end_task([(UserDict(x=X, a=Y), Y), (UserDict(a=Y, x=X), Y)])
    gem.end_task(DataLoader(TensorDataset(X, Y), batch_size=5, collate_fn=lambda all: ({"x": X, "a": Y}, Y)))
    expected = rows(model, [({"x": X}, Y)] * 2, nested)
    take(model, optimizer, task(9))
    torch.testing.assert_close(gem.projector.constraints, expected)
    gem.memory.add(({"a": Y, "x": X}, Y), 2)
    mixed, labels = gem.memory.sample(50, exclude=1)
    assert torch.equal(mixed["a"], labels)


# --- draws in a loader's workers ----------------------------------------------------------------


class Replayed(Dataset):
    """Draws what is replayed with each of its elements."""

    def __init__(self, memory):
        self.memory = memory

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return self.memory.sample(5), next(self.memory.batches(n=5))


@pytest.mark.parametrize("start", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of a process with threads
def test_workers_of_a_loader_draw_examples_of_their_own(start):
    memory = EpisodicMemory(1000)
    memory.add(torch.arange(1000), 0)
    next(memory.batches(n=5))  # the queue of draws is copied, too

    def draws():
        torch.manual_seed(0)
        loader = DataLoader(Replayed(memory), batch_size=None, num_workers=2, multiprocessing_context=start)
        return [sorted(x.tolist()) for both in loader for x in both]

    found = draws()
    assert len(set(map(tuple, found))) == len(found)
    assert start == "spawn" or found == draws()  # those take seconds to start
