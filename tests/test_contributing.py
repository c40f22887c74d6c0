"""The trees of docs/contributing.md: each file is imported by the one that it stands under."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gemproj"
LINE = re.compile(r"^( *)([\w/]+\.py)  *\S")


def trees():
    """Return for each tree of the page its files with their depths."""
    page = (ROOT / "docs" / "contributing.md").read_text()
    blocks = re.findall(r"(?ms)^```text\n(.*?)^```", page)
    found = [[LINE.match(line) for line in block.splitlines()] for block in blocks]
    return [[(len(m[1]) // 2, m[2]) for m in lines] for lines in found if all(lines)]


def imports(file):
    """Return the files of the package that a file imports, by their paths in it."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    paths = {Path(*name.split(".")[1:]) for name in found if name.startswith("gemproj.")}
    return {
        f"{p.as_posix()}{end}"
        for p in paths
        for end in (".py", "/__init__.py")
        if (PACKAGE / f"{p}{end}").is_file()
    }


def test_there_are_two_trees():
    assert [tree[0][1] for tree in trees()] == ["_project.py", "torch/gem.py"]


@pytest.mark.parametrize("tree", trees(), ids=lambda tree: tree[0][1])
def test_each_file_is_imported_by_the_one_above(tree):
    above = []
    for depth, file in tree:
        assert depth <= len(above)
        del above[depth:]
        if above:
            assert file in imports(above[-1]), f"{above[-1]} does not import {file}"
        above.append(file)


def test_no_file_of_the_core_is_left_out():
    named = {file for tree in trees() for _, file in tree}
    core = {path.name for path in PACKAGE.glob("_*.py")} - {"__init__.py", "__main__.py", "_selfcheck.py"}
    assert core - named == {"_constants.py", "_tspace.py"}, "what all others use stands in no tree"
