"""The lowest version of every package that pyproject.toml admits: what ``make test-lowest`` installs and tests.

As a script this prints the versions for pip; as a plugin of pytest it writes a table of them when all tests have
passed. The script runs before anything is installed, so it imports only what comes with Python.
"""

import platform
from importlib import metadata
from pathlib import Path

try:
    import tomllib
except ImportError:  # before Python 3.11
    try:
        import tomli as tomllib  # which pytest brings
    except ImportError:  # Not where tests run: importing pip undoes what setuptools does to distutils.
        from pip._vendor import tomli as tomllib

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/results/lowest-versions.md"
NOT_TESTED = {
    "avalanche": "brings a package `tests`, which hides ours",
    "cupy": "needs an NVIDIA device",
    "docs": "builds these pages",
    "dev": "tools for editing",
}


def lowest_versions(root=ROOT):
    """Return the lower bound of every package that is tested.

    A requirement that is not of the form ``name>=version``, or two bounds of one package, would be bounds
    that no test has seen: an error.
    """
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    found = {}
    for extra, requirements in {"": project["dependencies"], **project["optional-dependencies"]}.items():
        for requirement in requirements:
            if extra in NOT_TESTED or requirement.startswith(f"{project['name']}["):
                continue
            name, _, version = requirement.partition(";")[0].strip().partition(">=")
            if not version or found.setdefault(name, version) != version:
                raise ValueError(
                    f"{requirement!r} in pyproject.toml must be name>=version, with one version everywhere."
                )
    return dict(sorted(found.items()))


def pytest_configure():
    """Stop where another version is installed."""
    import pytest
    from packaging.specifiers import SpecifierSet

    for name, bound in lowest_versions().items():
        if (found := metadata.version(name)) not in SpecifierSet(f"=={bound}"):
            raise pytest.UsageError(f"{name} {found} is installed, not {bound}: use make test-lowest.")


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    """Write the page after a run of all tests in which none has failed."""
    part = hasattr(config, "workerinput")  # of pytest-xdist
    part = part or config.args_source != config.ArgsSource.TESTPATHS or config.option.keyword
    if part or exitstatus:
        return
    passed, skipped = (len(terminalreporter.stats.get(outcome, ())) for outcome in ("passed", "skipped"))
    others = "; ".join(f"`{extra}` ({reason})" for extra, reason in NOT_TESTED.items())
    lines = [
        "All tests, with exactly the lowest version of each package that `pyproject.toml` admits, on Python "
        f"{platform.python_version()}: {passed:,} passed, {skipped:,} skipped. Written by `make test-lowest`. "
        f"Not tested are the packages of the extras {others}.",
        "",
        "| package | lowest version |",
        "| :-- | :-- |",
        *(f"| {name} | {version} |" for name, version in lowest_versions().items()),
    ]
    PAGE.write_text("\n".join(lines) + "\n")
    terminalreporter.write_line(f"written: {PAGE}")


if __name__ == "__main__":
    for name, version in lowest_versions().items():
        print(f"{name}=={version}")
    print("pyarrow<22")  # which datasets asks for: later ones need NumPy 2, and do not say so to pip
