"""Memory of the compiled loops: whose it is, and that nothing is read or written that is not there."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gemproj
from gemproj.backends.numba import installed

SOURCES = sorted((Path(gemproj.__file__).parent / "backends" / "numba").glob("*.py"))
# NumPy's functions of numbers; all others may return a new array.
SCALAR = {"sqrt", "float32", "float64", "uint16", "uint32"}


def unsafe_addresses(*sources):
    """Return where addresses are taken of arrays that may be freed before the address is used.

    numba frees an array after the last use of its name. So only addresses of parameters are taken, which the
    caller holds; and a compiled function that makes arrays calls nothing that takes addresses.
    """
    functions = [f for source in sources for f in ast.walk(ast.parse(source)) if type(f) is ast.FunctionDef]
    found, calls, takers, makers = [], {}, set(), set()
    for f in functions:
        nodes = list(ast.walk(f))
        bound = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        safe = {a.arg for a in (*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs)} - bound
        taken = [n for n in nodes if isinstance(n, ast.Attribute) and n.attr == "ctypes"]
        found += [f"{f.name}: {ast.unparse(n)}" for n in taken if getattr(n.value, "id", None) not in safe]
        called = [n.func for n in nodes if isinstance(n, ast.Call)]
        calls[f.name] = {n.id for n in called if isinstance(n, ast.Name)}
        if taken:
            takers.add(f.name)
        methods = [n for n in called if isinstance(n, ast.Attribute)]
        new = any(
            (ast.unparse(n.value) == "np" and n.attr not in SCALAR) or n.attr == "copy" for n in methods
        )
        if new and {"fast", "strict"} & set(map(ast.unparse, f.decorator_list)):
            makers.add(f.name)
    while more := {name for name, called in calls.items() if called & takers} - takers:
        takers |= more
    return found + [f"{name} makes arrays" for name in sorted(makers & takers)]


def test_loops_take_addresses_only_of_what_their_caller_holds():
    assert unsafe_addresses(*(path.read_text() for path in SOURCES)) == []


@pytest.mark.parametrize(
    "body",
    [
        "tile = np.empty(n)\n    address = tile.ctypes.data\n    fill(address)",
        "a = a + 1.0\n    fill(a.ctypes.data)",
        "fill(a[1:].ctypes.data)",
        "fill(aligned(n, a).ctypes.data)",
        "take(np.zeros(n))",
        "take(a.copy())",
        "other(np.zeros(n))",
    ],
)
def test_addresses_of_arrays_that_may_be_freed_are_found(body):
    helpers = "@fast\ndef take(b):\n    return b.ctypes.data\n@fast\ndef other(b):\n    return take(b)\n"
    assert unsafe_addresses(helpers) == []
    assert unsafe_addresses(helpers, f"@fast\ndef loop(a, n):\n    {body}\n")


@pytest.mark.skipif(not installed(), reason="needs numba")
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_results_do_not_depend_on_freed_memory(library):
    pytest.importorskip(library)
    # Freed memory is overwritten, large blocks of it are gone at once, and all threads share it.
    poisoned = {"MALLOC_PERTURB_": "165", "MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_ARENA_MAX": "1"}
    environment = os.environ | poisoned | {"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-X", "faulthandler", Path(__file__).with_name("checks_scratch.py"), library]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
