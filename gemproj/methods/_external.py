"""Solvers from other packages: imported when asked for, run on the CPU, problem by problem."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from gemproj._array import Array, device_of, from_numpy, namespace, to_numpy
from gemproj.methods._method import Outcome, clip, normalise


def solve_each(
    solve_one: Callable[..., Outcome],
    package: str,
    K: Array,
    b: Array,
    warm_start: Array | None,
    upper: Array | None,
) -> Outcome:
    """Call ``solve_one(module, K, b, start, upper)`` on every normalised problem of a batch."""
    try:
        module: Any = importlib.import_module(package)
    except ImportError as error:
        raise ImportError(
            f"This method needs the package {package}: pip install 'gemproj[qp]'. method='exact' needs none."
        ) from error
    xp, device = namespace(K), device_of(b)
    unit = normalise(K, b, warm_start, upper)
    unit_K, unit_b = (np.asarray(to_numpy(a), dtype=np.float64) for a in (unit.K, unit.b))
    start, bound = (None if a is None else to_numpy(a) for a in (unit.start, unit.upper))
    batch = unit_b.shape[:-1]
    lam = np.zeros_like(unit_b)
    iterations, status = np.zeros(batch, dtype=np.int64), np.zeros(batch, dtype=np.int64)
    for i in np.ndindex(batch) if unit_b.shape[-1] else ():
        lam[i], iterations[i], status[i], *_ = solve_one(
            module,
            unit_K[i],
            unit_b[i],
            None if start is None else start[i],
            None if bound is None else bound[i],
        )
    lam, iterations, status = (from_numpy(a, xp, device) for a in (clip(lam, bound), iterations, status))
    return Outcome(lam * unit.scale, iterations, status)
