"""The examples of one file run as they are, and projection keeps what they lose without it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("rich")

ROOT = Path(__file__).parents[1]


def run(*command):
    """Run an example in a process of its own; return the accuracies that it prints, by row."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"(with(?:out)? projection) (.*)", done.stdout)
    assert [name for name, _ in rows] == ["without projection", "with projection"], done.stdout
    return [[int(number) for number in re.findall(r"\d+", cells)] for _, cells in rows]


@pytest.mark.parametrize("name", sorted(f.stem for f in ROOT.glob("examples/[a-z]*.py")))
def test_tiny_models_are_trained_by_one_thread(name):
    """More threads wait for each other, ten times as long beside a busy core."""
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    assert "    torch.set_num_threads(1)" in text.split('if __name__ == "__main__":')[1]


@pytest.mark.parametrize(
    ("command", "gain"),
    [
        (["examples/plain_torch.py", "100"], 20),
        # Standalone: a free port, so that tests can run side by side.
        ("-m torch.distributed.run --standalone --nproc-per-node 2 examples/fsdp2.py 15".split(), 10),
    ],
)
def test_plain_torch_and_fsdp2(command, gain):
    if not hasattr(pytest.importorskip("torch.distributed.fsdp"), "fully_shard"):
        pytest.skip("torch without fully_shard")
    without, projected = run(*command)
    assert sum(projected[:-1]) > sum(without[:-1]) + gain


@pytest.mark.parametrize(
    ("name", "package", "options", "gain"),
    [("trainer_peft", "peft", {"steps": 3}, None), ("accelerate_loop", "accelerate", {"epochs": 2}, 20)],
)
def test_loops_of_libraries(name, package, options, gain, fresh_state):
    pytest.importorskip(package)
    table = pytest.importorskip(f"examples.{name}").main(**options)
    first, last = ([*column.cells] for column in (table.columns[0], table.columns[-1]))
    means = {name: float(cell.rstrip("%")) for name, cell in zip(first, last, strict=True)}
    assert gain is None or means['GEM, on="both"'] > gain + means["fine-tuning"]


def test_lightning(capsys, monkeypatch):
    pytest.importorskip("lightning", reason="needs the extra lightning")
    monkeypatch.setenv("COLUMNS", "100")
    pytest.importorskip("examples.lightning_fit").main(["--quick"])
    lines = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    rows = {line.split()[1]: [int(n) for n in re.findall(r"\d+", line)] for line in lines}
    before, after = rows["Fine-tuning"], rows["GEM"]
    assert after[0] > before[0]
    assert after[-1] > before[-1]
