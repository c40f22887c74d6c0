"""Promises of a training loop against plain forms of their formulas: steps, bounds and resumed runs."""

import copy
import itertools
from contextlib import nullcontext
from functools import cache, partial
from types import SimpleNamespace

import loops
import numpy as np
import pytest
import torch
from devices import cpu_as_device
from loops import adam_weights, cosines, flat, gradient, moved, rows, sgd, take, through_a_file, unlearn
from models import BOTH, EACH, SAID, loss, perceptron, rival, task
from torch.utils.data import default_collate

from gemproj import project, solve_dual
from gemproj._tspace import Gram
from gemproj.torch import Keeper, Promise
from gemproj.torch.losses import Distillation
from gemproj.torch.step import Terms


@cache
def learned_once(n):
    model, batch = perceptron(), task(0, n)
    optimizer = sgd(model.parameters(), 0.3)
    for _ in range(60):
        take(model, optimizer, batch)
    return model, batch


def learned(n=24, dtype=torch.float64):
    """Return a model that has learned a task, and that task."""
    model, (x, y) = copy.deepcopy(learned_once(n))
    return model.to(dtype), (x.to(dtype), y)


def begin(promised=loss, *more, rate=0.05, make=torch.optim.SGD, n=24, dtype=torch.float64, **options):
    """Return a model that has learned a task, its optimizer, a keeper of this task and of more, and the task."""
    model, batch = learned(n, dtype)
    return *loops.begin(promised, [batch, *more], model=model, make=partial(make, lr=rate), **options), batch


def give(model, g):
    """Set the gradient of a model."""
    for p, part in zip(model.parameters(), g.split([p.numel() for p in model.parameters()]), strict=True):
        p.grad = part.view_as(p).clone()


# --- each step in plain form ----------------------------------------------------------------------

SETS = [task(1), dict(zip("xy", task(2), strict=True)), task(3), task(4)]
OF_SETS = {
    "nothing rises": [Promise(loss)] * 3,
    "replay": [Promise(loss, weight=weight) for weight in (0.01, 0.3, 0.0)],
    "penalties": [Promise(loss, penalty=1e-3), Promise(loss, weight=0.1, penalty=0.2), Promise(loss)],
    "equalities": [Promise(loss, equal=True), Promise(loss), Promise(loss, equal=True)],
    "bounds": [Promise(EACH, tolerance=0.002), Promise(EACH, tolerance=10.0, repair=0.3)],
    "a row of zeros": [Promise(loss), Promise(lambda model, batch: 0.0 * loss(model, batch))],
    "all kinds": [
        Promise(loss, weight=0.3),
        Promise(BOTH, tolerance=0.002, repair=0.5),
        Promise(EACH),
        Promise(loss, equal=True),
    ],
}
OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW, amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.5, 0.5), amsgrad=True),
    "AdamW, for each": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, foreach=True),
    "AdamW, one by one": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, foreach=False),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1, fused=True),
    "AdamW, capturable rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.02), foreach=False),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.02, weight_decay=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.02),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.02),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.02),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.02),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
}
SECOND_MOMENTS = [name for name in OPTIMIZERS if "Adam" in name and name != "Adamax"]


def in_plain_form(G, v, promises, excess, weighted=True, rate=1.0, metric=None, scaled=False, used=0.0):
    """Project a gradient or a step: ``G s >= repair (loss - bound)``, of at most ``|g_k| |s|``.

    If the optimizer scales the entries of a gradient, it is at most that fraction. Return the multipliers, too;
    those that another projection `used` count towards a penalty.
    """
    weights = torch.ones_like(v) if metric is None else metric
    longest = ((G**2 / weights).sum(1) * (v**2 * weights).sum()).sqrt()
    repair = torch.tensor([one.repair for one in promises], dtype=torch.float64)
    h = torch.minimum(repair * excess / rate, (repair if scaled else 1.0) * longest).nan_to_num(0.0)
    penalty = [torch.inf if one.penalty is None else one.penalty for one in promises]
    options = {
        "h": h,
        "margin": [one.weight * weighted for one in promises],
        "penalty": (torch.tensor(penalty, dtype=torch.float64) - used).clamp(min=0.0),
        "equality": torch.tensor([one.equal for one in promises]),
        "metric": metric,
    }
    return project(G, v, **options), torch.as_tensor(solve_dual(G, v, **options).multipliers)


class Heated(torch.nn.Sequential):
    """A model with a parameter without axes, as the temperature of CLIP."""

    def __init__(self):
        super().__init__(*perceptron())
        self.register_parameter("heat", torch.nn.Parameter(torch.tensor(1.0, dtype=torch.float64)))

    def forward(self, x):
        return self.heat * super().forward(x)


class Twins:
    """A model under promises, and another one whose gradients and steps are projected by hand."""

    def __init__(self, name, promises, on):
        make = OPTIMIZERS[name]
        self.name, self.on, self.adam, self.promises = name, on, name in SECOND_MOMENTS, promises
        self.model, self.plain = Heated(), Heated()
        held = [list(model.parameters()) for model in (self.model, self.plain)]
        self.optimizer, self.other = (make([{"params": p[:3]}, {"params": p[3:]}]) for p in held)
        if not isinstance(self.optimizer.param_groups[1]["lr"], torch.Tensor):
            self.optimizer.param_groups[1]["lr"] *= 0.5
        for one in (self.optimizer, self.other):  # hooks may drop gradients in a step
            one.register_step_post_hook(lambda optimizer, *_: optimizer.zero_grad())
        self.keeper = loops.protect(self.model, self.optimizer, on=on)
        self.losses = []
        for batch, one in zip(SETS, promises, strict=False):
            self.keeper.keep([batch], one)
            given = (batch, one.loss.outputs(self.plain, batch)) if hasattr(one.loss, "outputs") else (batch,)
            self.losses.append(lambda m, one=one, given=given: one.loss(m, *given).mean())
        tolerances = [torch.nan if one.tolerance is None else one.tolerance for one in promises]
        self.bounds = self.now() + torch.tensor(tolerances, dtype=torch.float64)

    def now(self):
        return torch.stack([one(self.plain).detach() for one in self.losses])

    def step(self):
        """Take a step with each, from the same weights and state, and compare them and what is said of them."""
        plain, keeper, on = self.plain, self.keeper, self.on
        plain.load_state_dict(self.model.state_dict())
        for p, its in zip(plain.parameters(), self.model.parameters(), strict=True):
            self.other.state[p] = copy.deepcopy(self.optimizer.state.get(its, {}))
        for group, its in zip(self.other.param_groups, self.optimizer.param_groups, strict=True):
            group["lr"] = copy.deepcopy(its["lr"])
        G = torch.stack([flat(torch.autograd.grad(one(plain), plain.parameters())) for one in self.losses])
        losses, excess = self.now(), self.now() - self.bounds
        rate = max(float(group["lr"]) for group in self.other.param_groups)
        for model in (self.model, plain):
            model.zero_grad()
            loss(model, rival(SETS[0])).backward()
        used = 0.0
        if on != "step":
            scaled = self.name != "SGD"
            g, used = in_plain_form(G, gradient(plain), self.promises, excess, rate=rate, scaled=scaled)
            give(plain, g)
        step = moved(plain, self.other.step)
        if on != "gradient":
            if self.adam:
                w = adam_weights(plain, self.other, G)
            else:  # a step is the gradient times the rate of its parameter
                held = [(p, group["lr"]) for group in self.other.param_groups for p in group["params"]]
                w = torch.cat([torch.full((p.numel(),), 1.0 / lr, dtype=step.dtype) for p, lr in held])
            step, _ = in_plain_form(G, step, self.promises, excess, on == "step", metric=w, used=used)
        found = moved(self.model, self.optimizer.step)
        torch.testing.assert_close(found, step, rtol=1e-7, atol=1e-10)
        last = keeper.last
        torch.testing.assert_close(last.cosines, cosines(G, step).nan_to_num(0.0), rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(last.losses, losses)
        if last.excess is not None:
            torch.testing.assert_close(last.excess, excess, rtol=1e-6, atol=1e-12, equal_nan=True)
        assert last.num_active == int((last.step if on == "step" else last.solution).active.sum())
        # Moments, counts and schedules are the optimizer's own, as if it had been left alone.
        both = (self.optimizer, self.model), (self.other, plain)
        states = [[one.state[p] for p in model.parameters()] for one, model in both]
        torch.testing.assert_close(*states, rtol=1e-6, atol=1e-12)
        return last.num_active


@pytest.mark.parametrize("on", ["gradient", "step", "both"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *itertools.product(OF_SETS, ["AdamW", "AdamW, amsgrad", "SGD"]),
        *itertools.product(["nothing rises"], [name for name in list(OPTIMIZERS)[2:] if name != "SGD"]),
    ],
)
def test_each_step_is_a_projection_of_the_optimizers_own(kind, name, on):
    twins = Twins(name, OF_SETS[kind], on)
    schedule = torch.optim.lr_scheduler.LambdaLR(twins.optimizer, lambda step: min(step + 1, 4) / 4)
    active = 0
    for _ in range(5):
        active += twins.step()
        schedule.step()
    assert active or kind == "replay"


# --- bounds -----------------------------------------------------------------------------------------


places = pytest.mark.parametrize("where", [nullcontext, cpu_as_device])


def rise_of_a_weight(where, g, excess=0.0, **options):
    """Return by how much a step of rate 0.5 along -g raises the only weight, whose value is kept."""
    model = torch.nn.Linear(1, 1, bias=False).double()
    with where():
        given = {"model": model, "make": partial(sgd, rate=0.5)} | options
        _, optimizer, keeper = loops.begin(lambda m, x: m(x)[:, 0], [torch.ones(4, 1).double()], **given)
        keeper.sets[0].losses -= excess
        give(model, torch.tensor([g]).double())
        return -moved(model, optimizer.step).item()


@places
@pytest.mark.parametrize("on", ["gradient", "step", "both"])
@pytest.mark.parametrize(
    ("more", "left"), [({"penalty": 9.0}, 0.0), ({"weight": 0.1}, 0.0), ({"repair": 0.6}, 0.4)]
)
def test_a_loss_above_its_bound_returns_on_a_device_as_on_the_cpu(where, more, left, on):
    """By the fraction that repair says."""
    found = rise_of_a_weight(where, -1.0, 0.25, on=on, tolerance=0.0, **more)
    assert found == pytest.approx(0.25 * (left - 1.0))


@places
@pytest.mark.parametrize("equal", [False, True])
@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("on", ["gradient", "step", "both"])
def test_a_penalty_is_spent_once(on, sign, equal, where):
    found = rise_of_a_weight(where, -10.0 * sign, on=on, penalty=2.0, equal=equal)
    assert found == pytest.approx(4.0 * sign if sign > 0 or equal else -5.0)


def test_a_gradient_of_a_frozen_parameter_of_another_optimizer_stays():
    """As in adversarial training, where one freezes what the other trains."""
    model = torch.nn.ModuleList([torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)])
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    keeper = Keeper(model, optimizers, lambda m, x: m[0](x)[:, 0])
    keeper.keep([torch.ones(4, 1)])
    (model[0](torch.ones(1, 1)) + model[1](torch.ones(1, 1))).sum().backward()
    model[1].requires_grad_(False)
    optimizers[0].step()
    assert model[1].weight.grad is not None


@pytest.mark.parametrize("on", ["gradient", "step", "both"])
@pytest.mark.parametrize(
    ("angle", "text"),
    [
        (90.0, ""),
        (150.0, "a part of the way"),
        (179.0, "a part of"),
        (179.99, "raises none"),
        (180.0, "raises none"),
    ],
)
def test_sets_that_oppose_each_other_ask_for_no_long_step(angle, text, on):
    """Both losses are above their bounds, and fall a part of the way, along the little they have in common."""
    far = np.radians(angle)
    rows = torch.tensor([[1.0, 0.0], [np.cos(far), np.sin(far)]], dtype=torch.float64)
    model, tasks = torch.nn.Linear(2, 1, bias=False).double(), {f"set {k}": rows[k][None] for k in range(2)}
    tasks["far"] = torch.tensor([[0.0, 1.0]]).double()
    _, optimizer, keeper = loops.begin(lambda m, x: m(x)[:, 0], tasks, model=model, on=on, tolerance=0.0)
    for name, kept in keeper.sets.items():
        kept.losses += 1.0 if name == "far" else -1.0
    give(model, torch.tensor([-1.0, -1.0]).double())
    with pytest.warns(UserWarning, match=f"'set 0', 'set 1'.*{text}") if text else nullcontext():
        step = moved(model, optimizer.step)
    assert keeper.last.excess.tolist() == pytest.approx([1.0, 1.0, -1.0])
    assert (rows @ step > (-1e-12 if "none" in text else 1e-6)).all()
    assert on == "both" or step.norm() < 4.0 * 0.1 * 2**0.5
    if angle == 180.0:  # what neither of them is about
        torch.testing.assert_close(step, torch.tensor([0.0, -0.1]).double())


@pytest.mark.parametrize("on", ["step", "both"])
def test_float16_with_a_small_rate(on):
    """Adam's metric, divided by the rate, is beyond float16."""
    model, make = torch.nn.Linear(4, 2).half(), partial(torch.optim.AdamW, lr=1e-6, eps=1e-4)
    given = {"model": model, "make": make, "on": on}
    _, optimizer, keeper = loops.begin(lambda m, x: m(x)[:, 0], [torch.ones(4, 4).half()], **given)
    (-10.0 * model(torch.ones(1, 4).half())).sum().backward()
    optimizer.step()
    assert keeper.report()[0].steps == 1


def test_what_is_frozen_holds_its_promise_and_stays_where_it_is():
    """Also with momentum and a gradient from before, for which an optimizer would move it."""
    torch.manual_seed(0)
    body, heads = torch.nn.Linear(6, 4).double(), [torch.nn.Linear(4, 3).double() for _ in range(2)]
    model = torch.nn.ModuleList([body, *heads])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    keeper = Keeper(model, optimizer, lambda m, b: EACH(torch.nn.Sequential(m[0], m[1]), b))
    keeper.keep([task(1)], name="first head")
    for step in range(4):
        if step == 2:
            warned = pytest.warns(UserWarning, match="'first head' depends on no trainable parameter now")
            body.requires_grad_(False)
            heads[0].requires_grad_(False)
            before = flat(body), flat(heads[0])
        optimizer.zero_grad(set_to_none=False)
        for head in heads if step < 2 else heads[1:]:
            loss(torch.nn.Sequential(body, head), rival(task(1))).backward()
        with warned if step >= 2 else nullcontext():
            optimizer.step()
    assert torch.equal(flat(body), before[0])
    assert torch.equal(flat(heads[0]), before[1])
    assert not keeper.rows.G.any()


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("since", [2, 4])
def test_no_optimizer_moves_what_is_frozen(since, order):
    """By momentum and decay, whichever of two optimizers steps first, also if it was frozen before."""
    model, optimizer, data = perceptron(), partial(torch.optim.SGD, lr=0.1, momentum=0.9), rival(task(1))
    optimizers = [optimizer(part.parameters(), weight_decay=0.1) for part in (model[0], model[2])][::order]
    for step in range(6):
        for one in optimizers:
            one.zero_grad(set_to_none=False)
        if step == since:
            model[2].requires_grad_(False)
            before = flat(model[2])
        if step == 2:
            keeper = Keeper(model, optimizers, EACH)
            keeper.keep([task(1)])
        loss(model, data).backward()
        for one in optimizers:
            one.step()
    assert torch.equal(flat(model[2]), before)


@pytest.mark.parametrize("on", ["gradient", "step", "both"])
def test_a_promise_that_no_step_would_break_moves_nothing(on):
    """Not by weight decay or momentum either, of weights that the training would leave alone."""
    heads = torch.nn.ModuleList([torch.nn.Linear(6, 3).double(), torch.nn.Linear(6, 3).double()])
    _, optimizer, keeper = loops.begin(
        lambda m, b: EACH(m[0], b), [task(1)], model=heads, make=torch.optim.AdamW, on=on
    )
    before = flat(heads[0])
    for _ in range(3):
        loops.take(heads[1], optimizer, task(2))
    assert torch.equal(flat(heads[0]), before)
    assert keeper.report()[0].steps == 3


def test_rows_are_the_means_of_drawn_examples():
    model, optimizer, keeper, batch = begin(EACH, task(7, 6), examples=5)
    same, random = copy.deepcopy(keeper.sets), torch.Generator()
    random.set_state(keeper._random.get_state())
    drawn = set()
    for _ in range(5):
        at = [kept.draw(random) for kept in same.values()]
        drawn.update(at[0])
        pairs = list(zip(at, same.values(), strict=True))
        G = rows(model, [default_collate([kept.examples[i] for i in k]) for k, kept in pairs])
        _, step = take(model, optimizer, rival(batch))
        torch.testing.assert_close(keeper.rows.G, G)
        torch.testing.assert_close(keeper.rows.stored, torch.stack([s.losses[k].mean() for k, s in pairs]))
        assert cosines(G, step).min() > -1e-9
    assert len(drawn) == 24


def test_hundreds_of_equalities():
    model, batch = learned(200)
    make, every = partial(torch.optim.Adam, lr=0.01), [*zip(*(leaf.split(1) for leaf in batch), strict=True)]
    _, optimizer, _ = loops.begin(loss, every, model=model, make=make, equal=True, on="both")
    G = rows(model, every)
    _, step = take(model, optimizer, rival(batch))
    # More rows than parameters, and directions are left: outputs depend on differences of logits only.
    assert len(G) == 200 > len(step) > torch.linalg.matrix_rank(G)
    assert (G @ step).abs().max() < 1e-9 < step.norm()


@pytest.mark.parametrize(("excess", "active"), [(1e-7, 0), (1e-3, 1)])
def test_the_rounding_of_a_loss_is_no_excess(excess, active):
    # The small rate makes even such an excess ask for much.
    model, optimizer, keeper, batch = begin(EACH, dtype=torch.float32, rate=1e-4, tolerance=0.0)
    keeper.sets[0].losses -= excess
    (row,), (g,) = rows(model, [batch]), rows(model, [rival(batch)])
    give(model, (g + (1e-4 - row @ g) / (row @ row) * row).float())  # it lowers the loss by very little
    optimizer.step()
    assert keeper.last.num_active == active


@pytest.mark.parametrize("options", [{}, {"on": "step"}, {"on": "both", "tolerance": 0.0}], ids=str)
def test_a_divergence_that_was_just_stored_does_not_turn_the_step(options):
    """It is zero, and its gradient noise in a random direction: it allows a step, or the opposite one."""
    for sign in (1, -1):
        model, optimizer, keeper, batch = begin(SAID, dtype=torch.float32, rate=0.1, **options)
        g = sign * rows(model, [rival(batch)])[0].float()
        before = flat(model)
        give(model, g)
        optimizer.step()
        assert (len(keeper.rows), keeper.last.num_active) == (1, 0)
        torch.testing.assert_close((before - flat(model)).float(), 0.1 * g, rtol=1e-4, atol=1e-6)
        if options.get("tolerance") == 0.0:
            give(model, g)
            optimizer.step()
            assert keeper.last.num_active == 1


# --- resumed runs -----------------------------------------------------------------------------------

OPTIONS = [
    {"examples": 4, "weight": 0.5, "tolerance": 0.3},
    {"examples": 4, "tolerance": 0.0, "on": "both"},
    {"tolerance": 0.01, "repair": 0.5, "look": 2, "on": "step", "saved": 3},  # between two looks
    {"examples": 4, "method": "pgd"},
    {"examples": 6, "method": "agem", "name": "past"},
    {"look": 4, "method": "gem2017"},
    {"examples": 8, "tolerance": 0.1, "on": "both", "look": "auto", "saved": 1},
    {"examples": 8, "tolerance": 0.1, "on": "both", "look": "auto", "saved": 23},
]


@pytest.mark.parametrize(
    ("promise", "options"),
    [
        (promise, options)
        for promise, options in itertools.product([EACH, SAID], OPTIONS)
        # Outputs have a tolerance, which GEM of 2017 cannot keep.
        if promise is EACH or options.get("method") != "gem2017"
    ],
)
def test_a_checkpoint_goes_on_to_the_bit(promise, options):
    batch, options, auto = learned()[1], dict(options), options.get("look") == "auto"
    name, saved = options.pop("name", None), options.pop("saved", 4)

    def start():
        model, _ = learned()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.003 if auto else 0.02)
        return model, optimizer, loops.protect(model, optimizer, promise, **options)

    def go_on(model, optimizer, keeper):
        unlearn(model, optimizer, batch, 40 if auto else 4)
        points, lines = keeper.history.points(), keeper.report().values()
        assert not auto or all(line.looks < line.steps == saved + 40 for line in lines)
        # As a string, in which NaN equals itself.
        said = {name: found[-3:] for name, found in points.items()}, [line.looks for line in lines]
        return flat(model), str(said)

    model, optimizer, keeper = start()
    for one in (batch, task(6)):
        keeper.keep([one], name=name, limit=11)
    unlearn(model, optimizer, batch, saved)
    states = through_a_file([part.state_dict() for part in (model, optimizer, keeper)])
    reported = str(keeper.report())
    expected, points = go_on(model, optimizer, keeper)
    for remembers in (True, False):
        parts = start()
        for part, state in zip(parts, states if remembers else states[:2], strict=remembers):
            part.load_state_dict(state)
        assert not remembers or str(parts[2].report()) == reported
        found, then = go_on(*parts)
        assert torch.equal(found, expected) is remembers
        assert (then == points) is remembers
    assert (found - expected).abs().max() > 1e-4  # so the state of the keeper matters
    options["examples"] = 5  # another promise about the same examples
    other = start()[2]
    other.load_state_dict(states[2])
    assert {line.steps for line in other.report().values()} == {0}
    assert [line.examples for line in keeper.report().values()] == [22 if name else 11] * (1 if name else 2)


@pytest.mark.parametrize(
    ("dtype", "tolerance", "loss", "unsure", "norm", "h"),
    [
        (torch.bfloat16, 0.01, 0.0101, 0.0, 1.0, 1e-4),  # an excess below the rounding of bfloat16 is one
        (torch.bfloat16, 0.01, 0.01 + 1e-8, 0.0, 1.0, 0.0),
        (torch.bfloat16, 0.005, 0.02, 0.0, 0.1, 0.015),  # also of a row much shorter than the gradient
        (torch.float32, 1e-9, 3e-9, 0.0, 1.0, 2e-9),  # losses may be small
        (torch.float32, 0.05, 0.04, 0.03, 1.0, 0.02),  # a modelled loss counts as larger by its error
    ],
)
def test_what_a_tolerance_asks_for(dtype, tolerance, loss, unsure, norm, h):
    vector, zero = SimpleNamespace(dtype=dtype, device=torch.device("cpu")), torch.zeros(1).double()
    rows = SimpleNamespace(vector=vector, losses=zero + loss, stored=zero, unsure=zero + unsure)
    terms = Terms.of([Promise(Distillation(), tolerance=tolerance)], vector.device)
    gram = Gram(np.full((1, 1), norm**2), np.zeros(1), np.array(1.0))
    asked = terms.right_hand_side(rows, gram, 1.0, 1.0, False)
    assert asked.tolist() == pytest.approx([h])
