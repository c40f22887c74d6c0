"""Gradients that a keeper writes: to which parameters, in which layout and dtype."""

import pytest

torch = pytest.importorskip("torch")

from models import begin, flat, rival, sgd, take, task  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from gemproj import project  # noqa: E402
from gemproj.torch import Keeper  # noqa: E402


class Bag(torch.nn.Module):
    """Parameters without a model."""

    def __init__(self, *parameters):
        super().__init__()
        self.held = torch.nn.ParameterList(parameters)


def watched(loss, *parameters, make=sgd, **options):
    """Return the parameters as a list, an optimizer, and a keeper of a loss of them."""
    bag = Bag(*parameters)
    optimizer = make(bag.parameters())
    keeper = Keeper(bag, optimizer, lambda model, x: loss(*model.held), **{"on": "gradient"} | options)
    keeper.keep([torch.zeros(1, 1)])
    return list(bag.held), optimizer, keeper


@pytest.mark.parametrize("metric", [None, torch.ones(1000)])  # the second is for the portable backend
def test_autocast_of_the_caller_does_not_reach_the_projection(metric, rng):
    G, g = torch.from_numpy(rng.standard_normal((2, 1000)) - 0.2).float(), torch.full((1000,), 0.2)
    expected = project(G, g, metric=metric)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(project(G, g, metric=metric), expected)


def test_gradients_appear_only_where_the_present_rows_reach():
    parts = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    (own, reached, other), optimizer, keeper = watched(lambda a, b, c: a.sum() + b.sum() + c.sum(), *parts)
    optimizer.step()  # with rows that reach all, and no gradient
    keeper.forget(0)
    keeper.keep([torch.zeros(1, 1)], lambda model, x: model.held[0].sum() + model.held[1].sum())
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
        parts = [torch.nn.Parameter(p) for p in (image, torch.randn(3, 4).T, torch.randn(3))]
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
    half, single = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16)), torch.nn.Parameter(torch.ones(5))
    model = Bag(half, half, single)
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
