"""The paper's metrics against matrices worked out by hand, and MEGA against its definition."""

import math

import pytest

torch = pytest.importorskip("torch")

from examples.common import metrics  # noqa: E402
from examples.study import mega  # noqa: E402

R = [  # rows: before training, then after each of three tasks
    [0.25, 0.20, 0.30],
    [0.90, 0.40, 0.35],
    [0.95, 0.80, 0.50],
    [0.60, 0.70, 0.85],
]


def test_metrics_follow_their_definitions():
    assert {name: metric(R) for name, metric in metrics.METRICS.items()} == {
        "average_accuracy": pytest.approx((0.60 + 0.70 + 0.85) / 3),
        "backward_transfer": pytest.approx(((0.60 - 0.90) + (0.70 - 0.80)) / 2),
        "forward_transfer": pytest.approx(((0.40 - 0.20) + (0.50 - 0.30)) / 2),
        # The best accuracy on task 1 came after task 2, which backward transfer does not see.
        "forgetting": pytest.approx(((0.95 - 0.60) + (0.80 - 0.70)) / 2),
    }


def test_forgetting_leaves_out_the_last_row_and_the_untrained_model():
    # Task 1 is best before training, task 2 at the very end: neither is something learned and lost.
    found = metrics.forgetting([[0.9, 0.1, 0], [0.5, 0.2, 0], [0.4, 0.3, 0], [0.5, 0.8, 1]])
    assert found == pytest.approx(((0.5 - 0.5) + (0.3 - 0.8)) / 2)


def test_one_task_is_not_enough():
    with pytest.raises(ValueError, match=r"\(T \+ 1, T\)"):
        metrics.forgetting([[0.5], [1.0]])


def test_spread_and_guarantee():
    deviation = math.sqrt(((4 / 3) ** 2 + (1 / 3) ** 2 + (5 / 3) ** 2) / 2)
    found = metrics.mean_std([1.0, 2.0, 4.0])
    assert found == {"mean": pytest.approx(7 / 3), "std": pytest.approx(deviation)}
    assert metrics.mean_std([3.0]) == {"mean": 3.0, "std": None}
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
def test_mega(weights, loss, x):
    # The loss on the memory is 1.
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64))
    method = mega.MEGA([p], weights)
    r = torch.ones(2, dtype=torch.float64)
    method.recall(torch.nn.Identity(), [r], lambda model, batch: model(p) @ batch + 1.0)
    p.grad = torch.tensor([-4.0, 2.0], dtype=torch.float64)
    method.balance_(torch.tensor(loss))
    assert p.grad.tolist() == pytest.approx(x, abs=1e-4)
