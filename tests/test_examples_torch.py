"""The examples of one file each run, and projection keeps what they lose without it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")

ROOT = Path(__file__).parent.parent


def run(*command):
    """Run an example in a process of its own; return the accuracies that it prints, by row."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"with(?:out)? projection: \d tasks of \d+ steps", done.stdout)) == 2  # as it goes
    rows = re.findall(r"(with(?:out)? projection) (.*)", done.stdout)
    assert [name for name, _ in rows] == ["without projection", "with projection"], done.stdout
    return [[int(number) for number in re.findall(r"\d+", cells)] for _, cells in rows]


def test_plain_torch():
    without, projected = run("examples/plain_torch.py", "100")
    assert len(without) == len(projected) == 4
    assert sum(projected[:-1]) > sum(without[:-1]) + 20


def test_fsdp2():
    if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("torch without fully_shard")
    # Standalone: a free port, so that tests can run side by side.
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "examples/fsdp2.py",
        "15",
    ]
    without, projected = run(*command)
    assert len(without) == len(projected) == 3
    assert sum(projected[:-1]) > sum(without[:-1]) + 10
