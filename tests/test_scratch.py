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
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_results_do_not_depend_on_freed_memory(library):
    pytest.importorskip(library)
    # Freed memory is overwritten, large blocks of it are gone at once, and all threads share it.
    poisoned = {"MALLOC_PERTURB_": "165", "MALLOC_MMAP_THRESHOLD_": "16384", "MALLOC_ARENA_MAX": "1"}
    environment = os.environ | poisoned | {"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-X", "faulthandler", Path(__file__).with_name("checks_scratch.py"), library]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
