"""The exact projection: an active-set method without a ridge."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gemproj._arrays import Array
from gemproj._constants import RESOLVED
from gemproj._search import GRAM_RESOLVES, INFEASIBLE, STALLED
from gemproj._tspace import Dual
from gemproj.backends import search
from gemproj.methods._method import Method, Outcome


@dataclass(frozen=True)
class Exact(Method):
    """The exact solution of GEM's quadratic program, to rounding; the default method.

    Lawson and Hanson's active-set method, see `gemproj._search`. Rows are normalised, so that rows of norm
    1e-6 are treated like rows of norm one, and no ridge is added. Linearly dependent rows (repeated tasks,
    opposite tasks, t > d) need no special care: if K is too inaccurate to decide whether rows are dependent,
    `solve_dual` and `project` solve again from G. On a device, `project` solves up to 8 rows without a
    penalty or equalities on all active sets at once, without synchronisation. Other problems are solved on
    the CPU.

    Examples
    --------
    >>> import numpy as np
    >>> from gemproj import Exact
    >>> Exact()(np.array([[1.0, 0.5], [0.5, 1.0]]), np.array([-1.0, 1.0]))
    array([1., 0.])
    """

    def solve(  # noqa: D102
        self, K: Array, b: Array, lower: Array = None, upper: Array = None, warm_start: Array = None
    ) -> Outcome:
        shape = (*np.broadcast_shapes(K.shape[:-2], b.shape[:-1]), b.shape[-1])
        K = np.broadcast_to(K, (*shape, shape[-1])) if K.ndim > 2 else K
        given = (a if a is None else np.broadcast_to(a, shape) for a in (b, None, lower, upper, warm_start))
        lam, status, pivots, _ = search(Dual(GRAM_RESOLVES, RESOLVED, K, *given))
        without_rays(lam, status)
        return Outcome(lam, pivots, status)


def without_rays(lam: np.ndarray, status: np.ndarray) -> None:
    """Write zero multipliers, and STALLED, where the search has ended with a ray."""
    rays = status >= INFEASIBLE
    lam[rays], status[rays] = 0.0, STALLED
