"""Without a GPU, Triton's kernels are tested by its interpreter; without Triton, not at all."""

import os
from importlib.util import find_spec

# Scripts and modules that a test calls.
collect_ignore_glob = [
    "tests/processes.py",
    "tests/checks_*.py",
    "examples/fsdp2.py",
]
if not (find_spec("triton") and find_spec("torch")):
    collect_ignore_glob.append("gemproj/backends/triton/*")
if not find_spec("lightning"):
    collect_ignore_glob += ["gemproj/integrations/lightning.py", "examples/lightning_fit.py"]
# Slow to import, and not importable wherever it is installed; its tests look.
collect_ignore_glob.append("gemproj/integrations/avalanche.py")

if not os.path.exists("/dev/nvidiactl"):
    # Read when Triton is imported, which other libraries do too. Nothing else uses Triton here.
    os.environ.setdefault("TRITON_INTERPRET", "1")
