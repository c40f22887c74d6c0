"""What is collected depends on the extras that are installed."""

import re
from importlib.util import find_spec
from pathlib import Path

# Scripts and modules that a test calls.
collect_ignore_glob = [
    "tests/processes.py",
    "tests/checks_*.py",
    "examples/cuda_graph.py",
    "examples/fsdp2.py",
]
if not find_spec("torch"):
    collect_ignore_glob += ["gemproj/torch/*", "gemproj/integrations/*", "gemproj/_autograd.py", "examples/*"]
    needs = re.compile(r"(?m)^(import torch|from (examples|(tests\.)?(models|frameworks))\b)")
    tests = Path(__file__).with_name("tests").glob("*.py")
    collect_ignore_glob += [f"tests/{path.name}" for path in tests if needs.search(path.read_text("utf-8"))]
if not find_spec("numba"):
    collect_ignore_glob.append("gemproj/backends/numba/*")
if not (find_spec("torch") and find_spec("triton")):
    collect_ignore_glob.append("gemproj/backends/triton/*")
if not find_spec("lightning"):
    collect_ignore_glob += ["gemproj/integrations/lightning.py", "examples/lightning_fit.py"]
# Slow to import, and not importable wherever it is installed; its tests look.
collect_ignore_glob.append("gemproj/integrations/avalanche.py")
