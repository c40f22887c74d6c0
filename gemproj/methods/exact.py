"""The exact projection: an active-set method without a ridge."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gemproj._arrays import Array, device_of, from_numpy, namespace, on_host, to_numpy
from gemproj._constants import RESOLVED
from gemproj._search import GRAM_RESOLVES
from gemproj._tspace import Dual, fetch
from gemproj.backends import search, solve_few
from gemproj.methods._method import Method, Outcome, Status

# Number of rows up to which a device solves on all active sets at once.
FEW = 8


@dataclass(frozen=True)
class Exact(Method):
    """The exact solution of GEM's quadratic program, to rounding; the default method.

    Lawson and Hanson's active-set method, see `gemproj._search`. Rows are normalised, so that rows of norm
    1e-6 are treated like rows of norm one, and no ridge is added. Linearly dependent rows (repeated tasks,
    opposite tasks, t > d) need no special care: if K is too inaccurate to decide whether rows are dependent,
    `solve_dual` and `project` solve again from G. On a device, up to 8 rows without a penalty or equalities
    are solved on all active sets at once, without synchronisation; other problems are solved on the CPU,
    after one synchronising copy of t*t numbers.

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
        xp, device, t = namespace(b), device_of(b), b.shape[-1]
        shape = (*np.broadcast_shapes(tuple(K.shape[:-2]), tuple(b.shape[:-1])), t)
        K = xp.broadcast_to(K, (*shape, t)) if K.ndim > 2 else K
        b = xp.broadcast_to(b, shape)
        if not on_host(device) and lower is None and upper is None and t <= FEW:
            none = xp.zeros(shape[:-1], dtype=xp.int64, device=device)
            return Outcome(solve_few(K, b), none, none)
        given = [K, b, *(a if a is None else xp.broadcast_to(a, shape) for a in (lower, upper, warm_start))]
        given = [a if a is None else to_numpy(a) for a in given] if on_host(device) else fetch(given)
        lam, status, pivots, _ = search(Dual(GRAM_RESOLVES, RESOLVED, given[0], given[1], None, *given[2:]))
        without_rays(lam, status)
        lam, pivots, status = (from_numpy(a, xp, device) for a in (lam, pivots, status))
        return Outcome(xp.astype(lam, b.dtype, copy=False), pivots, status)


def without_rays(lam: np.ndarray, status: np.ndarray) -> None:
    """Write zero multipliers, and STALLED, where the search has ended with a ray."""
    rays = status >= int(Status.INFEASIBLE)
    if np.count_nonzero(rays):
        lam[rays], status[rays] = 0.0, int(Status.STALLED)


def enumerable(b: Array, options: Any) -> bool:
    """Return whether a device solves a problem with these options without being read."""
    return b.shape[-1] <= FEW and options.penalty is None and options.equality is False
