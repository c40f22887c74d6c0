"""Several promises of different kinds about different data, what is told about them, and only watching."""

import copy
import itertools

import pytest

torch = pytest.importorskip("torch")

from models import EACH, SAID, begin, flat, loss, perceptron, rival, rows, sgd, take, task, trainable  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

from gemproj import project  # noqa: E402
from gemproj.torch import GEM, Promise  # noqa: E402
from gemproj.torch.losses import Distillation  # noqa: E402


class LanguageModel(torch.nn.Module):
    """Predicts the next token from the last two."""

    def __init__(self, vocabulary=11, width=6):
        super().__init__()
        self.table = torch.nn.Embedding(vocabulary, width)
        self.mix = torch.nn.Linear(2 * width, vocabulary)

    def forward(self, tokens):
        now = self.table(tokens)
        before = torch.nn.functional.pad(now, (0, 0, 1, 0))[:, :-1]
        return self.mix(torch.cat([now, before], -1).tanh())


def texts(seed, n=8, length=7):
    return torch.randint(11, (n, length), generator=torch.Generator().manual_seed(seed))


def next_token(model, tokens):
    """The mean over the texts of a tensor."""
    logits = model(tokens)[:, :-1]
    return cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def of_pairs(model, batch):
    """One number for each of (prompt, answer): the loss of the answer alone."""
    tokens = torch.cat(batch, 1)
    logits = model(tokens)[:, batch[0].shape[1] - 1 : -1]
    losses = cross_entropy(logits.transpose(1, 2), batch[1], reduction="none")
    return losses.mean(1)


def of_mapping(model, batch):
    return next_token(model, batch["input_ids"])


def test_three_kinds_of_promises_while_a_fourth_thing_is_learned():
    """As by hand: replay with a weight, outputs at a tolerance, a set that never rises, one that stays equal."""
    torch.manual_seed(0)
    model = LanguageModel().double()
    said = Distillation(lambda m, b: m(b["input_ids"]), mask=lambda b: b["input_ids"] >= 0)
    kept = {
        "task": ({"input_ids": texts(1)}, Promise(of_mapping, weight=0.3)),
        "general": ({"input_ids": texts(2, 12)}, Promise(said, tolerance=0.002, repair=0.5)),
        "safety": ((texts(3)[:, :4], texts(4)[:, :2]), Promise(of_pairs)),
        "equal": (texts(5, 3), Promise(next_token, equal=True)),
    }
    optimizer = sgd(model.parameters(), 0.3)
    gem = GEM(model, optimizer)
    for name, (batch, promise) in kept.items():
        gem.keep([batch], promise, name=name)
    other, start = copy.deepcopy(model), copy.deepcopy(model)
    outputs = said.outputs(other, kept["general"][0])
    losses = [
        lambda m: of_mapping(m, kept["task"][0]),
        lambda m: said(m, kept["general"][0], outputs).mean(),
        lambda m: of_pairs(m, kept["safety"][0]).mean(),
        lambda m: next_token(m, kept["equal"][0]),
    ]
    new, active = texts(9, 16), set()
    for _ in range(25):
        optimizer.zero_grad()
        next_token(model, new).backward()
        optimizer.step()
        (g,) = rows(other, [new], next_token)
        G = torch.stack([flat(torch.autograd.grad(one(other), trainable(other))) for one in losses])
        excess = losses[1](other).item() - 0.002
        h = torch.zeros(4, dtype=torch.float64)
        h[1] = min(0.5 * excess / 0.3, float(G[1].norm() * g.norm()))
        if excess < -0.0019999:  # rows of rounding ask for nothing
            h[1] = min(h[1], -float(G[1].norm() * g.norm()))
        equality = torch.tensor([False, False, False, True])
        x = project(G, g, h=h, margin=[0.3, 0.0, 0.0, 0.0], equality=equality)
        torch.nn.utils.vector_to_parameters(flat(other) - 0.3 * x, other.parameters())
        active |= {gem.last.names[k][0] for k in gem.last.solution.active.nonzero().flatten().tolist()}
        torch.testing.assert_close(flat(model), flat(other), rtol=1e-8, atol=1e-9)
    assert active >= kept.keys() - {"task"}  # or they would not have been tried
    assert gem.last.multipliers[0] >= 0.3
    assert losses[1](model) < 0.01
    assert next_token(model, new) < next_token(start, new)
    report = gem.report()
    assert [line.name for line in report] == list(kept)
    assert report["general"].bound == pytest.approx(0.002, abs=1e-9)
    assert report["safety"].broke <= report["safety"].would_break


@pytest.mark.parametrize(
    "options", [{"weight": 0.5}, {"on": "step"}, {"on": "both", "every": 2}, {"tolerance": 0.0}]
)
@pytest.mark.parametrize("make", [sgd, torch.optim.AdamW])
def test_a_run_that_only_watches_is_the_plain_one_to_the_bit(options, make):
    def train(protect):
        model = perceptron()
        model.append(torch.nn.Dropout(0.2))
        optimizer = make(model.parameters())
        gem = GEM(model, optimizer, EACH, project=False, **options) if protect else None
        if protect:
            gem.end_task([task(1)])
        torch.manual_seed(3)
        for k in range(6):
            take(model, optimizer, rival(task(1), 1 + k % 2))
        return model, gem

    (plain, _), (watched, gem) = train(False), train(True)
    assert torch.equal(flat(plain), flat(watched))
    (line,) = gem.report()
    assert line.steps == 6
    assert line.would_break > 0
    assert line.broke > 0
    assert gem.last.num_active  # it tells what would have been done


def test_a_report_has_what_can_be_measured_from_outside():
    model, optimizer, gem = begin(EACH, make=lambda p: torch.optim.Adam(p, lr=0.02), tolerance=0.01)
    seen = []
    data = {"a": task(1), 7: task(2)}
    for name, batch in data.items():
        gem.end_task([batch], name)
    before = {name: EACH(model, batch).mean().item() for name, batch in data.items()}
    for _ in range(8):
        seen.append({name: EACH(model, batch).mean().item() for name, batch in data.items()})
        take(model, optimizer, rival(data["a"]))
    report = gem.report()
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
    assert [line.name for line in gem.report()] == [0, 1, "labels", "all sets"]


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
    other.memory.remove("said")
    assert other.promises == {}


def test_a_promise_that_cannot_be_kept_is_told_at_once_and_stores_nothing():
    model = perceptron()
    gem = GEM(model, [sgd(model[0].parameters()), sgd(model[2].parameters())], method="agem")
    for promise, message in (
        (Promise(EACH, tolerance=0.1), "tolerance cannot be combined with method|a whole step"),
        (Promise(EACH, equal=True), "equality cannot be combined with method"),
        (Promise(EACH, per="label"), "needs labels"),
    ):
        with pytest.raises(ValueError, match=message):
            gem.keep([task(0)], promise)
    assert gem.memory.tasks == []
    assert gem.promises == {}
