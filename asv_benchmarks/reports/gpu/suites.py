"""The project's own tests on the device, shared out between processes: most of their time is Python.

It is also the plugin by which such a process takes its share and tells what became of each test.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from asv_benchmarks.reports.gpu.printing import Checks, Found, say

PUBLIC = ["stages", "exact", "bounds", "refine", "certificate", "methods", "bad_input", "derivative"]


class Suite(NamedTuple):
    """Tests of some files, in so many processes."""

    files: list[str]
    processes: int
    expression: str = ""


SUITES = {
    "tests of what waits": Suite(["device"], 2),
    "tests of the public functions": Suite(PUBLIC, 4, "cuda or cupy"),
}
_MOST_NAMED = 20


def run_suites(seconds: float) -> int:
    """Run all suites at once, print a table, and return how many were wrong."""
    end = time.monotonic() + seconds
    checks, failures = (
        Checks("Tests of the project on the device; errors are tests that failed, or 1 if none ran"),
        [],
    )
    with tempfile.TemporaryDirectory() as folder:
        running = {
            name: [_start(suite, k, Path(folder) / f"{name}, {k}") for k in range(suite.processes)]
            for name, suite in SUITES.items()
        }
        for name, processes in running.items():
            lines = [line for one in processes for line in _result(*one, end)]
            counts = Counter(line[0] for line in lines)
            found = Found(counts["passed"], counts["failed"] + (not counts["passed"]), 0)
            checks.add(f"{name}, {counts['skipped']} skipped", partial(Found, *found))
            failures += [f"- `{test}`: {reason}" for outcome, test, reason in lines if outcome == "failed"]
    say("", *failures[:_MOST_NAMED])
    return checks.wrong


def _start(suite: Suite, k: int, path: Path) -> tuple[subprocess.Popen[bytes], Path]:
    environment = os.environ | {
        "GEMPROJ_BACKEND": "portable",
        "GEMPROJ_SHARE": f"{k} {suite.processes} {path}",
        "OMP_NUM_THREADS": "1",
    }
    # Warnings of other libraries are no errors here: a machine with a GPU has versions of its own.
    options = ["-q", "-p", __name__, "-p", "no:cacheprovider", "-W", "default", "--maxfail", "10"]
    files = [f"tests/test_{file}.py" for file in suite.files]
    command = [sys.executable, "-m", "pytest", *options, "-k", suite.expression, *files]
    with open(f"{path}.out", "wb") as out:
        return subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT), path


def _result(process: subprocess.Popen[bytes], path: Path, end: float) -> list[list[str]]:
    """Return outcome, name and reason of each test, and of what did not end as it should."""
    try:
        code: Any = process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        code = "killed, out of time"
    lines = [line.split("\t") for line in path.read_text().splitlines()] if path.exists() else []
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        print(Path(f"{path}.out").read_text(errors="replace")[-2000:], file=sys.stderr)
        last = lines[-1][1] if lines and lines[-1][0] == "started" else "no test"
        lines.append(["failed", last, f"pytest ended: {code!s}"])
    return lines


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Keep every n-th test, once others have deselected theirs."""
    k, n, _ = os.environ["GEMPROJ_SHARE"].split(" ", 2)
    items[:] = items[int(k) :: int(n)]


def pytest_runtest_logstart(nodeid: str) -> None:
    """Tell which test begins, in case it never ends."""
    _tell("started", nodeid, "")


def pytest_runtest_logreport(report: Any) -> None:
    """Tell how a test ended."""
    if report.when == "call" or report.outcome != "passed":
        crash = getattr(report.longrepr, "reprcrash", None)
        _tell(report.outcome, report.nodeid, str(crash.message if crash else "").partition("\n")[0])


def _tell(*cells: str) -> None:
    with open(os.environ["GEMPROJ_SHARE"].split(" ", 2)[2], "a") as file:
        file.write("\t".join(cell.replace("\t", " ") for cell in cells) + "\n")
