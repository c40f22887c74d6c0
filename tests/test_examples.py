"""The loops of frameworks run as they are, and a keeper keeps what they lose without it."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("mnist1d", reason="needs the extra examples")

from examples.common.toy import compare

ROOT = Path(__file__).parents[1]
# On a free port, so that tests can run side by side.
TWO_PROCESSES = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def gained(found):
    """Return by how many points the mean accuracy on past tasks is higher with a keeper."""
    means = [100 * sum(shares[:-1]) / len(shares[:-1]) for shares in found.values()]
    return means[1] - means[0]


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
    assert gained(compare(partial(example.learn, **options))) > 10
    assert "Accuracy after the last task" in capsys.readouterr().out


def test_two_processes(monkeypatch):
    if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("torch without fully_shard")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "120")
    command = [sys.executable, *TWO_PROCESSES, "-m", "examples.fsdp2"]
    printed = subprocess.run(
        command, cwd=ROOT, check=True, timeout=300, capture_output=True, text=True
    ).stdout
    rows = (re.findall(rf"^\W*{name}( .*\d.*)$", printed, re.M) for name in ("fine-tuning", "kept"))
    assert gained({k: [int(n) / 100 for n in re.findall(r"\d+", row)] for k, [row] in enumerate(rows)}) > 10
