"""Solvers of other packages: imported on first use, run on the CPU, problem by problem."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar

import numpy as np

from gemproj._arrays import Array, device_of, from_numpy, namespace, to_numpy
from gemproj._tspace import clip, normalise
from gemproj.methods._method import Method, Outcome


class External(Method):
    """A method that calls `_solve_one` for each normalised problem, with the imported module `package`."""

    package: ClassVar[str]

    def _solve_one(
        self, module: Any, K: np.ndarray, b: np.ndarray, lower: Any, upper: Any, start: Any
    ) -> Outcome:
        raise NotImplementedError

    def solve(
        self, K: Array, b: Array, lower: Array = None, upper: Array = None, warm_start: Array = None
    ) -> Outcome:
        try:
            module = importlib.import_module(self.package)
        except ImportError as error:
            raise ImportError(
                f"This method needs the package {self.package}: pip install '.[qp]' in a checkout of "
                "gemproj. method='exact' needs no package."
            ) from error
        xp, device = namespace(b), device_of(b)
        unit = normalise(K, b, lower, upper, warm_start)
        unit_K, unit_b = (np.asarray(to_numpy(a), dtype=np.float64) for a in (unit.K, unit.b))
        batch, t = unit_b.shape[:-1], unit_b.shape[-1]
        unit_K = np.broadcast_to(unit_K, (*batch, t, t))
        least = np.zeros_like(unit_b) if lower is None else np.broadcast_to(to_numpy(lower), unit_b.shape)
        most = np.full_like(unit_b, np.inf) if upper is None else to_numpy(unit.upper)
        start = None if warm_start is None else to_numpy(unit.start)
        lam = np.zeros_like(unit_b)
        iterations, status = np.zeros(batch, dtype=np.int64), np.zeros(batch, dtype=np.int64)
        for i in np.ndindex(batch) if t else ():
            first = None if start is None else start[i]
            lam[i], iterations[i], status[i], *_ = self._solve_one(
                module, unit_K[i], unit_b[i], least[i], most[i], first
            )
        found = [from_numpy(a, xp, device) for a in (clip(lam, least, most), iterations, status)]
        return Outcome(found[0] * unit.scale, *found[1:])
