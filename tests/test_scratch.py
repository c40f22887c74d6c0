"""Memory of the compiled loops: whose it is, and that nothing is read or written that is not there."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gemproj.backends.numba import installed


@pytest.mark.skipif(not installed(), reason="needs numba")
@pytest.mark.parametrize("kind", ["fast", "strict", "fast_entry"])
def test_loops_that_take_addresses_cannot_make_arrays(kind):
    """numba frees an array after the last use of its name, also where its address is still in use."""
    import numba

    from gemproj.backends.numba import jit

    def loop(n):
        return np.empty(n)[0]

    with pytest.raises(numba.core.errors.TypingError):
        getattr(jit, kind)(loop).compile((numba.int64,))


@pytest.mark.skipif(not installed(), reason="needs numba")
def test_results_do_not_depend_on_freed_memory():
    # Freed memory is overwritten, large blocks of it are gone at once, and all threads share it.
    poisoned = {"MALLOC_PERTURB_": "165", "MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_ARENA_MAX": "1"}
    chosen = "formulas or columns_of_tensors or many_gradients or many_threads or every_size"
    command = [sys.executable, "-m", "pytest", "-xqp", "no:cacheprovider", "-k", chosen]
    files = [Path(__file__).with_name(f"test_{name}.py") for name in ("compiled", "exact")]
    done = subprocess.run(
        [*command, *files], env=os.environ | poisoned, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout
