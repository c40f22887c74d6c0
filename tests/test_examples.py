"""The examples of one file run as they are, and projection keeps what they lose without it."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("mnist1d", reason="needs the extra examples")

ROOT = Path(__file__).parents[1]
# On a free port, so that tests can run side by side.
TWO_PROCESSES = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
NAMES = "without projection", "with projection"


@pytest.mark.filterwarnings("ignore::UserWarning")  # of Lightning, about workers and loggers
@pytest.mark.parametrize(
    ("needed", "name", "options", "names", "gain"),
    [
        ("torch", "plain_torch", [100], NAMES, 20),
        ("torch.distributed.fsdp", "fsdp2", [15], NAMES, 10),
        ("lightning", "lightning_fit", [3, 256], ("Fine-tuning", "Kept"), 0),
    ],
)
def test_projection_keeps_past_tasks(needed, name, options, names, gain, monkeypatch, capfd, one_thread):
    if needed.endswith("fsdp") and not hasattr(pytest.importorskip(needed), "fully_shard"):
        pytest.skip("torch without fully_shard")
    pytest.importorskip(needed)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "120")
    if name == "fsdp2":
        command = [*TWO_PROCESSES, "examples/fsdp2.py", *map(str, options)]
        subprocess.run([sys.executable, *command], cwd=ROOT, check=True, timeout=300)
    else:  # in this process, which has imported all that
        importlib.import_module(f"examples.{name}").main(*options)
    printed = capfd.readouterr().out
    cells = (re.findall(rf"^\W*{name}( .*\d.*)$", printed, re.M) for name in names)
    without, projected = ([int(number) for number in re.findall(r"\d+", row)] for [row] in cells)
    assert sum(projected[:-1]) > sum(without[:-1]) + gain


@pytest.mark.parametrize(
    ("name", "options", "gain"),
    [("trainer_peft", {"steps": 3}, -100), ("accelerate_loop", {"epochs": 2}, 20)],
)
def test_loops_of_libraries(name, options, gain, fresh_state, one_thread):
    table = pytest.importorskip(f"examples.{name}").main(**options)
    first, last = ([*column.cells] for column in (table.columns[0], table.columns[-1]))
    means = {name: float(cell.rstrip("%")) for name, cell in zip(first, last, strict=True)}
    assert means['kept, on="both"'] > gain + means["fine-tuning"]
