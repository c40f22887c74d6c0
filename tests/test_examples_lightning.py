"""The example for Lightning runs, and GEM keeps more of the first task than fine-tuning does."""

import re

import pytest

pytest.importorskip("torch")
pytest.importorskip("lightning", reason="needs the extra lightning")
pytest.importorskip("rich", reason="needs the extra examples")

from examples.lightning_fit import main


def test_lightning_example(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    main(["--quick"])
    printed = capsys.readouterr().out
    assert printed.count(": 3 tasks of 4 epochs ...") == 2  # as it goes
    rows = {line.split()[1]: re.findall(r"\d+", line) for line in printed.splitlines() if "│" in line}
    before, after = (list(map(int, rows[name])) for name in ("Fine-tuning", "GEM"))
    assert len(before) == len(after) == 4
    assert after[0] > before[0]
    assert after[-1] > before[-1]
