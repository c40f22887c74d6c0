"""What is told about promises, sets that share a row, and only watching."""

import copy
import itertools
import warnings
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from models import EACH, SAID, begin, flat, loss, perceptron, rival, rows, sgd, take, task  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset  # noqa: E402

from gemproj.torch import GEM, Promise  # noqa: E402
from gemproj.torch.gem import Keeper  # noqa: E402

CONTRADICTING = [Promise(EACH, equal=True), Promise(EACH, tolerance=0.0)]


@pytest.mark.parametrize(
    ("options", "promises"),
    [
        ({"weight": 0.5}, [None]),
        ({"on": "step"}, [None]),
        ({"on": "both", "every": 2}, [None]),
        ({"tolerance": 0.0}, [None]),
        # A projection would fail.
        ({}, CONTRADICTING),
        ({"on": "step"}, CONTRADICTING),
    ],
)
@pytest.mark.parametrize("make", [sgd, torch.optim.AdamW])
def test_a_run_that_only_watches_is_the_plain_one_to_the_bit(options, promises, make):
    def train(protect):
        model = perceptron()
        model.append(torch.nn.Dropout(0.2))
        optimizer = make(model.parameters())
        gem = GEM(model, optimizer, EACH, project=False, **options) if protect else None
        for promise in promises if protect else ():
            gem.keep([task(1)], promise)
        torch.manual_seed(3)
        for k in range(6):
            take(model, optimizer, rival(task(1), 1 + k % 2))
        if protect and len(promises) == 1:
            (line,) = gem.report()
            assert line.steps == 6
            assert line.would_break > 0
            assert line.broke > 0
            assert gem.last.num_active  # it tells what would have been done
        optimizer.zero_grad()
        (float("nan") * loss(model, task(1))).backward()
        before = flat(model)
        optimizer.step()
        return torch.stack([before, flat(model)])

    torch.testing.assert_close(train(False), train(True), rtol=0, atol=0, equal_nan=True)


SET = TensorDataset(*task(1))
ORDERS = {
    "torch's": lambda random: {"batch_size": 4, "shuffle": True},
    "of a loader": lambda random: {"batch_size": 4, "shuffle": True, "generator": random},
    "of a sampler": lambda random: {
        "batch_sampler": BatchSampler(RandomSampler(SET, generator=random), 4, drop_last=False)
    },
    "of workers": lambda random: {
        "batch_size": 4, "shuffle": True, "num_workers": 1, "persistent_workers": True,
        "multiprocessing_context": "fork",
    },
}  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of a process with threads
def test_a_loader_that_is_kept_changes_nothing_of_a_training_that_only_watches(order):
    def train(protect):
        model = perceptron()
        optimizer = sgd(model.parameters())
        loader = DataLoader(SET, **ORDERS[order](torch.Generator().manual_seed(0)))
        gem = GEM(model, optimizer, EACH, project=False) if protect else None
        torch.manual_seed(3)
        for _ in range(2):
            for k, batch in enumerate(loader):
                take(model, optimizer, batch)
                if gem and k != 1:  # also within an epoch
                    gem.end_task(loader)
        return flat(model)

    assert torch.equal(train(False), train(True))


def test_a_report_has_what_can_be_measured_from_outside():
    model, optimizer, gem = begin(EACH, make=lambda p: torch.optim.Adam(p, lr=0.02), tolerance=0.01)
    seen = []
    data = {"a": task(1), 7: task(2)}
    for name, batch in data.items():
        gem.end_task([batch], name)
    before = {name: EACH(model, batch).mean().item() for name, batch in data.items()}
    assert gem.logs() == {}
    steps = []
    for _ in range(8):
        seen.append({name: EACH(model, batch).mean().item() for name, batch in data.items()})
        take(model, optimizer, rival(data["a"]))
        steps.append(gem.last)
        gem.report()  # which counts them one by one
    taken, report = gem.logs(), gem.report()
    assert gem.logs() == {}
    assert float(taken["gem/excess"]) == max(float(step.excess.max()) for step in steps)
    assert float(taken["gem/worst_cosine"]) == min(step.worst_cosine for step in steps)
    assert float(taken["gem/cosine"]) == pytest.approx(sum(step.cosine for step in steps) / 8)
    for name in data:
        line, losses = report[name], [one[name] for one in seen]
        assert line.examples == 12
        assert line.steps == 8
        assert line.seconds > 0
        found = (line.stored, line.now, line.worst, line.bound)
        expected = (before[name], losses[-1], max(losses), before[name] + 0.01)
        assert found == pytest.approx(expected, rel=1e-9)
        assert line.broke == pytest.approx(sum(n > before[name] + 0.01 + 1e-6 for n in losses) / 8)
        assert [loss for _, loss, _ in gem.history.points()[name]] == pytest.approx(losses, rel=1e-9)
    assert report[0] is report["a"]
    gem.memory.remove("a")
    assert gem.report()["a"].examples == 0
    assert str(report).splitlines()[0].split()[:3] == ["name", "examples", "stored"]
    with pytest.raises(KeyError, match=r"no promise is about 'b'; found \['a', 7\]"):
        report["b"]


def test_a_report_is_drawn():
    pytest.importorskip("matplotlib").use("agg")
    model, optimizer, gem = begin(EACH, tolerance=0.01)
    assert str(gem.report()) == "No examples are stored: nothing is promised."
    gem.keep([task(1)], name="general")
    take(model, optimizer, rival(task(1)))
    axes = gem.report().plot()
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["general"]
    assert len(axes.lines) == 2  # the loss and its bound


def test_a_history_stays_small():
    model, optimizer, gem = begin(EACH, tolerance=0.0)
    gem.keep([task(1)], name="a")
    take(model, optimizer, rival(task(1)))
    for _ in range(4003):
        gem.history.add(gem.last)
    steps = [step for step, _, _ in gem.history.points()["a"]]
    assert 500 <= len(steps) <= 1000
    assert len({later - one for one, later in itertools.pairwise(steps)}) == 1  # over all of the training


def test_sets_with_equal_promises_about_all_of_them_share_a_row():
    model, optimizer, gem = begin(per="all", label=1)
    for k in range(2):
        gem.end_task([task(k)])
    gem.keep([task(5)], Promise(loss, per="label"), name="labels")
    G = rows(model, [tuple(map(torch.cat, zip(task(0), task(1), strict=True)))])
    take(model, optimizer, rival(task(0)))
    assert gem.last.constraints == 1 + len(task(5)[1].unique())
    torch.testing.assert_close(gem.projector.constraints[:1], G)
    assert [line.name for line in gem.report()] == ["labels", "all sets"]
    assert gem.last.excess is None
    assert "gem/excess" not in gem.logs()


def test_the_promise_about_a_set_stays_with_the_memory_until_it_is_removed():
    model, _, gem = begin()
    gem.keep([task(0)], Promise(SAID, tolerance=0.1), name="said")
    gem.end_task([task(1)], "labels")
    gem.remove()
    optimizer = torch.optim.Adam(model.parameters())
    other = GEM(model, optimizer, loss, memory=gem.memory)
    assert list(other.promises) == ["said"]
    take(model, optimizer, rival(task(0)))
    assert other.last.excess.isnan().tolist() == [False, True]
    other.end_task([task(2)], "said")  # more of it, under the same promise
    assert other.promises["said"].tolerance == 0.1
    before_training = Keeper(loss, memory=copy.deepcopy(gem.memory))
    for keeper in (other, before_training):  # under another one, for which nothing is stored
        keeper.keep([task(3)], Promise(loss), name="said")
        assert keeper.memory.source("said").all()[0].shape == (36, 6)
    other.memory.remove("said")
    assert other.promises == {}


def test_stored_losses_that_depend_on_the_batch_are_told():
    def contrastive(model, batch):
        similar = model(batch[0]) @ model(batch[0]).mT
        return cross_entropy(similar, torch.arange(len(similar)), reduction="none")

    gem = begin()[2]
    with pytest.warns(UserWarning, match="depend on the other examples of their batch"):
        gem.keep([task(0)], Promise(contrastive, tolerance=0.0, examples=4), name="few")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gem.keep([task(0)], Promise(contrastive, tolerance=0.0), name="all")
        gem.keep([task(0)], Promise(EACH, tolerance=0.0, examples=4), name="apart")


def test_running_statistics_that_move_are_told():
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3)
    ).double()
    _, optimizer, gem = begin(model=model)
    take(model, optimizer, task(0))
    gem.end_task([task(0)])
    with pytest.warns(UserWarning, match="layers, such as '1', move their running statistics"):
        take(model, optimizer, task(1))
    model[1].eval()
    gem.end_task([task(1)])
    take(model, optimizer, task(2))


@pytest.mark.parametrize("removed", [False, True])
def test_a_set_that_is_another_one_begins_a_line(removed):
    """It is under another promise, or of other examples."""
    model, optimizer, gem = begin(EACH)
    gem.keep([task(1)], EACH, name="a")
    take(model, optimizer, rival(task(1)))
    stored = EACH(model, task(2)).mean().item()
    if removed:
        gem.memory.remove("a")
        gem.keep([task(2)], name="a")
        take(model, optimizer, rival(task(1)))
    else:
        for _ in range(2):
            gem.keep([task(1)], Promise(SAID, tolerance=0.01), name="a")
            take(model, optimizer, rival(task(1)))
    now, earlier = gem.report()["a"], gem.report()["a (earlier)"]
    assert (now.steps, earlier.steps) == (1 if removed else 2, 1)
    assert now.stored == pytest.approx(stored if removed else 0.0, abs=1e-9)
    assert removed or now.stored + 0.01 == pytest.approx(now.bound)  # also where it was stored again
    assert earlier.stored > 0.1


def test_parameters_without_dimensions_and_frozen_ones_of_any_kind():
    model, keeper = perceptron(), Keeper(lambda model, batch: model.scale * EACH(model, batch))
    model.scale = torch.nn.Parameter(torch.tensor(2.0).double())
    # As of quantized weights.
    model.codes = torch.nn.Parameter(torch.zeros(4, dtype=torch.uint8), requires_grad=False)
    keeper.keep([task(1)], name="a", model=model)
    optimizer = sgd(model.parameters())
    gem = GEM(model, optimizer, keeper.promise, memory=keeper.memory)
    expected = rows(model, [task(1)], lambda model, batch: model.scale * loss(model, batch))
    take(model, optimizer, task(1))
    torch.testing.assert_close(gem.projector.constraints, expected)


def test_what_is_found_out_about_losses_is_forgotten_at_some_time():
    model, _, gem = begin(EACH)
    for seed in range(2):
        gem.memory.add(task(seed), seed)
    for _ in range(100):
        gem.projector.recall(model, gem.memory.batches(), lambda model, batch: EACH(model, batch))
    assert len(gem.projector._passes._limits) <= 64


@pytest.mark.parametrize("on", ["gradient", "both"])
def test_what_only_watches_gives_no_parameter_a_gradient(on):
    model = perceptron()
    optimizer = sgd(model.parameters())
    gem = GEM(model, optimizer, EACH, project=False, on=on)
    gem.keep([task(0)])
    loss(model, rival(task(0))).backward()
    model[0].weight.grad = None
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert gem.last.num_violated == 1
    assert model[0].weight.grad is None
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize(("cosine", "broke"), [(-5e-6, 0.0), (-2e-5, 0.5)])
def test_rounding_of_weights_breaks_no_promise(cosine, broke):
    model, optimizer, gem = begin()
    gem.end_task([task(0)])
    take(model, optimizer, task(0))
    gem.history.add(replace(gem.last, cosines=torch.tensor([cosine], dtype=torch.float64)))
    (line,) = gem.report()
    assert (line.steps, line.broke) == (2, broke)
