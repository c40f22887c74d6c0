"""The project's tests on the device, a process for each file, because most of their time is Python."""

import re
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from asv_benchmarks.reports.gpu.printing import Checks, Found, say
from asv_benchmarks.reports.gpu.processes import follow

# By title: files of tests, and the selected tests; with and without Triton's kernels.
SUITES = {
    "what waits": (["device"], ""),
    "the public functions": (
        ["stages", "exact", "bounds", "refine", "certificate", "methods", "bad_input", "derivative"],
        "cuda or cupy",
    ),
}
BACKENDS = ("triton", "portable")
# Warnings of other libraries are no errors here, because GPU machines have other versions.
OPTIONS = ["-q", "-rfE", "-p", "no:cacheprovider", "-W", "default", "--maxfail", "10", "--tb", "line"]
_MOST_NAMED = 20


def run_suites(seconds: float) -> int:
    """Run all suites at once, print a table, and return the number of wrong suites."""
    title = "Tests of the project on the device; errors are tests that failed, or 1 if none ran"
    checks, failures = Checks(title), []
    with ThreadPoolExecutor(len(BACKENDS) * sum(len(files) for files, _ in SUITES.values())) as pool:
        running = {
            f"{name}, {backend}": pool.map(partial(_tested, backend, chosen, seconds), files)
            for name, (files, chosen) in SUITES.items()
            for backend in BACKENDS
        }
        for name, results in running.items():
            counts = Counter[str]()
            for found, named in results:
                counts += found
                failures += named
            wrong = counts["failed"] + counts["error"] + (not counts["passed"])
            checks.add(f"{name}, {counts['skipped']} skipped", partial(Found, counts["passed"], wrong, 0))
    say("", *(f"- {failure}" for failure in failures[:_MOST_NAMED]))
    return checks.wrong


def _tested(backend: str, chosen: str, seconds: float, file: str) -> tuple[Counter[str], list[str]]:
    """Return the counts of passed, failed and skipped tests of a file, and its failures with reasons."""
    lines: list[str] = []
    command = [sys.executable, "-um", "pytest", *OPTIONS, "-k", chosen, f"tests/test_{file}.py"]
    code = follow(command, seconds, lines.append, GEMPROJ_BACKEND=backend, OMP_NUM_THREADS="1", COLUMNS="160")
    found = re.findall(r"(\d+) (passed|failed|error|skipped)", lines[-1] if lines else "")  # its summary
    counts = Counter({word: int(number) for number, word in found})
    failures = [line.split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if code not in (0, 1, 5):  # passed, failed, none chosen
        print(*lines[-20:], sep="\n", file=sys.stderr)
        counts["error"] += 1
        failures.append(f"{file}: {'out of time' if code is None else f'code {code}'}, {lines[-1:]}")
    return counts, failures
