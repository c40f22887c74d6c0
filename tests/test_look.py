"""When rows are computed: with ``look="auto"`` only as often as models of losses and rows need it."""

import copy
import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from loops import begin, flat, sgd, take
from models import EACH, SAID, loss, perceptron, rival, task
from torch import nn

from gemproj.torch import Keeper, Promise
from gemproj.torch.forecast import Forecast
from gemproj.torch.losses import Distillation
from gemproj.torch.memory import Draw

pytestmark = pytest.mark.filterwarnings("ignore:A tolerance of 100 nats")  # far from any loss
MOST, PRESSED = 64, 8  # steps between two looks, and if a loss may pass its bound


class Looks:
    """A loss that notes the steps in which it is computed."""

    def __init__(self, loss, clock):
        self.loss, self.clock, self.steps = loss, clock, []
        if hasattr(loss, "outputs"):
            self.outputs = loss.outputs

    def __call__(self, *args):
        if not self.steps or self.steps[-1] != self.clock[0]:
            self.steps.append(self.clock[0])
        return self.loss(*args)


class Training:
    """Learns other labels for the points of the kept sets, and notes the steps in which each set is looked at."""

    def __init__(self, look="auto", make=torch.optim.AdamW, rate=3e-3, sets=None, **options):
        self.model, self.clock, self.losses = perceptron(), [-1], {}
        self.optimizer = make(self.model.parameters(), lr=rate)
        self.keeper = None
        if look is not None:
            self.keeper = Keeper(self.model, self.optimizer, look=look, **options)
            for name, promise in ({0: Promise(SAID, tolerance=0.05)} if sets is None else sets).items():
                self.losses[name] = Looks(promise.loss, self.clock)
                self.keeper.keep([task(1, 32)], replace(promise, loss=self.losses[name]), name=name)

    def run(self, steps):
        """Take some steps; return the weights after each of them."""
        weights = []
        for _ in range(steps):
            self.clock[0] += 1
            self.optimizer.zero_grad()
            loss(self.model, rival(task(100 + self.clock[0], 16))).backward()
            self.optimizer.step()
            weights.append(flat(self.model))
        return torch.stack(weights)

    def looks(self, name=0):
        """Return the steps in which a set was looked at."""
        return [step for step in self.losses[name].steps if step >= 0]


# --- what a promise far from its bound costs -----------------------------------------------------


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("of", [SAID, EACH], ids=["divergence", "cross-entropy"])
def test_far_from_the_bound_few_steps_look_and_all_are_those_without_a_keeper(of, make):
    promise = Promise(of, tolerance=100.0)
    plain, auto = Training(None, make), Training("auto", make, sets={0: promise})
    assert torch.equal(plain.run(150), auto.run(150))
    looks, line = auto.looks(), auto.keeper.report()[0]
    assert looks[:2] == [0, 1]  # where a divergence is stored, its row is zero and tells nothing
    assert len(looks) < 20
    assert (line.steps, line.looks) == (150, len(looks))


# --- what is promised ----------------------------------------------------------------------------


def worst_excess(training, steps, tolerance=0.05):
    """Take steps; return by how much the mean over all kept examples was above its bound at most."""
    kept, worst = training.keeper.sets[0], 0.0
    batch, stored = kept.fetch(list(range(len(kept))), None)
    for _ in range(steps):
        training.run(1)
        with torch.no_grad():
            worst = max(worst, float(SAID(training.model, batch, stored).mean()) - tolerance)
    return worst


def assert_held(worst, tolerance=0.05):
    """Compare with a look in every step, which holds most bounds to rounding: then 2 % of the tolerance count."""
    assert worst["auto"] <= 1.5 * max(worst[1], 0.02 * tolerance)


@pytest.mark.parametrize(
    ("make", "rate", "on"), [(torch.optim.SGD, 0.03, "gradient"), (torch.optim.AdamW, 3e-3, "both")]
)
def test_the_bound_is_held_as_with_a_look_in_every_step(make, rate, on):
    """Else the loss ends far above its bound; all examples are in each row, and none is left to chance."""
    sets, worst = {0: Promise(SAID, examples=None, tolerance=0.05)}, {}
    for look in (1, "auto"):
        training = Training(look, make, rate, sets, on=on)
        worst[look] = worst_excess(training, 150)
    assert worst[1] < 0.005
    assert_held(worst)
    assert len(training.looks()) < 150
    assert worst_excess(Training(1, make, rate, sets, on=on, project=False), 150) > 0.1


def test_what_is_new_is_learned_where_few_of_the_examples_are_drawn():
    """Another draw has a larger loss than the last one; that is no curvature, which would take steps back."""

    def learn(model, x, labels, steps, look=None):
        optimizer = torch.optim.AdamW(model.parameters())
        if look:
            keeper = Keeper(model, optimizer, look=look)
            keeper.keep([old], Promise(Distillation(lambda model, x: model(x)), tolerance=0.05))
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = 0.01 * (1.0 - step / steps)
            some = torch.randint(len(x), (16,))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[some]), labels[some]).backward()
            optimizer.step()
        return nn.functional.cross_entropy(model(x), labels).item()

    learned = {1: 0.0, "auto": 0.0}
    for look, seed in itertools.product(learned, (1, 2)):
        torch.manual_seed(seed)
        old, new = torch.randn(60, 8) - 1.0, torch.randn(400, 8) + 0.5
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
        learn(model, old, old[:, :4].argmax(1), 200)
        learned[look] += learn(model, new, (new[:, :4] + 0.7 * new[:, 4:]).argmax(1), 200, look)
    assert learned["auto"] < 1.4 * learned[1]


def test_the_bound_is_held_where_the_losses_of_the_drawn_examples_differ_a_lot():
    """A few examples hold most of the loss; a draw without them would leave many steps alone."""
    said, late = Distillation(lambda model, x: model(x)), {1: 0.0, "auto": 0.0}
    for look, seed in itertools.product(late, (0, 1, 2)):
        torch.manual_seed(seed)
        old, new = torch.randn(500, 8).double() - 1.0, torch.randn(500, 8).double() + 1.0
        labels = (new @ torch.randn(8, 4).double()).argmax(1)
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4)).double()
        stored, optimizer = said.outputs(model, old), torch.optim.AdamW(model.parameters())
        keeper = Keeper(model, optimizer, look=look)
        keeper.keep([old], Promise(said, tolerance=0.05))
        for step in range(300):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(new), labels).backward()
            optimizer.step()
            if step >= 200:
                late[look] += said(model, old, stored).mean().item() / 300
    assert late["auto"] < 1.15 * late[1]


@pytest.mark.parametrize("steps_back", [(), (70, 140)], ids=["on and on", "weights set back"])
def test_the_bound_is_held_by_a_long_training_that_presses_against_it(steps_back):
    """Old curvatures tell nothing of the next ones; the excess is that of three seeds, on average."""
    worst = {1: 0.0, "auto": 0.0}
    for look, seed in itertools.product(worst, (4, 5, 6)):
        torch.manual_seed(seed)
        x, new, rule = torch.randn(60, 8) - 1, torch.randn(200, 8) + 1, torch.randn(8, 4)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
        said_of = Distillation(lambda model, x: model(x))
        said, optimizer = said_of.outputs(model, x), torch.optim.AdamW(model.parameters(), lr=1e-2)
        begun = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        keeper, losses = Keeper(model, optimizer, look=look), []
        keeper.keep([x], Promise(said_of, tolerance=0.02, examples=None))
        for step in range(200):
            if step in steps_back:
                model.load_state_dict(begun[0])
                optimizer.load_state_dict(copy.deepcopy(begun[1]))
            some = new[torch.randint(200, (32,))]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(some), (some @ rule).argmax(1)).backward()
            optimizer.step()
            losses.append(said_of(model, x, said).mean().item())
        worst[look] += (max(losses) - 0.02) / 3
    assert_held(worst, 0.02)


@pytest.mark.parametrize("change", ["other examples", "more examples"])
def test_the_bound_is_held_after_a_change_of_the_set(change):
    """Where the loss was stored is not where the training has come from."""
    worst = {}
    for look in (1, "auto"):
        training = Training(look, sets={0: Promise(SAID, examples=None, tolerance=0.05)})
        training.run(60)
        if change == "other examples":
            training.keeper.forget(0)
        promise = Promise(training.losses[0], examples=None, tolerance=0.05)
        training.keeper.keep([task(2, 320)], promise, name=0)
        worst[look] = worst_excess(training, 60)
    assert_held(worst)


def test_a_gradient_that_is_not_finite_is_refused_in_a_step_without_a_look():
    training = Training(sets={0: Promise(SAID, tolerance=100.0)})
    training.run(20)
    looks, before = training.looks(), flat(training.model)
    loss(training.model, task(3)).backward()
    training.model[2].weight.grad[0, 0] = torch.nan
    training.clock[0] += 1
    with pytest.raises(ValueError, match=r"The gradient of 2.weight is not finite"):
        training.optimizer.step()
    assert training.looks() == looks
    assert torch.equal(flat(training.model), before)


def test_promises_without_a_tolerance_or_with_a_weight_look_in_every_step():
    sets = {
        "never up": Promise(EACH),
        "replayed": Promise(EACH, weight=0.1, tolerance=100.0),
        "far": Promise(EACH, tolerance=100.0),
    }
    training = Training(sets=sets)
    training.run(40)
    assert training.looks("never up") == training.looks("replayed") == list(range(40))
    assert len(training.looks("far")) < 20


def test_sets_look_one_by_one():
    """The loss of a set is computed by itself, while the row of another one is modelled."""
    sets = {"near": Promise(SAID, tolerance=0.01), "far": Promise(SAID, tolerance=1.0)}
    training = Training(rate=1e-3, sets=sets)
    training.run(100)
    near, far = (set(training.looks(name)) for name in sets)
    assert near - far
    assert far - near
    assert len(far) < len(near) / 2
    lines = training.keeper.report()
    assert [lines[name].looks for name in sets] == [len(near), len(far)]
    assert lines["far"].steps == lines["near"].steps == 100


def test_rows_of_some_sets_are_those_of_all_sets_also_in_a_shared_pass():
    """Of four sets the first, the second and the last are due: two adjacent rows may share a pass."""
    model, optimizer, keeper = begin(EACH, [task(k, 32) for k in range(4)], tolerance=1.0)
    take(model, optimizer, task(9))
    rows, joint = keeper.rows, keeper._training.joint
    before = rows.G.clone()
    sets = enumerate(keeper.sets.values())
    draws = [Draw(kept, kept.draw(keeper._random), EACH, k) for k, kept in sets]
    rows.fill(model, draws, range(4), joint=joint)
    expected, losses = rows.G.clone(), rows.losses
    rows.G.copy_(before)
    rows.ages, rows.unsure = [5] * 4, torch.ones(4)
    some = [0, 1, 3]
    rows.fill(model, [draws[k] for k in some], range(4), joint=joint)
    assert joint.reason is None
    torch.testing.assert_close(rows.G[some], expected[some], rtol=1e-12, atol=1e-15)
    assert torch.equal(rows.G[2], before[2])
    torch.testing.assert_close(rows.losses[some], losses[some])
    assert rows.ages == [0, 0, 5, 0]
    assert rows.unsure.tolist() == [0, 0, 1, 0]  # losses that were computed are sure


def test_a_tolerance_of_zero_is_held_as_with_a_look_in_every_step():
    worst = {}
    for look in (1, "auto"):
        training = Training(look, sets={0: Promise(SAID, tolerance=0.0)})
        worst[look] = worst_excess(training, 40, 0.0)
    assert worst["auto"] <= 1.5 * worst[1] < 1e-3
    assert training.keeper._forecast.known.isfinite().all()


@pytest.mark.parametrize("way", ["alone", "in parts", "shared"])
def test_squares_of_rises_are_those_of_the_drawn_examples(way):
    model, optimizer, keeper = begin(EACH, [task(k, 32) for k in range(3)], tolerance=1.0)
    for k in range(3):
        take(model, optimizer, task(9 + k))
    rows, joint = keeper.rows, keeper._training.joint
    draws = [Draw(kept, kept.draw(keeper._random), EACH, k) for k, kept in enumerate(keeper.sets.values())]
    parts = 5 if way == "in parts" else None
    rows.fill(model, draws, range(3), microbatch=parts, joint=joint if way == "shared" else None)
    expected = []
    for draw in draws:
        batch, _ = draw.kept.fetch(draw.at, None)
        rises = EACH(model, batch).detach() - draw.kept.losses[draw.at]
        expected.append(rises.square().mean())
    torch.testing.assert_close(rows.squares(draws), torch.stack(expected).double())
    torch.testing.assert_close(rows.squares(draws[1:2])[1], expected[1].double())
    assert way != "shared" or joint.reason is None


def test_after_a_look_that_failed_the_next_step_looks_at_all_sets():
    training = Training(sets={k: Promise(EACH, tolerance=100.0) for k in range(2)})
    training.run(3)

    class Broken(Exception):
        pass

    def fails(*args):
        raise Broken

    of, training.losses[1].loss = training.losses[1].loss, fails
    with pytest.raises(Broken):
        training.run(MOST + 1)
    training.losses[1].loss = of
    training.run(1)
    assert training.looks(0)[-1] == training.looks(1)[-1] == training.clock[0]
    assert len(training.keeper.rows) == 2


@pytest.mark.parametrize("look", [4, "auto"])
def test_after_rows_that_are_not_finite_the_next_step_looks(look):
    training, refused = Training(look, sets={0: Promise(EACH, tolerance=0.01)}), 0
    training.run(10)
    of, training.losses[0].loss = training.losses[0].loss, lambda *args: EACH(*args) * torch.inf
    for _ in range(30):
        try:
            training.run(1)
        except ValueError:
            refused, training.losses[0].loss = refused + 1, of
    assert refused == 1
    assert training.looks()[-1] > training.clock[0] - 10
    assert training.keeper._forecast.known.isfinite().all()


@pytest.mark.parametrize("before", [1, "auto"])
def test_auto_may_be_chosen_in_the_middle_of_a_training(before):
    """What it was told before a number of steps was chosen tells nothing of the rows now."""
    promise, worst = Promise(SAID, examples=None, tolerance=0.05), {}
    for look in (1, "auto"):
        training = Training(before, torch.optim.SGD, sets={0: promise})
        training.run(30)
        training.keeper.look = 1
        training.optimizer.param_groups[0]["lr"] = 0.1
        training.run(40)
        training.keeper.look = look
        worst[look] = worst_excess(training, 60)
    assert_held(worst)


def test_after_a_switch_of_adapters_the_next_step_looks_at_the_sets_of_the_new_one():
    training = Training(sets={})
    keeper, model = training.keeper, training.model
    for adapter, names in (("one", "ab"), ("two", "c")):
        model.active_adapter = adapter
        for name in names:
            keeper.keep([task(1)], Promise(EACH, tolerance=100.0), name=name)
    for adapter, names in (("two", "c"), ("one", "ab"), ("two", "c")):
        model.active_adapter = adapter
        with pytest.warns(UserWarning, match=f"and {adapter!r} is active"):
            training.run(3)
        assert keeper.rows.names == list(names)


# --- the forecast --------------------------------------------------------------------------------


class Quadratic:
    """Half the squared distance of a weight from where it was stored, times two."""

    def outputs(self, model, batch):
        return model.weight.detach().clone().reshape(1, -1).expand(len(batch), -1)

    def __call__(self, model, batch, outputs):
        return (model.weight - outputs).square().sum(1)


def quadratic(steps):
    """Take random steps; yield the keeper, where the weight was, and the error of its loss."""
    torch.manual_seed(0)
    model, promise = nn.Linear(4, 1, bias=False).double(), Promise(Quadratic(), tolerance=0.09)
    start = model.weight.detach().clone()
    options = {"model": model, "make": lambda p: sgd(p, 1.0), "look": "auto", "on": "both"}
    _, optimizer, keeper = begin(promise, [torch.ones(3, 4).double()], **options)
    for _ in range(steps):
        model.weight.grad = 0.02 * torch.randn(1, 4).double()
        before = model.weight.detach() - start
        looked = keeper.report()[0].looks
        optimizer.step()
        looks = keeper.report()[0].looks
        losses = keeper.rows.losses if keeper._forecast.age else keeper.last.losses  # of a projected step
        error = abs(float(losses) - float(before.square().sum())) if looks == looked else None
        yield keeper, before, error


def test_the_curvature_of_a_loss_that_curves_alike_in_all_directions_is_learned():
    """It is one, and each look finds three tenths of what is missing."""
    learned = [float(keeper._forecast.known[1]) for keeper, *_ in quadratic(300)]
    looks = list(dict.fromkeys(learned))
    assert looks[:4] == pytest.approx([0.0, 0.3, 0.51, 0.657], rel=1e-6)
    assert 0.8 < min(learned[150:]) < max(learned[150:]) < 1.2
    errors = [e for keeper, _, e in quadratic(300) if e is not None and keeper._forecast.known[4] == 0.0]
    assert max(errors) < 0.05 * 0.09  # of the tolerance
    assert len(errors) > 100


class Modelled:
    """Rows after a way of length .1, which has raised each loss by `rise` to first order."""

    def __init__(self, losses, rise):
        self.losses, self.stored, self._rise = losses, 0.0 * losses, rise
        self.names = list("abc")[: len(losses)]
        alone = SimpleNamespace(world=1)
        self.vector = SimpleNamespace(device=torch.device("cpu"), topology=alone, read_step=lambda: None)
        self.unsure, self.norms = None, torch.full_like(losses, 6.0)
        self.variance = 0.0  # of the losses of the drawn examples

    def __len__(self):
        return len(self.losses)

    def products(self, step):
        return torch.tensor(0.01, dtype=torch.float64), torch.full_like(self.losses, -self._rise)

    def squares(self, draws):
        return self.losses**2 + self.variance


def begun(loss, rise=0.01, curvature=0.0, error=0.0, most=0.2, age=5, weight=None, doubt=0.0):
    """Return a forecast of a loss with a tolerance of one, its rows, and what is due and projected after a way."""
    rows = Modelled(torch.tensor([loss], dtype=torch.float64), rise)
    known = torch.tensor([[loss, curvature, error, 0.0, 0.0, 0.0, most, doubt]], dtype=torch.float64).T
    forecast = Forecast.from_state_dict({"names": rows.names, "known": known})
    forecast.age = age - 1
    terms = SimpleNamespace(tolerance=torch.ones(1).double(), weight=weight)
    return forecast, rows, forecast.due(rows, terms, False)


@pytest.mark.parametrize(
    ("known", "due", "projects"),
    [
        ({"loss": 0.5, "rise": 0.34}, False, False),  # .908 after the next step, and a tenth
        ({"loss": 0.5, "rise": 0.35}, False, True),  # .92
        ({"loss": 0.5, "rise": 0.0, "curvature": 28.0}, False, False),  # 28 * .12^2
        ({"loss": 0.5, "rise": 0.0, "curvature": 29.0}, True, True),  # 2 * 29 * .12 is more than 6
        ({"loss": 0.95, "rise": 0.0, "curvature": 24.0}, False, True),
        ({"loss": 0.6, "rise": -0.1, "curvature": 28.0}, False, False),  # which does not fall on
        ({"loss": 0.6, "rise": -0.1, "curvature": 29.0}, True, True),
        ({"loss": 0.5, "rise": 0.0, "error": 31.0}, False, False),
        ({"loss": 0.5, "rise": 0.0, "error": 32.0}, False, True),
        ({"loss": 0.5, "doubt": 0.43}, False, False),  # the standard error of a mean of few drawn examples
        ({"loss": 0.5, "doubt": 0.44}, False, True),
        ({"loss": -0.5, "error": 90.0}, False, False),
        ({"loss": 0.5, "most": 0.121}, False, False),  # the next step ends at .12
        ({"loss": 0.5, "most": 0.119}, True, True),
        ({"loss": 0.5, "age": MOST - 1}, False, False),
        ({"loss": 0.5, "age": MOST}, True, True),
        ({"loss": 0.99, "age": PRESSED - 1}, False, True),
        ({"loss": 0.99, "age": PRESSED}, True, True),
        ({"loss": 0.5, "weight": torch.ones(1)}, True, True),
    ],
)
def test_when_a_row_is_computed_and_when_a_step_is_projected(known, due, projects):
    forecast, rows, found = begun(**known)
    assert found == ([due], projects)
    curvature, error = known.get("curvature", 0.0), known.get("error", 0.0)
    now = known["loss"] + known.get("rise", 0.01) + 0.01 * curvature
    assert float(rows.losses) == pytest.approx(now)
    if projects:
        doubt = known.get("doubt", 0.0)
        assert float(rows.unsure) == pytest.approx(0.01 * error + 0.1 * abs(now) + doubt)
        expected = [now, curvature, error, 0.0, 0.1, known.get("age", 5), known.get("most", 0.2), doubt]
        assert forecast.known[:, 0].tolist() == pytest.approx(expected)
        assert forecast.age == 0
    else:
        assert rows.unsure is None
        assert forecast.age == known.get("age", 5)


def draw(total=None):
    """Return a draw of the only row; of all examples, or of so many."""
    kept = SimpleNamespace(promise=Promise(SAID, examples=total))
    return Draw(kept, [], SAID, 0, total or 0)


@pytest.mark.parametrize(
    ("known", "found", "drawn", "then"),
    [
        # Three tenths of the error are put down to the curvature, and the next way is not twice as long.
        ({"loss": 0.97}, 1.08, None, (1.08, 3.0, 10.0, (0.05 * 0.98 / 10.0) ** 0.5)),
        ({"loss": 0.96, "curvature": 1.0}, 0.93, None, (0.93, 0.0, 5.0, (0.05 * 0.98 / 5.0) ** 0.5)),
        ({"loss": 0.97, "error": 0.1}, 0.98, None, (0.98, 0.0, 0.085, 0.2)),  # no error
        # The standard error of the nine drawn examples is .05; what is within three times that is halved. The
        # mean of what was found and modelled has less, in the long run.
        ({"loss": 0.97, "error": 0.1}, 1.06, 9, (1.02, 2.4, 0.085, 0.2)),
        ({"loss": 0.97}, 1.23, 9, (1.155, 7.5, 10.0, (0.05 * 1.13 / 10.0) ** 0.5)),
        # Of a loss below a tenth of the tolerance, errors are relative to that.
        ({"loss": 0.01, "rise": 0.0}, 0.02, None, (0.02, 0.3, 1.0, (0.05 * 0.1 / 1.0) ** 0.5)),
        ({"loss": -0.5}, -0.48, None, (-0.48, 0.3, 1.0, (0.05 * 0.1 / 1.0) ** 0.5)),
        # The way of .1 is more than four times as long as steps could lead: weights were set.
        ({"loss": 0.97, "error": 0.1, "most": 0.024}, 0.98, None, (0.98, 0.0, 0.085, 0.0)),
        ({"loss": 0.97, "error": 0.1, "most": 0.026}, 0.98, None, (0.98, 0.0, 0.085, 0.2)),
    ],
)
def test_what_a_look_learns_from_the_error_of_its_model(known, found, drawn, then):
    """The loss, the curvature, the error, and the way to the next look, which is at most twice as long."""
    forecast, rows, _ = begun(**{"most": 0.0} | known)
    rows.losses[0], rows.variance = found, (drawn or 0) * 0.05**2
    forecast.take(rows, [draw(drawn)], torch.ones(1).double(), fresh=False)
    loss, *learned, most = then
    now = known["loss"] + known.get("rise", 0.01)
    spread = rows.variance / max(now, 0.1) ** 2
    expected = [loss, *learned, spread, 0.0, 0.0, most, 0.05 / 3**0.5 if drawn else 0.0]
    assert forecast.known[:, 0].tolist() == pytest.approx(expected, abs=1e-12)


def test_variances_of_looks_are_pooled():
    forecast, rows, _ = begun(0.99)
    forecast.known[3], rows.variance = 0.4, 0.9
    forecast.take(rows, [draw(9)], torch.ones(1).double(), fresh=False)
    assert float(forecast.known[3]) == pytest.approx(0.4 + 0.2 * (0.9 - 0.4))


def test_what_is_known_of_a_row_stays_when_other_sets_come():
    forecast, rows, _ = begun(0.5, curvature=0.4, error=3.0, doubt=0.3)
    rows.names, rows.losses, rows.stored = ["b", "a"], torch.tensor([0.1, 0.6]).double(), torch.zeros(2)
    forecast.take(rows, [], torch.ones(2), fresh=True)
    new, old = forecast.known.T.tolist()
    assert new == pytest.approx([0.1, 0, 0, 0, 0, 0, 0, 0])
    assert old == pytest.approx([0.6, 0.4, 3.0, 0, 0, 0, 0.2, 0.3])  # with its radius, and its standard error


@pytest.mark.parametrize(
    ("tolerance", "weight", "due"), [(1.0, 0.0, [True, False]), (torch.nan, 0.0, [True]), (1.0, 0.5, [True])]
)
def test_on_a_device_a_look_is_asked_for_once(tolerance, weight, due, monkeypatch):
    """There flags come a step late, when the look that they ask for may have been taken; some are due always."""
    event = SimpleNamespace(record=lambda stream: None, synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    forecast, rows, _ = begun(0.5, most=0.0)  # a look is due in every step
    rows.vector.device = torch.device("cuda")
    terms = SimpleNamespace(tolerance=torch.tensor([tolerance]), weight=torch.tensor([weight]))
    found = [forecast.due(rows, terms, False)[0][0] for _ in range(6)]
    assert found == due * (6 // len(due))


@pytest.mark.parametrize("fresh", [False, True])
def test_after_a_loss_that_is_not_finite_the_next_step_looks(fresh):
    forecast, rows, _ = begun(0.5, curvature=0.4, error=3.0, most=0.0)
    for found in torch.inf, torch.nan, -torch.inf:
        rows.losses = torch.tensor([found]).double()
        forecast.take(rows, [draw()], torch.ones(1).double(), fresh)
        assert forecast.known[:, 0].tolist() == pytest.approx([0.0, 0.4, 3.0, 0.0, 0.0, 0.0, -1.0, 0.0])
    due, _ = forecast.due(rows, SimpleNamespace(tolerance=torch.ones(1), weight=None), False)
    assert due == [True]
