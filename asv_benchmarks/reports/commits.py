"""``make bench-asv``: run the present benchmarks on the library of each commit, and record the results.

The records name the machine and the interpreter as given here, but neither a host nor a folder.
"""

import json
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
from io import BytesIO
from pathlib import Path
from typing import Annotated

import typer

from asv_benchmarks.reports.machine import processor
from examples.common.command import cores

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "asv_benchmarks" / "results"
ASV = [sys.executable, "-m", "asv", "--config", str(ROOT / "asv_benchmarks" / "asv.conf.json")]
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"


def main(
    commits: Annotated[list[str] | None, typer.Argument(help="By default the last one.")] = None,
    machine: Annotated[
        str, typer.Option(help="A name; git ignores the results of all machines but epyc.")
    ] = "local",
    bench: Annotated[str, typer.Option(help="Only what matches this regular expression.")] = ".",
    quick: Annotated[bool, typer.Option(help="Call every benchmark once.")] = False,
    dry_run: Annotated[bool, typer.Option(help="Record nothing.")] = False,
) -> None:
    """Record times and memory of commits, and write pages of all records into asv_benchmarks/html."""
    about = ["--os", platform.system(), "--cpu", f"{processor()}, {cores()} cores"]
    subprocess.run([*ASV, "machine", "--machine", machine, *about, "--yes"], check=True)
    options = ["--bench", bench, *["--quick"] * quick, *["--dry-run"] * dry_run]
    git = ["git", "-C", str(ROOT)]
    for commit in commits or ["HEAD"]:
        found = subprocess.check_output([*git, "rev-parse", commit + "^{commit}"], text=True).strip()
        library = subprocess.check_output([*git, "archive", found, "gemproj"])
        with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=BytesIO(library)) as archive:
            archive.extractall(folder, filter="data")
            command = [*ASV, "run", "--python=same", "--machine", machine, "--set-commit-hash", found]
            subprocess.run(command + options, env={**os.environ, "ASV_PYTHONPATH": folder}, check=True)
        rename(RESULTS / machine)
    subprocess.run([*ASV, "publish"], check=True)


def rename(folder: Path) -> None:
    """Replace the interpreter's path, with which asv names the environment, by the version of Python."""
    for path in folder.glob("*-existing-*.json"):
        new = json.loads(path.read_text(encoding="utf-8"))
        new |= {"env_name": PYTHON, "python": PYTHON, "params": {**new["params"], "python": PYTHON}}
        to = path.with_name(f"{new['commit_hash'][:8]}-{PYTHON}.json")
        if to.exists():  # keep the results that were not measured again
            new["results"] = json.loads(to.read_text(encoding="utf-8"))["results"] | new["results"]
        to.write_text(json.dumps(new) + "\n", encoding="utf-8")
        path.unlink()


if __name__ == "__main__":
    typer.run(main)
