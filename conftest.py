"""Without a GPU, Triton's kernels are tested by its interpreter; without Triton, not at all."""

import os
from importlib.util import find_spec

collect_ignore_glob = ["tests/compile_kernels.py"]  # a script, which a test calls
if not (find_spec("triton") and find_spec("torch")):
    collect_ignore_glob.append("gemproj/kernels/*")

if not os.path.exists("/dev/nvidiactl"):
    # Read when Triton is imported, which other libraries do too. Nothing else uses Triton here.
    os.environ.setdefault("TRITON_INTERPRET", "1")
