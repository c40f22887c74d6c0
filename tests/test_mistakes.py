"""Mistakes in a training loop that nothing else would show, and what a projection cannot be asked for."""

import pytest

torch = pytest.importorskip("torch")

from models import EACH, begin, flat, logits, loss, perceptron, rival, rows, sgd, take, task  # noqa: E402

from gemproj.torch import GEM, EpisodicMemory, Promise  # noqa: E402
from gemproj.torch.gem import Keeper  # noqa: E402
from gemproj.torch.losses import CrossEntropy, Distillation  # noqa: E402


def resumed(keep, steps=1, **options):
    """Train one step, save, train on; and load into another training, which trains on as well."""
    runs = []
    for _ in range(2):
        model, optimizer, gem = begin(loss, **options)
        keep(gem)
        runs.append((model, optimizer, gem))
    (model, optimizer, gem), (other, same, again) = runs
    take(model, optimizer, rival(task(1)))
    other.load_state_dict(model.state_dict())
    again.load_state_dict(gem.state_dict())
    for _ in range(steps):
        take(model, optimizer, rival(task(1)))
        take(other, same, rival(task(1)))
    return flat(model), flat(other), gem


@pytest.mark.parametrize("sets", [{"a": 2.0}, {"a": 2.0, "b": 2.0}, {"a": 2.0, "b": 2.0, "c": 0.5, "d": 0.5}])
def test_rows_of_sets_that_have_one_together_are_resumed_with_their_promise(sets):
    def keep(gem):
        for seed, (name, weight) in enumerate(sets.items()):
            gem.keep([task(seed)], Promise(loss, per="all", weight=weight), name=name)

    here, there, gem = resumed(keep, every=3)
    assert torch.equal(here, there)
    lines = [line for line in gem.report() if line.steps]
    assert len(lines) == len(set(sets.values()))
    assert [line.examples for line in lines] == [12 * len(sets) // len(lines)] * len(lines)


def test_hooks_of_parameters_that_come_later_are_called_for_each_row():
    model, optimizer, gem = begin(EACH)
    for seed in range(3):
        gem.end_task([task(seed)])
    take(model, optimizer, rival(task(1)))
    assert gem.projector.why_row_by_row is None
    frozen, weight = model[0].weight[:2].clone(), model[0].weight
    mask = torch.ones_like(weight)
    mask[:2] = 0.0
    weight.register_hook(lambda gradient: gradient * mask)
    for _ in range(5):
        take(model, optimizer, rival(task(1)))
    assert "hooks" in gem.projector.why_row_by_row
    assert torch.equal(weight[:2], frozen)


def test_another_optimizer_than_the_one_attached_to_is_told_with_the_report():
    model, _, gem = begin(loss)
    gem.keep([task(1)], name="a")
    take(model, sgd(model.parameters()), rival(task(1)))
    with pytest.warns(UserWarning, match="weights have changed .* not in step"):
        gem.report()


def test_a_set_that_a_state_lacks_is_named():
    _, _, gem = begin(loss)
    gem.keep([task(1)], name="a")
    _, _, more = begin(loss)
    for name in "ab":
        more.keep([task(1)], name=name)
    with pytest.warns(UserWarning, match="no examples of 'b', which are dropped"):
        more.load_state_dict(gem.state_dict())


def contradicting(gem):
    gem.keep([task(1)], Promise(EACH, equal=True), name="a")
    gem.keep([task(1)], Promise(EACH, tolerance=0.0), name="b")


def test_a_set_under_another_promise_begins_a_line():
    model, optimizer, gem = begin(EACH)
    gem.keep([task(1)], EACH, name="a")
    take(model, optimizer, rival(task(1)))
    other = Promise(Distillation(logits), tolerance=0.01)
    for _ in range(2):
        gem.keep([task(1)], other, name="a")
        take(model, optimizer, rival(task(1)))
    now, earlier = gem.report()["a"], gem.report()["a (earlier)"]
    assert (now.steps, earlier.steps) == (2, 1)
    assert now.stored + 0.01 == pytest.approx(now.bound)  # also where it was stored again
    assert now.stored < 1e-9 < 0.1 < earlier.stored


def test_parameters_without_dimensions_and_frozen_ones_of_any_kind():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.scale = perceptron(), torch.nn.Parameter(torch.tensor(2.0).double())
            codes = torch.zeros(4, dtype=torch.uint8)  # as of quantized weights
            self.codes = torch.nn.Parameter(codes, requires_grad=False)

        def forward(self, x):
            return self.scale * self.inner(x)

    model, keeper = Scaled(), Keeper(EACH)
    keeper.keep([task(1)], name="a", model=model)
    optimizer = sgd(model.parameters())
    gem = GEM(model, optimizer, EACH, memory=keeper.memory)
    take(model, optimizer, rival(task(1)))
    expected = rows(model, [task(1)])
    gem.projector.recall(model, [task(1)])
    torch.testing.assert_close(gem.projector.constraints, expected)


def test_examples_may_be_stored_in_inference_mode():
    model, optimizer, gem = begin(EACH)
    with torch.inference_mode():
        gem.keep(([leaf + 0 for leaf in task(1)] for _ in range(2)), name="a")
    gem.keep([list(task(2))], name="a")
    take(model, optimizer, rival(task(1)))
    assert gem.last.constraints == 1


@pytest.mark.parametrize("on", ["gradient", "step"])
def test_watching_goes_on_where_a_projection_would_fail(on):
    weights = []
    for project in (None, False):
        model = perceptron()
        optimizer = sgd(model.parameters())
        if project is False:
            contradicting(GEM(model, optimizer, EACH, project=False, on=on))
        for scale in (1.0, 1.0, float("nan")):
            optimizer.zero_grad()
            (scale * loss(model, rival(task(1)))).backward()
            optimizer.step()
        weights.append(flat(model))
    torch.testing.assert_close(*weights, rtol=0, atol=0, equal_nan=True)


def test_rows_in_errors_have_the_names_of_their_sets():
    model, optimizer, gem = begin(EACH)
    contradicting(gem)

    def train():
        for _ in range(5):
            take(model, optimizer, rival(task(1)))

    with pytest.raises(
        ValueError, match=r"infeasible.*ow 0 is of 'a', row 1 is of 'b'\. h is what their tol"
    ):
        train()


def test_rows_that_come_from_no_memory_have_no_names():
    model, _, gem = begin(EACH, every=2)
    gem.projector.recall(model, [task(1), task(2)])
    _, _, again = begin(EACH, every=2)
    again.load_state_dict(gem.state_dict())
    assert torch.equal(again.projector.constraints, gem.projector.constraints)
    gem.projector.constraints[1] = float("nan")
    loss(model, task(3)).backward()
    with pytest.raises(ValueError, match=r"row 1.*if it is finite\.$"):
        gem.projector.project_()


def test_a_state_that_is_refused_changes_nothing():
    _, _, small = begin(loss, per_task=5, every=5)
    model, optimizer, gem = begin(loss, per_task=7, every=5)
    for one in (small, gem):
        one.keep([task(1)], name="a")
    take(model, optimizer, rival(task(1)))
    rows = gem.projector.constraints.clone()
    with pytest.raises(ValueError, match="per_task"):
        small.load_state_dict(gem.state_dict())
    assert small.projector.count == 0
    with pytest.raises(ValueError, match="per_task"):
        gem.load_state_dict(small.state_dict())
    assert torch.equal(gem.projector.constraints, rows)


def halves(examples):
    return torch.utils.data.default_collate(examples)


def wholes(examples):
    return torch.utils.data.default_collate(examples)


@pytest.mark.parametrize("others", [halves, wholes])
def test_one_batch_has_one_collate_function(others):
    memory = EpisodicMemory()
    for name, collate in (("a", halves), ("b", others)):
        memory.add(list(zip(*task(1), strict=True)), name, collate=collate)
    if others is halves:
        assert len(memory.sample(4)[0]) == 4
        return
    with pytest.raises(ValueError, match="collate functions differ"):
        memory.sample(24)
    fresh = EpisodicMemory()
    fresh.load_state_dict(memory.state_dict())
    with pytest.raises(ValueError, match="loaded without the function that makes batches"):
        fresh.sample(24)


def test_outputs_are_not_stored_of_what_is_drawn_at_random():
    def collate(examples):
        x, y = torch.utils.data.default_collate(examples)
        return x * (torch.rand_like(x) > 0.3), y

    _, _, gem = begin(loss)
    said = Promise(Distillation(lambda model, batch: model(batch[0])), tolerance=0.1)
    with pytest.raises(ValueError, match="'a' each time, as masking at random does"):
        gem.keep(list(zip(*task(1), strict=True)), said, name="a", collate=collate)
    assert not len(gem.memory)


def test_a_set_without_labels_is_refused():
    _, _, gem = begin(loss)
    x, y = task(1)
    labelled = CrossEntropy(lambda model, batch: model(batch[0]), labels=1)
    gem.keep([(x, y.index_fill(0, torch.tensor([0, 1]), -100))], Promise(labelled), name="some")
    with pytest.raises(ValueError, match="No example of 'none' has a label"):
        gem.keep([(x, torch.full_like(y, -100))], Promise(labelled), name="none")


def test_a_name_that_is_given_again_begins_with_nothing():
    model, optimizer, gem = begin(EACH)
    gem.keep([task(1)], name="a")
    take(model, optimizer, rival(task(1)))
    gem.memory.remove("a")
    gem.keep([task(2)], name="a")
    before = EACH(model, task(2)).mean().item()
    take(model, optimizer, rival(task(1)))
    assert gem.report()["a"].stored == pytest.approx(before)
    assert gem.report()["a"].steps == gem.report()["a (earlier)"].steps == 1


def test_what_is_found_out_about_losses_is_forgotten_at_some_time():
    model, _, gem = begin(EACH)
    for seed in range(2):
        gem.memory.add(task(seed), seed)
    for _ in range(100):
        gem.projector.recall(model, gem.memory.batches(), lambda model, batch: EACH(model, batch))
    assert len(gem.projector._passes._limits) <= 64


class Uncounted(torch.optim.Optimizer):
    """Second moments without a correction of their bias, and so without a count of steps."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            second = self.state[p].setdefault("exp_avg_sq", torch.ones_like(p))
            second.mul_(0.99).add_(0.01 * p.grad**2)
            p -= 0.01 * p.grad / (second.sqrt() + 1e-8)


class Coarse(Uncounted):
    """Counts, and keeps one second moment for each row of a parameter."""

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            state["exp_avg_sq"] = (p.grad**2).mean(-1, keepdim=True)
            p -= 0.01 * p.grad / (state["exp_avg_sq"].sqrt() + 1e-8)


@pytest.mark.parametrize("make", [Uncounted, Coarse])
def test_second_moments_without_a_count_or_of_another_shape_are_no_metric(make):
    model, optimizer, gem = begin(loss, make=make, on="both")
    gem.keep([task(1)], name="a")
    take(model, optimizer, rival(task(1)))
    assert gem.last.worst_cosine > -1e-9
    gem.metric = "adam"
    with pytest.raises(ValueError, match="of each entry and a count of steps"):
        take(model, optimizer, rival(task(1)))


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (lambda gem: gem.keep([task(1)], Promise), TypeError, r"class Promise; pass an object of it"),
        (lambda gem: gem.keep([task(1)], name=["a"]), TypeError, r"name must be hashable.*found \['a'\]"),
        (lambda gem: gem.load_state_dict(None), ValueError, "state has no 'memory'"),
        (lambda gem: gem.clip_grad_norm_(iter(()), 1.0), TypeError, "max_norm must be a number; found"),
        (lambda gem: Promise(Distillation), TypeError, "class Distillation; pass an object of it"),
        (lambda gem: Distillation(dtype=torch.int8), TypeError, "floating-point dtype.*int8"),
        (lambda gem: Distillation(dtype="fp16"), TypeError, "floating-point dtype.*'fp16'"),
        (lambda gem: setattr(gem.projector, "metric", "Adam"), ValueError, "metric must be.*found 'Adam'"),
    ],
)
def test_errors_name_the_argument(wrong, error, text):
    with pytest.raises(error, match=text):
        wrong(begin(loss)[2])
