"""Solvers of other packages (extra `qp`): imported on first use, run on the CPU, problem by problem."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from gemproj._arrays import Array
from gemproj._checks import check_count, check_number
from gemproj._tspace import clip, normalise
from gemproj.methods._method import Method, Outcome, Status


class External(Method):
    """A method that calls `_solve_one` for each normalised problem, with the imported module `package`."""

    package: ClassVar[str]

    def _solve_one(
        self, module: Any, K: np.ndarray, b: np.ndarray, lower: Any, upper: Any, start: Any
    ) -> tuple[np.ndarray, int, Any]:
        """Return multipliers, iterations and status of one problem with rows of norm one."""
        raise NotImplementedError

    def solve(  # noqa: D102
        self, K: Array, b: Array, lower: Array = None, upper: Array = None, warm_start: Array = None
    ) -> Outcome:
        try:
            module = importlib.import_module(self.package)
        except ImportError as error:
            raise ImportError(
                f"This method needs the package {self.package}: pip install '.[qp]' in a checkout of "
                "gemproj. method='exact' needs no package."
            ) from error
        K, unit_b, most, first, scale = normalise(K, b, upper, warm_start)
        batch, t = b.shape[:-1], b.shape[-1]
        lam = np.zeros((*batch, t))
        least, most = (0.0 if lower is None else lower), (np.inf if upper is None else most)
        given = [K, unit_b, least, most, lam if first is None else first]
        shapes = [(*batch, t, t), *[lam.shape] * 4]
        Ks, bs, least, most, start = map(np.broadcast_to, given, shapes)
        iterations, status = np.zeros(batch, dtype=np.int64), np.zeros(batch, dtype=np.int64)
        for i in np.ndindex(batch) if t else ():
            first = None if warm_start is None else start[i]
            lam[i], iterations[i], status[i] = self._solve_one(module, Ks[i], bs[i], least[i], most[i], first)
        return Outcome(clip(lam, least, most) * scale, iterations, status)


@dataclass(frozen=True)
class Quadprog(External):
    """Goldfarb and Idnani's dual active-set method from the quadprog package: the solver of GEM's own code.

    It runs on the CPU, on normalised rows, and needs the extra `qp`. It needs a positive definite matrix, so
    a ridge is unavoidable; `solve_dual` sets the status ``STALLED`` where the optimality conditions are
    missed by more than 1e-9. Here the ridge is relative to the unit diagonal of the normalised Gram matrix;
    in GEM's own code it is absolute.

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
        self, module: Any, K: np.ndarray, b: np.ndarray, lower: Any, upper: Any, start: Any
    ) -> tuple[np.ndarray, int, Any]:
        one, below, above = np.eye(len(b)), np.isfinite(lower), np.isfinite(upper)
        limits = np.concatenate([lower[below], -upper[above]])
        bounds = (np.concatenate([one[:, below], -one[:, above]], axis=1), limits) if len(limits) else ()
        try:
            lam, _, _, iterations, _, _ = module.solve_qp(K + self.ridge * one, -b, *bounds)
        except ValueError as error:
            raise ValueError(
                f"quadprog rejects this problem ({error}). Dependent rows need a larger ridge: "
                f"{self!r} has {self.ridge}. method='exact' needs no ridge."
            ) from error
        return lam, int(iterations[0]), int(Status.OPTIMAL)


@dataclass(frozen=True)
class OSQP(External):
    """ADMM from the osqp package, with a warm start. It runs on the CPU, on normalised rows.

    It needs the extra `qp`. The polishing step of osqp is switched off, because it prints even with
    ``verbose=False``.

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
        self, module: Any, K: np.ndarray, b: np.ndarray, lower: Any, upper: Any, start: Any
    ) -> tuple[np.ndarray, int, Any]:
        from scipy import sparse

        model, one = module.OSQP(), sparse.identity(len(b), format="csc")
        options = {"eps_abs": self.eps, "eps_rel": self.eps, "max_iter": self.max_iter}
        switches = {"polishing": False, "warm_starting": True, "verbose": False}
        model.setup(sparse.csc_matrix(np.triu(K)), b, one, lower, upper, **options, **switches)
        if start is not None:
            model.warm_start(x=start, y=-(K @ start + b))
        result, status = model.solve(raise_error=False), module.SolverStatus
        solved, ended = result.info.status_val == status.OSQP_SOLVED, result.info.status_val
        if solved or ended in (status.OSQP_SOLVED_INACCURATE, status.OSQP_MAX_ITER_REACHED):
            lam = np.nan_to_num(np.clip(result.x, lower, upper), nan=0.0)
        else:  # osqp reports an unbounded problem, and its x is a ray
            lam = np.zeros(len(b)) if start is None else start
        return lam, int(result.info.iter), int(Status.APPROXIMATE if solved else Status.STALLED)
