"""The step that an optimizer applies: what is projected, in which metric, and what a refused step leaves."""

import copy
from functools import partial

import pytest
import torch
from loops import begin, cosines, flat, gradient, moved, rows, sgd, take
from models import EACH, Quantised, loss, perceptron, rival, task
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves

from gemproj import PGD, project
from gemproj.torch import Keeper, Promise

ways = pytest.mark.parametrize("on", ["gradient", "step", "both"])
steps = pytest.mark.parametrize("on", ["step", "both"])


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, **({"lr": 0.02} | options))


def start(make=adamw, dtype=torch.float64, model=None, loss=loss, **options):
    """Return a model, an optimizer and a keeper of two tasks, with a gradient that conflicts with the first."""
    tasks = {k: task(k, dtype=dtype) for k in (1, 2)}
    model, optimizer, keeper = begin(loss, tasks, model=model or perceptron(dtype), make=make, **options)
    learning(model, optimizer, dtype)()
    return model, optimizer, keeper


def conflict(dtype=torch.float64):
    return rival(task(1, dtype=dtype))


def learning(model, optimizer, dtype=torch.float64):
    """Return the closure of a step that conflicts with the first task."""

    def closure():
        optimizer.zero_grad()
        value = loss(model, conflict(dtype))
        value.backward()
        return value

    return closure


# --- what is applied -----------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_cosines_are_measured_on_the_weights_outside_of_autocast(dtype, error):
    model, optimizer, keeper = start(dtype=dtype, on="both")
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.float32):
        step = moved(model, optimizer.step)
    seen = cosines(keeper.rows.G.double(), step)
    torch.testing.assert_close(keeper.last.cosines, seen, rtol=0, atol=error)
    assert float(seen.min()) > -10 * error


@steps
def test_what_the_optimizer_does_not_move_stays(on):
    model = perceptron()
    model.extra = nn.Parameter(torch.ones(4, dtype=torch.float64))  # only the kept loss depends on it
    model.spare = nn.Parameter(torch.ones(4, dtype=torch.float64))  # no loss does
    frozen, still = model[0].bias, model[2].bias
    frozen.requires_grad_(False)

    def make(_):
        moving = {"params": [model[0].weight, model[2].weight, model.extra, model.spare]}
        groups = [moving, {"params": [still], "lr": torch.tensor(0.0), "weight_decay": 0.0}]
        return adamw(groups, foreach=False)

    def extra_loss(model, data):
        return loss(model, data) + (model.extra * data[0].mean()).sum()

    _, optimizer, keeper = begin(extra_loss, [task(1)], model=model, make=make, on=on)
    before = [p.clone() for p in (frozen, still, model.extra)]
    for _ in range(3):
        _, step = take(model, optimizer, conflict())
        if on == "step":
            assert float(cosines(keeper.rows.G, step).min()) > -1e-10
    assert model.spare.grad is None
    assert torch.equal(frozen, before[0])
    assert torch.equal(still, before[1])
    # A projected gradient reaches what rows reach.
    assert torch.equal(model.extra, before[2]) == (on == "step")


@steps
def test_rows_are_computed_before_a_closure_and_weight_decay_is_part_of_the_step(on):
    model, optimizer, keeper = start(lambda p: sgd(p, weight_decay=0.5), on=on)
    for _ in range(3):
        G, before = rows(model, [task(1), task(2)]), flat(model)
        assert optimizer.step(closure=learning(model, optimizer)).requires_grad
        torch.testing.assert_close(keeper.rows.G, G)
        assert float(cosines(G, before - flat(model)).min()) > -1e-10


def test_a_subclass_that_calls_its_parents_step_is_projected_once():
    class Wrapper(torch.optim.AdamW):
        def step(self, closure=None):
            for group in self.param_groups:
                group["lr"] = 0.02
            return super().step(closure)

    weights = []
    for kind in (torch.optim.AdamW, Wrapper):
        model, optimizer, keeper = start(partial(kind, lr=0.02), on="both", weight=0.5)
        optimizer.step()
        take(model, optimizer, conflict())
        assert keeper.report()[1].steps == 2
        weights.append(flat(model))
    assert torch.equal(*weights)


@pytest.mark.parametrize("make", [partial(torch.optim.LBFGS, lr=0.1, max_iter=1), torch.optim.ASGD])
def test_gradients_of_any_optimizer_are_projected_and_steps_of_most(make):
    model, optimizer, keeper = start(make)
    closure = [learning(model, optimizer)] * (make is not torch.optim.ASGD)
    step = moved(model, lambda: optimizer.step(*closure))
    assert keeper.last.num_violated
    torch.testing.assert_close(keeper.last.square, step.square().sum().reshape(1))
    keeper.remove()
    Keeper(model, optimizer, Promise(loss), on="both", project=False)  # any step may be watched


@pytest.mark.parametrize("options", [{"weight": 0.5}, {"penalty": 0.02}, {"weight": 0.01, "penalty": 0.02}])
def test_clipping_makes_a_step_shorter_and_turns_it_not(options):
    """Weights and penalties of a step act on what is left of the gradient."""
    found = []
    for most in (torch.inf, 1e-3):
        model, optimizer, keeper = start(sgd, on="step", **options)
        norm = float(gradient(model).norm())
        keeper.clip_grad_norm_(most)
        found.append(moved(model, optimizer.step))
        assert keeper.last.num_violated
    torch.testing.assert_close(found[1], found[0] * 1e-3 / (norm + 1e-6))
    assert take(model, optimizer, conflict())[1].norm() > 10 * found[1].norm()  # which is not clipped


def test_two_optimizers_of_which_one_is_frozen_in_turn_are_both_projected():
    """As in adversarial training: a step with other frozen parameters is no part of the step before."""
    model = perceptron()
    parts = [list(layer.parameters()) for layer in (model[0], model[2])]
    optimizers = [adamw(part) for part in parts]
    keeper = Keeper(model, optimizers, Promise(loss, examples=None))
    keeper.keep([task(1)])
    for _ in range(4):
        for k, optimizer in enumerate(optimizers):
            for p in parts[1 - k]:
                p.requires_grad_(False)
            optimizer.zero_grad()
            loss(model, conflict()).backward()
            G = rows(model, [task(1)])
            step = moved(model, optimizer.step)
            for p in parts[1 - k]:
                p.requires_grad_(True)
            assert keeper.last.num_violated
            assert float(cosines(G, step).min()) > -1e-10
    assert keeper.report()[0].steps == 8


def test_a_keeper_that_projects_nothing_clips_as_torch_does():
    """To the bit, also where the optimizer has parameters in groups: the order decides how a norm is rounded."""
    weights = []
    for clips in (True, False):
        model = perceptron(torch.float32)
        parts = [model[0].weight, model[2].weight], [model[0].bias, model[2].bias]
        optimizer = adamw([{"params": parts[0]}, {"params": parts[1], "weight_decay": 0.0}])
        keeper = Keeper(model, optimizer, Promise(loss), project=False)
        keeper.keep([task(1, dtype=torch.float32)])
        for k in range(20):
            optimizer.zero_grad()
            loss(model, task(k, dtype=torch.float32)).backward()
            (keeper.clip_grad_norm_ if clips else partial(nn.utils.clip_grad_norm_, model.parameters()))(1e-2)
            optimizer.step()
        weights.append(flat(model))
    assert torch.equal(*weights)


# --- steps that are refused, undone or taken again ------------------------------------------------


@ways
@pytest.mark.parametrize("bad", ["gradient", "row"])
def test_a_refused_step_leaves_weights_state_and_statistics(on, bad):
    faults = []

    def faulty(model, batch):  # the gradient of a root at zero is infinite
        return EACH(model, batch) + sum((model[2].bias[0] * 0.0).abs().sqrt() for _ in faults)

    model, optimizer, keeper = begin(faulty, {"old": task(1)}, make=adamw, on=on)
    for _ in range(3):
        take(model, optimizer, conflict())
    before = copy.deepcopy([model.state_dict(), optimizer.state_dict(), dict(keeper.report())])
    learning(model, optimizer)()
    keeper.clip_grad_norm_(1e-6)
    if bad == "gradient":
        model[2].weight.grad[1, 2] = float("inf")
        text = r"The gradient of 2.weight is not finite.*as before"
    else:
        faults.append(1)
        text = r"G is not finite: row 0.*Row 0 is of 'old'"
    for _ in range(2):
        with pytest.raises(ValueError, match=text):
            optimizer.step()
        after = [model.state_dict(), optimizer.state_dict(), dict(keeper.report())]
        assert str(after) == str(before)  # moments and counters
    faults.clear()
    _, step = take(model, optimizer, conflict())
    assert step.isfinite().all()
    assert gradient(model).norm() > 1e-3  # which is not clipped any more
    assert keeper.report()["old"].steps == 4


def test_a_gradient_is_projected_for_the_parameters_that_move():
    """Those of a group without a rate do not help to keep the loss at its bound."""
    model, batch = perceptron(), task(1)
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters(), "lr": 0.1}]
    optimizer = torch.optim.SGD(groups)
    keeper = Keeper(model, optimizer, on="gradient")
    keeper.keep([batch], Promise(EACH, examples=None, tolerance=0.01), name="old")
    for _ in range(200):
        take(model, optimizer, rival(batch))
    assert abs(keeper.last.excess) < 1e-4


def test_one_large_gradient_does_not_end_a_training_with_adam():
    """Its square fits into the moment, and not the moment without its bias."""
    model, make = perceptron(torch.float32), partial(torch.optim.Adam, lr=0.01)
    _, optimizer, _ = begin(loss, [task(1, dtype=torch.float32)], model=model, make=make, on="both")
    for large in (1e20, 0.0, 0.0):
        optimizer.zero_grad()
        loss(model, task(2, dtype=torch.float32)).backward()
        model[0].weight.grad[0, 0] += large
        optimizer.step()
    assert flat(model).isfinite().all()


def failing(error):
    def method(K, b, warm_start):
        raise error("no answer")

    return method


@pytest.mark.parametrize(
    ("options", "rate", "error", "message"),
    [
        (
            {"on": "both"},
            torch.inf,
            ValueError,
            "undone, but not in the optimizer's state.* finite in 2.weight",
        ),
        ({"method": failing(RuntimeError)}, 0.1, RuntimeError, "no answer"),
        ({"method": failing(KeyboardInterrupt)}, 0.1, KeyboardInterrupt, "no answer"),
    ],
)
def test_a_step_that_cannot_be_projected_is_undone(options, rate, error, message):
    model = perceptron()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": rate}]
    _, optimizer, _ = start(lambda _: sgd(groups), model=model, **{"on": "step"} | options)
    before = flat(model)
    with pytest.raises(error, match=message):
        optimizer.step()
    assert torch.equal(before, flat(model))


# --- loss scaling ---------------------------------------------------------------------------------


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(("on", "weight"), [("gradient", 0.5), ("both", 0.0)])
def test_loss_scaling_changes_nothing_and_skipped_steps_compute_nothing(on, weight, fused, unscale):
    past, now = task(1, dtype=torch.float32), conflict(torch.float32)

    def train(scale, broken=()):
        seen, scaler = [], torch.amp.GradScaler("cpu", init_scale=scale)

        def counting(model, batch):
            seen.append(len(batch[1]))
            return loss(model, batch)

        options = {"make": partial(adamw, fused=fused), "on": on, "weight": weight, "scaler": scaler}
        model, optimizer, keeper = begin(counting, [past], model=perceptron(torch.float32), **options)
        seen.clear()
        for step in range(4):
            optimizer.zero_grad(set_to_none=True)
            value = loss(model, now)
            scaler.scale(value * float("inf") if step in broken else value).backward()
            if unscale:
                scaler.unscale_(optimizer)
            assert (not moved(model, lambda: scaler.step(optimizer)).any()) == (step in broken)
            scaler.update()
        assert len(seen) == 4 - len(broken)
        assert keeper.last.num_violated
        keeper.remove()
        assert getattr(optimizer, "_step_supports_amp_scaling", False) == fused  # again
        return flat(model)

    plain = train(2.0**0)
    torch.testing.assert_close(train(2.0**10), plain, rtol=1e-5, atol=1e-6)
    train(2.0**10, broken=(1, 2))


# --- Adam's metric, and optimizers without it ------------------------------------------------------


class Signs(torch.optim.Optimizer):
    """Steps along the signs of the gradient, and keeps something else."""

    def __init__(self, parameters, keeps=lambda p: {}, **group):
        super().__init__(parameters, group)
        self.keeps = keeps

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            self.state[p].update(self.keeps(p))
            p -= 0.01 * p.grad.sign()


NO_MOMENTS = {
    "nothing": lambda p: {"step": 1},
    "no count": lambda p: {"exp_avg_sq": torch.ones_like(p)},
    "one for each row": lambda p: {"step": 1, "exp_avg_sq": p.detach()[..., :1] ** 2},
    "moments": lambda p: {"step": 1, "exp_avg_sq": p.detach() ** 2},
    "moments in few bits": lambda p: {"step": 1, "exp_avg_sq": Quantised(p.detach() ** 2)},  # as in torchao
}


def test_only_second_moments_of_each_entry_are_a_metric():
    found = []
    for keeps in NO_MOMENTS.values():
        make = partial(Signs, keeps=keeps, lr=0.01, betas=(0.9, 0.99), eps=1e-8)
        model, optimizer, keeper = start(make, on="step")
        found.append(moved(model, optimizer.step))
        assert keeper.last.num_active > 0
        assert keeper.last.worst_cosine > -1e-10
    assert all(torch.equal(one, found[0]) for one in found[:3])
    assert not torch.allclose(found[0], found[3])
    assert torch.equal(found[3], found[4])


def test_a_weight_of_a_step_needs_a_learning_rate_and_that_of_a_gradient_does_not():
    _, optimizer, keeper = start(Signs, on="both", weight=0.1)
    optimizer.step()
    assert keeper.last.worst_cosine > -1e-10
    _, optimizer, _ = start(Signs, on="step", weight=0.1)
    with pytest.raises(ValueError, match="Signs has no learning rate"):
        optimizer.step()


# --- rounding, warm starts, rows that are followed ------------------------------------------------


@pytest.mark.parametrize("rate", [1e-5, 1e-6])
def test_rounding_of_the_weights_breaks_no_promise(rate):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 300), nn.Tanh(), nn.Linear(300, 3))
    _, optimizer, keeper = start(partial(adamw, lr=rate), torch.float32, model, on="both")
    for _ in range(20):
        optimizer.step()
        optimizer.zero_grad()
        (-loss(model, task(1, dtype=torch.float32))).backward()
    line = keeper.report()[1]
    assert (line.steps, line.broke, line.would_break) == (20, 0.0, 1.0)
    assert -1e-2 < keeper.last.worst_cosine < 0
    keeper.project = False
    for _ in range(20):
        optimizer.step()
    assert keeper.report()[1].broke == 0.5


def test_rounding_is_that_of_each_parameter_in_its_dtype_now():
    def said(model, batch):
        return cross_entropy(model(batch[0].to(model[0].weight.dtype)).float(), batch[1])

    model, optimizer, keeper = begin(said, [task(1)], make=sgd)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):  # at once after each change
        model.to(dtype)
        optimizer.zero_grad()
        said(model, conflict()).backward()
        optimizer.step()
        vector, eps = keeper.rows.vector, torch.finfo(dtype).eps
        expected = eps * float(vector.before.whole.double().norm())
        assert float(keeper.last.rounding) == pytest.approx(expected, rel=0.05)
    model[0].bias.data = model[0].bias.data.bfloat16()
    of_bias = torch.finfo(torch.bfloat16).eps * float(vector.before.parts[1].norm())
    assert float(vector.rounding()) == pytest.approx(of_bias)


def test_warm_starts_are_those_of_each_set_also_after_another_joined():
    """Three steps of PGD from the last multipliers end closer to the solution than three from zero."""
    model, optimizer, keeper = start(partial(sgd, rate=0.0), method=PGD(steps=3))

    def error():
        model.zero_grad()
        (loss(model, rival(task(5))) - loss(model, task(1)) - loss(model, task(2))).backward()
        optimizer.step()
        return float(keeper.last.solution.kkt_residual())

    errors = [error() for _ in range(8)]
    assert errors[-1] < 1e-5 < 1e-2 < errors[0]
    keeper.keep([task(3)], name=0)
    assert error() < 1e-2
    assert keeper.last.multipliers[:2].tolist() == pytest.approx([0.61, 1.26], rel=0.05)
    keeper.sets[1] = keeper.sets.pop(1)  # the last one now
    assert error() < 1e-2
    for name in (1, 2):
        keeper.forget(name)
        keeper.keep([task(name)], name=name)
    assert error() > 1e-2


def test_rows_of_every_third_step_are_followed_in_between():
    model, optimizer, keeper = start(partial(sgd, rate=0.01), loss=EACH, on="both", look=3, project=False)
    for step in range(7):
        learning(model, optimizer)()
        with torch.no_grad():
            now = [float(loss(model, task(k))) for k in (1, 2)]
        optimizer.step()
        assert keeper.last.age == step % 3
        assert keeper.last.losses.tolist() == pytest.approx(now, rel=1e-3)


# --- gradients that are written: to which parameters, in which layout and dtype ---------------------


def watched(loss, *parameters, make=sgd):
    """Return the parameters as a list, an optimizer, and a keeper of a loss of them."""
    bag = nn.ParameterList(parameters)
    _, optimizer, keeper = begin(lambda model, x: loss(*model), [torch.zeros(1, 1)], model=bag, make=make)
    return list(bag), optimizer, keeper


@pytest.mark.parametrize("metric", [None, torch.ones(1000)])  # the second is for the portable backend
def test_autocast_of_the_caller_does_not_reach_the_projection(metric, rng):
    G, g = torch.from_numpy(rng.standard_normal((2, 1000)) - 0.2).float(), torch.full((1000,), 0.2)
    expected = project(G, g, metric=metric)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(project(G, g, metric=metric), expected)


def test_gradients_appear_only_where_the_present_rows_reach():
    parts = [nn.Parameter(torch.ones(2)) for _ in range(3)]
    (own, reached, other), optimizer, keeper = watched(lambda a, b, c: a.sum() + b.sum() + c.sum(), *parts)
    optimizer.step()  # with rows that reach all, and no gradient
    keeper.forget(0)
    keeper.keep([torch.zeros(1, 1)], lambda model, x: model[0].sum() + model[1].sum())
    own.grad = -torch.ones(2)
    optimizer.step()
    assert other.grad is None
    assert keeper.last.multipliers.tolist() == [0.5]
    assert own.grad.tolist() == [-0.5, -0.5]
    assert reached.grad.tolist() == [0.5, 0.5]


def test_a_gradient_that_appears_lies_in_memory_as_its_parameter_does():
    weights = []
    for fused in (False, True):
        torch.manual_seed(0)
        image = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)
        parts = [nn.Parameter(p) for p in (image, torch.randn(3, 4).T, torch.randn(3))]
        factors = [*(torch.randn(p.shape) for p in parts[:2]), torch.ones(3)]
        parts, optimizer, _ = watched(
            lambda *held, f=factors: sum((p * f).sum() for p, f in zip(held, f, strict=True)),
            *parts,
            make=lambda p, fused=fused: torch.optim.AdamW(p, lr=0.1, fused=fused),
        )
        parts[2].grad = -torch.ones(3)
        optimizer.step()
        assert [p.grad.stride() for p in parts] == [p.stride() for p in parts]
        weights.append(flat(parts))
    torch.testing.assert_close(*weights)


def test_mixed_dtypes_and_shared_parameters():
    half, single = nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), nn.Parameter(torch.ones(5))
    model = nn.ParameterList([half, half, single])
    _, optimizer, keeper = begin(lambda model, x: (half.float() ** 2).sum() + single.sum(), model=model)
    keeper.keep([torch.zeros(1, 1)])
    half.grad, single.grad = -torch.ones_like(half), torch.zeros_like(single)
    optimizer.step()
    assert (keeper.rows.G.shape, keeper.rows.G.dtype) == ((1, 8), torch.float32)
    assert half.grad.dtype == torch.bfloat16
    assert abs(float(2 * half.grad.sum() + single.grad.sum())) < 0.05


def test_a_state_is_a_copy_of_what_a_step_changes():
    model, optimizer, keeper = begin(examples=5)
    keeper.keep([task(1)])
    take(model, optimizer, rival(task(1)))
    state = keeper.state_dict()
    before = list(map(str, tree_leaves(state)))
    for _ in range(2):
        take(model, optimizer, rival(task(1)))
    keeper.keep([task(2)], name=0)
    assert list(map(str, tree_leaves(state))) == before
    assert list(map(str, tree_leaves(keeper.state_dict()))) != before
