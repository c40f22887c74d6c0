"""The paper's metrics against matrices worked out by hand."""

import math

import pytest

pytest.importorskip("torch")

from examples.lora_agnews import metrics

R = [  # rows: before training, then after each of three tasks
    [0.25, 0.20, 0.30],
    [0.90, 0.40, 0.35],
    [0.95, 0.80, 0.50],
    [0.60, 0.70, 0.85],
]


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        (metrics.average_accuracy, (0.60 + 0.70 + 0.85) / 3),
        (metrics.backward_transfer, ((0.60 - 0.90) + (0.70 - 0.80)) / 2),
        (metrics.forward_transfer, ((0.40 - 0.20) + (0.50 - 0.30)) / 2),
        # The best accuracy on task 1 came after task 2, which backward transfer does not see.
        (metrics.forgetting, ((0.95 - 0.60) + (0.80 - 0.70)) / 2),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_metrics_follow_their_definitions(metric, value):
    assert metric(R) == pytest.approx(value, abs=1e-12)


def test_forgetting_leaves_out_the_last_row_and_the_untrained_model():
    # Task 1 is best before training, task 2 at the very end: neither counts as something learned and lost.
    assert metrics.forgetting([[0.9, 0.1, 0], [0.5, 0.2, 0], [0.4, 0.3, 0], [0.5, 0.8, 1]]) == pytest.approx(
        ((0.5 - 0.5) + (0.3 - 0.8)) / 2
    )


def test_two_tasks_are_enough_and_one_is_not():
    assert metrics.backward_transfer([[0, 0], [1, 0], [0.5, 1]]) == -0.5
    with pytest.raises(ValueError, match=r"\(T \+ 1, T\)"):
        metrics.forgetting([[0.5], [1.0]])


def test_mean_std_is_the_sample_deviation():
    assert metrics.mean_std([1.0, 2.0, 4.0]) == {
        "mean": pytest.approx(7 / 3),
        "std": pytest.approx(math.sqrt(((4 / 3) ** 2 + (1 / 3) ** 2 + (5 / 3) ** 2) / 2)),
    }
    assert metrics.mean_std([3.0]) == {"mean": 3.0, "std": None}


def test_rounding_is_no_violation():
    assert metrics.guarantee([0.2, -1e-9, -0.3, -0.002]) == {"violated": 0.5, "worst_cosine": -0.3}
