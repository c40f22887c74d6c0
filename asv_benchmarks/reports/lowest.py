"""``make test-lowest``: all tests with the lowest version of every package that pyproject.toml admits.

With ``--constraints`` it prints these versions for pip. That is before anything is installed, so that only
Python's own library is imported at the top.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

PYPROJECT = Path(__file__).parents[2] / "pyproject.toml"
NOT_TESTED = {
    "avalanche": "brings a package `tests`, which hides ours",
    "cupy": "needs an NVIDIA device",
    "docs": "builds these pages",
    "dev": "tools for editing",
}
OUTCOMES = ("passed", "failed", "error", "skipped")


def lowest_versions(without: Collection[str] = ()) -> dict[str, str]:
    """Return the lower bound of every package, without the packages of some extras.

    A requirement that is not of the form ``name>=version``, or two bounds of one package, would be bounds
    that no test has seen: an error.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        from pip._vendor import tomli as tomllib
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    extras = {"": project["dependencies"], **project["optional-dependencies"]}
    found: dict[str, str] = {}
    for extra, requirements in extras.items():
        for requirement in requirements:
            if extra in without or requirement.startswith(f"{project['name']}["):
                continue
            name, _, version = requirement.partition(">=")
            if not version or found.setdefault(name, version) != version:
                raise ValueError(
                    f"{requirement!r} in pyproject.toml must be name>=version, with one version everywhere."
                )
    return dict(sorted(found.items()))


def main() -> int:
    """Print the constraints, or run the tests and write the table."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--constraints", action="store_true", help="print constraints for pip, and no more")
    parser.add_argument("--out", type=Path, help="Markdown file to write")
    options, for_pytest = parser.parse_known_args()
    if options.constraints:
        print("\n".join(f"{name}=={version}" for name, version in lowest_versions().items()))
        return 0
    import pytest

    lowest, counts = lowest_versions(NOT_TESTED), Counts()
    check_installed(lowest)
    given = ["-q", "-n", "auto", "--dist", "loadfile", *for_pytest]
    code = pytest.main(given, plugins=[counts])
    if options.out is not None and counts.found:
        options.out.write_text(page(lowest, counts.found))
    return int(code)


class Counts:
    """Keep how many tests had which outcome."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Count what pytest is going to print."""
        self.found = {name: len(terminalreporter.stats.get(name, ())) for name in OUTCOMES}


def check_installed(lowest: dict[str, str]) -> None:
    """Stop where another version is installed."""
    from importlib.metadata import version

    from packaging.specifiers import SpecifierSet

    for name, bound in lowest.items():
        if version(name) not in SpecifierSet(f"=={bound}"):
            sys.exit(f"{name} {version(name)} is installed, not {bound}. Use make test-lowest.")


def page(lowest: dict[str, str], counts: dict[str, int]) -> str:
    """Return the outcome and the versions as Markdown."""
    total = ", ".join(f"{number:,} {name}" for name, number in counts.items())
    others = "; ".join(f"`{extra}` ({reason})" for extra, reason in NOT_TESTED.items())
    lines = [
        "All tests, with exactly the lowest version of each package that `pyproject.toml` admits: "
        f"{total}, on Python {platform.python_version()}. Written by `make test-lowest`. Not tested are the "
        f"packages of the extras {others}.",
        "",
        "| package | lowest version |",
        "| :-- | :-- |",
        *(f"| {name} | {version} |" for name, version in lowest.items()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
