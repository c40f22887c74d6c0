"""Run the parts in separate processes, and write their output to the terminal and to a file.

A part that fails, hangs or ends too late does not affect the other parts.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch

from asv_benchmarks.reports.gpu.processes import follow
from asv_benchmarks.reports.machine import versions

# Seconds of each part, measured on an H200. Later parts share the time that a part leaves over.
PARTS = {"correctness": 75.0, "speed": 60.0, "training": 100.0, "rows": 45.0}
# The least time of a late part.
LEAST = 10.0
PACKAGES = ["torch", "numpy", "cupy-cuda13x"]


def command(part: str, seconds: float) -> list[str]:
    """Return the command that runs a part in a process of its own."""
    code = f"import sys; from {__package__} import {part}; sys.exit({part}.main({seconds:.0f}))"
    return [sys.executable, "-u", "-c", code]


def main(arguments: list[str] | None = None) -> int:
    """Run the requested parts; return the exit code."""
    parser = argparse.ArgumentParser(prog="asv_benchmarks.reports.gpu", description=__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="separated by commas (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=480.0, help="for all parts (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="Markdown file that is written as the parts print")
    options = parser.parse_args(arguments)
    parts = options.parts.split(",")
    if unknown := set(parts) - PARTS.keys():
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    if not torch.cuda.is_available():
        print("This needs an NVIDIA GPU that torch can use, and found none.", file=sys.stderr)
        return 1
    end = time.monotonic() + options.seconds
    with open(options.out or os.devnull, "w", buffering=1, encoding="utf-8") as file:

        def tell(line: str) -> None:
            print(line, flush=True)
            print(line, file=file)

        device = torch.cuda.get_device_name()
        tell(f"{device}, {versions(PACKAGES)}. Written by `make bench-gpu`, part by part.")
        right = True
        for k, part in enumerate(parts):
            start = time.monotonic()
            seconds = max(LEAST, (end - start) * PARTS[part] / sum(PARTS[later] for later in parts[k:]))
            tell(f"\n## {part.capitalize()}")
            # Most parts use loops on the CPU for less time than their compilation takes. But the part on
            # speed times compiled loops, which solve above 8 rows.
            code = follow(command(part, seconds), seconds, tell, NUMBA_DISABLE_JIT=str(int(part != "speed")))
            endings = {0: "right", 1: "something is wrong", None: "killed"}
            ending = endings.get(code, f"ended with code {code}")
            tell(f"\n{part.capitalize()}: {ending}, {time.monotonic() - start:.0f} s.")
            right = right and code == 0
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
