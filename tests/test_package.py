"""The package from outside: public names, the command line, what an import costs."""

import importlib
import os
import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import gemproj
from gemproj import __main__ as command
from gemproj import _selfcheck
from gemproj._tiles import _HOST_TILE
from gemproj.backends.numba import installed

TORCH = [importlib.import_module("gemproj.torch")] if find_spec("torch") else []


def said(code, **environment):
    """Run code in an interpreter of its own; return what it prints, and what it tells."""
    command, both = [sys.executable, "-c", code], {"capture_output": True, "text": True}
    done = subprocess.run(command, env=os.environ | environment, check=True, **both)
    return done.stdout.strip(), done.stderr


def test_every_public_name_exists_and_is_documented():
    methods = {"Exact", "PGD", "FISTA", "AGEM", "Quadprog", "OSQP", "GEM2017"}
    assert {"project", "solve_dual", "combine", "gram", *methods} <= set(gemproj.__all__)
    for module in (gemproj, *TORCH):
        for name in module.__all__:
            thing = getattr(module, name)
            assert len(thing.__doc__ or "") > 40, name
            for attribute, member in vars(thing).items() if isinstance(thing, type) else ():
                if not attribute.startswith("_") and callable(member) and attribute != "solve":
                    assert member.__doc__, f"{name}.{attribute}"


def test_import_needs_the_core_only():
    code = "import sys, gemproj; print(sorted({'torch', 'scipy', 'quadprog', 'osqp'} & set(sys.modules)))"
    assert said(code)[0] == "[]"


def test_command_prints_versions(capsys, monkeypatch):
    unnamed = SimpleNamespace(name=None, version="1.0")  # what an interrupted installation leaves behind
    monkeypatch.setattr(command, "distributions", lambda: [*distributions(), unnamed])
    assert command.main([]) == 0
    out = capsys.readouterr().out
    for word in (f"gemproj {gemproj.__version__}", f"numpy {np.__version__}", "array-api-compat", "loops: "):
        assert word in out
    monkeypatch.setitem(sys.modules, "quadprog", None)
    with pytest.raises(ImportError, match=r"This method needs the package quadprog.*\[qp\]"):
        gemproj.project(np.eye(2), -np.ones(2), method="quadprog")


def test_a_numba_that_cannot_be_imported_is_told_and_done_without(tmp_path):
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text("raise ImportError('Numba needs another NumPy.')")
    code = "import numpy, gemproj; print(gemproj.project(numpy.eye(1), -numpy.ones(1)))"
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    printed, told = said(code, GEMPROJ_BACKEND="", PYTHONPATH=path)
    assert printed == "[0.]"
    assert "Numba needs another NumPy." in told
    assert "GEMPROJ_BACKEND=portable" in told


def test_an_archive_of_modules_is_imported_without_numba(tmp_path):
    with zipfile.ZipFile(tmp_path / "modules.zip", "w") as archive:
        for source in Path(gemproj.__file__).parent.rglob("*.py"):
            archive.write(source, Path("gemproj") / source.relative_to(Path(gemproj.__file__).parent))
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'modules.zip')!r})\n"
    code += "import numpy, gemproj; print(gemproj.__file__, gemproj.project(numpy.eye(1), -numpy.ones(1)))"
    printed, _ = said(code, GEMPROJ_BACKEND="")
    assert "modules.zip" in printed
    assert printed.endswith("[0.]")


@pytest.mark.skipif(not installed(), reason="needs numba")
def test_machines_that_share_compiled_loops_agree_in_their_layout():
    code = "from gemproj.backends.numba import block; print(block._BYTES)"
    assert said(code, NUMBA_CPU_NAME="generic")[0] == "16"


def test_backends_that_cannot_be_had(monkeypatch):
    monkeypatch.setattr("gemproj.backends.wanted", "wrong")
    for use in (lambda: command.main([]), lambda: gemproj.project(np.eye(2), np.ones(2))):
        with pytest.raises(ValueError, match="GEMPROJ_BACKEND must be portable, numba or triton; found 'wr"):
            use()


@pytest.mark.skipif(not TORCH, reason="needs torch")
@pytest.mark.parametrize("reason", ["", "triton is not installed."])
def test_check_covers_the_backends_of_a_device(reason, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("gemproj._selfcheck.no_kernels", lambda device: reason)
    found = [backend for _, device, backend in _selfcheck.ways() if device == "cuda"]
    assert found == ["portable", "triton"][: 1 if reason else 2]


def test_check_counts_wrong_answers_and_errors(capsys, monkeypatch):
    monkeypatch.setattr("gemproj._selfcheck.PROBLEMS", 28)
    assert command.main(["--check"]) == 0
    out = capsys.readouterr().out
    assert "All right" in out
    libraries = [line.split()[0] for line in out[out.index("28 problems") :].splitlines()]
    assert {"numpy", *(["torch"] if TORCH else [])} <= set(libraries)
    right = gemproj.project

    def wrong(G, g, **options):
        if "h" in options:
            raise ValueError("no such h")
        return right(G, g, **options) + (1e-7 * np.linalg.norm(g) if "metric" in options else 0)

    monkeypatch.setattr(gemproj, "project", wrong)
    assert command.main(["--check"]) == 1
    out = capsys.readouterr().out
    assert "WRONG" in out
    assert "ValueError: no such h" in out
    assert ": off by 1." in out


@pytest.mark.parametrize(
    "needed", ["accelerate", "transformers", "lightning.pytorch", "avalanche.models", "torchjd.linalg"]
)
def test_integrations_say_how_to_install_what_they_need(needed, monkeypatch):
    extra = needed.partition(".")[0]
    monkeypatch.setitem(sys.modules, needed, None)
    monkeypatch.delitem(sys.modules, f"gemproj.integrations.{extra}", raising=False)
    with pytest.raises(ImportError, match=rf"pip install '\.\[{extra}\]' in a checkout"):
        importlib.import_module(f"gemproj.integrations.{extra}")


@pytest.mark.parametrize("switch", [{"GEMPROJ_BACKEND": "portable"}, {"NUMBA_DISABLE_JIT": "1"}], ids=str)
def test_compiled_loops_can_be_switched_off(switch):
    code = "import numpy as np, gemproj._problem as p, gemproj.backends as b; "
    code += "print(b.select(p.check_problem(np.ones((1, 2)), np.ones(2))).name)"
    assert said(code, **switch)[0] == "portable"


def test_large_problem_makes_no_copy_of_G():
    """Peak extra memory of an in-place projection stays below 5 % of G, and two tiles without compiled loops."""
    import tracemalloc

    rng = np.random.default_rng(0)
    G, g = rng.standard_normal((10, 500_000), dtype=np.float32) - 0.1, np.full(500_000, 0.1, np.float32)
    gemproj.project(G, g.copy(), out=g.copy())  # what is compiled or loaded first is not of the projection
    tracemalloc.start()
    gemproj.project(G, g, out=g)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    tiles = 0 if installed() else 2 * 8 * _HOST_TILE
    assert peak < 0.05 * G.nbytes + tiles
