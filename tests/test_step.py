"""The step that an optimizer applies: what GEM does not promise for it, and what the update modes do."""

from contextlib import nullcontext
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from models import (  # noqa: E402
    SMALL,
    Quantised,
    cosines,
    flat,
    gradient,
    half_loss,
    loss,
    moved,
    perceptron,
    projector_of,
    rival,
    rows,
    sgd,
    take,
    task,
)

from gemproj.torch import GEM, hooks  # noqa: E402
from gemproj.torch.hooks import clip_grad_norm_  # noqa: E402

modes = pytest.mark.parametrize(
    ("on", "metric"), [("step", "euclidean"), ("step", "adam"), ("both", "euclidean"), ("both", "adam")]
)


def past_tasks(dtype=torch.float64):
    return [task(1, dtype=dtype), task(2, dtype=dtype)]


def conflicting(dtype=torch.float64):
    return rival(past_tasks(dtype)[0])


def attach(model, make, parameters=None, **options):
    """Return an optimizer with a projector in it."""
    optimizer = make(model.parameters() if parameters is None else parameters)
    projector = projector_of(model.parameters(), **options)
    projector.attach(optimizer)
    return optimizer, projector


def begin(make, dtype=torch.float64, **options):
    """Return a model, an optimizer and a projector in it."""
    model = perceptron(dtype)
    return model, *attach(model, make, **options)


def oppose(model, projector, dtype=torch.float64):
    """Compute the constraints, and a gradient that violates one of them."""
    projector.recall(model, past_tasks(dtype), loss)
    loss(model, conflicting(dtype)).backward()


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, **({"lr": 0.02} | options))


@pytest.mark.parametrize(
    ("dtype", "error", "least"), [(torch.float32, 1e-6, -1e-5), (torch.bfloat16, 1e-2, -0.1)]
)
def test_rounding_of_weights_is_part_of_the_report(dtype, error, least):
    model, optimizer, projector = begin(adamw, dtype, on="both")
    oppose(model, projector, dtype)
    seen = cosines(projector.constraints.double(), moved(model, optimizer.step))
    torch.testing.assert_close(projector.last.cosines, seen, rtol=0, atol=error)
    assert float(seen.min()) > least


@modes
def test_autocast_of_the_caller_reaches_neither_projection_nor_report(on, metric):
    results = []
    for enabled in (False, True):
        model, optimizer, projector = begin(adamw, torch.float32, on=on, metric=metric)
        oppose(model, projector, torch.float32)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            optimizer.step()
        results.append([flat(model), projector.last.cosines])
    for plain, cast in zip(*results, strict=True):
        assert torch.equal(plain, cast)


def test_entries_that_the_optimizer_has_never_moved_are_not_moved_far():
    # The past task depends on the second row, of which the present one has no gradient.
    model = torch.nn.Embedding(2, 1, dtype=torch.float64)
    model.weight.data = torch.tensor([[0.0], [0.0]], dtype=torch.float64)
    optimizer, projector = attach(model, lambda p: torch.optim.Adam(p, lr=0.01), on="step")
    projector.constrain([(model.weight[0] + 0.1 * model.weight[1]).sum()])
    (-model(torch.tensor([0]))).sum().backward()
    optimizer.step()
    assert projector.last.step.multipliers.item() > 0
    assert projector.last.cosines.item() > -1e-12
    assert 0 < model.weight.abs().max() < 0.01


@modes
def test_a_step_that_violates_nothing_is_the_optimizers_to_the_last_bit(on, metric):
    data, models = task(1, dtype=torch.float32), [perceptron(torch.float32), perceptron(torch.float32)]
    optimizer, projector = attach(models[0], adamw, on=on, metric=metric)
    random = torch.get_rng_state()
    projector.recall(models[0], [data], loss)
    take(models[0], optimizer, data)
    take(models[1], adamw(models[1].parameters()), data)
    assert torch.equal(torch.get_rng_state(), random)
    assert projector.last.num_violated == 0
    assert projector.last.worst_cosine > 0.1
    assert torch.equal(flat(models[0]), flat(models[1]))


@pytest.mark.parametrize("rate", [0.0, torch.tensor(0.0)])
@modes
def test_what_the_optimizer_does_not_move_stays(on, metric, rate):
    model = perceptron()
    model.extra = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))  # only the past depends on it
    frozen, still = model[0].bias, model[2].bias
    frozen.requires_grad_(False)
    groups = [
        {"params": [model[0].weight, model[2].weight, model.extra]},
        {"params": [still], "lr": rate, "weight_decay": 0.0},
    ]
    optimizer, projector = attach(model, lambda p: adamw(p, foreach=False), groups, on=on, metric=metric)
    kept = [p.clone() for p in (frozen, still, model.extra)]

    def past_loss(model, data):
        return loss(model, data) + (model.extra * data[0].mean()).sum()

    for _ in range(3):
        projector.recall(model, past_tasks(), past_loss)
        G = projector.constraints.clone()
        _, step = take(model, optimizer, conflicting())
        if on == "step":
            assert float(cosines(G, step).min()) > -1e-10
    assert torch.equal(frozen, kept[0])
    assert torch.equal(still, kept[1])
    if on == "step":  # a gradient that is projected reaches what the constraints reach
        assert torch.equal(model.extra, kept[2])


def test_closures_and_weights_decay_are_part_of_the_step():
    model, optimizer, projector = begin(lambda p: sgd(p, weight_decay=0.5), on="both")

    def closure():
        optimizer.zero_grad()
        projector.recall(model, past_tasks(), loss)  # as late as here
        value = loss(model, conflicting())
        value.backward()
        return value

    for _ in range(3):
        G, before = rows(model, past_tasks()), flat(model)
        assert optimizer.step(closure=closure).requires_grad
        assert projector.last.step is not None
        assert float(cosines(G, before - flat(model)).min()) > -1e-10


@pytest.mark.parametrize("make", [torch.optim.LBFGS, torch.optim.ASGD])
def test_gradients_of_any_optimizer_are_projected(make):
    begin(make)


def failing(error):
    def method(K, b, warm_start):
        raise error("no answer")

    return method


@pytest.mark.parametrize(
    ("on", "method", "rate", "error", "message"),
    [
        ("both", "exact", torch.inf, ValueError, "SGD could not be projected and was undone.*not finite"),
        ("step", failing(RuntimeError), 0.1, RuntimeError, "no answer"),
        ("step", failing(KeyboardInterrupt), 0.1, KeyboardInterrupt, "no answer"),
    ],
)
def test_a_step_that_cannot_be_projected_is_undone(on, method, rate, error, message):
    model = perceptron()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": rate}]
    optimizer, projector = attach(model, sgd, groups, on=on, method=method)
    oppose(model, projector)
    before = flat(model)
    with pytest.raises(error, match=message):
        optimizer.step()
    assert torch.equal(before, flat(model))


@pytest.mark.parametrize("on", ["gradient", "both"])
@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("clip", [False, True])
def test_a_step_that_breaks_off_and_is_taken_again_has_the_margin_once(on, anew, clip):
    class Interrupted(torch.optim.SGD):
        times = 0

        def step(self, closure=None):
            if self.times:
                self.times -= 1
                raise KeyboardInterrupt
            return super().step(closure)

    weights = []
    for times in (0, 2):
        model = perceptron()
        optimizer, projector = attach(model, partial(Interrupted, lr=0.1), on=on, weight=0.5)
        optimizer.times = times
        oppose(model, projector)
        for _ in range(times):
            if clip:
                clip_grad_norm_([optimizer], model.parameters(), 0.5)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            if anew:  # other gradients are projected
                model.zero_grad()
                loss(model, conflicting()).backward()
        if clip:
            clip_grad_norm_([optimizer], model.parameters(), 0.5)
        optimizer.step()
        assert projector.last.num_violated
        weights.append(flat(model))
        optimizer.step()  # of gradients that were used already
        weights[-1] += flat(model)
    close = {"rtol": 1e-5, "atol": 1e-5} if clip else {}  # torch clips to a little less than it says
    torch.testing.assert_close(*weights, **close)


@pytest.mark.parametrize("metric", ["euclidean", "adam"])
def test_nearly_dependent_rows_on_a_part_of_the_parameters(metric):
    model = perceptron()
    groups = [{"params": model[0].parameters(), "lr": 0.0}, {"params": model[2].parameters()}]
    optimizer, projector = attach(model, adamw, groups, on="step", metric=metric)
    projector.recall(model, [*past_tasks(), task(3)], loss)
    loss(model, conflicting()).backward()
    G = projector.constraints
    G[0] = -gradient(model).sign()  # against the gradient, and Adam's first step
    G[1] = G[0] * (1 + 1e-9 * torch.arange(G.shape[1]))  # only G itself tells them apart
    assert float(cosines(G, moved(model, optimizer.step)).min()) > -1e-6


@pytest.mark.parametrize("options", [{"weight": 0.5}, {"weight": 0.2, "penalty": 0.5}])
@pytest.mark.parametrize("broken", [1.0, float("inf"), float("nan")])
@pytest.mark.parametrize("clip", [False, True])
def test_no_margin_makes_a_step_of_one_that_a_fused_optimizer_skips(clip, broken, options, monkeypatch):
    monkeypatch.setattr(hooks, "will_skip", lambda optimizer: False)  # as on an accelerator
    model, optimizer, projector = begin(lambda p: adamw(p, fused=True), on="step", **options)
    projector.recall(model, past_tasks(), loss)
    (loss(model, conflicting()) * broken).backward()
    if clip:
        clip_grad_norm_([optimizer], model.parameters(), 0.1)
    # Where nobody waits to ask, only this flag tells.
    optimizer.found_inf, optimizer.grad_scale = torch.tensor(float(broken != 1.0)), None
    assert moved(model, optimizer.step).any() == (broken == 1.0)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("on", ["gradient", "both"])
def test_loss_scaling_changes_nothing_and_skipped_steps_compute_nothing(on, fused):
    past, now = task(1, dtype=torch.float32), conflicting(torch.float32)

    def train(scale, broken=()):
        seen, scaler = [], torch.amp.GradScaler("cpu", init_scale=scale)

        def counting(model, batch):
            seen.append(len(batch[1]))
            return loss(model, batch)

        model = perceptron(torch.float32)
        optimizer = adamw(model.parameters(), fused=fused)
        gem = GEM(model, optimizer, counting, on=on, scaler=scaler)
        gem.end_task([past])
        seen.clear()  # the loss was tried
        for step in range(4):
            optimizer.zero_grad(set_to_none=True)
            value = loss(model, now)
            scaler.scale(value * float("inf") if step in broken else value).backward()
            assert (not moved(model, lambda: scaler.step(optimizer)).any()) == (step in broken)
            scaler.update()
        assert len(seen) == 4 - len(broken)
        assert gem.last.num_violated
        return flat(model)

    plain = train(2.0**0)
    torch.testing.assert_close(train(2.0**10), plain, rtol=1e-5, atol=1e-6)
    train(2.0**10, broken=(1, 2))


def test_constraints_in_float16_do_not_vanish():
    model, past = perceptron(torch.float32), task(1, dtype=torch.float32)
    expected = rows(model, [past])

    def error(scaler):
        optimizer = sgd(model.parameters(), 0.0)
        gem = GEM(model, optimizer, half_loss, scaler=scaler)
        gem.end_task([past])
        take(model, optimizer, past)
        gem.remove()
        return float((gem.projector.constraints.double() / SMALL - expected).norm() / expected.norm())

    assert error(None) > 0.1
    assert error(torch.amp.GradScaler("cpu", init_scale=2.0**26)) < 0.01


@pytest.mark.parametrize("options", [{"weight": 0.5}, {"penalty": 0.5}, {"method": "gem2017"}], ids=str)
@pytest.mark.parametrize("unscale", [False, True])
def test_bounds_need_gradients_in_their_own_units(unscale, options):
    model, optimizer, projector = begin(lambda p: adamw(p, fused=True), torch.float32, **options)
    scaler = torch.amp.GradScaler("cpu")
    projector.recall(model, past_tasks(torch.float32), loss)
    scaler.scale(loss(model, conflicting(torch.float32))).backward()
    if unscale:
        scaler.unscale_(optimizer)
    with nullcontext() if unscale else pytest.raises(ValueError, match=r"unscale_\(optimizer\)"):
        scaler.step(optimizer)


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
    "one for each row": lambda p: {"step": 1, "exp_avg_sq": torch.ones_like(p)[..., :1]},
}


@pytest.mark.parametrize("keeps", NO_MOMENTS.values(), ids=NO_MOMENTS)
def test_what_is_no_second_moment_of_each_entry_is_no_metric(keeps):
    adam = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8}
    model, optimizer, projector = begin(partial(Signs, keeps=keeps, **adam), on="both")
    oppose(model, projector)
    optimizer.step()
    assert projector.last.worst_cosine > -1e-10
    projector.metric = "adam"
    with pytest.raises(ValueError, match=r"of each entry and a count of steps.*found Signs"):
        optimizer.step()


def test_moments_in_few_bits_are_dequantised():
    """Those of torchao's optimizers are tensors without storage."""
    adam = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8}
    steps = []
    for kind in (torch.clone, Quantised):
        keeps = lambda p, kind=kind: {"step": 1, "exp_avg_sq": kind(p.detach() ** 2)}  # noqa: E731
        model, optimizer, projector = begin(partial(Signs, keeps=keeps, **adam), on="step", metric="adam")
        oppose(model, projector)
        steps.append(moved(model, optimizer.step))
        assert projector.last.num_active > 0
    assert torch.equal(*steps)


@pytest.mark.parametrize(
    ("on", "outcome"),
    [("both", nullcontext()), ("step", pytest.raises(ValueError, match="Signs has no learning rate"))],
)
def test_bounds_of_a_step_need_a_learning_rate_and_a_margin_of_the_gradient_does_not(on, outcome):
    model, optimizer, projector = begin(Signs, on=on, weight=0.1)
    oppose(model, projector)
    with outcome:
        optimizer.step()
        assert projector.last.worst_cosine > -1e-10
