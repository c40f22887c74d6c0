"""Part 2: whether kernels touch memory that is not theirs, or race for the memory that programs share."""

from __future__ import annotations

import shutil
import sys
import time

from asv_benchmarks.reports.gpu.printing import Running
from asv_benchmarks.reports.gpu.processes import follow

SCRIPT = [sys.executable, "-m", "asv_benchmarks.reports.gpu.each_kernel"]
SANITIZER = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck")
_FOUND = 9  # the exit code that says so
# Of machines whose driver lets no tool look on.
_REFUSED = "Device not supported"


def watched(tool: str) -> list[str]:
    """Return how to run the script under a tool."""
    options = ["--error-exitcode", str(_FOUND), "--target-processes", "application-only"]
    return [SANITIZER, "--tool", tool, *options, *SCRIPT]


def run(command: list[str], seconds: float) -> tuple[str, str]:
    """Return the verdict of one run, and the last line that it printed."""
    lines: list[str] = []
    # Each array in memory of its own, so that one column too far is seen.
    code = follow(command, seconds, lines.append, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    last = lines[-1] if lines else ""
    if code == 0:
        return "right", last
    print(*lines[-40:], sep="\n", file=sys.stderr)
    if any(_REFUSED in line for line in lines):
        return "not checked", "the device refuses the tool"
    return "**out of time**" if code is None else "**wrong**", last


def main(seconds: float) -> int:
    """Run the script by itself, which compiles, and then under each tool; return the exit code."""
    end, wrong = time.monotonic() + 0.9 * seconds, 0
    table = Running("Every kernel once", ["run", "seconds", "last line", "verdict"])
    for k, tool in enumerate(("", *TOOLS)):
        if tool and shutil.which(SANITIZER) is None:
            table.row(tool, "", f"{SANITIZER} is not there", "not checked")
            continue
        start = time.monotonic()
        verdict, last = run(watched(tool) if tool else SCRIPT, (end - start) / (len(TOOLS) + 1 - k))
        wrong += verdict.startswith("*")
        table.row(tool or "by itself", f"{time.monotonic() - start:.0f}", last, verdict)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
