"""What published numbers are made of: metrics, intervals and comparisons, MEGA and gradient projection memory.

Tables are compared, letter by letter, with the committed pages in test_study.py.
"""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("mnist1d", reason="needs the extra examples")

import torch
from scipy import stats

import gemproj
from examples.common import metrics, tables
from examples.study import mega
from examples.study.gpm import Subspaces, grow

MATRIX = [  # rows: before training, then after each of three tasks
    [0.25, 0.20, 0.30],
    [0.90, 0.40, 0.35],
    [0.95, 0.80, 0.50],
    [0.60, 0.70, 0.85],
]


def test_metrics_follow_their_definitions():
    assert {name: metric(MATRIX) for name, metric in metrics.METRICS.items()} == {
        "average_accuracy": pytest.approx((0.60 + 0.70 + 0.85) / 3),
        "backward_transfer": pytest.approx(((0.60 - 0.90) + (0.70 - 0.80)) / 2),
        "forward_transfer": pytest.approx(((0.40 - 0.20) + (0.50 - 0.30)) / 2),
        # The best accuracy on task 1 came after task 2, which backward transfer does not see.
        "forgetting": pytest.approx(((0.95 - 0.60) + (0.80 - 0.70)) / 2),
    }
    # Task 1 is best before training, task 2 at the very end: neither is something learned and lost.
    found = metrics.forgetting([[0.9, 0.1, 0], [0.5, 0.2, 0], [0.4, 0.3, 0], [0.5, 0.8, 1]])
    assert found == pytest.approx(((0.5 - 0.5) + (0.3 - 0.8)) / 2)


def test_spread_and_guarantee():
    deviation = (((4 / 3) ** 2 + (1 / 3) ** 2 + (5 / 3) ** 2) / 2) ** 0.5
    found = metrics.spread([1.0, None, 2.0, 4.0])
    assert (found.mean, found.std, found.n) == (pytest.approx(7 / 3), pytest.approx(deviation), 3)
    assert tables.plus_minus(metrics.spread([3.0]), 1, 1) == "3.0"
    assert tables.plus_minus(metrics.spread([]), 1, 1) == "-"
    # The second is rounding, and no violation.
    assert metrics.guarantee([0.2, -1e-9, -0.3, -0.002]) == {"violated": 0.5, "worst_cosine": -0.3}


@pytest.mark.parametrize(
    ("weights", "loss", "x"),
    [
        (mega.mega1, 0.5, [-2.0, 4.0]),  # g + 2 r
        (mega.mega1, 0.0, [1.0, 1.0]),  # learned: r
        (mega.mega2, 0.0, [2.0, 4.0]),  # at a right angle to g, on the side of r
        (mega.mega2, 1.0, [-0.7164, 4.4144]),  # along g / |g| + r / |r|
        (mega.mega2, 1e9, [-4.0, 2.0]),  # r is all but learned: g
    ],
)
def test_mega_against_its_definition(weights, loss, x):
    # The loss on the memory is 1.
    g, r = torch.tensor([-4.0, 2.0], dtype=torch.float64), torch.ones(1, 2, dtype=torch.float64)
    mega.Balanced.change(SimpleNamespace(weights=weights), [r], [g], (loss, 1.0))
    assert g.tolist() == pytest.approx(x, abs=1e-4)


@pytest.mark.parametrize("rank", [1, 4])
def test_gradient_projection_memory_is_a_projection(rank):
    """With equalities."""
    torch.manual_seed(0)
    model = torch.nn.Linear(12, 5).double()
    stream = SimpleNamespace(model=model, logits=lambda model, inputs: model(inputs))
    learner = Subspaces(SimpleNamespace(stream=stream, memory=dict, knob=1.0))
    learner.end_task(0, torch.randn(50, rank).double() @ torch.randn(rank, 12).double())
    output = model(torch.randn(4, 12, dtype=torch.float64))  # on other inputs than those remembered
    (output.square().sum() + output.sum()).backward()
    dW = model.weight.grad.clone()
    rows = learner.bases[""].mT
    assert rows.shape == (rank, 12)
    learner.constrain(SimpleNamespace(turn=str), None)
    expected = gemproj.project(rows.expand(5, -1, -1), dW, equality=True)
    torch.testing.assert_close(model.weight.grad, expected, rtol=0, atol=1e-13)


def directions(R, M, threshold):
    """The paper's rule, from a singular value decomposition of the inputs R (inputs, examples)."""
    covered = M @ (M.T @ R)
    U, sizes, _ = np.linalg.svd(R - covered, full_matrices=False)
    energy = np.sum(covered**2) + np.concatenate([[0.0], np.cumsum(sizes**2)])
    k = int(np.argmax(energy >= threshold * np.sum(R**2) * (1 - 1e-12)))
    return np.concatenate([M, U[:, :k]], axis=1)


@pytest.mark.parametrize("threshold", [0.5, 0.97])
def test_bases_grow_by_the_rule_of_the_paper(threshold, rng):
    M, expected = torch.empty(20, 0, dtype=torch.float64), np.empty((20, 0))
    for _ in range(4):
        R = rng.standard_normal((20, 60)) * 10.0 ** rng.uniform(-2, 0, (20, 1))
        R = np.linalg.qr(rng.standard_normal((20, 20)))[0] @ R
        C = torch.from_numpy(R @ R.T)
        M, expected = grow(M, C, threshold), directions(R, expected, threshold)
        np.testing.assert_allclose((M @ M.T).numpy(), expected @ expected.T, rtol=0, atol=1e-9)
        assert torch.equal(grow(M, C, threshold), M)  # what is known adds nothing


def test_intervals_agree_with_scipy():
    a, b = np.random.default_rng(0).normal(size=(2, 10))
    expected = stats.ttest_rel(a, b).confidence_interval()
    found = metrics.spread(a - b)
    assert (found.mean - found.half, found.mean + found.half) == pytest.approx((expected.low, expected.high))
    assert found.excludes_zero == (stats.ttest_rel(a, b).pvalue < 0.05)
    # One seed excludes nothing; equal values exclude zero if they are not zero.
    found = [metrics.spread(values).excludes_zero for values in ([], [3.0], [0.0, 0.0], [3.0, 3.0])]
    assert found == [False, False, False, True]
