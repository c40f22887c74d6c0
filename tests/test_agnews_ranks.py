"""Several processes that learn as one end with the numbers of one."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("peft")
torch = pytest.importorskip("torch")

from examples.lora_agnews import ranks  # noqa: E402
from examples.lora_agnews.config import METHODS  # noqa: E402


def learn(out, cache, *launcher):
    options = [
        "--preset",
        "mini",
        "--no-dropout",
        "--methods",
        ",".join(METHODS),
        "--seeds",
        "0",
        "--device",
        "auto",
    ]
    command = [
        sys.executable,
        "-m",
        *launcher,
        "examples.lora_agnews",
        *options,
        "--out",
        out,
        "--cache",
        cache,
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=240, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads((out / "results.json").read_text(encoding="utf-8"))


def test_two_processes_end_with_the_numbers_of_one(tmp_path):
    cache = tmp_path / "cache"
    alone = learn(tmp_path / "one", cache)
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    together = learn(tmp_path / "two", cache, *launcher)
    assert [run["method"] for run in alone["runs"]] == list(METHODS)
    for one, two in zip(alone["runs"], together["runs"], strict=True):
        assert two["accuracies"] == one["accuracies"]
        assert two["curve"] == one["curve"]
        for p, q in zip(one["guarantee"]["probes"], two["guarantee"]["probes"], strict=True):
            assert q == pytest.approx(p, abs=2e-3)


def test_shares_of_a_batch_average_to_the_whole(monkeypatch):
    for processes in (1, 2, 4):
        monkeypatch.setattr(ranks, "count", lambda n=processes: n)
        for n in (1, 2, 3, 8):
            values = torch.arange(1.0, n + 1)
            total = 0.0
            for rank in range(processes):
                monkeypatch.setattr(ranks, "rank", lambda k=rank: k)
                part, weight = ranks.share({"x": values, "labels": values})
                total += weight * float(part["x"].mean()) / processes
            assert total == pytest.approx(float(values.mean()))
