"""The operator-splitting method of the osqp package."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gemproj._checks import check_count, check_number
from gemproj.methods._external import External
from gemproj.methods._method import Outcome, Status


@dataclass(frozen=True)
class OSQP(External):
    """OSQP's ADMM on normalised rows, with a warm start. Runs on the CPU; needs the extra `qp`.

    The polishing step of osqp is switched off, because it prints even with ``verbose=False``.

    Parameters
    ----------
    eps : float, default 1e-9
        Absolute and relative tolerance, on the normalised problem. Solutions have the status
        ``APPROXIMATE``.
    max_iter : int, default 20000
        Iteration limit; a problem that reaches it has the status ``STALLED``.
    """

    eps: float = 1e-9
    max_iter: int = 20_000

    package: ClassVar[str] = "osqp"

    def __post_init__(self) -> None:
        check_number(self.eps, "eps", 0.0, strict=True)
        check_count(self.max_iter, "max_iter", 1)

    def _solve_one(
        self, osqp: Any, K: np.ndarray, b: np.ndarray, lower: Any, upper: Any, start: Any
    ) -> Outcome:
        from scipy import sparse

        t = len(b)
        model = osqp.OSQP()
        model.setup(
            sparse.csc_matrix(np.triu(K)),
            b,
            sparse.identity(t, format="csc"),
            lower,
            upper,
            eps_abs=self.eps,
            eps_rel=self.eps,
            max_iter=self.max_iter,
            polishing=False,
            warm_starting=True,
            verbose=False,
        )
        if start is not None:
            model.warm_start(x=start, y=-(K @ start + b))
        result = model.solve(raise_error=False)
        status = osqp.SolverStatus
        solved = result.info.status_val == status.OSQP_SOLVED
        if solved or result.info.status_val in (status.OSQP_SOLVED_INACCURATE, status.OSQP_MAX_ITER_REACHED):
            lam = np.nan_to_num(np.clip(result.x, lower, upper), nan=0.0)
        else:  # osqp reports an unbounded problem, and its x is a certificate of unboundedness
            lam = np.zeros(t) if start is None else start
        return Outcome(lam, int(result.info.iter), int(Status.APPROXIMATE if solved else Status.STALLED))
