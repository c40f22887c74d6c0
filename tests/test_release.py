"""What a release is made of fits together: workflows, Makefile, extras, smoke problems, and what a wheel holds."""

import re
import tarfile
import zipfile
from contextlib import nullcontext
from pathlib import Path

import dists
import lowest
import matrix
import pytest
import smoke

import gemproj

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_what_there_is(workflow):
    text = workflow.read_text()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = re.findall(r"make ([^\n\"]*)", text)
    called = {word for line in lines for word in line.split() if "=" not in word}
    assert called
    assert called <= targets
    cells = set(re.findall(r"{ cell: ([^,]*),", text))
    cells |= {name for line in re.findall(r"cell: \[(.*)\]", text) for name in line.split(", ")}
    assert cells <= set(matrix.cells())
    # A tag can be moved to other code; a commit cannot.
    assert all(re.fullmatch(r"[0-9a-f]{40}", ref) for ref in re.findall(r"uses: [^@\s]*@(\S*)", text))


def test_every_extra_has_a_smoke_problem():
    project = lowest.tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = {"bench", "compare", "cupy", "dev", "docs", "examples", "test"}  # for work on gemproj, or a device
    assert {*matrix.EXTRAS, *ours} == set(project["optional-dependencies"])
    assert all(callable(getattr(smoke, extra)) for extra in matrix.EXTRAS)


@pytest.mark.parametrize("other", ["numpy", "numpy>=2.0", "numpy~=1.26", "numpy==1.26", "numpy<3"])
def test_a_bound_that_would_not_be_tested_is_an_error(tmp_path, other):
    extras = '[project.optional-dependencies]\nall = ["some[fast]", "numpy>=1.26"]\ndocs = ["sphinx>=8"]\n'
    for fast in (["numba>=0.60"], [other]):
        core = f'[project]\nname = "some"\ndependencies = ["numpy>=1.26"]\n{extras}fast = {fast}\n'
        (tmp_path / "pyproject.toml").write_text(core)
        if fast != [other]:
            assert lowest.lowest_versions(tmp_path) == {"numba": "0.60", "numpy": "1.26"}
    with pytest.raises(ValueError, match=f"^'{other}' in pyproject.toml must be name>=version"):
        lowest.lowest_versions(tmp_path)


def test_all_files_name_one_version():
    for name, line in (("CITATION.cff", "version: {}\n"), ("conda/recipe.yaml", '  version: "{}"\n')):
        assert line.format(gemproj.__version__) in (ROOT / name).read_text(), name
    assert f"\n## {gemproj.__version__} - " in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize(("stray", "missing"), [("", ""), ("", "py.typed"), ("tests/test_x.py", "")])
def test_contents_of_a_wheel_are_checked(stray, missing, tmp_path, monkeypatch):
    names, wrong = {"gemproj/__init__.py", "gemproj/py.typed"}, stray or missing
    monkeypatch.setattr(dists, "source_files", lambda: names)
    with zipfile.ZipFile(tmp_path / "x.whl", "w") as wheel:
        for name in names - {f"gemproj/{missing}"} | {stray} - {""}:
            wheel.writestr(name, "")
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as sdist:
        for name in names:
            sdist.addfile(tarfile.TarInfo(f"gemproj-0/{name}"))
    with pytest.raises(AssertionError, match=wrong) if wrong else nullcontext():
        dists.check_contents(tmp_path / "x.tar.gz", tmp_path / "x.whl")
