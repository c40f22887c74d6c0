"""Goldfarb and Idnani's dual active-set method, from the quadprog package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gemproj._checks import check_number
from gemproj._tspace import snap
from gemproj.methods._external import External
from gemproj.methods._method import Outcome, exact_status


@dataclass(frozen=True)
class Quadprog(External):
    """The solver of GEM's reference code, on normalised rows. Runs on the CPU; needs the extra `qp`.

    The solver needs a positive definite matrix, so a ridge is unavoidable. Here the ridge is relative to the
    unit diagonal of the normalised Gram matrix; in the reference code it is absolute.

    Parameters
    ----------
    ridge : float, default 1e-12
        Ridge added to the unit diagonal.
    """

    ridge: float = 1e-12

    package: ClassVar[str] = "quadprog"

    def __post_init__(self) -> None:
        check_number(self.ridge, "ridge", 0.0)

    def _solve_one(
        self, quadprog: Any, K: np.ndarray, b: np.ndarray, lower: Any, upper: Any, start: Any
    ) -> Outcome:
        t = len(b)
        below, above = np.isfinite(lower), np.isfinite(upper)
        sides = np.concatenate([np.eye(t)[:, below], -np.eye(t)[:, above]], axis=1)
        limits = np.concatenate([lower[below], -upper[above]])
        bounds = (sides, limits) if len(limits) else ()
        try:
            lam, _, _, iterations, _, _ = quadprog.solve_qp(K + self.ridge * np.eye(t), -b, *bounds)
        except ValueError as error:
            raise ValueError(
                f"quadprog rejects this problem ({error}). Dependent rows need a larger ridge: "
                f"{self!r} has {self.ridge}. method='exact' needs no ridge."
            ) from error
        lam = snap(np.clip(lam, lower, upper), upper)
        return Outcome(lam, int(iterations[0]), exact_status(lam, K @ lam + b, lower, upper))
