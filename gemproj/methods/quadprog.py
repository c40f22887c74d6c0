"""Goldfarb and Idnani's dual active-set method, from the quadprog package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from gemproj.methods._external import solve_each
from gemproj.methods._method import Method, Outcome, check_number, exact_status


@dataclass(frozen=True)
class Quadprog(Method):
    """The solver that GEM codes use, on normalised rows. Runs on the CPU; needs the extra `qp`.

    quadprog needs a positive definite matrix, so a ridge is unavoidable; here it is relative to the
    unit diagonal of the normalised Gram matrix, not absolute as in the reference code.

    Parameters
    ----------
    ridge : float, default 1e-12
        Added to the unit diagonal.
    """

    ridge: float = 1e-12
    accepts: ClassVar[frozenset[str]] = Method.accepts | {"refine"}

    def __post_init__(self) -> None:
        check_number(self.ridge, "ridge", 0.0)

    def solve(self, K, b, warm_start=None, upper=None):  # noqa: D102
        return solve_each(self._solve_one, "quadprog", K, b, warm_start, upper)

    def _solve_one(self, quadprog, K, b, start, upper):
        t = len(b)
        sides, limits = np.eye(t), np.zeros(t)
        if upper is not None:
            finite = np.isfinite(upper)
            sides = np.concatenate([sides, -np.eye(t)[:, finite]], axis=1)
            limits = np.concatenate([limits, -upper[finite]])
        try:
            lam, _, _, iterations, _, _ = quadprog.solve_qp(K + self.ridge * np.eye(t), -b, sides, limits)
        except ValueError as error:
            raise ValueError(
                f"quadprog rejects this problem ({error}). Dependent rows need a larger ridge, "
                f"{self!r} has {self.ridge}; method='exact' needs none."
            ) from error
        return Outcome(lam, int(iterations[0]), exact_status(lam, K @ lam + b, upper))
