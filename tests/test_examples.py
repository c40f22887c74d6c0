"""The loops of frameworks run as they are, and a keeper keeps what they lose without it."""

from functools import partial

import pytest

pytest.importorskip("mnist1d", reason="needs the extra examples")

from examples.common.toy import compare


def gained(found):
    """Return by how much the mean accuracy on past tasks is higher with a keeper."""
    plain, kept = (sum(shares[:-1]) / len(shares[:-1]) for shares in found.values())
    return kept - plain


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Lightning, about workers and loggers
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plain_torch", {"steps": 100}),
        ("accelerate_loop", {"epochs": 2}),
        ("lightning_fit", {"epochs": 2}),
        ("trainer_peft", {"steps": 30}),
    ],
)
def test_a_keeper_keeps_past_tasks(name, options, fresh_state, one_thread, capsys):
    example = pytest.importorskip(f"examples.{name}")
    assert gained(compare(partial(example.learn, **options))) > 0.1
    assert "Accuracy after the last task" in capsys.readouterr().out
