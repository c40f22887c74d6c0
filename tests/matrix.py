"""``make matrix``: the wheel in environments of their own, one after the other, and a table of what was found.

``python tests/matrix.py CELL ...`` runs some cells and replaces their rows in docs/results/matrix.md; without
names, all but "nightly", which needs another index. An environment is removed when its cell is done. Interpreters
are searched on the path and in pyenv.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import lowest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/results/matrix.md"
NUMERICAL = ["stages", "exact", "bounds", "feasibility", "refine", "certificate"]
NUMERICAL = [f"tests/test_{name}.py" for name in NUMERICAL]
KINDS = {(): "all", tuple(NUMERICAL): "numerical"}
NEEDED = ["array-api-strict", "hypothesis", "pytest", "pytest-xdist"]
EXTRAS = ["fast", "qp", "torch", "accelerate", "transformers", "lightning", "avalanche", "torchjd"]
EXTRAS += ["deepspeed"]
SHOWN = ["numpy", "numba", "torch", "transformers", "accelerate", "lightning", "peft", "deepspeed", "trl"]
SHOWN += ["avalanche-lib", "torchjd", "osqp", "quadprog"]
HEAD = """\
Written by `make matrix`: in each row the wheel in an environment of its own. Smoke problems (`tests/smoke.py`) are one
for each extra; `python -m gemproj --check` solves 200 problems with known answers, in brackets by how many pairs of
array library and backend; "numerical" are the tests of the solver. Bold is wrong.

| cell | Python | versions | smoke problems | `--check` | tests |
| :-- | :-- | :-- | :-- | :-- | :-- |"""


@dataclass(frozen=True)
class Cell:
    """An interpreter, what is installed beside the wheel and its extras, and what runs there."""

    python: str
    extras: str = ""
    packages: tuple[str, ...] = ()
    smoke: tuple[str, ...] = ("core",)
    tests: tuple[str, ...] | None = None  # arguments of pytest


def cells() -> dict[str, Cell]:
    """Return all cells by name."""
    pinned, tests = ("-c", str(ROOT / "constraints.txt")), tuple(NEEDED)
    found = {f"numpy-{v}": Cell(v) for v in ("3.10", "3.11", "3.12", "3.13", "3.14")}
    alone = (*pinned, "pytest")
    found |= {f"extra-{extra}": Cell("3.11", extra, alone, smoke=(extra,)) for extra in EXTRAS}
    # torchvision chooses its torch, and the package brings a package `tests`, which hides ours. Its own GEM, with
    # which the tests compare, needs a solver.
    packages = (*tests, "quadprog")
    avalanche = Cell(
        "3.11", "avalanche", packages, ("avalanche",), ("tests/test_avalanche.py", "tests/test_frameworks.py")
    )
    found["extra-avalanche"] = avalanche
    for version in ("3.12", "3.13", "3.14"):
        smoke, numerical = ("torch", "fast"), tuple(NUMERICAL)
        found[f"pinned-{version}"] = Cell(version, "torch,fast", (*pinned, *tests), smoke, numerical)
    some = tuple(extra for extra in EXTRAS if extra != "avalanche")
    bounds = tuple(f"{name}=={version}" for name, version in lowest.lowest_versions().items())
    found["lowest"] = Cell("3.10", "test", bounds, some, tuple(NUMERICAL))
    found["no-extras"] = Cell("3.12", "", tests, tests=())
    found["newest"] = Cell("3.13", "test", ("trl",), some, ())
    nightly = ("--pre", "torch", "--extra-index-url", "https://download.pytorch.org/whl/nightly/cpu")
    found["nightly"] = Cell("3.13", "test", nightly, ("torch", "fast"), ())
    return found


def interpreter(version: str) -> str | None:
    """Return the path of a Python that works, or None."""
    others = Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    for path in filter(None, [shutil.which(f"python{version}"), *others]):
        if subprocess.run([path, "-c", "import venv, ssl"], capture_output=True).returncode == 0:
            return str(path)
    return None


def run_cell(name: str, cell: Cell, wheel: Path) -> str:
    """Run a cell in a temporary folder; return its row of the table, with failures in bold, or nothing."""
    base = interpreter(cell.python)
    if base is None:
        return ""
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "environment/bin/python")
        subprocess.run([base, "-m", "venv", python.parents[1]], check=True)
        source = f"{wheel}[{cell.extras}]" if cell.extras else str(wheel)
        pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", source, *cell.packages]
        installed = subprocess.run(pip, capture_output=True, text=True)
        if installed.returncode:
            print(installed.stderr[-3000:])
            return f"| {name} | {cell.python} | **cannot be installed** | - | - | - |"
        smoke = [run([python, ROOT / "tests/smoke.py", one], folder) for one in cell.smoke]
        wrong = [one for one, (code, _) in zip(cell.smoke, smoke, strict=True) if code]
        said = f"**wrong: {', '.join(wrong)}**" if wrong else ", ".join(cell.smoke)
        if cell.smoke == ("core",) and not wrong:
            said += f" ({re.search(r'[0-9]+ ms', smoke[0][1])[0]} to import beyond NumPy)"
        code, out = run([python, "-m", "gemproj", "--check"], folder)
        check = "**wrong**" if code else f"right ({out.count(' cpu ')})"
        tests = "-"
        if cell.tests is not None:
            pytest = [python, "-m", "pytest", "-q", "-n", "auto", "--dist", "loadfile"]
            code, out = run([*pytest, *cell.tests], ROOT)
            tests = ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|errors?)", out.splitlines()[-1]))
            tests = f"**{tests or 'pytest failed'}**" if code else tests
            tests = f"{KINDS.get(cell.tests, ' '.join(cell.tests))}: {tests}"
        code, out = run([python, "-m", "pip", "list", "--format", "freeze"], folder)
        versions = dict(line.split("==", 1) for line in out.split() if "==" in line)
        shown = ", ".join(f"{p} {versions[p]}" for p in SHOWN if p in versions)
        code, out = run([python, "-c", "import platform; print(platform.python_version())"], folder)
    return f"| {name} | {out.strip()} | {shown} | {said} | {check} | {tests} |"


def run(command: list[str | Path], folder: str | Path) -> tuple[int, str]:
    """Run a command, tell what it said if it failed, and return its exit status and what it said."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    both = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=folder, env=clean, **both)
    if done.returncode:
        print(*command, done.stdout[-6000:], sep="\n", flush=True)
    return done.returncode, done.stdout


def write(rows: dict[str, str]) -> None:
    """Write the page: rows that were just found, and those of other cells as they were."""
    if PAGE.exists():
        known = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][2:]
        rows = {line.split(" | ")[0][2:]: line for line in known} | rows
    order = [name for name in cells() if name in rows]
    PAGE.write_text("\n".join([HEAD, *(rows[name] for name in order)]) + "\n")


def main(names: list[str]) -> int:
    """Run cells, and return 1 if something is wrong in one of them."""
    every, bad = cells(), 0
    if unknown := set(names) - set(every):
        print(f"No such cells: {sorted(unknown)}. There are: {list(every)}.")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        pip_wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT]
        subprocess.run(pip_wheel, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        for name in names or [name for name in every if name != "nightly"]:
            start = time.perf_counter()
            row = run_cell(name, every[name], wheel)
            if not row:  # the row of an earlier run stays
                print(f"{name}: there is no Python {every[name].python}", flush=True)
                continue
            write({name: row})
            bad |= "**" in row
            print(f"{row}   {time.perf_counter() - start:.0f} s", flush=True)
    return int(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
